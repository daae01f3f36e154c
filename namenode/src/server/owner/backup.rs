//! Backups: a snapshot is written for an operator, and stays open until all of it was read.

use std::sync::Arc;

use harvestfs_protocol::admin::AdminReply;
use harvestfs_protocol::backup::{BackupContent, BackupReply, BackupRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::version::Release;
use rustc_hash::FxHashMap;

use super::Owner;
use crate::consensus::blocking;
use crate::journal::{Lsn, SnapshotFile};
use crate::server::metrics::Responder;
use crate::server::sessions::ConnectionId;
use crate::server::{clock, data_dir};

/// Snapshots that are being read, by connection. Their files remain readable even when the journal has removed them.
#[derive(Default)]
pub(super) struct Backups {
    open: FxHashMap<ConnectionId, Arc<SnapshotFile>>,
    /// The record with which an operator accepted what this namenode's backup lacks, until the record is committed.
    accepted: Option<Lsn>,
}

impl Backups {
    /// The connection that read a snapshot is closed.
    pub(super) fn disconnected(&mut self, connection: ConnectionId) {
        self.open.remove(&connection);
    }

    /// Notes that with this record an operator accepts what the backup lacks that this namenode was restored from.
    pub(super) fn accepted(&mut self, record: Lsn) {
        self.accepted = Some(record);
    }
}

impl Owner {
    pub(super) fn backup_request(
        &mut self,
        connection: ConnectionId,
        request: BackupRequest,
        responder: Responder,
    ) {
        match request {
            BackupRequest::Begin { of_any } if !of_any && !self.leads() => {
                responder.send(&Err(self.not_leader()));
            }
            BackupRequest::Begin { .. } => self.want_backup(connection, responder),
            BackupRequest::Read { offset } => {
                let Some(file) = self.backups.open.get(&connection).cloned() else {
                    let what = "no backup was begun on this connection".to_owned();
                    responder.send(&Err(FsError::InvalidArgument(what)));
                    return;
                };
                // The disk may be slow, and others must be served meanwhile.
                tokio::spawn(async move {
                    let part = blocking(move || file.part(offset)).await;
                    let part = part.map_err(|error| FsError::Internal(error.to_string()));
                    let reply = |part| Reply::Admin(AdminReply::Backup(BackupReply::Part(part)));
                    responder.send(&part.map(reply));
                });
            }
        }
    }

    /// Once the acceptance is committed, no operator has to accept again, after the next start, what the backup
    /// lacks.
    pub(super) fn forget_backup(&mut self, committed: Lsn) {
        if self
            .backups
            .accepted
            .is_none_or(|record| record > committed)
        {
            return;
        }
        self.backups.accepted = None;
        if let Err(error) = data_dir::accept_backup(&self.options.data_dir) {
            tracing::error!(%error, "the next start is in recovery again, and has to be accepted once more");
        }
    }

    /// Describes the snapshot that begins now.
    pub(super) fn backup_content(&self) -> BackupContent {
        let group = self.log.group();
        let status = group.status();
        let record = self.log.last_lsn();
        let Some(term) = group.term_of(record) else {
            unreachable!("record {record} is committed, and in the log");
        };
        let counts = self.namespace.counts();
        BackupContent {
            cluster: self.formatted.cluster,
            record,
            term,
            epoch: self.namespace.epoch().unwrap_or_default(),
            unix_ms: clock::unix_now_ms(),
            version: Release::OURS.to_string(),
            edition: self.namespace.edition(),
            name: self.options.identity.peer().name.clone(),
            addr: self.options.listen,
            led: self.leads(),
            behind_records: self.log.behind_records(),
            namenodes: status.members.iter().map(|it| it.addr).collect(),
            files: counts.files,
            directories: counts.directories,
            blocks: counts.blocks,
            length_bytes: 0,
        }
    }

    /// Starts serving a backup, once its snapshot is written.
    pub(super) fn begin_backup(
        &mut self,
        connection: ConnectionId,
        mut content: Box<BackupContent>,
        responder: Responder,
    ) {
        if !self.connections.contains_key(&connection) {
            // The responder is dropped: nobody would receive the answer.
            return;
        }
        let reply = match self.log.group().journal().newest_snapshot() {
            Ok(Some(file)) if file.lsn() == content.record => {
                content.length_bytes = file.len_bytes();
                tracing::info!(
                    record = content.record,
                    length_bytes = content.length_bytes,
                    "a backup is being read"
                );
                self.backups.open.insert(connection, Arc::new(file));
                Ok(Reply::Admin(AdminReply::Backup(BackupReply::Begun(
                    content,
                ))))
            }
            Ok(_) => Err(FsError::Internal(
                "another snapshot was written meanwhile: begin again".to_owned(),
            )),
            Err(error) => Err(FsError::Internal(error.to_string())),
        };
        responder.send(&reply);
    }
}
