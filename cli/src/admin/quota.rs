//! What a server's owner lets the file system use.

use std::time::{Duration, Instant};

use anyhow::bail;
use harvestfs_protocol::admin::{AdminReply, AdminRequest, NodeStatus};
use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::placement::PlacementRequest;

use super::link::{self, AdminLink};
use super::placement::POLL_INTERVAL;
use super::{DEADLINE, placement};
use crate::units::{self, Size};

/// How long a datanode may take to confirm a quota: some heartbeats.
const QUOTA_CONFIRM_DEADLINE: Duration = Duration::from_secs(30);

/// Sets what a server's owner lets the file system use, and waits until its datanode has confirmed that.
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
        if let Some((quota_bytes, used_bytes)) = node.map(|node| space_of(node, volume)) {
            // Shares of the volumes are rounded down.
            if quota_bytes <= size.0 && size.0 - quota_bytes < 16 {
                let over_bytes = used_bytes.saturating_sub(quota_bytes);
                println!(
                    "{server}: {} of {} used, {} to be freed",
                    units::human(used_bytes),
                    units::human(quota_bytes),
                    units::human(over_bytes)
                );
                return Ok(());
            }
        }
        if start.elapsed() > QUOTA_CONFIRM_DEADLINE {
            bail!(
                "{server} has not confirmed the quota yet; the namenode repeats the request until it does"
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Quota and use of one volume, or of all.
fn space_of(node: &NodeStatus, volume: Option<StorageId>) -> (u64, u64) {
    let volumes = node.volumes.iter();
    volumes
        .filter(|it| volume.is_none_or(|volume| it.storage == volume))
        .fold((0, 0), |(quota, used), it| {
            (quota + it.quota_bytes, used + it.used_bytes)
        })
}
