//! Checks this machine, which does not require a namenode: configuration, certificates, disks and
//! mounts.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harvestfs_fuse_mount::mount_table::{self, MOUNT_TYPE, MountEntry};
use harvestfs_protocol::identity::Identity;
use harvestfs_protocol::outlook::count;
use serde::de::DeserializeOwned;

use super::{Area, Diagnosis};
use crate::cluster::ClusterArgs;
use crate::config::{self, ClientConfig, DatanodeConfig, NamenodeConfig, VolumeConfig};
use crate::units;

/// Certificates that expire within this time should be renewed now.
const EXPIRY_NOTICE: Duration = Duration::from_secs(30 * 24 * 3600);
/// A mount that does not respond within this time counts as hung.
const MOUNT_DEADLINE: Duration = Duration::from_secs(10);
/// Time after which a mount that was being unmounted is gone, and not reported.
const UNMOUNT_PAUSE: Duration = Duration::from_secs(2);
const RENEW: &str = "make a new one on the machine that has the authority (`harvestfs init namenode`, `init datanode`, \
                     or `init client`, `--administrator` for `admin`), put the `identity` of what it makes in the \
                     place of this one, and restart the part";
const REPLACE: &str = "make a new cluster authority with `harvestfs init` and new certificates for all \
                       parts, and restart them together";

/// Checks the parts that are configured here, and the mounts of this machine.
///
/// # Errors
/// When it is unclear which cluster is meant.
pub fn examine(args: &ClusterArgs, diagnosis: &mut Diagnosis) -> anyhow::Result<()> {
    match (args.directory()?, args.config_file()) {
        (Some(directory), _) => examine_directory(&directory, diagnosis),
        (None, Some(file)) => examine_client(&file, diagnosis),
        (None, None) => {}
    }
    // Without a valid identity, whose absence is reported above, the mounts of this cluster cannot be recognized.
    if let Ok(access) = args.access("admin") {
        examine_mounts(&access.identity.cluster(), diagnosis);
    }
    Ok(())
}

/// Checks every part whose configuration is in a cluster's directory.
fn examine_directory(directory: &Path, diagnosis: &mut Diagnosis) {
    diagnosis.checked(Area::Configuration);
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return diagnosis.error(
                Area::Configuration,
                format!("there is no cluster in {}", directory.display()),
                "make one with `harvestfs up`, or name another with --data or --config",
            );
        }
        Err(error) => {
            return diagnosis.error(
                Area::Configuration,
                format!("cannot read {}: {error}", directory.display()),
                "look at it as the user whose cluster it is, or name a configuration with --config",
            );
        }
    };
    // A hung mount in it would block the whole command.
    let mounted: HashSet<PathBuf> = mount_table::mounts()
        .unwrap_or_default()
        .into_iter()
        .map(|it| it.mount_point)
        .collect();
    let base = directory.canonicalize();
    let is_mounted = |name: &OsStr| {
        base.as_ref()
            .is_ok_and(|it| mounted.contains(&it.join(name)))
    };
    let mut parts: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| !is_mounted(&entry.file_name()))
        .map(|entry| entry.path())
        .collect();
    parts.sort();
    for part in parts {
        for (name, examine_part) in [
            (
                "namenode.toml",
                examine_namenode as fn(&Path, &mut Diagnosis),
            ),
            ("datanode.toml", examine_datanode),
            ("client.toml", examine_client),
        ] {
            let file = part.join(name);
            if file.exists() {
                examine_part(&file, diagnosis);
            }
        }
    }
}

fn load<T: DeserializeOwned>(file: &Path, diagnosis: &mut Diagnosis) -> Option<T> {
    diagnosis.checked(Area::Configuration);
    let loaded = config::load(file);
    if let Err(error) = &loaded {
        let advice = "put the file right; the part does not start with it";
        diagnosis.error(Area::Configuration, format!("{error:#}"), advice);
    }
    loaded.ok()
}

fn examine_namenode(file: &Path, diagnosis: &mut Diagnosis) {
    if let Some(config) = load::<NamenodeConfig>(file, diagnosis) {
        examine_certificate(&config::beside(file, &config.identity), diagnosis);
    }
}

fn examine_client(file: &Path, diagnosis: &mut Diagnosis) {
    if let Some(config) = load::<ClientConfig>(file, diagnosis) {
        examine_certificate(&config::beside(file, &config.identity), diagnosis);
    }
}

fn examine_datanode(file: &Path, diagnosis: &mut Diagnosis) {
    let Some(config) = load::<DatanodeConfig>(file, diagnosis) else {
        return;
    };
    examine_certificate(&config::beside(file, &config.identity), diagnosis);
    for volume in &config.volumes {
        examine_disk(&config::beside(file, &volume.path), volume, diagnosis);
    }
}

fn examine_certificate(directory: &Path, diagnosis: &mut Diagnosis) {
    diagnosis.checked(Area::Certificates);
    let expires = Identity::load(directory).and_then(|identity| {
        Ok([
            ("certificate", identity.expires_unix_s()?, RENEW),
            ("authority", identity.authority_expires_unix_s()?, REPLACE),
        ])
    });
    let now_s = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    match expires {
        Err(error) => diagnosis.error(Area::Certificates, error.to_string(), RENEW),
        Ok(all) => {
            for (what, expires_s, advice) in all {
                let what = format!("the {what} in {}", directory.display());
                judge_expiry(&what, expires_s, now_s, advice, diagnosis);
            }
        }
    }
}

fn judge_expiry(what: &str, expires_s: u64, now_s: u64, advice: &str, diagnosis: &mut Diagnosis) {
    match expires_s.checked_sub(now_s) {
        None => diagnosis.error(Area::Certificates, format!("{what} has expired"), advice),
        Some(left_s) if left_s < EXPIRY_NOTICE.as_secs() => diagnosis.warning(
            Area::Certificates,
            format!("{what} expires in {}", count(left_s / 86_400, "day")),
            advice,
        ),
        Some(_) => {}
    }
}

fn examine_disk(path: &Path, volume: &VolumeConfig, diagnosis: &mut Diagnosis) {
    diagnosis.checked(Area::Disks);
    let Ok(stat) = rustix::fs::statvfs(path) else {
        diagnosis.error(
            Area::Disks,
            format!("the volume {} is not there", path.display()),
            "mount its disk; a volume that was never used is made when the datanode starts",
        );
        return;
    };
    let total_bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
    if volume.quota.0 > total_bytes {
        diagnosis.warning(
            Area::Disks,
            format!(
                "{} may use {}, but its disk has {} in all",
                path.display(),
                units::human(volume.quota.0),
                units::human(total_bytes)
            ),
            "lower `quota` in datanode.toml to what the owner can spare",
        );
    }
}

/// Checks the mounts of a cluster on this machine.
fn examine_mounts(cluster: &str, diagnosis: &mut Diagnosis) {
    diagnosis.checked(Area::Mounts);
    if let Err(error) = find_bad_mounts(cluster, diagnosis) {
        diagnosis.warning(
            Area::Mounts,
            format!("the kernel's table of mounts cannot be read: {error}"),
            "see that /proc is mounted",
        );
    }
}

fn find_bad_mounts(cluster: &str, diagnosis: &mut Diagnosis) -> io::Result<()> {
    let bad: Vec<_> = mounts(cluster)?
        .into_iter()
        .filter(|mount| fault_of(mount).is_some())
        .collect();
    if bad.is_empty() {
        return Ok(());
    }
    thread::sleep(UNMOUNT_PAUSE);
    let still_mounted = mounts(cluster)?;
    for mount in bad.iter().filter(|mount| still_mounted.contains(mount)) {
        if let Some(fault) = fault_of(mount) {
            let shown = mount.display();
            diagnosis.error(
                Area::Mounts,
                format!("{shown} {fault}"),
                format!(
                    "see whether the namenode can be reached, and the log of the mount; if its \
                     process is gone, `umount --lazy {shown}` and mount it again"
                ),
            );
        }
    }
    Ok(())
}

/// The fault of a mount, if it has one.
fn fault_of(mount: &Path) -> Option<String> {
    let (sender, answers) = mpsc::channel();
    let mount = mount.to_owned();
    // The thread may hang as long as the mount does.
    thread::spawn(move || sender.send(rustix::fs::statvfs(&mount).map(drop)));
    match answers.recv_timeout(MOUNT_DEADLINE) {
        Ok(Ok(())) => None,
        Ok(Err(error)) => Some(format!("does not work: {error}")),
        Err(_) => Some(format!("did not answer for {} s", MOUNT_DEADLINE.as_secs())),
    }
}

fn mounts(cluster: &str) -> io::Result<Vec<PathBuf>> {
    Ok(of_cluster(mount_table::mounts()?, cluster))
}

fn of_cluster(mounts: Vec<MountEntry>, cluster: &str) -> Vec<PathBuf> {
    let source = mount_table::source_of(cluster);
    mounts
        .into_iter()
        .filter(|mount| mount.kind == MOUNT_TYPE && mount.source == source)
        .map(|mount| mount.mount_point)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::Severity;
    use super::*;

    #[test]
    fn only_mounts_of_the_cluster_are_judged() {
        let mount = |kind: &str, source: &str, path: &str| MountEntry {
            device: "0:1".into(),
            mount_point: path.into(),
            kind: kind.into(),
            source: source.into(),
        };
        let mounts = vec![
            mount("proc", "proc", "/proc"),
            mount(MOUNT_TYPE, "harvestfs:c1", "/a"),
            mount(MOUNT_TYPE, "harvestfs:c2", "/b"),
            mount("fuse.other", "harvestfs:c1", "/c"),
        ];
        assert_eq!(of_cluster(mounts, "c1"), [PathBuf::from("/a")]);
    }

    #[test]
    fn a_certificate_is_reported_before_it_expires() {
        let day_s = 86_400;
        for (days, findings) in [(31, 0), (29, 1), (0, 1)] {
            let mut diagnosis = Diagnosis::default();
            judge_expiry(
                "it",
                (100 + days) * day_s,
                100 * day_s,
                RENEW,
                &mut diagnosis,
            );
            assert_eq!(diagnosis.findings.len(), findings, "{days}");
        }
        let mut diagnosis = Diagnosis::default();
        judge_expiry("it", 99 * day_s, 100 * day_s, RENEW, &mut diagnosis);
        assert_eq!(diagnosis.findings[0].what, "it has expired");
    }

    #[test]
    fn what_is_wrong_in_a_directory_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let mut diagnosis = Diagnosis::default();
        examine_directory(&directory.path().join("nothing"), &mut diagnosis);
        assert_eq!(diagnosis.findings[0].area, Area::Configuration);

        for (part, name) in [("namenode", "namenode.toml"), ("client", "client.toml")] {
            std::fs::create_dir(directory.path().join(part)).unwrap();
            std::fs::write(directory.path().join(part).join(name), "x = 1\n").unwrap();
        }
        let datanode = directory.path().join("datanode-1");
        std::fs::create_dir(&datanode).unwrap();
        let text = "name = \"a\"\nrack = \"r\"\nenvironment = \"e\"\nmachine_function = \"f\"\n\
                    listen = \"127.0.0.1:0\"\nnamenodes = []\nidentity = \"identity\"\n\
                    [[volume]]\npath = \".\"\nquota = \"8000PiB\"\n\
                    [[volume]]\npath = \"gone\"\nquota = \"1GiB\"\n";
        std::fs::write(datanode.join("datanode.toml"), text).unwrap();
        let mut diagnosis = Diagnosis::default();
        examine_directory(directory.path(), &mut diagnosis);
        let found: Vec<_> = diagnosis
            .findings
            .iter()
            .map(|finding| (finding.area, finding.severity))
            .collect();
        let error = |area| (area, Severity::Error);
        assert_eq!(
            found,
            [
                error(Area::Configuration),
                error(Area::Certificates),
                (Area::Disks, Severity::Warning),
                error(Area::Disks),
                error(Area::Configuration),
            ]
        );
    }
}
