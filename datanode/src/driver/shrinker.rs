//! Gives up replicas on volumes that are above a lowered quota past its deadline.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::node::Node;
use crate::store::now;

/// How often volumes are checked.
const INTERVAL: Duration = Duration::from_millis(500);

/// Checks the volumes until the datanode stops.
pub async fn run(node: Arc<Node>) {
    let rounds = async {
        loop {
            tokio::time::sleep(INTERVAL).await;
            shrink(&node).await;
        }
    };
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = rounds => {}
    }
}

async fn shrink(node: &Node) {
    for (storage, excess_bytes) in node.store.overdue(now()) {
        let victims = node.store.victims(storage, excess_bytes);
        if !victims.is_empty() {
            let replicas = victims.len();
            tracing::warn!(%storage, excess_bytes, replicas, "giving up replicas: the quota's deadline is over");
        }
        for block in victims {
            if let Err(error) = node.store.delete(block).await {
                tracing::warn!(%block, %error, "cannot delete a replica");
            }
        }
    }
}
