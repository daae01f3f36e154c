//! Whether images can only have been written by the user that restores them. A restored job runs with the
//! rights that its images say: a user that can change an image can do all that the restoring user can.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::store::{Job, StoreError, io_error};

/// The bits of a mode that let others than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Why images are not trusted.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// Another user owns something.
    #[error(
        "{} belongs to user {owner}, and not to user {wanted}: its images could be anything. If they \
         are right, `chown -R {wanted} {}` first",
        path.display(), job.display()
    )]
    Owner {
        /// What.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The owner that it would have to have.
        wanted: u32,
        /// The directory of the job.
        job: PathBuf,
    },
    /// Others can write to something.
    #[error(
        "{} can be written by others (mode {mode:04o}): its images could be anything. If they are right, \
         `chmod -R go-w {}` first",
        path.display(), job.display()
    )]
    Mode {
        /// What.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// The directory of the job.
        job: PathBuf,
    },
    /// A link leads out of the directory that was judged.
    #[error("{} leads out of the job's directory, where anybody could write", path.display())]
    LeadsOut {
        /// The link.
        path: PathBuf,
    },
    /// It cannot be looked at.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Refuses what others than `user` could have written: the directory of all jobs, that of the job, and
/// everything in it are judged by their owners and modes, as `sudo` judges its files.
///
/// # Errors
/// Names the first thing that is not as it must be.
pub fn refuse_what_others_could_write(job: &Job, user: u32) -> Result<(), TrustError> {
    let top = job.directory();
    if let Some(store) = top.parent() {
        judge(job, store, &look(fs::metadata(store), store)?, user)?;
    }
    // Outermost first: what is inside a directory that is right cannot be exchanged any more.
    let mut paths = vec![top.to_owned()];
    while let Some(path) = paths.pop() {
        let metadata = look(fs::symlink_metadata(&path), &path)?;
        judge(job, &path, &metadata, user)?;
        if metadata.is_symlink() {
            let target = look(path.canonicalize(), &path)?;
            if !target.starts_with(look(top.canonicalize(), top)?) {
                return Err(TrustError::LeadsOut { path });
            }
        } else if metadata.is_dir() {
            for entry in look(fs::read_dir(&path), &path)? {
                paths.push(look(entry, &path)?.path());
            }
        }
    }
    Ok(())
}

fn look<T>(result: io::Result<T>, path: &Path) -> Result<T, StoreError> {
    result.map_err(io_error("judge", path))
}

fn judge(job: &Job, path: &Path, metadata: &fs::Metadata, user: u32) -> Result<(), TrustError> {
    if metadata.uid() != user {
        return Err(TrustError::Owner {
            path: path.to_owned(),
            owner: metadata.uid(),
            wanted: user,
            job: job.directory().to_owned(),
        });
    }
    // The mode of a link means nothing.
    let mode = metadata.mode() & 0o7777;
    if !metadata.is_symlink() && mode & WRITABLE_BY_OTHERS != 0 {
        return Err(TrustError::Mode {
            path: path.to_owned(),
            mode,
            job: job.directory().to_owned(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::store::Store;

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("chmod");
    }

    /// A job with one image, and its owner.
    fn job(directory: &Path) -> (Job, PathBuf, u32) {
        let store = directory.join("store");
        fs::create_dir_all(&store).expect("mkdir");
        let job = Store::open(store.clone()).expect("it is there");
        let job = job.job("job".parse().expect("a name"));
        let images = job.directory().join("000001");
        fs::create_dir_all(&images).expect("mkdir");
        for path in [&store, job.directory(), &images] {
            chmod(path, 0o755);
        }
        let image = images.join("core-1.img");
        fs::write(&image, "image").expect("written");
        chmod(&image, 0o644);
        let user = fs::metadata(&image).expect("it is there").uid();
        (job, image, user)
    }

    #[test]
    fn what_only_the_owner_can_write_is_trusted() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, image, user) = job(directory.path());
        std::os::unix::fs::symlink("../000001", image.with_file_name("parent")).expect("symlink");
        refuse_what_others_could_write(&job, user).expect("it is trusted");
        let error = refuse_what_others_could_write(&job, user + 1).expect_err("of another user");
        assert!(matches!(error, TrustError::Owner { wanted, .. } if wanted == user + 1));
    }

    #[test]
    fn what_others_can_write_is_refused_wherever_it_is() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, image, user) = job(directory.path());
        let images = job.directory().join("000001");
        let store = directory.path().join("store");
        for (path, right, wrong) in [
            (&image, 0o644, 0o664),
            (&image, 0o644, 0o646),
            (&images, 0o755, 0o775),
            (&job.directory().to_owned(), 0o755, 0o757),
            (&store, 0o755, 0o1777),
        ] {
            chmod(path, wrong);
            let error = refuse_what_others_could_write(&job, user).expect_err("it is refused");
            assert!(
                matches!(&error, TrustError::Mode { path: named, mode, .. } if named == path && *mode == wrong),
                "{error}"
            );
            chmod(path, right);
        }
        refuse_what_others_could_write(&job, user).expect("it is trusted again");
    }

    #[test]
    fn a_link_that_leads_out_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, image, user) = job(directory.path());
        let link = image.with_file_name("parent");
        std::os::unix::fs::symlink(directory.path(), &link).expect("symlink");
        let error = refuse_what_others_could_write(&job, user).expect_err("it is refused");
        assert!(matches!(error, TrustError::LeadsOut { path } if path == link));
    }
}
