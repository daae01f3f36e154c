//! The mount point of a cluster: checks before it is mounted, and before it is unmounted.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use harvestfs_fuse_mount::mount_table::{self, MOUNT_TYPE, MountEntry};
use harvestfs_fuse_mount::remove_dead;

use super::layout::Layout;
use crate::cluster;

/// Creates the directory to mount on. Refuses one that is not empty, since a mount would hide what programs wrote while
/// nothing was mounted there, and one on which another cluster is mounted.
pub fn make(layout: &Layout) -> anyhow::Result<()> {
    let mount = &layout.mount;
    let own = source(&layout.data)?;
    let mut seen = seen_at(mount)?;
    if seen.as_ref().is_some_and(|it| *it != own) {
        // The dead mount of a cluster that was killed, and perhaps removed, must not be in the way.
        remove_dead(mount).with_context(|| format!("cannot mount on {}", mount.display()))?;
        seen = seen_at(mount)?;
    }
    if let Some(seen) = seen {
        if seen == own {
            // A mount left by a killed cluster, which does not respond until its servers run.
            return Ok(());
        }
        bail!(
            "another cluster is mounted on {} ({seen}): unmount that, or name another directory with --mount",
            mount.display()
        );
    }
    // ENOTCONN: a mount whose process was killed; the supervisor removes it.
    match std::fs::read_dir(mount) {
        Ok(mut entries) => {
            if entries.next().is_some() {
                bail!(
                    "{} is not empty: move away what was written there while nothing was mounted, or name an \
                     empty directory with --mount",
                    mount.display()
                );
            }
            Ok(())
        }
        Err(error) if error.kind() == ErrorKind::NotFound => std::fs::create_dir_all(mount)
            .with_context(|| format!("cannot make {}", mount.display())),
        _ => Ok(()),
    }
}

/// Refuses to continue if another file system is mounted in ours or over it: it may contain data that exists nowhere
/// else.
pub fn refuse_if_mounted_below(data: &Path) -> anyhow::Result<()> {
    let Some(mount) = Layout::ready_mount(data) else {
        return Ok(());
    };
    let Some(directory) = canonical(&mount)? else {
        return Ok(());
    };
    let mounts = mount_table::mounts().context("cannot tell what is mounted")?;
    // If the cluster's identity cannot be read, for example because its key was moved away, it can still be stopped.
    let source = source(data).ok();
    let below = others_below(&mounts, &directory, source.as_deref());
    if below.is_empty() {
        return Ok(());
    }
    bail!(
        "something else is mounted in {}, so the cluster goes on: `umount {}` first",
        mount.display(),
        below.join(" ")
    )
}

/// Paths of other file systems mounted in or over that of a cluster, in the order in which they have to be unmounted.
/// `source` is the source of the cluster's mount; without it, the first HarvestFS mount there counts as the cluster's.
fn others_below(mounts: &[MountEntry], directory: &Path, source: Option<&str>) -> Vec<String> {
    let is_own = |it: &&MountEntry| {
        it.mount_point == directory
            && it.kind == MOUNT_TYPE
            && source.is_none_or(|source| it.source == source)
    };
    let Some(own) = mounts.iter().find(is_own) else {
        return Vec::new();
    };
    mount_table::mounted_below(mounts, &own.device)
        .iter()
        .filter(|it| it.device != own.device)
        .map(|it| it.mount_point.display().to_string())
        .collect()
}

/// The source of the cluster's mount in the kernel's mount table; `data` is the cluster's directory.
fn source(data: &Path) -> anyhow::Result<String> {
    let access = cluster::access(&data.join("client/client.toml"))?;
    Ok(mount_table::source_of(&access.identity.cluster()))
}

/// The source of the mount at a directory, if that is a HarvestFS mount.
fn seen_at(mount: &Path) -> anyhow::Result<Option<String>> {
    let Some(directory) = canonical(mount)? else {
        return Ok(None);
    };
    let mounts = mount_table::mounts().context("cannot tell what is mounted")?;
    let seen = mount_table::mounted_on(&mounts, &directory);
    Ok(seen
        .filter(|it| it.kind == MOUNT_TYPE)
        .map(|it| it.source.clone()))
}

/// The path of a mount as in the kernel's mount table. `None` if its parent directory does not exist, so that nothing
/// can be mounted there.
fn canonical(mount: &Path) -> anyhow::Result<Option<PathBuf>> {
    match mount_table::canonical(mount) {
        Ok(path) => Ok(Some(path)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot look at {}", mount.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_in_or_over_the_own_mount_is_named() {
        let mount = |device: &str, kind: &str, source: &str, path: &str| MountEntry {
            device: device.into(),
            mount_point: path.into(),
            kind: kind.into(),
            source: source.into(),
        };
        let mounts = [
            mount("0:1", "ext4", "/dev/vda", "/"),
            mount("0:2", MOUNT_TYPE, "harvestfs:c1", "/mnt"),
            mount("0:3", "tmpfs", "tmpfs", "/mnt/a"),
            mount("0:2", MOUNT_TYPE, "harvestfs:c1", "/mnt/bound"),
            mount("0:4", MOUNT_TYPE, "harvestfs:c2", "/mnt"),
        ];
        let below = |source| others_below(&mounts, Path::new("/mnt"), source);
        assert_eq!(below(Some("harvestfs:c1")), ["/mnt", "/mnt/a"]);
        assert!(below(Some("harvestfs:c2")).is_empty());
        assert!(below(Some("harvestfs:c3")).is_empty());
        assert_eq!(below(None), ["/mnt", "/mnt/a"]);
        assert!(others_below(&mounts, Path::new("/"), None).is_empty());
    }

    #[test]
    fn nothing_is_mounted_where_nothing_is() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path();
        let mount = data.join("gone/mnt");
        assert_eq!(seen_at(&mount).unwrap(), None);
        std::fs::write(data.join("up.ready"), mount.as_os_str().as_encoded_bytes()).unwrap();
        assert_eq!(Layout::ready_mount(data).unwrap(), mount);
        refuse_if_mounted_below(data).unwrap();
        remove_dead(&mount).unwrap();
        // Which cluster it is cannot be determined, since nothing is configured here.
        std::fs::create_dir_all(&mount).unwrap();
        refuse_if_mounted_below(data).unwrap();
    }
}
