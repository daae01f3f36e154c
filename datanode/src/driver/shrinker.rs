//! Getting below a quota that was lowered.
//!
//! Until the deadline the namenode chooses what goes: it knows how many copies are elsewhere, and has
//! time to make more. What is still too much then goes in this order, until the rest fits:
//!
//! 1. corrupt replicas, which are of no use to anybody;
//! 2. sealed replicas, the largest first, so that as few blocks as possible lose a replica.
//!
//! Replicas that are being written stay; they may not grow, are sealed soon, and are chosen then.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::driver::node::Node;

/// How often volumes are looked at.
const INTERVAL: Duration = Duration::from_millis(500);

/// Looks after the volumes until the datanode stops.
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
    for (storage, excess_bytes) in node.store.overdue(Instant::now()) {
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
