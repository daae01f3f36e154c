//! The version of the cluster: what may be in its journal and in its snapshots.
//!
//! A program writes nothing that exists since a later version than the cluster's ([`Command::since`]), so
//! that one which has no more than that can go on with the same directory. An operator raises the version
//! when all programs have it. A release that carries out commands otherwise than the one before does so
//! from that record on: editions ([`super::edition`]) are what did it before there were versions.

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

    /// How many records of the next version there are.
    #[cfg(feature = "next-version")]
    #[must_use]
    pub fn probes(&self) -> u64 {
        self.probes
    }

    /// Refuses what exists since a later version than the cluster's.
    pub(super) fn check_exists(&self, command: &Command) -> Result<(), FsError> {
        let (since, cluster) = (command.since(), self.version);
        if since <= cluster {
            Ok(())
        } else {
            Err(FsError::ClusterVersion { since, cluster })
        }
    }

    /// Raises the version. One that this program does not have is refused; an old one is not, since records
    /// of then can be read as long as they are.
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
