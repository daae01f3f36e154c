//! What a directory of checkpoints asks for, as extended attributes of the store or of a job's
//! directory (the job's count first). Replicas and storage class of new images are asked for as for
//! any file, by `user.harvestfs.replication` and `user.harvestfs.class`.

use std::{path::Path, time::Duration};

use crate::store::{Checkpoint, StoreError, io_error};

/// How many replicas images have in the end: a job stands still while few are written, and the rest
/// is made in the background.
pub const RAISE_XATTR: &str = "user.checkpoint.raise";
/// How long a checkpoint is kept, for example `12h`.
pub const LIFETIME_XATTR: &str = "user.checkpoint.lifetime";
/// HarvestFS's own attribute.
const REPLICATION_XATTR: &str = "user.harvestfs.replication";
const VALUE_BYTES_MAX: usize = 64;

/// What is asked for; nothing by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// Replicas of each image after the dump.
    pub raise_to: Option<u8>,
    /// Older checkpoints are removed by `gc`.
    pub lifetime: Option<Duration>,
}

/// Why a policy is not understood.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The attribute cannot be read.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It says something else.
    #[error("`{value}` is no {name}: {expected}")]
    Value {
        /// Which attribute.
        name: &'static str,
        /// What it says.
        value: String,
        /// What it may say.
        expected: &'static str,
    },
}

impl Policy {
    /// What holds for a job: its directory, and the one that all jobs are in.
    ///
    /// # Errors
    /// When an attribute is not understood.
    pub fn of(job: &Path, store: &Path) -> Result<Self, PolicyError> {
        let ask = |name| match read(job, name)? {
            None => read(store, name),
            value => Ok(value),
        };
        Ok(Self {
            raise_to: ask(RAISE_XATTR)?.map(parse_replicas).transpose()?,
            lifetime: ask(LIFETIME_XATTR)?.map(parse_lifetime).transpose()?,
        })
    }

    /// Whether a checkpoint has outlived its time at `now_unix_ms`.
    #[must_use]
    pub fn has_expired(&self, created_unix_ms: u64, now_unix_ms: u64) -> bool {
        self.lifetime.is_some_and(|lifetime| {
            u128::from(now_unix_ms.saturating_sub(created_unix_ms)) > lifetime.as_millis()
        })
    }

    /// Asks for the replicas that the images have in the end; they are made in the background.
    ///
    /// # Errors
    /// When the file system refuses.
    pub fn raise(&self, checkpoint: &Checkpoint) -> Result<(), StoreError> {
        let Some(replicas) = self.raise_to else {
            return Ok(());
        };
        for image in &checkpoint.manifest.images {
            let path = checkpoint.directory.join(&image.name);
            rustix::fs::setxattr(
                &path,
                REPLICATION_XATTR,
                replicas.to_string().as_bytes(),
                rustix::fs::XattrFlags::empty(),
            )
            .map_err(|error| io_error("raise the replicas of", &path)(error.into()))?;
        }
        Ok(())
    }
}

/// An attribute's text; none: it is not set, or the file system or the directory is not there.
fn read(directory: &Path, name: &'static str) -> Result<Option<String>, PolicyError> {
    use rustix::io::Errno;
    let mut value = [0; VALUE_BYTES_MAX];
    match rustix::fs::getxattr(directory, name, &mut value[..]) {
        Ok(length) => Ok(Some(String::from_utf8_lossy(&value[..length]).into_owned())),
        Err(Errno::NODATA | Errno::NOTSUP | Errno::NOENT) => Ok(None),
        Err(error) => Err(io_error("read the policy of", directory)(error.into()).into()),
    }
}

fn parse_replicas(value: String) -> Result<u8, PolicyError> {
    let replicas = value
        .parse()
        .ok()
        .filter(|number| (1..=10).contains(number));
    replicas.ok_or(PolicyError::Value {
        name: RAISE_XATTR,
        value,
        expected: "write a number of replicas from 1 to 10",
    })
}

fn parse_lifetime(value: String) -> Result<Duration, PolicyError> {
    let unit = value.chars().last().and_then(|unit| match unit {
        's' => Some(1),
        'm' => Some(60),
        'h' => Some(3600),
        'd' => Some(24 * 3600),
        _ => None,
    });
    let lifetime = unit.and_then(|unit_s| {
        let number: u64 = value[..value.len() - 1].parse().ok()?;
        Some(Duration::from_secs(number.checked_mul(unit_s)?))
    });
    lifetime.ok_or(PolicyError::Value {
        name: LIFETIME_XATTR,
        value,
        expected: "write a number with s, m, h or d, for example 12h",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lifetimes_have_a_unit() {
        let parse = |text: &str| parse_lifetime(text.to_owned()).ok();
        assert_eq!(parse("90s"), Some(Duration::from_secs(90)));
        assert_eq!(parse("2d"), Some(Duration::from_secs(2 * 24 * 3600)));
        for bad in ["", "d", "7", "1w", "-1h", "99999999999999999999h", "1ä"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn replicas_are_from_1_to_10() {
        let parse = |text: &str| parse_replicas(text.to_owned()).ok();
        assert_eq!((parse("3"), parse("10")), (Some(3), Some(10)));
        assert_eq!((parse("0"), parse("11"), parse("x")), (None, None, None));
    }

    #[test]
    fn a_checkpoint_expires_after_its_lifetime() {
        let policy = Policy {
            raise_to: None,
            lifetime: Some(Duration::from_secs(1)),
        };
        assert!(!policy.has_expired(5000, 6000));
        assert!(policy.has_expired(5000, 6001));
        assert!(!policy.has_expired(5000, 0), "clocks may differ");
        assert!(!Policy::default().has_expired(0, u64::MAX));
    }

    #[test]
    fn the_job_counts_before_the_store() {
        let directory = tempfile::tempdir_in(".").expect("a directory");
        let (store, job) = (directory.path(), directory.path().join("job"));
        std::fs::create_dir(&job).expect("it is made");
        let set = |path: &Path, name: &str, value: &str| {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(path, name, value.as_bytes(), flags).expect("it is set");
        };
        assert_eq!(Policy::of(&job, store).expect("none"), Policy::default());
        set(store, RAISE_XATTR, "3");
        set(store, LIFETIME_XATTR, "1h");
        set(&job, RAISE_XATTR, "2");
        let policy = Policy::of(&job, store).expect("both");
        assert_eq!(policy.raise_to, Some(2));
        assert_eq!(policy.lifetime, Some(Duration::from_secs(3600)));
        set(&job, RAISE_XATTR, "many");
        assert!(Policy::of(&job, store).is_err());
    }
}
