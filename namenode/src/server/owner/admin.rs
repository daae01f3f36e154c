//! Requests of operators, and the snapshots that the namenode writes on its own.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use harvestfs_protocol::admin::{AdminReply, AdminRequest, ClusterStatus, FsckFinding, FsckReport};
use harvestfs_protocol::backup::BackupContent;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::Timestamp;
use harvestfs_protocol::version::Release;
use tokio::sync::{mpsc, oneshot};

use super::Owner;
use crate::consensus::blocking;
use crate::engine::cluster::{BlockFault, OrphanReplica, ShortenedBlock};
use crate::engine::namespace::Command;
use crate::journal::Lsn;
use crate::server::checkpoint::{Checkpoint, CheckpointError, Outcome, Purpose};
use crate::server::clock;
use crate::server::log::Log;
use crate::server::metrics::Responder;
use crate::server::sessions::ConnectionId;

/// Maximum number of findings in a report.
const FINDINGS_MAX: usize = 1_000;
/// How long a backup waits for all that the namenode has to be committed.
const COMMITTED_WITHIN_MS: u64 = 10_000;

/// Checkpoints that are running or waited for.
pub(super) struct Checkpoints {
    running: Option<Checkpoint>,
    wanted: VecDeque<Wanted>,
    results: mpsc::Receiver<Result<Outcome, CheckpointError>>,
    sender: mpsc::Sender<Result<Outcome, CheckpointError>>,
    /// What waits for the running checkpoint.
    waiting: Vec<Waiter>,
    /// Describes the running checkpoint, if anybody waits for a backup.
    content: Option<Box<BackupContent>>,
    /// Where the last snapshot ended.
    last: Covered,
    /// Where the running checkpoint will end.
    next: Covered,
    /// Size of the last snapshot.
    content_bytes: u64,
}

/// A caller that waits for a checkpoint that has not begun, and the kind of checkpoint.
struct Wanted {
    purpose: Purpose,
    waiter: Waiter,
}

/// A caller that waits for a checkpoint.
enum Waiter {
    Operator(Responder),
    /// An operator that wants a backup on this connection, and since when.
    Backup(ConnectionId, Responder, u64),
    /// A change of the group: another namenode is to be added.
    Group(oneshot::Sender<Result<(), FsError>>),
}

impl Waiter {
    fn answer(self, result: Result<AdminReply, FsError>) {
        match self {
            Self::Operator(responder) | Self::Backup(_, responder, _) => {
                responder.send(&result.map(Reply::Admin));
            }
            // The receiver may have given up.
            Self::Group(sender) => drop(sender.send(result.map(drop))),
        }
    }
}

/// The end of a snapshot in the journal.
#[derive(Clone, Copy, Debug, Default)]
struct Covered {
    lsn: Lsn,
    appended_bytes: u64,
}

impl Checkpoints {
    pub(super) fn new(log: &Log, records_since_snapshot: u64) -> Self {
        let (sender, results) = mpsc::channel(1);
        let last = Covered {
            lsn: log.last_lsn() - records_since_snapshot,
            appended_bytes: 0,
        };
        Self {
            running: None,
            wanted: VecDeque::new(),
            results,
            sender,
            waiting: Vec::new(),
            content: None,
            last,
            next: last,
            content_bytes: 0,
        }
    }

    /// The result of the running checkpoint. Cancellation-safe.
    pub(super) async fn finished(&mut self) -> Option<Result<Outcome, CheckpointError>> {
        self.results.recv().await
    }

    /// Drops all that waits for a checkpoint.
    pub(super) fn let_go(&mut self) {
        self.wanted.clear();
        self.waiting.clear();
    }

    /// Cancels the running checkpoint and waits for its thread.
    pub(super) async fn cancel(&mut self) {
        // Otherwise the thread could not hand over its result.
        self.results.close();
        if let Some(running) = self.running.take() {
            blocking(move || running.cancel()).await;
        }
    }
}

impl Owner {
    pub(super) fn admin(
        &mut self,
        connection: ConnectionId,
        request: AdminRequest,
        responder: Responder,
    ) {
        match request {
            AdminRequest::Status => {
                let status = AdminReply::Status(Box::new(self.status()));
                self.answer_shown(responder, status);
            }
            AdminRequest::Nodes => {
                let mut nodes = self.cluster.nodes(self.clock.now_ms());
                for status in &mut nodes {
                    let connection = self.node_connections.get(&status.node);
                    let connected = connection.and_then(|id| self.connections.get(id));
                    status.clock_ahead_ms = connected.and_then(|it| it.clock_ahead_ms);
                    status.version = connected.and_then(|it| it.version.clone());
                }
                self.answer_shown(responder, AdminReply::Nodes(nodes));
            }
            AdminRequest::Fsck => {
                let counts = self.namespace.counts();
                if counts.inodes + counts.blocks <= self.options.fsck_in_place_max {
                    let report = self.fsck_report(self.namespace.check());
                    self.answer_shown(responder, AdminReply::Fsck(report));
                } else {
                    self.want_checkpoint(Purpose::Check, Waiter::Operator(responder));
                }
            }
            AdminRequest::Snapshot => {
                self.want_checkpoint(Purpose::Snapshot, Waiter::Operator(responder));
            }
            AdminRequest::AcceptLoss => match self.accept_loss() {
                Ok(record) => {
                    self.answer(responder, Ok(Reply::Admin(AdminReply::Done)), Some(record));
                }
                Err(error) => responder.send(&Err(error)),
            },
            AdminRequest::Quarantine { after } => {
                let blocks = AdminReply::Quarantine(self.quarantined(after));
                self.answer_shown(responder, blocks);
            }
            AdminRequest::Classes => {
                let classes = AdminReply::Classes(Box::new(self.classes()));
                self.answer_shown(responder, classes);
            }
            AdminRequest::Harvest(report) => {
                let taken = self.activity.harvests.take(self.clock.now_ms(), report);
                let reply = taken
                    .map(|()| Reply::Admin(AdminReply::Done))
                    .map_err(|fault| FsError::InvalidArgument(fault.to_owned()));
                responder.send(&reply);
            }
            AdminRequest::Placement(request) => {
                let reply = self.placement(request);
                let record = self.undurable.last();
                let reply = reply.map(|reply| Reply::Admin(AdminReply::Placement(reply)));
                self.answer(responder, reply, record);
            }
            AdminRequest::Group(request) => self.group_request(request, responder),
            AdminRequest::Backup(request) => self.backup_request(connection, request, responder),
            AdminRequest::Upgrade(request) => self.upgrade_request(request, responder),
            AdminRequest::History(request) => {
                // It answers with what has happened until now.
                self.historian.tick(clock::unix_now_s());
                self.historian.request(request, responder);
            }
        }
    }

    /// Answers with data that may show any change: a change that is not committed may be missing on the next leader.
    fn answer_shown(&mut self, responder: Responder, reply: AdminReply) {
        let record = self.undurable.last();
        self.answer(responder, Ok(Reply::Admin(reply)), record);
    }

    pub(super) fn status(&self) -> ClusterStatus {
        let counts = self.namespace.counts();
        let summary = self.cluster.summary(self.clock.now_ms());
        ClusterStatus {
            cluster: self.formatted.cluster,
            version: Release::OURS.to_string(),
            unix_ms: clock::unix_now_ms(),
            uptime_s: self.clock.now_ms() / 1_000,
            ready: summary.ready,
            inodes: counts.inodes,
            files: counts.files,
            directories: counts.directories,
            blocks: counts.blocks,
            under_replicated_blocks: summary.under_replicated_blocks,
            curtailed_blocks: summary.curtailed_blocks,
            writes: self.cluster.write_outlook(&self.formatted.default_rules),
            lost_blocks: summary.lost_blocks,
            repairs_under_way: summary.repairs_under_way,
            repairs_done: summary.repairs_done,
            sessions: counts.sessions,
            nodes_alive: summary.nodes_alive,
            nodes_in_maintenance: summary.nodes_in_maintenance,
            nodes_known: summary.nodes_known,
            quota_bytes: summary.quota_bytes,
            used_bytes: summary.used_bytes,
            journal_lsn: self.log.last_lsn(),
            engine_bytes: counts.memory_bytes + summary.engine_bytes,
            epoch: self.timeline.epoch(),
            recovery: self.timeline.recovery(),
            refused_nodes: self.timeline.refused_nodes(),
            quarantined_blocks: summary.quarantined_blocks,
            quarantined_bytes: summary.quarantined_bytes,
            cluster_version: self.namespace.version(),
            newest_version: self.newest_version(),
        }
    }

    /// Combines the findings in the namespace with the cluster's counts. Traverses all blocks once, a fraction of a
    /// microsecond for each.
    fn fsck_report(&self, mut findings: Vec<FsckFinding>) -> FsckReport {
        let counts = self.namespace.counts();
        let replicas = self.cluster.fsck();
        let finding = |message: String| FsckFinding {
            ino: None,
            path: None,
            block: None,
            message,
        };
        let summary = self.cluster.summary(self.clock.now_ms());
        if !summary.ready {
            findings.push(finding(
                "the locations of blocks are still being learned after the start: look again later"
                    .to_owned(),
            ));
        }
        if let Err(reason) = self.timeline.check_serving() {
            findings.push(finding(reason.to_string()));
        }
        let room = FINDINGS_MAX.saturating_sub(findings.len());
        findings.extend(self.block_findings(room));
        let room = FINDINGS_MAX.saturating_sub(findings.len());
        findings.extend(self.lost_end_findings().into_iter().take(room));
        let room = FINDINGS_MAX.saturating_sub(findings.len());
        findings.extend(self.orphan_findings(room));
        findings.truncate(FINDINGS_MAX - 1);
        let healthy = findings.is_empty()
            && replicas.missing_replicas == 0
            && replicas.lost_blocks == 0
            && replicas.orphan_replicas == 0
            && replicas.excess_replicas == 0;
        // Quarantined blocks do not affect the health of what is in the file system.
        if summary.quarantined_blocks > 0 {
            findings.push(finding(format!(
                "{} blocks are in quarantine: this namenode never allocated them; \
                 `harvestfs admin quarantine` lists them, `harvestfs admin fsck --recover DIR` \
                 reads them back",
                summary.quarantined_blocks
            )));
        }
        FsckReport {
            healthy,
            files: counts.files,
            directories: counts.directories,
            blocks: counts.blocks,
            missing_replicas: replicas.missing_replicas,
            lost_blocks: replicas.lost_blocks,
            orphan_blocks: replicas.orphan_replicas,
            excess_replicas: replicas.excess_replicas,
            findings,
        }
    }

    /// What is wrong with blocks, which files are affected, and why it is not repaired yet.
    fn block_findings(&self, findings_max: usize) -> Vec<FsckFinding> {
        let faults = self.cluster.faults(self.clock.now_ms(), findings_max);
        let mut users: BTreeMap<BlockId, InodeId> = BTreeMap::new();
        // Going over all inodes of a larger namespace would hold up all requests.
        if !faults.is_empty() && self.namespace.counts().inodes <= self.options.fsck_in_place_max {
            let blocks = faults.iter().map(|fault| (fault.block, 0)).collect();
            users.extend(self.namespace.files_using(&blocks));
        }
        let paths = self.namespace.paths(&users.values().copied().collect());
        let finding = |fault: &BlockFault| {
            let ino = users.get(&fault.block).copied();
            FsckFinding {
                ino,
                path: ino.and_then(|ino| paths.get(&ino).cloned()),
                block: Some(fault.block),
                message: format!(
                    "block {} has {} of {} replicas: {}",
                    fault.block, fault.replicas, fault.wanted, fault.reason
                ),
            }
        };
        faults.iter().map(finding).collect()
    }

    /// Findings about files that use the lost ends of blocks.
    fn lost_end_findings(&self) -> Vec<FsckFinding> {
        let shortened: BTreeMap<_, _> = self.cluster.shortened().map(|it| (it.block, it)).collect();
        // Going over all inodes of a larger namespace would hold up all requests.
        if self.namespace.counts().inodes > self.options.fsck_in_place_max {
            let finding = |it: &ShortenedBlock| lost_end(it, None, None);
            return shortened.values().map(finding).collect();
        }
        let left = shortened.iter().map(|(&block, it)| (block, it.left_bytes));
        let users = if shortened.is_empty() {
            BTreeSet::new()
        } else {
            self.namespace.files_using(&left.collect())
        };
        let paths = self
            .namespace
            .paths(&users.iter().map(|&(_, ino)| ino).collect());
        let finding = |&(block, ino): &(BlockId, InodeId)| {
            let path = paths.get(&ino).cloned();
            Some(lost_end(shortened.get(&block)?, Some(ino), path))
        };
        users.iter().filter_map(finding).collect()
    }

    /// Findings about replicas that nothing uses, and what becomes of them.
    fn orphan_findings(&self, findings_max: usize) -> Vec<FsckFinding> {
        let orphans = self.cluster.orphans(findings_max);
        let finding = |orphan: &OrphanReplica| {
            let server = match self.cluster.node_info(orphan.node) {
                Some(info) => info.name,
                None => orphan.node.to_string(),
            };
            let fate = if orphan.reachable {
                "it is being removed"
            } else {
                "it is removed when that answers again"
            };
            FsckFinding {
                ino: None,
                path: None,
                block: Some(orphan.block),
                message: format!(
                    "{server} has a replica of block {}, which no file uses (any more): {fate}",
                    orphan.block
                ),
            }
        };
        orphans.iter().map(finding).collect()
    }

    fn want_checkpoint(&mut self, purpose: Purpose, waiter: Waiter) {
        self.checkpoints
            .wanted
            .push_back(Wanted { purpose, waiter });
    }

    /// Requests a snapshot for a namenode that is to be added to the group.
    pub(super) fn want_snapshot(&mut self, done: oneshot::Sender<Result<(), FsError>>) {
        self.want_checkpoint(Purpose::Snapshot, Waiter::Group(done));
    }

    /// Requests a snapshot for a backup.
    pub(super) fn want_backup(&mut self, connection: ConnectionId, responder: Responder) {
        let waiter = Waiter::Backup(connection, responder, self.clock.now_ms());
        self.want_checkpoint(Purpose::Snapshot, waiter);
    }

    /// Answers callers that have waited too long for a backup because what this namenode has is not committed.
    fn refuse_late_backups(&mut self) {
        let now_ms = self.clock.now_ms();
        let is_late = |wanted: &Wanted| matches!(wanted.waiter, Waiter::Backup(_, _, since_ms) if now_ms.saturating_sub(since_ms) >= COMMITTED_WITHIN_MS);
        let (late, waiting) = std::mem::take(&mut self.checkpoints.wanted)
            .into_iter()
            .partition(is_late);
        self.checkpoints.wanted = waiting;
        for Wanted { waiter, .. } in late {
            waiter.answer(Err(FsError::Internal(
                "what this namenode has is not committed: most namenodes have to work".to_owned(),
            )));
        }
    }

    /// Begins a checkpoint if an operator waits for one or the journal has grown enough. Everything
    /// that was executed must have been handed to the journal.
    pub(super) async fn begin_checkpoint_if_due(&mut self) {
        if self.checkpoints.running.is_some() {
            return;
        }
        let wanted = self.checkpoints.wanted.front().map(|wanted| wanted.purpose);
        let Some(purpose) = wanted.or_else(|| self.snapshot_is_due().then_some(Purpose::Snapshot))
        else {
            return;
        };
        if purpose == Purpose::Check && self.log.last_lsn() == self.checkpoints.last.lsn {
            // The journal shows its contents only for something new: a record that changes nothing.
            let nothing = Command::ReleaseOrphans {
                inodes: Vec::new(),
                now: Timestamp::now(),
            };
            if let Err(error) = self.execute(&nothing, false) {
                tracing::error!(%error, "an empty record was refused");
            }
            self.log.flush().await;
        }
        // A snapshot must not cover anything that other namenodes may never have. If that is not certain yet, it
        // begins later.
        let is_committed = self.log.all_committed().await;
        self.on_progress();
        if !is_committed {
            self.refuse_late_backups();
            return;
        }
        // One checkpoint serves all callers that wait for the same kind.
        let waiting = std::mem::take(&mut self.checkpoints.wanted);
        for wanted in waiting {
            if wanted.purpose == purpose {
                self.checkpoints.waiting.push(wanted.waiter);
            } else {
                self.checkpoints.wanted.push_back(wanted);
            }
        }
        self.checkpoints.next = Covered {
            lsn: self.log.last_lsn(),
            appended_bytes: self.log.appended_bytes(),
        };
        let is_backup = |waiter: &Waiter| matches!(waiter, Waiter::Backup(..));
        self.checkpoints.content = (self.checkpoints.waiting.iter().any(is_backup))
            .then(|| Box::new(self.backup_content()));
        let running = self.namespace.counts();
        let sender = self.checkpoints.sender.clone();
        let before_install = self.log.before_snapshot();
        match Checkpoint::start(purpose, running, before_install, sender) {
            Ok((checkpoint, begin)) => {
                tracing::debug!(?purpose, lsn = self.log.last_lsn(), "a checkpoint begins");
                self.checkpoints.running = Some(checkpoint);
                let lsn = self.log.last_lsn();
                self.log.journal().begin_snapshot(lsn, begin).await;
            }
            Err(error) => {
                // The next attempt comes only when as much again has been written.
                self.checkpoints.last = self.checkpoints.next;
                self.checkpoint_failed(&format!("no thread for it: {error}"));
            }
        }
    }

    fn snapshot_is_due(&self) -> bool {
        let Checkpoints {
            last,
            content_bytes,
            ..
        } = &self.checkpoints;
        let trigger = self.options.snapshots;
        let records = self.log.last_lsn() - last.lsn;
        let bytes = self.log.appended_bytes() - last.appended_bytes;
        records > 0
            && (records >= trigger.records || bytes >= trigger.bytes)
            && bytes >= *content_bytes
    }

    pub(super) fn on_checkpoint(&mut self, result: Result<Outcome, CheckpointError>) {
        let Some(finished) = self.checkpoints.running.take() else {
            tracing::error!("a checkpoint finished that was not running");
            return;
        };
        let purpose = finished.purpose;
        // The thread has nothing left to do.
        finished.cancel();
        if purpose == Purpose::Snapshot {
            // After a failure, too: the next attempt comes when as much again has been written.
            self.checkpoints.last = self.checkpoints.next;
        }
        let reply = match result {
            Ok(Outcome::Installed { lsn, content_bytes }) => {
                tracing::info!(lsn, content_bytes, "a snapshot was written");
                self.checkpoints.content_bytes = content_bytes;
                self.log.snapshot_installed();
                AdminReply::Done
            }
            Ok(Outcome::NothingNew) => AdminReply::Done,
            Ok(Outcome::Checked(findings)) => AdminReply::Fsck(self.fsck_report(findings)),
            Ok(Outcome::Cancelled) => return,
            Err(error) => return self.checkpoint_failed(&error.to_string()),
        };
        let content = self.checkpoints.content.take();
        for waiter in std::mem::take(&mut self.checkpoints.waiting) {
            match (waiter, &content) {
                (Waiter::Backup(connection, responder, _), Some(content)) => {
                    self.begin_backup(connection, content.clone(), responder);
                }
                (Waiter::Backup(..), None) => unreachable!("it is known what a backup is of"),
                // It shows more than what was committed when the check began.
                (Waiter::Operator(responder), _) => self.answer_shown(responder, reply.clone()),
                (other, _) => other.answer(Ok(reply.clone())),
            }
        }
    }

    fn checkpoint_failed(&mut self, reason: &str) {
        tracing::error!(
            reason,
            "the checkpoint failed; the journal keeps all records"
        );
        let error = FsError::Internal(format!("the checkpoint failed: {reason}"));
        for waiter in self.checkpoints.waiting.drain(..) {
            waiter.answer(Err(error.clone()));
        }
    }
}

fn lost_end(it: &ShortenedBlock, ino: Option<InodeId>, path: Option<String>) -> FsckFinding {
    let ShortenedBlock {
        block,
        left_bytes,
        committed_bytes,
    } = it;
    FsckFinding {
        ino,
        path,
        block: Some(*block),
        message: format!(
            "of block {block}, {left_bytes} of {committed_bytes} bytes are left: its servers lost their power before \
             the rest was synced. What is lost cannot be read: write or remove the file again"
        ),
    }
}
