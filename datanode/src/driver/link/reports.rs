//! Reporting replicas to a namenode.

use std::convert::Infallible;
use std::time::Duration;

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::node::{IncrementalReport, NodeReply, NodeRequest, ReplicaChange};
use tokio::sync::mpsc;

use super::{Client, LinkError, call};
use crate::driver::node::Node;
use crate::engine::link::LinkId;
use crate::engine::link::changes::Change;
use crate::engine::link::reports::{GATHERING_TIME, Reports, Step, parts};
use crate::store::{BlockStore, ChangeQueue};

/// How long a report may take. The namenode answers once it has processed it.
const REPORT_DEADLINE: Duration = Duration::from_secs(30);

/// Sends full reports of all volumes, then changes, and full reports that are `asked` for. Returns the error that
/// ended it.
pub async fn send(
    node: &Node,
    link: LinkId,
    client: &Client,
    mut asked: mpsc::Receiver<StorageId>,
) -> LinkError {
    match send_all(node, link, client, &mut asked).await {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

async fn send_all(
    node: &Node,
    link: LinkId,
    client: &Client,
    asked: &mut mpsc::Receiver<StorageId>,
) -> Result<Infallible, LinkError> {
    let store = &node.store;
    let queue = store.changes().of(link);
    let mut reports = Reports::default();
    loop {
        let step = reports.next(&mut queue.lock(), || asked.try_recv().ok());
        match step {
            Step::ListVolumes => reports.volumes(store.healthy_storages()),
            Step::ReportVolume(storage) => send_full_report(store, client, storage).await?,
            Step::ListCorrupt(storage) => {
                for block in store.corrupt_replicas_of(storage) {
                    queue.push(storage, ReplicaChange::Corrupt(block));
                }
            }
            Step::Reported => node.reported(link),
            Step::Gather => tokio::time::sleep(GATHERING_TIME).await,
            Step::ReportChanges(changes) => send_changes(queue, client, changes).await?,
            Step::Wait => {
                tokio::select! {
                    biased;
                    storage = asked.recv() => match storage {
                        Some(storage) => reports.asked(storage),
                        // The heartbeats have ended, and the connection ends with them.
                        None => std::future::pending().await,
                    },
                    () = queue.wait() => {}
                }
            }
        }
    }
}

async fn send_full_report(
    store: &BlockStore,
    client: &Client,
    storage: StorageId,
) -> Result<(), LinkError> {
    let replicas = store.replicas_of(storage);
    for report in parts(storage, &replicas) {
        accepted(call(client, NodeRequest::BlockReport(report), REPORT_DEADLINE).await?)?;
    }
    Ok(())
}

async fn send_changes(
    queue: &ChangeQueue,
    client: &Client,
    changes: Vec<Change>,
) -> Result<(), LinkError> {
    let report = IncrementalReport {
        changes: changes.clone(),
    };
    let request = NodeRequest::IncrementalReport(report);
    match call(client, request, REPORT_DEADLINE).await {
        Ok(reply) => accepted(reply),
        Err(error) => {
            queue.lock().put_back(changes);
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
