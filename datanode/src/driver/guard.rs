//! Checks that volumes are still in place and part of the cluster.

use std::sync::Arc;
use std::time::Duration;

use futures::future::{join, join_all};

use crate::driver::node::Node;

/// Time between checks. Blocks written between the removal of a directory and the next check have one replica fewer
/// than it seems.
const INTERVAL: Duration = Duration::from_secs(1);

/// Checks the volumes until the datanode stops.
pub async fn run(node: Arc<Node>) {
    let rounds = async {
        loop {
            tokio::time::sleep(INTERVAL).await;
            // Simultaneously: a disk that does not respond delays no other one for longer than this round.
            let volumes = node.store.volumes();
            let looks = join_all(volumes.iter().map(|it| it.check_place()));
            join(looks, node.claim_rest()).await;
        }
    };
    tokio::select! {
        biased;
        () = node.stopping() => {}
        () = rounds => {}
    }
}
