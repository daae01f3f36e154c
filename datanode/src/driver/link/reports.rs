//! Telling the namenode what is here: everything after a registration, then what changes.

use std::time::Duration;

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::limits::REPLICAS_PER_REPORT_MAX;
use harvestfs_protocol::node::{
    BlockReport, IncrementalReport, NodeReply, NodeRequest, ReplicaChange, ReplicaReport,
};
use tokio::sync::mpsc;

use super::{Client, LinkError, call};
use crate::driver::node::Node;
use crate::store::{BlockStore, Pending};

/// How long changes are gathered for one report.
const GATHERING_TIME: Duration = Duration::from_millis(50);
/// How long a report may take. The namenode answers once it has taken it in.
const REPORT_DEADLINE: Duration = Duration::from_secs(30);

/// Sends full reports of all volumes, then changes, and full reports that are `asked` for. Returns
/// why that is over.
pub async fn send(node: &Node, client: &Client, mut asked: mpsc::Receiver<StorageId>) -> LinkError {
    match send_all(node, client, &mut asked).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn send_all(
    node: &Node,
    client: &Client,
    asked: &mut mpsc::Receiver<StorageId>,
) -> Result<std::convert::Infallible, LinkError> {
    let store = &node.store;
    send_everything(store, client).await?;
    node.set_known();
    loop {
        tokio::select! {
            biased;
            storage = asked.recv() => match storage {
                Some(storage) => send_full_report(store, client, storage).await?,
                // Heartbeats are over, and with them this connection.
                None => std::future::pending().await,
            },
            () = store.changes().wait() => {
                tokio::time::sleep(GATHERING_TIME).await;
                send_changes(store, client).await?;
            }
        }
    }
}

async fn send_everything(store: &BlockStore, client: &Client) -> Result<(), LinkError> {
    // Changes until now are part of the full reports. Those from now on are sent after them, so
    // that a full report never takes back a change that was reported after it.
    store.changes().clear();
    for storage in store.healthy_storages() {
        send_full_report(store, client, storage).await?;
    }
    for (storage, block) in store.corrupt_replicas() {
        store.changes().push(storage, ReplicaChange::Corrupt(block));
    }
    Ok(())
}

async fn send_full_report(
    store: &BlockStore,
    client: &Client,
    storage: StorageId,
) -> Result<(), LinkError> {
    let replicas = store.replicas_of(storage);
    let parts: Vec<&[ReplicaReport]> = if replicas.is_empty() {
        vec![&[]]
    } else {
        replicas.chunks(REPLICAS_PER_REPORT_MAX).collect()
    };
    for (part, replicas) in parts.iter().enumerate() {
        let report = BlockReport {
            storage,
            part: part as u32,
            last: part + 1 == parts.len(),
            replicas: replicas.to_vec(),
        };
        accepted(call(client, NodeRequest::BlockReport(report), REPORT_DEADLINE).await?)?;
    }
    Ok(())
}

async fn send_changes(store: &BlockStore, client: &Client) -> Result<(), LinkError> {
    let changes = match store.changes().take() {
        Pending::Changes(changes) => changes,
        Pending::Everything => return send_everything(store, client).await,
    };
    let report = IncrementalReport {
        changes: changes.clone(),
    };
    let request = NodeRequest::IncrementalReport(report);
    match call(client, request, REPORT_DEADLINE).await {
        Ok(reply) => accepted(reply),
        Err(error) => {
            // Reported again, unless the next registration makes them superfluous.
            store.changes().put_back(changes);
            Err(error)
        }
    }
}

fn accepted(reply: NodeReply) -> Result<(), LinkError> {
    match reply {
        NodeReply::Accepted => Ok(()),
        NodeReply::Registered(_) | NodeReply::Heartbeat(_) => Err(LinkError::UnexpectedReply),
    }
}
