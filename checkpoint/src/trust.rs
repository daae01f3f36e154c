//! Whether images can only have been written by the user that restores them. A restored job runs with the
//! rights that its images say: a user that can change an image can do all that the restoring user can.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::store::{Job, StoreError, io_error};

/// The bits of a mode that let others than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Where one thing is wrong in the directory of a job, others are.
const ALL_BELOW: &str = "-R ";

/// Why images are not trusted.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// Another user owns something.
    #[error(
        "{} belongs to user {owner}, and not to user {wanted}: its images could be anything. If they \
         are right, `chown {options}{wanted} {}` first",
        path.display(), wrong.display()
    )]
    Owner {
        /// What.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The owner that it would have to have.
        wanted: u32,
        /// What is to be put right.
        wrong: PathBuf,
        /// How far: options of `chown`.
        options: &'static str,
    },
    /// Others can write to something.
    #[error(
        "{} can be written by others (mode {mode:04o}): its images could be anything. If they are right, \
         `chmod {options}go-w {}` first",
        path.display(), wrong.display()
    )]
    Mode {
        /// What.
        path: PathBuf,
        /// Its mode.
        mode: u32,
        /// What is to be put right.
        wrong: PathBuf,
        /// How far: options of `chmod`.
        options: &'static str,
    },
    /// A link leads out of the directory that was judged.
    #[error("{} leads out of the checkpoint's directory, where anybody could write", path.display())]
    LeadsOut {
        /// The link.
        path: PathBuf,
    },
    /// It cannot be looked at.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Refuses directories in which others than `user` could exchange what is stored: that of all jobs, and that of
/// the job, if it is there.
///
/// # Errors
/// Names the first one that is not as it must be.
pub fn refuse_directories(job: &Job, user: u32) -> Result<(), TrustError> {
    let top = job.directory();
    if let Some(store) = top.parent() {
        let metadata = look(fs::metadata(store), store)?;
        // Other jobs in it may be somebody else's.
        judge(store, &metadata, user, (store, ""))?;
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

/// Refuses what others than `user` could have written of a checkpoint: the directory of all jobs, that of the job, and
/// `images`, that of the checkpoint in it, with everything in it are judged by their owners and modes, as `sudo` judges
/// its files. Nothing else in the job's directory is: a checkpoint needs no other one.
///
/// # Errors
/// Names the first thing that is not as it must be.
pub fn refuse_what_others_could_write(
    job: &Job,
    images: &Path,
    user: u32,
) -> Result<(), TrustError> {
    refuse_directories(job, user)?;
    let top = job.directory();
    // Not through `images`, which may be a link itself.
    let judged = look(top.canonicalize(), top)?.join(images.file_name().unwrap_or_default());
    // Outermost first: what is inside a directory that is right cannot be exchanged any more.
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

/// None: another node has removed it since it was seen, and so it is not read.
fn look_if_there<T>(result: io::Result<T>, path: &Path) -> Result<Option<T>, StoreError> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        result => look(result, path).map(Some),
    }
}

fn look<T>(result: io::Result<T>, path: &Path) -> Result<T, StoreError> {
    result.map_err(io_error("judge", path))
}

/// Refuses what is not as it must be; then `wrong` is to be put right, with such options of `chown` or `chmod`.
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
    // The mode of a link means nothing.
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
    fn directories_are_judged_before_anything_is_stored() {
        let directory = tempfile::tempdir().expect("a directory");
        let (job, image, user) = job(directory.path());
        let store = directory.path().join("store");
        let refusal = |user| {
            let refused = refuse_directories(&job, user);
            refused.expect_err("it is refused").to_string()
        };
        // What is in the job is judged when it is restored.
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

        // A job that is not there yet is made by whoever judges.
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
        // What it leads to would not be judged.
        let checkpoint = job.directory().join("000002");
        std::os::unix::fs::symlink("000001", &checkpoint).expect("symlink");
        leads_out(&checkpoint, &checkpoint);
    }
}
