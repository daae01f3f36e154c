//! Removes what repairs have left behind because a disk did not answer. Nobody knows of it who could have it removed, and
//! perhaps no repair of the block comes here again.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::node::Node;

/// How often it is looked for.
const INTERVAL: Duration = Duration::from_secs(60);

/// Looks for it until the datanode stops.
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
