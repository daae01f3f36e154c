//! Looks whether volumes are still where they were.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::node::Node;

/// How often. What is written between the removal of a directory and the next look has one replica fewer than it seems.
const INTERVAL: Duration = Duration::from_secs(1);

/// Looks after the volumes until the datanode stops.
pub async fn run(node: Arc<Node>) {
    let rounds = async {
        loop {
            tokio::time::sleep(INTERVAL).await;
            node.store.check_places().await;
        }
    };
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = rounds => {}
    }
}
