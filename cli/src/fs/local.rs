//! Creates the files of `harvestfs fs get` on this machine.
//!
//! The names in a tree of the cluster were chosen by its users, and files at the destination may belong to other users.
//! So each name is created relative to its open parent directory, and no symlink of that name is followed. And until
//! a copy is complete, other users cannot read it, since its final mode may deny them access.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Permissions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, bail};
use rustix::fs::{AtFlags, Mode, OFlags, fchmod, mkdirat, openat, renameat, symlinkat, unlinkat};
use rustix::io::Errno;

use super::failures::OfItsPath;

/// The permission bits of a file. Set-user-id and set-group-id bits are not copied in either direction, since the copy
/// belongs to the user who makes it.
pub const FILE_BITS: u16 = 0o777;
/// The permission bits of a directory, with the sticky bit, which prevents users of a shared directory from removing
/// each other's files.
pub const DIRECTORY_BITS: u16 = 0o1777;

const EXISTS: &str = "it exists; replace it with -f";

/// A directory in which copies are made.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
    /// The mode that it gets once its contents are complete; `None` if it has that already, or existed before and is
    /// left unchanged.
    mode: Option<Mode>,
}

impl Directory {
    /// Opens the parent directory of a path that the user names; symlinks in the parent's path are followed.
    pub fn above(path: &Path) -> anyhow::Result<Self> {
        let parent = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(parent, flags, Mode::empty())
            .with_context(|| format!("cannot open {}", parent.display()))?;
        Ok(Self { fd, mode: None })
    }

    /// Creates a subdirectory, or opens an existing one.
    pub fn directory(&self, name: &OsStr, mode: u16) -> anyhow::Result<Self> {
        // Its contents can be created even if its final mode denies that.
        let is_made = match mkdirat(&self.fd, name, Mode::RWXU) {
            Err(Errno::EXIST) => false,
            made => {
                made?;
                true
            }
        };
        // fchmod needs a descriptor that is open for reading.
        let access = if is_made {
            OFlags::RDONLY
        } else {
            OFlags::PATH
        };
        let flags = access | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&self.fd, name, flags, Mode::empty()) {
            Err(Errno::NOTDIR | Errno::LOOP) => {
                bail!(OfItsPath(
                    "it exists, and is not a directory: move it away".into()
                ))
            }
            opened => Ok(Self {
                fd: opened?,
                mode: is_made.then(|| Mode::from_raw_mode(u32::from(mode & DIRECTORY_BITS))),
            }),
        }
    }

    /// Sets its final mode, if it was created here, after which nothing more is created in it.
    pub fn finish(&mut self) -> io::Result<()> {
        match self.mode.take() {
            Some(mode) => Ok(fchmod(&self.fd, mode)?),
            None => Ok(()),
        }
    }

    /// Creates a symlink in it, replacing an existing entry of that name if `replace` is set.
    pub fn symlink(&self, name: &OsStr, target: &[u8], replace: bool) -> anyhow::Result<()> {
        let target = OsStr::from_bytes(target);
        match symlinkat(target, &self.fd, name) {
            Err(Errno::EXIST) if replace => {}
            Err(Errno::EXIST) => bail!(OfItsPath(EXISTS.into())),
            made => return Ok(made?),
        }
        let temporary = temporary_name();
        symlinkat(target, &self.fd, &temporary)?;
        let replaced = renameat(&self.fd, &temporary, &self.fd, name);
        if replaced.is_err() {
            // The original error is reported instead.
            let _ = unlinkat(&self.fd, &temporary, AtFlags::empty());
        }
        Ok(replaced?)
    }

    /// Begins a file in it. With `replace`, the complete file replaces an existing entry of that name.
    pub fn file(&self, name: &OsStr, replace: bool) -> anyhow::Result<PendingCopy<'_>> {
        let written = if replace {
            temporary_name()
        } else {
            name.to_owned()
        };
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(&self.fd, &written, flags, Mode::RUSR | Mode::WUSR) {
            Err(Errno::EXIST) if !replace => bail!(OfItsPath(EXISTS.into())),
            opened => Ok(PendingCopy {
                directory: self,
                file: File::from(opened?),
                written,
                name: name.to_owned(),
                is_finished: false,
            }),
        }
    }
}

impl Drop for Directory {
    /// Sets its mode even if the copy ends early: it need not stay closed to others.
    fn drop(&mut self) {
        // The copy's own error is reported instead.
        let _ = self.finish();
    }
}

impl AsFd for Directory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn temporary_name() -> OsString {
    let random = rand::random::<u64>();
    OsString::from(format!(".harvestfs-get.{random:016x}.tmp"))
}

/// A file that is being copied; it is removed when this is dropped before it is finished.
#[derive(Debug)]
pub struct PendingCopy<'a> {
    directory: &'a Directory,
    file: File,
    /// The name under which it is written.
    written: OsString,
    /// The name that it will have.
    name: OsString,
    is_finished: bool,
}

impl PendingCopy<'_> {
    /// The file, for writing its content.
    pub fn content(&mut self) -> &mut File {
        &mut self.file
    }

    /// Sets its mode and gives it its name.
    pub fn finish(mut self, mode: u16) -> io::Result<()> {
        let mode = Permissions::from_mode(u32::from(mode & FILE_BITS));
        self.file.set_permissions(mode)?;
        if self.written != self.name {
            let directory = &self.directory.fd;
            renameat(directory, &self.written, directory, &self.name)?;
        }
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for PendingCopy<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            // The partial content is of no use. This may fail, too.
            let _ = unlinkat(&self.directory.fd, &self.written, AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn names(directory: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<OsString> = entries.map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn symlinks_with_the_names_of_copies_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("elsewhere")).unwrap();
        fs::write(at("elsewhere/kept"), "old").unwrap();
        fs::create_dir(at("here")).unwrap();
        symlink("../elsewhere", at("here/d")).unwrap();
        symlink("../elsewhere/kept", at("here/f")).unwrap();
        symlink("../elsewhere/new", at("here/dangling")).unwrap();

        let here = Directory::above(&at("here/d")).unwrap();
        let refused = here.directory("d".as_ref(), 0o755).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("not a directory"), "{refused}");
        for name in ["f", "dangling"] {
            let refused = here.file(name.as_ref(), false).unwrap_err().to_string();
            assert!(refused.contains("replace it with -f"), "{refused}");
            let mut file = here.file(name.as_ref(), true).unwrap();
            file.content().write_all(b"new").unwrap();
            file.finish(0o644).unwrap();
            let copy = at("here").join(name);
            assert!(fs::symlink_metadata(&copy).unwrap().is_file());
            assert_eq!(fs::read(&copy).unwrap(), b"new");
        }
        assert_eq!(names(&at("elsewhere")), ["kept"]);
        assert_eq!(fs::read(at("elsewhere/kept")).unwrap(), b"old");
    }

    #[test]
    fn copies_are_private_until_they_are_whole_and_then_have_their_modes() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let here = Directory::above(&at("d")).unwrap();
        let mut made = here.directory("d".as_ref(), 0o500).unwrap();
        assert_eq!(mode(&at("d")), 0o700);
        let file = made.file("f".as_ref(), false).unwrap();
        assert_eq!(mode(&at("d/f")), 0o600);
        file.finish(0o4755).unwrap();
        made.symlink("l".as_ref(), b"f", false).unwrap();
        let mut shared = made.directory("shared".as_ref(), 0o1777).unwrap();
        shared.finish().unwrap();
        // One whose contents are incomplete.
        drop(made.directory("part".as_ref(), 0o755).unwrap());
        made.finish().unwrap();
        assert_eq!(mode(&at("d/f")), 0o755);
        assert_eq!(mode(&at("d/shared")), 0o1777);
        assert_eq!(mode(&at("d/part")), 0o755);
        assert_eq!(mode(&at("d")), 0o500);
        assert_eq!(fs::read_link(at("d/l")).unwrap(), Path::new("f"));

        // An existing directory is left unchanged.
        let mut again = here.directory("d".as_ref(), 0o777).unwrap();
        again.finish().unwrap();
        assert_eq!(mode(&at("d")), 0o500);
        // With its mode, only root could remove its contents.
        fs::set_permissions(at("d"), Permissions::from_mode(0o700)).unwrap();
    }

    #[test]
    fn a_symlink_replaces_what_is_there_only_when_it_may() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        symlink("old", at("link")).unwrap();
        fs::write(at("file"), "old").unwrap();
        fs::create_dir(at("directory")).unwrap();
        let here = Directory::above(&at("link")).unwrap();
        for name in ["link", "file"] {
            let refused = here.symlink(name.as_ref(), b"new", false).unwrap_err();
            let refused = refused.to_string();
            assert!(refused.contains("replace it with -f"), "{refused}");
            here.symlink(name.as_ref(), b"new", true).unwrap();
            assert_eq!(fs::read_link(at(name)).unwrap(), Path::new("new"));
        }
        here.symlink("directory".as_ref(), b"new", true)
            .unwrap_err();
        assert_eq!(names(dir.path()), ["directory", "file", "link"]);
    }

    #[test]
    fn what_a_copy_does_not_replace_in_the_end_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        fs::write(&path, "old").unwrap();
        let here = Directory::above(&path).unwrap();
        let mut half = here.file("f".as_ref(), true).unwrap();
        half.content().write_all(b"half").unwrap();
        assert_eq!(names(dir.path()).len(), 2);
        drop(half);
        drop(here.file("g".as_ref(), false).unwrap());
        assert_eq!(names(dir.path()), ["f"]);
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }
}
