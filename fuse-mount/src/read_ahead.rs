//! The kernel's read-ahead on the mount: 128 KiB by default, which only root can change. With a larger one, one
//! request fetches as much as one packet carries.

use std::io;
use std::path::Path;

/// The read-ahead in kibibytes: twice the largest request, so that one is in flight while another is copied out.
const READ_AHEAD_KIB: u32 = 2_048;

/// Raises the read-ahead of the file system that is mounted on `directory`, an absolute path
/// without symlinks.
pub fn raise(directory: &Path) -> io::Result<()> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo")?;
    let device = device_of(&mounts, &directory.to_string_lossy())
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "it is not mounted"))?;
    std::fs::write(
        format!("/sys/class/bdi/{device}/read_ahead_kb"),
        READ_AHEAD_KIB.to_string(),
    )
}

/// `major:minor` of the last mount on a directory, from the lines of proc_pid_mountinfo(5).
fn device_of<'a>(mounts: &'a str, directory: &str) -> Option<&'a str> {
    // The kernel writes these characters as octal escapes.
    let escaped = directory
        .replace('\\', "\\134")
        .replace(' ', "\\040")
        .replace('\t', "\\011")
        .replace('\n', "\\012");
    mounts.lines().rev().find_map(|line| {
        let mut fields = line.split(' ');
        let device = fields.nth(2)?;
        (fields.nth(1)? == escaped).then_some(device)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_mount_on_a_directory_counts() {
        let mounts = "\
21 1 254:0 / / rw shared:1 - ext4 /dev/vda rw\n\
40 21 0:38 / /mnt/a\\040b rw - fuse.harvestfs harvestfs rw\n\
41 21 0:39 / /mnt/a\\040b rw - fuse.harvestfs harvestfs rw\n";
        assert_eq!(device_of(mounts, "/mnt/a b"), Some("0:39"));
        assert_eq!(device_of(mounts, "/"), Some("254:0"));
        assert_eq!(device_of(mounts, "/mnt"), None);
        assert_eq!(device_of("nonsense", "/"), None);
    }
}
