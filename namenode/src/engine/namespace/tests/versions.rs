//! The version of the cluster.

use harvestfs_protocol::version::{Unfit, Version, Versions};

use super::*;
use crate::engine::namespace::SnapshotError;

fn newer() -> Version {
    Version(Version::NEWEST.0 + 1)
}

fn raise(version: Version) -> Command {
    Command::RaiseVersion {
        version,
        now: Timestamp(9),
    }
}

#[test]
fn a_cluster_begins_with_the_first_version_and_keeps_it_in_its_snapshot() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.namespace.version(), Version::V0_2);
    for not_later in [Version::V0_2, Version(1)] {
        let refused = fixture.apply(&raise(not_later));
        assert!(matches!(refused, Err(FsError::Internal(_))), "{refused:?}");
    }
    let unfit = Unfit {
        program: Versions::OURS,
        cluster: newer(),
    };
    assert_eq!(fixture.apply(&raise(newer())), Err(FsError::Unfit(unfit)));
    let read = Namespace::read_snapshot(&mut fixture.snapshot().as_slice()).unwrap();
    assert_eq!(read.version(), Version::V0_2);
}

#[test]
fn a_snapshot_of_a_newer_cluster_is_refused_before_what_is_new_in_it() {
    let mut fixture = Fixture::new();
    fixture.namespace.version = newer();
    let read = Namespace::read_snapshot(&mut fixture.snapshot().as_slice());
    match read {
        Err(SnapshotError::Unfit(unfit)) => assert_eq!(unfit.cluster, newer()),
        other => panic!("{other:?}"),
    }
}

/// Nothing that is written now is newer than the first version, so it is as if the cluster were older.
#[test]
fn what_the_cluster_does_not_have_yet_is_refused_and_changes_nothing() {
    let mut fixture = Fixture::new();
    fixture.file("/a");
    fixture.namespace.version = Version(Version::V0_2.0 - 1);
    let before = fixture.namespace.extent_of_tables();
    let refused = fixture.unlink("/a");
    let expected = FsError::ClusterVersion {
        since: Version::V0_2,
        cluster: fixture.namespace.version(),
    };
    assert_eq!(refused, Err(expected));
    assert_eq!(fixture.namespace.extent_of_tables(), before);
    fixture.namespace.version = Version::V0_2;
    assert!(fixture.unlink("/a").is_ok());
}
