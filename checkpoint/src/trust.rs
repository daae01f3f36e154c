//! Checks that images can only have been written by the user that restores them. A restored job runs with the
//! privileges recorded in its images: a user that can modify an image can do everything that the restoring user can.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::store::{Job, StoreError, io_error};

/// Mode bits that let users other than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Mode bit with which the entries of a directory can only be replaced by their owners and by the directory's.
const STICKY: u32 = 0o1000;
const ROOT: u32 = 0;
/// Option to change a job's directory recursively: where one entry is wrong, others usually are, too.
const ALL_BELOW: &str = "-R ";

/// Why images are not trusted.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// A file or directory is owned by another user.
    #[error(
        "{} belongs to user {owner}, and not to user {wanted}: its images could be anything. If they \
         are right, `chown {options}{wanted} {}` first",
        path.display(), wrong.display()
    )]
    Owner {
        /// The file or directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The required owner.
        wanted: u32,
        /// The path whose owner has to be changed.
        wrong: PathBuf,
        /// Options of `chown` for that.
        options: &'static str,
    },
    /// A file or directory can be written by other users.
    #[error(
        "{} can be written by others (mode {mode:04o}): its images could be anything. If they are right, \
         `chmod {options}go-w {}` first",
        path.display(), wrong.display()
    )]
    Mode {
        /// The file or directory.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// The path whose mode has to be changed.
        wrong: PathBuf,
        /// Options of `chmod` for that.
        options: &'static str,
    },
    /// A directory above the store lets other users replace the store.
    #[error(
        "{0} belongs to user {owner} and has mode {mode:04o}, so others could replace {1} as a whole. If it is right, \
         let it belong to user {user} (`chown {user} {0}`) and let nobody else write to it (`chmod go-w {0}`, or \
         `chmod +t {0}`); or keep checkpoints elsewhere",
        path.display(), store.display()
    )]
    Above {
        /// The directory.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Its mode.
        mode: u32,
        /// The directory of all jobs.
        store: PathBuf,
        /// The user who restores or stores.
        user: u32,
    },
    /// A symbolic link leads out of the directory that was checked.
    #[error("{} leads out of the checkpoint's directory, where anybody could write", path.display())]
    LeadsOut {
        /// The link.
        path: PathBuf,
    },
    /// A path cannot be examined.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Refuses directories in which users other than `user` could replace entries. Checks the directory of all jobs, those
/// above it (which may also belong to root, or be sticky) and, if it exists, that of the job.
///
/// # Errors
/// For the first directory with a wrong owner or mode, and when the job's directory is a link.
pub fn refuse_directories(job: &Job, user: u32) -> Result<(), TrustError> {
    let top = job.directory();
    if let Some(store) = top.parent() {
        let metadata = look(fs::symlink_metadata(store), store)?;
        // Not recursively: other jobs in it may belong to other users.
        judge(store, &metadata, user, (store, ""))?;
        judge_above(store, user)?;
    }
    match fs::symlink_metadata(top) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        metadata => {
            let metadata = look(metadata, top)?;
            judge(top, &metadata, user, (top, ALL_BELOW))?;
            if metadata.is_symlink() {
                return Err(StoreError::Link(top.to_owned()).into());
            }
            Ok(())
        }
    }
}

/// Refuses a checkpoint of which users other than `user` could have written any part. Checks the owners and modes, as
/// `sudo` does for its files, of the directory of all jobs and those above it, that of the job, and `images`, that of
/// the checkpoint, with everything in it. Other entries of the job's directory are not checked, as a checkpoint does
/// not depend on others.
///
/// # Errors
/// For the first path with a wrong owner or mode, and for a link that leads out of the checkpoint.
pub fn refuse_what_others_could_write(
    job: &Job,
    images: &Path,
    user: u32,
) -> Result<(), TrustError> {
    refuse_directories(job, user)?;
    let top = job.directory();
    // Does not resolve `images` itself, which may be a link.
    let judged = look(top.canonicalize(), top)?.join(images.file_name().unwrap_or_default());
    // Outermost first: the entries of a directory that has passed can no longer be replaced by others.
    let mut paths = vec![images.to_owned()];
    while let Some(path) = paths.pop() {
        let Some(metadata) = look_if_there(fs::symlink_metadata(&path), &path)? else {
            continue;
        };
        judge(&path, &metadata, user, (top, ALL_BELOW))?;
        if metadata.is_symlink() {
            let target = look(path.canonicalize(), &path)?;
            if !target.starts_with(&judged) {
                return Err(TrustError::LeadsOut { path });
            }
        } else if metadata.is_dir() {
            for entry in look_if_there(fs::read_dir(&path), &path)?
                .into_iter()
                .flatten()
            {
                paths.push(look(entry, &path)?.path());
            }
        }
    }
    Ok(())
}

/// Returns `None` when the path does not exist: another node has removed it since it was listed, so nothing reads it.
fn look_if_there<T>(result: io::Result<T>, path: &Path) -> Result<Option<T>, StoreError> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => look(result, path).map(Some),
    }
}

fn look<T>(result: io::Result<T>, path: &Path) -> Result<T, StoreError> {
    result.map_err(io_error("judge", path))
}

/// Refuses a store that users other than root and `user` could replace: whoever can write to a directory can rename
/// what is in it, whoever owns that, unless the directory is sticky.
fn judge_above(store: &Path, user: u32) -> Result<(), TrustError> {
    for above in store.ancestors().skip(1) {
        // Links were resolved when the store was opened: one that is here now was put here since.
        let metadata = look(fs::symlink_metadata(above), above)?;
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        let is_shared = mode & WRITABLE_BY_OTHERS != 0 && mode & STICKY == 0;
        if is_shared || ![ROOT, user].contains(&owner) {
            return Err(TrustError::Above {
                path: above.to_owned(),
                owner,
                mode,
                store: store.to_owned(),
                user,
            });
        }
    }
    Ok(())
}

/// Refuses a path with a wrong owner or mode. The error suggests `chown` or `chmod` with these options for `wrong`.
fn judge(
    path: &Path,
    metadata: &fs::Metadata,
    user: u32,
    (wrong, options): (&Path, &'static str),
) -> Result<(), TrustError> {
    if metadata.uid() != user {
        return Err(TrustError::Owner {
            path: path.to_owned(),
            owner: metadata.uid(),
            wanted: user,
            wrong: wrong.to_owned(),
            options,
        });
    }
    // The mode of a symbolic link is meaningless.
    let mode = metadata.mode() & 0o7777;
    if !metadata.is_symlink() && mode & WRITABLE_BY_OTHERS != 0 {
        return Err(TrustError::Mode {
            path: path.to_owned(),
            mode,
            wrong: wrong.to_owned(),
            options,
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
        let images = job.directory().join("000001");
        std::os::unix::fs::symlink("../000001", image.with_file_name("itself")).expect("symlink");
        refuse_what_others_could_write(&job, &images, user).expect("it is trusted");
        let error =
            refuse_what_others_could_write(&job, &images, user + 1).expect_err("of another user");
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
            let error =
                refuse_what_others_could_write(&job, &images, user).expect_err("it is refused");
            assert!(
                matches!(&error, TrustError::Mode { path: named, mode, .. } if named == path && *mode == wrong),
                "{error}"
            );
            chmod(path, right);
        }
        refuse_what_others_could_write(&job, &images, user).expect("it is trusted again");
    }

    #[test]
    fn a_store_that_others_could_replace_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, _, user) = job(&directory.path().join("above"));
        let images = job.directory().join("000001");
        let above = job.directory().ancestors().nth(2).expect("above the store");
        let refused = || match refuse_what_others_could_write(&job, &images, user) {
            Ok(()) => false,
            Err(TrustError::Above { path, .. }) if path == above => true,
            Err(error) => panic!("{error}"),
        };
        for (mode, is_refused) in [
            (0o755, false),
            (0o775, true),
            (0o757, true),
            // As /tmp is.
            (0o1777, false),
            (0o700, false),
        ] {
            chmod(above, mode);
            assert_eq!(refused(), is_refused, "{mode:o}");
        }
        // Only root can give it to somebody else.
        if std::os::unix::fs::chown(above, Some(user + 1), None).is_ok() {
            assert!(refused(), "its owner can write to it");
        }
    }

    #[test]
    fn directories_are_judged_before_anything_is_stored() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, image, user) = job(directory.path());
        let store = directory.path().join("store");
        let refusal = |user| {
            let refused = refuse_directories(&job, user);
            refused.expect_err("it is refused").to_string()
        };
        // The job's contents are checked only when it is restored.
        chmod(&image, 0o666);
        refuse_directories(&job, user).expect("both are right");
        for (path, command) in [(&*store, "chmod go-w"), (job.directory(), "chmod -R go-w")] {
            chmod(path, 0o775);
            let (said, command) = (refusal(user), format!("`{command} {}`", path.display()));
            assert!(said.contains(&command), "{said}");
            chmod(path, 0o755);
        }
        let (said, other) = (refusal(user + 1), user + 1);
        let command = format!("`chown {other} {}`", store.display());
        assert!(said.contains(&command), "{said}");

        // A missing job directory is created later by the user who runs the check.
        fs::rename(job.directory(), directory.path().join("elsewhere")).expect("renamed");
        refuse_directories(&job, user).expect("the store is right");
        std::os::unix::fs::symlink("../elsewhere", job.directory()).expect("symlink");
        let error = refuse_directories(&job, user).expect_err("a link");
        let TrustError::Store(StoreError::Link(path)) = error else {
            panic!("{error}");
        };
        assert_eq!(path, job.directory());
    }

    #[test]
    fn only_the_checkpoint_that_is_restored_is_judged() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, _, user) = job(directory.path());
        let images = job.directory().join("000001");
        let other = job.directory().join("000002");
        fs::create_dir(&other).expect("mkdir");
        for path in [other.join("core-1.img"), job.directory().join("notes")] {
            fs::write(&path, "anything").expect("written");
            chmod(&path, 0o666);
        }
        chmod(&other, 0o777);
        refuse_what_others_could_write(&job, &images, user).expect("it is trusted");
        refuse_what_others_could_write(&job, &other, user).expect_err("it is refused");
        let gone = job.directory().join("000003");
        refuse_what_others_could_write(&job, &gone, user).expect("there is nothing to read");
    }

    #[test]
    fn a_link_that_leads_out_is_refused() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, image, user) = job(directory.path());
        let images = job.directory().join("000001");
        let link = image.with_file_name("parent");
        let leads_out = |images: &Path, link: &Path| {
            let error = refuse_what_others_could_write(&job, images, user);
            let error = error.expect_err("it is refused");
            assert!(matches!(error, TrustError::LeadsOut { path } if path == link));
        };
        for target in [directory.path(), Path::new("../../job")] {
            std::os::unix::fs::symlink(target, &link).expect("symlink");
            leads_out(&images, &link);
            fs::remove_file(&link).expect("it is there");
        }
        // The target would not be checked.
        let checkpoint = job.directory().join("000002");
        std::os::unix::fs::symlink("000001", &checkpoint).expect("symlink");
        leads_out(&checkpoint, &checkpoint);
    }
}
