//! The table of mounts, as the kernel lists it in `/proc/self/mountinfo`. Nothing here accesses a mounted file system,
//! so nothing waits for one that hangs.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// The file system type of HarvestFS mounts in the kernel.
pub const MOUNT_TYPE: &str = "fuse.harvestfs";

/// The source name of a mount of a cluster.
#[must_use]
pub fn source_of(cluster: &str) -> String {
    format!("harvestfs:{cluster}")
}

/// One mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountEntry {
    /// `major:minor` of its device, which no other mounted file system has. Further mounts of the same file system, as
    /// by `mount --bind`, have the same device: the first entry is the mount that the others were made from.
    pub device: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
    /// The type of the file system, with its subtype.
    pub kind: String,
    /// The source of the mount: for HarvestFS, the cluster.
    pub source: String,
}

/// All mounts, in the order in which they were mounted.
///
/// # Errors
/// If `/proc` is not available.
pub fn mounts() -> io::Result<Vec<MountEntry>> {
    Ok(parse(&std::fs::read("/proc/self/mountinfo")?))
}

/// The mount visible at a directory: the last one that was mounted there.
#[must_use]
pub fn mounted_on<'a>(mounts: &'a [MountEntry], directory: &Path) -> Option<&'a MountEntry> {
    mounts.iter().rfind(|it| it.mount_point == directory)
}

/// Mounts in or over a file system, wherever it is visible, in the order in which they have to be unmounted. Further
/// mounts of the file system itself, as made by `mount --bind`, are included if they are in or over one of its mounts.
#[must_use]
pub fn mounted_below<'a>(mounts: &'a [MountEntry], device: &str) -> Vec<&'a MountEntry> {
    let later = mounted_later(mounts, device).into_iter();
    later
        .filter_map(|(entry, is_below)| is_below.then_some(entry))
        .collect()
}

/// All mounts that have to be unmounted before the first mount of a file system can be, in that order: mounts below
/// it, and its further mounts.
pub(crate) fn mounted_besides<'a>(mounts: &'a [MountEntry], device: &str) -> Vec<&'a MountEntry> {
    let later = mounted_later(mounts, device).into_iter();
    later
        .filter_map(|(entry, is_below)| (is_below || entry.device == device).then_some(entry))
        .collect()
}

/// Mounts made after a file system's, the last one first, each with whether it is in or over a mount of that file
/// system.
fn mounted_later<'a>(mounts: &'a [MountEntry], device: &str) -> Vec<(&'a MountEntry, bool)> {
    let mut own: Vec<&Path> = Vec::new();
    let mut later = Vec::new();
    for entry in mounts {
        if !own.is_empty() {
            let is_below = own.iter().any(|it| entry.mount_point.starts_with(it));
            later.push((entry, is_below));
        }
        if entry.device == device {
            own.push(&entry.mount_point);
        }
    }
    later.reverse();
    later
}

/// The absolute path of a directory that may be a mount that does not respond: only its parents are accessed.
///
/// # Errors
/// If there is no such path.
pub fn canonical(directory: &Path) -> io::Result<PathBuf> {
    let absolute = std::path::absolute(directory)?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            let path = parent.canonicalize()?.join(name);
            match path.read_link() {
                Ok(_) => path.canonicalize(),
                Err(_) => Ok(path),
            }
        }
        _ => Ok(absolute),
    }
}

/// Parses lines of proc_pid_mountinfo(5). Lines that cannot be parsed are omitted.
fn parse(table: &[u8]) -> Vec<MountEntry> {
    table
        .split(|&byte| byte == b'\n')
        .filter_map(|line| {
            let mut fields = line.split(|&byte| byte == b' ');
            let device = fields.nth(2)?;
            let mount_point = fields.nth(1)?;
            // The number of fields before the dash varies.
            fields.find(|field| *field == b"-")?;
            let kind = fields.next()?;
            let source = fields.next()?;
            let text = |field| String::from_utf8_lossy(&unescaped(field)).into_owned();
            Some(MountEntry {
                device: text(device),
                mount_point: OsString::from_vec(unescaped(mount_point)).into(),
                kind: text(kind),
                source: text(source),
            })
        })
        .collect()
}

/// Decodes blanks, newlines and backslashes, which the kernel writes as three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, others @ ..] = rest {
        rest = others;
        if let (
            b'\\',
            [
                a @ b'0'..=b'3',
                b @ b'0'..=b'7',
                c @ b'0'..=b'7',
                after @ ..,
            ],
        ) = (first, others)
        {
            plain.push((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'));
            rest = after;
        } else {
            plain.push(*first);
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
21 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
40 21 0:38 / /mnt/a\\040b rw - fuse.harvestfs harvestfs:c1 rw\n\
41 21 0:39 / /mnt/a\\040b rw,nosuid - fuse.harvestfs harvestfs:c2 rw\n\
42 41 0:40 / /mnt/a\\040b/c rw - tmpfs tmpfs rw\n\
43 42 0:41 / /mnt/a\\040b/c/d rw shared:3 master:1 - tmpfs tmpfs rw\n\
44 21 0:42 / /mnt/a\\040bc rw - tmpfs tmpfs rw\n\
nonsense\n";

    #[test]
    fn mounts_are_found() {
        let mounts = parse(TABLE);
        assert_eq!(mounts.len(), 6);
        let seen = mounted_on(&mounts, Path::new("/mnt/a b")).expect("it is mounted");
        assert_eq!(
            (seen.device.as_str(), seen.source.as_str()),
            ("0:39", "harvestfs:c2")
        );
        assert_eq!(seen.kind, MOUNT_TYPE);
        assert_eq!(mounted_on(&mounts, Path::new("/mnt")), None);
    }

    #[test]
    fn what_is_below_is_unmounted_from_the_innermost_outwards() {
        let mounts = parse(TABLE);
        let below = |device| {
            let below = mounted_below(&mounts, device);
            below.iter().map(|it| it.device.clone()).collect::<Vec<_>>()
        };
        assert_eq!(below("0:39"), ["0:41", "0:40"]);
        assert_eq!(below("0:38"), ["0:41", "0:40", "0:39"]);
        assert!(below("0:41").is_empty());
        assert!(below("9:9").is_empty());
    }

    /// 0:38 is mounted once, and bound elsewhere, inside itself and over itself.
    const BOUND: &[u8] = b"\
21 1 254:0 / / rw - ext4 /dev/vda rw\n\
40 21 0:38 / /mnt rw - fuse.harvestfs harvestfs:c1 rw\n\
41 40 0:40 / /mnt/a rw - tmpfs tmpfs rw\n\
42 21 0:38 / /bound rw - fuse.harvestfs harvestfs:c1 rw\n\
43 42 0:41 / /bound/b rw - tmpfs tmpfs rw\n\
44 40 0:38 /c /mnt/d rw - fuse.harvestfs harvestfs:c1 rw\n\
45 21 0:42 / /other rw - tmpfs tmpfs rw\n\
46 40 0:38 / /mnt rw - fuse.harvestfs harvestfs:c1 rw\n";

    #[test]
    fn a_file_system_that_is_bound_elsewhere_is_seen_there_too() {
        let mounts = parse(BOUND);
        let points = |entries: Vec<&MountEntry>| {
            let points = entries
                .iter()
                .map(|it| it.mount_point.display().to_string());
            points.collect::<Vec<_>>()
        };
        assert_eq!(
            points(mounted_below(&mounts, "0:38")),
            ["/mnt", "/mnt/d", "/bound/b", "/mnt/a"]
        );
        assert_eq!(
            points(mounted_besides(&mounts, "0:38")),
            ["/mnt", "/mnt/d", "/bound/b", "/bound", "/mnt/a"]
        );
        // Only the first mount is left.
        assert!(mounted_besides(&mounts[..2], "0:38").is_empty());
        assert!(mounted_besides(&mounts, "9:9").is_empty());
    }

    #[test]
    fn the_path_of_a_directory_is_found_without_looking_into_it() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().canonicalize().expect("it is there");
        std::fs::create_dir(path.join("a")).expect("mkdir");
        std::os::unix::fs::symlink("a", path.join("link")).expect("symlink");
        assert_eq!(
            canonical(&path.join("gone")).expect("a path"),
            path.join("gone")
        );
        assert_eq!(
            canonical(&path.join("link")).expect("a path"),
            path.join("a")
        );
        assert!(canonical(&path.join("gone/b")).is_err());
    }
}
