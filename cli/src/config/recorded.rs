//! Tests that every release reads the configuration files that users wrote for earlier ones, in
//! `tests/fixtures/<release>/config`.

use harvestfs_protocol::identity::{Identity, Role};

use super::*;
use crate::http::AccessConfig;

const RELEASES: &[&str] = &["0.2.0"];

fn fixtures(release: &str) -> PathBuf {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.join("../tests/fixtures").join(release)
}

#[test]
fn configurations_of_releases_say_what_they_said() {
    for release in RELEASES {
        let directory = fixtures(release).join("config");
        let namenode: NamenodeConfig = load(&directory.join("namenode.toml")).unwrap();
        assert_eq!(namenode.listen, "10.0.0.1:9310".parse().unwrap());
        assert_eq!(namenode.policy, PolicyKind::Harvest);
        assert_eq!(namenode.locality, Locality::Prefer);
        assert_eq!(namenode.min_write_replicas.get(), 2);
        assert_eq!(namenode.quarantine_s, 7 * 24 * 3600);
        let repair = namenode.repair;
        let limits = [
            repair.per_hour,
            repair.urgent_per_hour,
            repair.moves_per_hour,
            repair.per_volume_per_hour,
            repair.at_once,
            repair.restart_wait_s,
            repair.balance_spread_percent,
        ];
        assert_eq!(limits, [30, 60, 10, 40, 2, 120, 10].map(Some));
        let http = namenode.http.unwrap();
        assert_eq!(http.access, AccessConfig::Proven);
        assert_eq!(http.token, PathBuf::from("http-token"));

        let datanode: DatanodeConfig = load(&directory.join("datanode.toml")).unwrap();
        assert_eq!(
            (datanode.name.as_str(), datanode.rack.as_str()),
            ("dn1", "rack-1")
        );
        assert_eq!(datanode.namenodes.len(), 3);
        assert_eq!(datanode.scrub_bytes_per_s, Size(8 << 20));
        assert_eq!(datanode.scrub_every_s.get(), 6 * 3600);
        assert_eq!(datanode.removal_bytes_per_s, Size(400 << 20));
        assert_eq!(datanode.priority, Priority::Low);
        let source = PrimarySourceConfig::Cgroup {
            name: "/sys/fs/cgroup/search.slice".into(),
            own_cgroup: None,
        };
        assert_eq!(datanode.primary.source, source);
        assert_eq!(datanode.primary.gate.cpu_reserve_share(), Some(0.2));
        assert_eq!(datanode.primary.gate.memory_reserve_share(), Some(0.1));
        assert_eq!(datanode.primary.gate.stalled_max_share(), Some(0.05));
        let settle = std::time::Duration::from_secs(30);
        assert_eq!(datanode.primary.gate.settle(), Some(settle));
        let volumes: Vec<(Size, StorageClass)> = (datanode.volumes.iter())
            .map(|it| (it.quota, it.class.into()))
            .collect();
        let expected = [
            (Size(64 << 30), StorageClass::Disk),
            (Size(4_096_000), StorageClass::Ssd),
        ];
        assert_eq!(volumes, expected);

        let client: ClientConfig = load(&directory.join("client.toml")).unwrap();
        assert_eq!(client.namenodes, datanode.namenodes);
        assert_eq!(client.dirty, Size(256 << 20));
        assert!(matches!(client.unreachable_timeout_s, Wait::Forever));
        assert_eq!(client.compaction_bytes_per_s, Size(8 << 20));
        assert_eq!(client.checkpoint.keep, Some(3));
        assert_eq!(client.http.unwrap().access, AccessConfig::Token);
    }
}

#[test]
fn identities_of_releases_are_read() {
    for release in RELEASES {
        let recorded = fixtures(release).join("identity");
        if *release == env!("CARGO_PKG_VERSION") && !recorded.exists() {
            record_identity(&recorded);
            panic!("an identity of {release} was recorded: commit it");
        }
        let directory = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(recorded).unwrap() {
            let entry = entry.unwrap();
            let to = directory.path().join(entry.file_name());
            std::fs::copy(entry.path(), &to).unwrap();
            // A repository does not preserve read permissions.
            let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            std::fs::set_permissions(to, private).unwrap();
        }
        let identity = Identity::load(directory.path()).unwrap();
        assert_eq!(identity.peer().role, Role::Client, "{release}");
        assert_eq!(identity.peer().name, "client", "{release}");
    }
}

/// Writes the identity of a client of a fictitious cluster.
fn record_identity(to: &Path) {
    use harvestfs_protocol::identity::CertificateAuthority;

    let authority = CertificateAuthority::in_memory().unwrap();
    let century = std::time::Duration::from_secs(100 * 365 * 24 * 3600);
    let identity = authority.issue(Role::Client, "client", century).unwrap();
    identity.save(to).unwrap();
}
