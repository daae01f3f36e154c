//! Removes files that repairs have left behind because a disk did not respond. No namenode knows of such a file and
//! could have it removed, and the block may never be repaired here again.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::node::Node;

/// How often such files are looked for.
const INTERVAL: Duration = Duration::from_secs(60);

/// Looks for such files until the datanode stops.
pub async fn run(node: Arc<Node>) {
    let rounds = async {
        loop {
            tokio::time::sleep(INTERVAL).await;
            for block in node.store.abandoned_repairs() {
                if let Err(error) = node.store.delete_abandoned_repair(block).await {
                    tracing::warn!(%block, %error, "cannot remove what a repair has left behind");
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = rounds => {}
    }
}
