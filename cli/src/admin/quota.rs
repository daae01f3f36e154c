//! Quotas: the space that a server's owner lets the file system use.

use std::time::{Duration, Instant};

use anyhow::bail;
use harvestfs_protocol::admin::{AdminReply, AdminRequest, NodeStatus};
use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::placement::PlacementRequest;

use super::link::{self, AdminLink};
use super::placement::POLL_INTERVAL;
use super::{DEADLINE, placement};
use crate::units::{self, Size};

/// Maximum time for a datanode to confirm a quota: several heartbeats.
const QUOTA_CONFIRM_DEADLINE: Duration = Duration::from_secs(30);

/// Sets the quota of a server, and waits until its datanode has confirmed it.
pub(super) async fn set(
    link: &AdminLink,
    server: &str,
    size: Size,
    volume: Option<StorageId>,
    deadline: Duration,
) -> anyhow::Result<()> {
    let request = PlacementRequest::SetQuota {
        server: server.to_owned(),
        storage: volume,
        quota_bytes: size.0,
        deadline_ms: u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX),
    };
    placement::ask(link, request).await?;
    let start = Instant::now();
    loop {
        let AdminReply::Nodes(nodes) = link.ask(AdminRequest::Nodes, DEADLINE).await? else {
            return Err(link::unexpected());
        };
        let node = nodes.iter().find(|node| node.server.name == server);
        let space = node.map(|node| Space::of(node, volume));
        if let Some(space) = space.filter(|it| it.is_confirmed(size.0)) {
            let over_bytes = space.used_bytes.saturating_sub(space.quota_bytes);
            println!(
                "{server}: {} of {} used, {} to be freed",
                units::human(space.used_bytes),
                units::human(space.quota_bytes),
                units::human(over_bytes)
            );
            return Ok(());
        }
        if start.elapsed() > QUOTA_CONFIRM_DEADLINE {
            bail!(
                "{server} has not confirmed the quota yet; the namenode repeats the request until it does"
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Quota and use of one volume, or of all volumes of a server.
#[derive(Clone, Copy, Debug, Default)]
struct Space {
    volumes: u64,
    quota_bytes: u64,
    used_bytes: u64,
}

impl Space {
    fn of(node: &NodeStatus, volume: Option<StorageId>) -> Self {
        let volumes = node.volumes.iter();
        volumes
            .filter(|it| volume.is_none_or(|volume| it.storage == volume))
            .fold(Self::default(), |sum, it| Self {
                volumes: sum.volumes + 1,
                quota_bytes: sum.quota_bytes + it.quota_bytes,
                used_bytes: sum.used_bytes + it.used_bytes,
            })
    }

    /// Whether the datanode has applied this quota. The share of each volume is rounded down, by less than a byte.
    fn is_confirmed(self, asked_bytes: u64) -> bool {
        let missing_bytes = asked_bytes.checked_sub(self.quota_bytes);
        missing_bytes.is_some_and(|bytes| bytes < self.volumes.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_that_are_rounded_down_are_what_was_asked_for() {
        for volumes in [1, 2, 16, 17, 64] {
            // The worst case of rounding: the remainder is one byte less than the number of volumes.
            let asked_bytes = volumes * 1000 + volumes - 1;
            let space = |share_bytes| Space {
                volumes,
                quota_bytes: volumes * share_bytes,
                used_bytes: 0,
            };
            assert!(space(asked_bytes / volumes).is_confirmed(asked_bytes));
            assert!(!space(1001).is_confirmed(asked_bytes), "{volumes}");
            assert!(!space(999).is_confirmed(asked_bytes), "{volumes}");
        }
    }
}
