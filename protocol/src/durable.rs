//! Small files that are replaced as a whole: identities, configurations, the state of a volume or a namenode.
//! After a crash or a power loss, either the old or the new content is present, complete.
//!
//! When a sync fails, the kernel keeps the pages as if they had been written, and no later sync of that file
//! writes them. So a file gets its name only after a successful sync, and a file whose sync failed is
//! discarded: the next attempt writes a new file. A process that relies on such files at its start must
//! [`recover`] their directory first: that a file has its name proves its content, but a process may have been
//! killed before the name was durable.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, RenameFlags};

const TEMPORARY_SUFFIX: &str = ".tmp";

/// Writes a file, replacing any existing file of that name; durable when this returns. The umask applies to
/// `mode`.
///
/// # Errors
/// The error of the operating system. The file then has the old content, or the new one, which may not be
/// durable.
pub fn replace_file(path: &Path, content: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, content, mode, File::sync_all)
}

fn replace_with(
    path: &Path,
    content: &[u8],
    mode: u32,
    sync: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let mut file = PendingFile::create(path, mode)?;
    file.file.write_all(content)?;
    sync(&file.file)?;
    file.put_in_place(true)
}

/// A file that is written piece by piece. It has a temporary name in the same directory and gets its final name
/// once it is complete; if it is dropped before that, it is removed.
#[derive(Debug)]
pub struct PendingFile {
    file: File,
    path: PathBuf,
    temporary: PathBuf,
    /// It has its final name.
    is_in_place: bool,
}

impl PendingFile {
    /// Creates a file that will get this name. The umask applies to `mode`. The file can be read, too.
    ///
    /// # Errors
    /// The error of the operating system.
    pub fn create(path: &Path, mode: u32) -> io::Result<Self> {
        let dir = directory_of(path);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let random = rand::random::<u64>();
        let temporary = dir.join(format!(".{name}.{random:016x}{TEMPORARY_SUFFIX}"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temporary)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            temporary,
            is_in_place: false,
        })
    }

    /// Its content.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Makes it durable and gives it its name, replacing an existing file if `replaces`.
    ///
    /// # Errors
    /// The error of the operating system; [`io::ErrorKind::AlreadyExists`] if the name is taken and `replaces`
    /// is false.
    pub fn install(self, replaces: bool) -> io::Result<()> {
        self.file.sync_all()?;
        self.put_in_place(replaces)
    }

    fn put_in_place(mut self, replaces: bool) -> io::Result<()> {
        let (from, to) = (&self.temporary, &self.path);
        if replaces {
            fs::rename(from, to)?;
        } else {
            match rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
                // File systems such as NFS cannot do it in one step.
                Err(rustix::io::Errno::INVAL) if !to.try_exists()? => fs::rename(from, to)?,
                Err(rustix::io::Errno::INVAL) => return Err(io::ErrorKind::AlreadyExists.into()),
                renamed => renamed?,
            }
        }
        self.is_in_place = true;
        sync_name_of(&self.path)
    }
}

impl Drop for PendingFile {
    fn drop(&mut self) {
        if !self.is_in_place {
            // Its content is of no use, and removing it may fail too.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Creates a directory and its missing ancestors; their names are durable when this returns. An existing
/// directory stays as it is.
///
/// # Errors
/// The error of the operating system.
pub fn create_directories(dir: &Path, mode: u32) -> io::Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let above = directory_of(dir);
    create_directories(above, mode)?;
    match fs::DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => sync_name_of(dir),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(e),
    }
}

/// Renames a file or directory, replacing an existing file of the new name; the change is durable when this
/// returns. Its content has to be durable before.
///
/// # Errors
/// The error of the operating system. The old name then still applies, or the new one, which may not be
/// durable.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    rename_with(from, to, RenameFlags::empty())
}

/// Does the same as [`rename`], but replaces nothing.
///
/// # Errors
/// As [`rename`]; [`io::ErrorKind::AlreadyExists`] if the new name is taken.
pub fn rename_to_new(from: &Path, to: &Path) -> io::Result<()> {
    rename_with(from, to, RenameFlags::NOREPLACE)
}

fn rename_with(from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
    rustix::fs::renameat_with(CWD, from, CWD, to, flags)?;
    sync_name_of(to)?;
    match directory_of(from) {
        same if same == directory_of(to) => Ok(()),
        other => sync_directory(other),
    }
}

/// Makes the names in a directory durable.
///
/// # Errors
/// The error of the operating system.
pub fn sync_directory(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// Makes the name of a file or directory durable.
///
/// # Errors
/// The error of the operating system.
pub fn sync_name_of(path: &Path) -> io::Result<()> {
    sync_directory(directory_of(path))
}

/// Prepares a directory in which only the caller writes: removes what a killed process left half written, and
/// makes the names that it gave durable.
///
/// # Errors
/// The error of the operating system.
pub fn recover(dir: &Path) -> io::Result<()> {
    recover_noting(dir, || {})
}

/// Does the same as [`recover`], and calls `answered` each time the disk has answered, for callers that time
/// out on a silent disk.
///
/// # Errors
/// As [`recover`].
pub fn recover_noting(dir: &Path, answered: impl Fn()) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        answered();
        let entry = entry?;
        if is_temporary(&entry.file_name()) {
            fs::remove_file(entry.path())?;
        }
    }
    answered();
    sync_directory(dir)
}

/// Whether a name is one that `PendingFile` gives to files that are still being written, or whose writer was
/// killed.
#[must_use]
pub fn is_temporary(name: &OsStr) -> bool {
    let name = name.to_str().and_then(|name| name.strip_prefix('.'));
    let name = name.and_then(|name| name.strip_suffix(TEMPORARY_SUFFIX));
    name.and_then(|name| name.rsplit_once('.'))
        .is_some_and(|(_, random)| random.len() == 16 && u64::from_str_radix(random, 16).is_ok())
}

fn directory_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
        entries.map(|entry| name(entry).unwrap()).collect()
    }

    #[test]
    fn a_file_is_replaced_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for content in ["one", "the second"] {
            replace_file(&path, content.as_bytes(), 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(names(dir.path()), ["file"]);
    }

    #[test]
    fn a_file_gets_its_name_as_a_whole_and_replaces_nothing_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let pending = |content: &str| {
            let mut pending = PendingFile::create(&path, 0o600).unwrap();
            pending.file().write_all(content.as_bytes()).unwrap();
            pending
        };
        let (given_up, first) = (pending("half"), pending("first"));
        assert!(!path.exists());
        drop(given_up);
        first.install(false).unwrap();
        let refused = pending("second").install(false).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"first");
        pending("third").install(true).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"third");
        assert_eq!(names(dir.path()), ["file"]);
    }

    /// The kernel does not retry the writes of a failed sync: neither a second sync of the same file nor
    /// giving it its name may make its content count as durable.
    #[test]
    fn after_a_failed_sync_the_next_attempt_writes_another_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace_file(&path, b"old", 0o600).unwrap();
        // Kept open, so that its inode is not used again.
        let lost = RefCell::new(Vec::new());
        let failing = |file: &File| {
            lost.borrow_mut().push(file.try_clone()?);
            Err(io::ErrorKind::Other.into())
        };
        for _ in 0..2 {
            replace_with(&path, b"new", 0o600, failing).unwrap_err();
            assert_eq!(fs::read(&path).unwrap(), b"old");
            assert_eq!(names(dir.path()), ["file"]);
        }
        replace_file(&path, b"new", 0o600).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        let inode = fs::metadata(&path).unwrap().ino();
        for lost in lost.borrow().iter() {
            assert_ne!(lost.metadata().unwrap().ino(), inode);
        }
    }

    #[test]
    fn a_directory_is_renamed_as_a_whole_and_replaces_nothing_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        create_directories(&at("above/one"), 0o700).unwrap();
        fs::write(at("above/one/file"), "x").unwrap();
        rename_to_new(&at("above/one"), &at("two")).unwrap();
        assert_eq!(fs::read(at("two/file")).unwrap(), b"x");
        fs::write(at("old"), "old").unwrap();
        let refused = rename_to_new(&at("two/file"), &at("old")).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists);
        rename(&at("two/file"), &at("old")).unwrap();
        assert_eq!(fs::read(at("old")).unwrap(), b"x");
        assert!(names(&at("two")).is_empty() && names(&at("above")).is_empty());
    }

    #[test]
    fn what_a_killed_writer_left_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let kept = ["file", ".file.tmp", ".file.0123456789abcdef", "a.tmp"];
        for name in kept {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        fs::write(dir.path().join(".file.0123456789abcdef.tmp"), "half").unwrap();
        recover(dir.path()).unwrap();
        let mut found = names(dir.path());
        found.sort();
        let mut expected = kept.map(str::to_owned);
        expected.sort();
        assert_eq!(found, expected);
    }
}
