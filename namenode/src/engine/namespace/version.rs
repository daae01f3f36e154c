//! The version of the cluster, which limits what its journal and its snapshots may contain.
//!
//! A program writes nothing that was added after the cluster's version ([`Command::since`]), so that a
//! program of that version can continue with the same directory. An operator raises the version when all
//! programs support it. A release that carries out commands differently from the one before does so from
//! the record of that raise on; editions ([`super::edition`]) served this purpose before there were versions.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::version::{Unfit, Version, Versions};

use super::Namespace;
use super::command::{Command, Outcome};

impl Namespace {
    /// The version of the cluster.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// The number of records of the next version that were applied.
    #[cfg(feature = "next-version")]
    #[must_use]
    pub fn probes(&self) -> u64 {
        self.probes
    }

    /// Refuses a command that was added after the cluster's version.
    pub(super) fn check_exists(&self, command: &Command) -> Result<(), FsError> {
        let (since, cluster) = (command.since(), self.version);
        if since <= cluster {
            Ok(())
        } else {
            Err(FsError::ClusterVersion { since, cluster })
        }
    }

    /// Raises the version. Refuses one that this program does not support, but not an old one: old records
    /// must stay readable for as long as they exist.
    pub(super) fn raise_version(&mut self, version: Version) -> Result<Outcome, FsError> {
        check_not_newer(version).map_err(FsError::Unfit)?;
        if version <= self.version {
            return Err(FsError::Internal(format!(
                "version {version} does not follow version {} of the cluster",
                self.version
            )));
        }
        self.version = version;
        Ok(Outcome::Done)
    }
}

/// Refuses the version of a cluster that is newer than this program.
pub(super) fn check_not_newer(cluster: Version) -> Result<(), Unfit> {
    if cluster <= Version::NEWEST {
        return Ok(());
    }
    Err(Unfit {
        program: Versions::OURS,
        cluster,
    })
}
