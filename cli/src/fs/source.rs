//! Reads the sources of `harvestfs fs put` on this machine.
//!
//! A tree may belong to a user who changes it while it is copied. So each entry is opened relative to its open parent
//! directory, a symlink that has replaced an entry is not followed, and opening a FIFO that has replaced one does not
//! block. Symlinks that the user names are followed.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fcntl_setfl, openat, readlinkat, statat};
use rustix::io::Errno;

/// Flags for opening; with NONBLOCK, opening a FIFO does not wait for a writer.
const READ: OFlags = OFlags::RDONLY
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// A file or directory to be copied.
#[derive(Debug)]
pub enum Source {
    /// A directory.
    Directory(File, Metadata),
    /// A regular file.
    File(File, Metadata),
    /// A symlink, with its target.
    Symlink(Vec<u8>),
    /// Something without content of its own, such as a device.
    Other,
}

impl Source {
    /// Opens a path that the user names; symlinks are followed.
    pub fn named(path: &Path) -> io::Result<Self> {
        // Opening a device may have side effects.
        let metadata = fs::metadata(path)?;
        if !metadata.is_file() && !metadata.is_dir() {
            return Ok(Self::Other);
        }
        Self::opened(rustix::fs::open(path, READ, Mode::empty())?)
    }

    /// Opens an entry of a directory, without following symlinks.
    pub fn within(directory: &File, name: &OsStr) -> io::Result<Self> {
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Directory => {}
            FileType::Symlink => return Self::symlink(directory, name),
            _ => return Ok(Self::Other),
        }
        match openat(directory, name, READ | OFlags::NOFOLLOW, Mode::empty()) {
            // A symlink has replaced the entry since it was examined.
            Err(Errno::LOOP) => Self::symlink(directory, name),
            opened => Self::opened(opened?),
        }
    }

    fn symlink(directory: &File, name: &OsStr) -> io::Result<Self> {
        let leads_to = readlinkat(directory, name, Vec::<u8>::new())?;
        Ok(Self::Symlink(leads_to.into_bytes()))
    }

    fn opened(fd: OwnedFd) -> io::Result<Self> {
        let file = File::from(fd);
        let metadata = file.metadata()?;
        if metadata.is_dir() {
            return Ok(Self::Directory(file, metadata));
        }
        if !metadata.is_file() {
            return Ok(Self::Other);
        }
        // Reads may block.
        fcntl_setfl(&file, OFlags::empty())?;
        Ok(Self::File(file, metadata))
    }
}

/// Lists the names in a directory.
pub fn names(directory: &File) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::new(directory.try_clone()?)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::thread;

    use rustix::fs::{RenameFlags, mknodat, renameat_with};

    use super::*;

    const ROUNDS: usize = 20_000;

    /// Repeatedly opens `a` in a directory, while another thread keeps exchanging it with `b`.
    fn look_while_exchanged(path: &Path, mut look: impl FnMut(Source) + Send) {
        let directory = File::open(path).unwrap();
        thread::scope(|scope| {
            let looking = scope.spawn(|| {
                let mut finds = 0;
                for _ in 0..ROUNDS {
                    // Fails if a symlink was exchanged between the two system calls.
                    if let Ok(found) = Source::within(&directory, "a".as_ref()) {
                        look(found);
                        finds += 1;
                    }
                }
                assert!(finds > 0, "nothing was ever found");
            });
            while !looking.is_finished() {
                let exchange = RenameFlags::EXCHANGE;
                renameat_with(&directory, "a", &directory, "b", exchange).unwrap();
            }
        });
    }

    #[test]
    fn a_symlink_that_takes_the_place_of_a_file_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, secret) = (dir.path().join("tree"), dir.path().join("secret"));
        fs::create_dir(&tree).unwrap();
        fs::write(&secret, "secret").unwrap();
        fs::write(tree.join("a"), "open").unwrap();
        symlink(&secret, tree.join("b")).unwrap();
        look_while_exchanged(&tree, |found| match found {
            Source::File(mut file, _) => {
                let mut content = String::new();
                file.read_to_string(&mut content).unwrap();
                assert_eq!(content, "open");
            }
            Source::Symlink(leads_to) => assert!(leads_to.ends_with(b"/secret")),
            found => panic!("{found:?}"),
        });
    }

    #[test]
    fn a_symlink_that_takes_the_place_of_a_directory_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs::create_dir_all(tree.join("a")).unwrap();
        symlink("/", tree.join("b")).unwrap();
        let own = fs::metadata(tree.join("a")).unwrap().ino();
        look_while_exchanged(&tree, |found| match found {
            Source::Directory(_, metadata) => assert_eq!(metadata.ino(), own),
            Source::Symlink(leads_to) => assert_eq!(leads_to, b"/"),
            found => panic!("{found:?}"),
        });
    }

    #[test]
    fn nothing_that_takes_the_place_of_a_file_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("a"), "open").unwrap();
        let directory = File::open(dir.path()).unwrap();
        mknodat(&directory, "b", FileType::Fifo, Mode::RWXU, 0).unwrap();
        look_while_exchanged(dir.path(), |found| {
            assert!(matches!(found, Source::File(..) | Source::Other));
        });
    }

    #[test]
    fn what_the_user_names_is_followed() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir(at("d")).unwrap();
        fs::write(at("d/f"), "content").unwrap();
        symlink("d", at("to-d")).unwrap();
        symlink("d/f", at("to-f")).unwrap();
        let named = |name: &str| Source::named(&at(name)).unwrap();
        assert!(matches!(named("to-f"), Source::File(..)));
        let Source::Directory(directory, _) = named("to-d") else {
            panic!("it is a directory");
        };
        assert_eq!(names(&directory).unwrap(), [b"f".to_vec()]);
        let device = Source::named("/dev/null".as_ref()).unwrap();
        assert!(matches!(device, Source::Other));
    }
}
