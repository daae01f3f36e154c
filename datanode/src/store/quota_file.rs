//! The file that stores a quota that was changed while the datanode ran.
//!
//! ```text
//! harvestfs-quota 1
//! configured 1099511627776     (bytes, as the configuration said then: a newer one is believed)
//! quota 549755813888           (bytes)
//! deadline 1767225600000       (when it must hold, in milliseconds since 1970)
//! crc32 01234567               (of everything above)
//! ```

use std::fs;
use std::path::Path;

use super::checked_text;
use crate::engine::quota::shrinking::SetQuota;

const QUOTA_FILE: &str = "QUOTA";
const MAGIC: &str = "harvestfs-quota 1";
/// More than any such file contains.
const FILE_BYTES_MAX: u64 = 1024;

/// Reads the file of a volume; `None` if there is none that can be trusted: the configured quota then applies.
pub fn read(dir: &Path) -> Option<SetQuota> {
    let path = dir.join(QUOTA_FILE);
    if fs::metadata(&path).ok()?.len() > FILE_BYTES_MAX {
        return None;
    }
    let found = parse(&fs::read_to_string(&path).ok()?);
    if found.is_none() {
        tracing::warn!(file = %path.display(), "this quota is damaged; the configured one holds");
    }
    found
}

/// Writes the file durably.
pub fn write(quota: &SetQuota, dir: &Path) -> std::io::Result<()> {
    checked_text::replace(&dir.join(QUOTA_FILE), &body(quota))
}

fn body(quota: &SetQuota) -> String {
    format!(
        "{MAGIC}\nconfigured {}\nquota {}\ndeadline {}\n",
        quota.configured_bytes, quota.quota_bytes, quota.deadline_unix_ms
    )
}

fn parse(text: &str) -> Option<SetQuota> {
    let body = checked_text::body(text).ok()?;
    let mut lines = body.lines();
    if lines.next()? != MAGIC {
        return None;
    }
    let mut number = |name: &str| lines.next()?.strip_prefix(name)?.trim().parse().ok();
    Some(SetQuota {
        configured_bytes: number("configured ")?,
        quota_bytes: number("quota ")?,
        deadline_unix_ms: number("deadline ")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_damage_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), None);
        let quota = SetQuota {
            configured_bytes: 1 << 40,
            quota_bytes: 5,
            deadline_unix_ms: 7,
        };
        write(&quota, dir.path()).unwrap();
        assert_eq!(read(dir.path()), Some(quota));
        let good = checked_text::with_checksum(&body(&quota)).into_bytes();
        for index in 0..good.len() {
            let mut bad = good.clone();
            bad[index] ^= 0x01;
            fs::write(dir.path().join(QUOTA_FILE), &bad).unwrap();
            assert_eq!(read(dir.path()), None, "byte {index}");
        }
    }
}
