//! Metadata operations.

use std::net::IpAddr;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, NodeId, SessionId};
use harvestfs_protocol::limits::{
    BLOCKS_PER_REQUEST_MAX, GROUPS_MAX, MUTATIONS_IN_FLIGHT_MAX, REPLICATION_MAX,
};
use harvestfs_protocol::meta::{MetaCall, MetaOp, MetaReply, StatFs};
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::{Credentials, FileKind, PlacementRules, Timestamp};

use super::class::{Class, class_of, creates_file};
use super::deferred::files_told;
use super::locate::LOCATIONS_XATTR;
use super::session::{peer_limit, unexpected_outcome};
use super::{Answer, Owner};
use crate::engine::namespace::{Command, Outcome};
use crate::journal::Lsn;
use crate::server::leases::Cached;
use crate::server::metrics::Responder;
use crate::server::sessions::{ConnectionId, OpenTo};

/// When a client may try again that has too much under way.
const TOO_MUCH_RETRY_AFTER_MS: u32 = 100;

/// How long a session that compacts has to come back for more before another may.
const COMPACTION_TURN_MS: u64 = 600_000;

/// Who asks.
#[derive(Clone, Copy, Debug)]
struct Asker {
    session: SessionId,
    ip: IpAddr,
}

impl Owner {
    pub(super) fn meta(&mut self, connection: ConnectionId, call: MetaCall, responder: Responder) {
        let asker = match self.asker(connection, &call.credentials) {
            Ok(asker) => asker,
            Err(error) => return responder.send(&Err(error)),
        };
        let relaxed = call.relaxed && self.may_be_relaxed(asker.session, &call.op);
        match class_of(&call.op, relaxed) {
            Class::ReadOnly => self.read(asker, connection, call, responder),
            Class::Awaited if self.mutates_ahead_of_commits(asker.session, &call.op) => {
                self.defer(connection, call, responder);
            }
            Class::Awaited => self.mutate(asker, call, true, responder),
            Class::Relaxed => self.mutate(asker, call, false, responder),
            Class::Housekeeping => {
                let reply = self.keep_house(asker, call.op);
                responder.send(&reply.map(Reply::Meta));
            }
        }
    }

    /// Whether a change may be lost in a crash: of all but the size of a file that never had content
    /// and is delegated to the asker.
    fn may_be_relaxed(&self, asker: SessionId, op: &MetaOp) -> bool {
        let MetaOp::SetAttr { ino, changes } = op else {
            return false;
        };
        let never_had_content = || {
            let attr = MetaOp::GetAttr { ino: *ino };
            let told = self.namespace.query(&Credentials::root(), &attr);
            matches!(told, Ok(MetaReply::Attr(attr)) if attr.content_version == 0)
        };
        changes.size_bytes.is_none() && self.delegations.is_held(asker, *ino) && never_had_content()
    }

    fn asker(
        &mut self,
        connection: ConnectionId,
        credentials: &Credentials,
    ) -> Result<Asker, FsError> {
        let session = self.session_of(connection)?;
        let connected = self.connections.get(&connection);
        let connected = connected.ok_or(FsError::SessionExpired)?;
        let groups = credentials.groups.len();
        if groups > GROUPS_MAX {
            return Err(FsError::InvalidArgument(format!(
                "{groups} groups, at most {GROUPS_MAX} are accepted"
            )));
        }
        Ok(Asker {
            session,
            ip: connected.ip,
        })
    }

    // --- read-only ---

    fn read(
        &mut self,
        asker: Asker,
        connection: ConnectionId,
        call: MetaCall,
        responder: Responder,
    ) {
        let result = self.query(asker, &call.credentials, &call.op);
        if let Ok(reply) = &result
            && self.is_ahead_of_commits(asker.session, || files_told(&call.op, reply))
        {
            return self.defer(connection, call, responder);
        }
        let mut record = None;
        match &result {
            Ok(_) | Err(FsError::NotFound | FsError::NoAttribute) => {
                let leases = &mut self.leases;
                let undurable = &self.undurable;
                each_told(&call.op, &result, &mut |cached| {
                    leases.granted(asker.session, cached);
                    let (Cached::Inode(ino) | Cached::Entries(ino)) = cached;
                    record = record.max(undurable.record_of([ino]));
                });
            }
            // An error may tell of anything.
            Err(_) => record = self.undurable.last(),
        }
        let response = result.map(Reply::Meta);
        match record {
            None => responder.send(&response),
            Some(_) => self.answer(responder, response, record),
        }
    }

    fn query(
        &mut self,
        asker: Asker,
        credentials: &Credentials,
        op: &MetaOp,
    ) -> Result<MetaReply, FsError> {
        match op {
            MetaOp::Locate { ino, blocks } => {
                check_block_count(blocks.len())?;
                let reader = self.opener(asker.session, *ino, OpenTo::Read);
                let reader = reader.as_ref().unwrap_or(credentials);
                let blocks = self.namespace.readable_blocks(reader, *ino, blocks)?;
                Ok(MetaReply::Located(self.located(blocks, asker.ip)))
            }
            MetaOp::GetExtents { ino, .. } => {
                let opener = self.opener(asker.session, *ino, OpenTo::Write);
                self.namespace
                    .query(opener.as_ref().unwrap_or(credentials), op)
            }
            MetaOp::GetXattr { ino, name } if name == LOCATIONS_XATTR => {
                self.locations(credentials, *ino)
            }
            MetaOp::Open {
                ino, read, execute, ..
            } => {
                let mut reply = self.namespace.query(credentials, op)?;
                let to = if *read || *execute || self.may_read(credentials, *ino) {
                    OpenTo::Read
                } else {
                    OpenTo::Write
                };
                self.hold(asker.session, *ino, to)?;
                if to == OpenTo::Read
                    && let MetaReply::Opened {
                        extents, located, ..
                    } = &mut reply
                {
                    *located = self.located_first(extents, asker.ip);
                }
                Ok(reply)
            }
            MetaOp::StatFs { .. } => {
                let reply = self.namespace.query(credentials, op)?;
                Ok(self.with_space(reply))
            }
            MetaOp::FindSparse { .. } => {
                self.take_compaction_turn(asker.session)?;
                self.namespace.query(credentials, op)
            }
            _ => self.namespace.query(credentials, op),
        }
    }

    /// Compaction is one session's at a time: two would copy the same data.
    fn take_compaction_turn(&mut self, session: SessionId) -> Result<(), FsError> {
        let now_ms = self.clock.now_ms();
        match self.compactor {
            Some((other, until_ms)) if other != session && now_ms < until_ms => {
                Err(FsError::Busy {
                    retry_after_ms: u32::try_from(until_ms - now_ms).unwrap_or(u32::MAX),
                })
            }
            _ => {
                self.compactor = Some((session, now_ms + COMPACTION_TURN_MS));
                Ok(())
            }
        }
    }

    fn hold(&mut self, session: SessionId, ino: InodeId, to: OpenTo) -> Result<(), FsError> {
        let holds_max = self.options.holds_per_session_max;
        if self.sessions.hold(session, ino, to, holds_max) {
            return Ok(());
        }
        Err(FsError::Busy {
            retry_after_ms: TOO_MUCH_RETRY_AFTER_MS,
        })
    }

    /// Cuts what quotas leave down to the space that the cluster has.
    fn with_space(&self, reply: MetaReply) -> MetaReply {
        let MetaReply::StatFs(quotas) = reply else {
            return reply;
        };
        let summary = self.cluster.summary(self.clock.now_ms());
        let replication = u64::from(self.formatted.default_rules.replication.max(1));
        let free_bytes = summary.quota_bytes.saturating_sub(summary.used_bytes);
        let free_bytes = quotas.free_bytes.min(free_bytes / replication);
        let outlook = self.cluster.write_outlook(&self.formatted.default_rules);
        MetaReply::StatFs(StatFs {
            total_bytes: quotas.total_bytes.min(summary.quota_bytes / replication),
            free_bytes,
            available_bytes: free_bytes.min(outlook.writable_bytes),
            ..quotas
        })
    }

    // --- mutations ---

    fn mutate(&mut self, asker: Asker, call: MetaCall, awaited: bool, responder: Responder) {
        let Some(responder) = self.answer_repeated(asker, call.sequence, responder) else {
            return;
        };
        let mutation = Some((asker.session, call.sequence));
        let mut pipelines = Vec::new();
        let done = self
            .prepare(asker, &call, &mut pipelines)
            .and_then(|()| self.execute_mutation(asker, call, awaited, pipelines));
        match done {
            Ok(Done {
                id,
                reply,
                record,
                waits_for_others,
            }) => {
                let answer = Answer {
                    responder,
                    response: Ok(Reply::Meta(reply)),
                    mutation,
                };
                self.answer_mutation(id, answer, record, waits_for_others);
            }
            // It may tell of something that is not durable yet.
            Err(error) => self.answer(responder, Err(error), self.undurable.last()),
        }
    }

    /// Answers a mutation that was executed before, and gives the responder back otherwise.
    fn answer_repeated(
        &mut self,
        asker: Asker,
        sequence: u64,
        responder: Responder,
    ) -> Option<Responder> {
        let session = self.sessions.get(asker.session)?;
        if let Some(&held) = session.unanswered.get(&sequence) {
            // The first attempt's connection is gone, or its client would not ask again.
            if let Some(answer) = self.gate.get_mut(held) {
                answer.responder = responder;
                return None;
            }
        }
        let Some(outcome) = self.namespace.remembered_reply(asker.session, sequence) else {
            return Some(responder);
        };
        let reply = match outcome.clone() {
            Outcome::Blocks(blocks) => self.locate_again(asker, blocks),
            outcome => reply_of(outcome),
        };
        if let Ok(MetaReply::Attr(attr)) = &reply
            && attr.kind == FileKind::Regular
            && let Err(error) = self.hold(asker.session, attr.ino, OpenTo::Read)
        {
            responder.send(&Err(error));
            return None;
        }
        responder.send(&reply.map(Reply::Meta));
        None
    }

    /// Checks what the engine cannot know, and chooses where new blocks go.
    fn prepare(
        &mut self,
        asker: Asker,
        call: &MetaCall,
        pipelines: &mut Vec<Vec<NodeId>>,
    ) -> Result<(), FsError> {
        self.timeline.check_serving()?;
        if call.sequence == 0 {
            return Err(FsError::Protocol("mutations are numbered from 1".into()));
        }
        let session = self.sessions.get(asker.session);
        let session = session.ok_or(FsError::SessionExpired)?;
        let too_much = session.unanswered.len() >= MUTATIONS_IN_FLIGHT_MAX;
        if too_much
            || creates_file(&call.op) && session.holds_len() >= self.options.holds_per_session_max
        {
            return Err(FsError::Busy {
                retry_after_ms: TOO_MUCH_RETRY_AFTER_MS,
            });
        }
        if let MetaOp::AllocateBlocks {
            count,
            rules,
            exclude,
        } = &call.op
        {
            let max = self.options.blocks_per_session_max;
            if self.namespace.blocks_written_by(asker.session, max) + *count as usize > max {
                return Err(peer_limit("blocks that a session writes", max));
            }
            *pipelines = self.place(asker, *count, rules, exclude)?;
        }
        Ok(())
    }

    fn place(
        &mut self,
        asker: Asker,
        count: u32,
        rules: &PlacementRules,
        exclude: &[NodeId],
    ) -> Result<Vec<Vec<NodeId>>, FsError> {
        check_block_count(count as usize)?;
        check_block_count(exclude.len())?;
        if count == 0 || !(1..=REPLICATION_MAX).contains(&rules.replication) {
            return Err(FsError::InvalidArgument(format!(
                "{count} blocks of {} replicas: at least 1 block, 1 to {REPLICATION_MAX} replicas",
                rules.replication
            )));
        }
        let now_ms = self.clock.now_ms();
        self.cluster
            .place(now_ms, count, rules, exclude, Some(asker.ip), &mut self.rng)
    }

    fn execute_mutation(
        &mut self,
        asker: Asker,
        call: MetaCall,
        awaited: bool,
        pipelines: Vec<Vec<NodeId>>,
    ) -> Result<Done, FsError> {
        let target = self.namespace.removal_target(&call.op);
        let op = call.op;
        let command = Command::Mutate {
            session: asker.session,
            sequence: call.sequence,
            answered_below: call.answered_below,
            credentials: call.credentials,
            now: Timestamp::now(),
            held_elsewhere: target.is_some_and(|ino| self.sessions.may_be_held(ino)),
            op,
        };
        let (applied, lsn) = self.execute(&command, awaited)?;
        let Command::Mutate { op, .. } = command else {
            return Err(FsError::Internal("a command changed its kind".into()));
        };
        let id = self.gate.next_id();
        let effects = applied.effects;
        // The answer may show what somebody was promised to be durable before it is seen.
        let shown = self.undurable.record_of(effects.inodes.iter().copied());
        let author = self.author_of(&effects, asker.session);
        let now_ms = self.clock.now_ms();
        let (announcements, waits_for_others) =
            self.leases
                .changed(now_ms, author, &effects.inodes, &effects.entries, id);
        self.announce(announcements);
        let reply = match (applied.reply, &op) {
            (Outcome::Blocks(blocks), MetaOp::AllocateBlocks { rules, .. }) => {
                let located = blocks.into_iter().zip(pipelines);
                let located: Vec<_> = located
                    .map(|(block, nodes)| (block, *rules, nodes))
                    .collect();
                for (block, _, nodes) in &located {
                    self.cluster.set_pipeline(*block, nodes);
                }
                MetaReply::Located(self.located_for_writing(located))
            }
            (outcome, _) => reply_of(outcome)?,
        };
        let reply = self.follow_mutation(asker, op, reply);
        Ok(Done {
            id,
            reply,
            record: if awaited { Some(lsn) } else { shown },
            waits_for_others,
        })
    }

    /// What the server itself has to do after a mutation.
    fn follow_mutation(&mut self, asker: Asker, op: MetaOp, reply: MetaReply) -> MetaReply {
        let leases = &mut self.leases;
        each_told_by_mutation(&op, &reply, &mut |cached| {
            leases.granted(asker.session, cached);
        });
        match (op, &reply) {
            (op, MetaReply::Attr(attr)) if creates_file(&op) => {
                // There is room: it was checked before.
                if let Err(error) = self.hold(asker.session, attr.ino, OpenTo::Read) {
                    tracing::error!(ino = %attr.ino, %error, "a created file is not held");
                }
                if matches!(op, MetaOp::Create { .. })
                    && let Ok(rules) = self.namespace.rules_of(attr.ino)
                {
                    // A quota may refuse what is written, which `close` has to tell.
                    let delegated = !self.namespace.is_limited(attr.ino)
                        && self.delegations.give(asker.session, attr.ino);
                    return MetaReply::Created {
                        attr: attr.clone(),
                        rules,
                        delegated,
                    };
                }
            }
            (MetaOp::Commit { files, .. }, _) => {
                for file in files {
                    self.delegation_returned(asker.session, file.ino);
                }
            }
            (MetaOp::SealBlocks { blocks }, _) => {
                let now_ms = self.clock.now_ms();
                for sealed in blocks {
                    self.cluster
                        .sealed_by_client(now_ms, sealed.block, &sealed.replicas);
                }
            }
            _ => {}
        }
        reply
    }

    /// The answer to a repeated allocation: the blocks as they were placed, or, when a restart has
    /// forgotten where that was, placed anew. Nothing can have been written to them without it.
    fn locate_again(&mut self, asker: Asker, blocks: Vec<BlockId>) -> Result<MetaReply, FsError> {
        let mut located = Vec::with_capacity(blocks.len());
        for block in blocks {
            let Some(view) = self.namespace.block(block) else {
                continue;
            };
            let mut nodes = self.cluster.replicas(block, Some(asker.ip));
            if nodes.is_empty() {
                nodes = self.place(asker, 1, &view.rules, &[])?.concat();
                self.cluster.set_pipeline(block, &nodes);
            }
            located.push((block, view.rules, nodes));
        }
        Ok(MetaReply::Located(self.located_for_writing(located)))
    }

    // --- housekeeping ---

    fn keep_house(&mut self, asker: Asker, op: MetaOp) -> Result<MetaReply, FsError> {
        match op {
            MetaOp::Release { inodes } => {
                for &ino in &inodes {
                    self.delegation_returned(asker.session, ino);
                }
                let unheld = inodes
                    .into_iter()
                    .filter(|&ino| self.sessions.release(asker.session, ino))
                    .collect();
                self.release_orphans(unheld);
            }
            MetaOp::ReturnDelegations { inodes } => {
                for ino in inodes {
                    self.delegation_returned(asker.session, ino);
                }
            }
            MetaOp::ReportBadReplica {
                block,
                node,
                corrupt,
            } => {
                let now_ms = self.clock.now_ms();
                self.cluster
                    .report_bad_replica(now_ms, block, node, corrupt);
            }
            _ => return Err(FsError::Internal("not a request of housekeeping".into())),
        }
        Ok(MetaReply::Done)
    }
}

/// A mutation that was executed.
struct Done {
    /// Its number at the gate.
    id: u64,
    reply: MetaReply,
    /// What its reply has to wait for.
    record: Option<Lsn>,
    waits_for_others: bool,
}

fn reply_of(outcome: Outcome) -> Result<MetaReply, FsError> {
    match outcome {
        Outcome::Done => Ok(MetaReply::Done),
        Outcome::Meta(reply) => Ok(reply),
        other => Err(unexpected_outcome(&other)),
    }
}

fn check_block_count(count: usize) -> Result<(), FsError> {
    if count <= BLOCKS_PER_REQUEST_MAX {
        return Ok(());
    }
    Err(FsError::InvalidArgument(format!(
        "{count} blocks or nodes in one request, at most {BLOCKS_PER_REQUEST_MAX} are accepted"
    )))
}

/// What a client may cache of the answer to a read-only operation.
fn each_told(op: &MetaOp, result: &Result<MetaReply, FsError>, told: &mut impl FnMut(Cached)) {
    match op {
        MetaOp::Lookup { parent, .. } => {
            told(Cached::Entries(*parent));
            if let Ok(MetaReply::Attr(attr)) = result {
                told(Cached::Inode(attr.ino));
            }
        }
        MetaOp::ReadDir { ino, .. } => {
            told(Cached::Entries(*ino));
            // Its parent is an attribute of the directory.
            told(Cached::Inode(*ino));
            if let Ok(MetaReply::Entries { entries, .. }) = result {
                for attr in entries.iter().filter_map(|entry| entry.attr.as_ref()) {
                    told(Cached::Inode(attr.ino));
                }
            }
        }
        MetaOp::GetAttr { ino }
        | MetaOp::Access { ino, .. }
        | MetaOp::ReadLink { ino }
        | MetaOp::Open { ino, .. }
        | MetaOp::GetExtents { ino, .. }
        | MetaOp::GetXattr { ino, .. }
        | MetaOp::ListXattr { ino } => told(Cached::Inode(*ino)),
        // Replicas move at any time, and totals are out of date as soon as they are told.
        _ => {}
    }
}

/// What a client may cache of the answer to its mutation.
fn each_told_by_mutation(op: &MetaOp, reply: &MetaReply, told: &mut impl FnMut(Cached)) {
    match op {
        MetaOp::Create { parent, .. }
        | MetaOp::MakeDir { parent, .. }
        | MetaOp::Symlink { parent, .. }
        | MetaOp::Link { parent, .. }
        | MetaOp::Unlink { parent, .. }
        | MetaOp::RemoveDir { parent, .. }
        | MetaOp::RemoveToTrash { parent, .. } => told(Cached::Entries(*parent)),
        MetaOp::Rename {
            parent, new_parent, ..
        } => {
            told(Cached::Entries(*parent));
            told(Cached::Entries(*new_parent));
        }
        _ => {}
    }
    match reply {
        MetaReply::Attr(attr) => {
            told(Cached::Inode(attr.ino));
            if matches!(op, MetaOp::MakeDir { .. }) {
                // That there are no entries.
                told(Cached::Entries(attr.ino));
            }
        }
        MetaReply::Removed(Some(attr)) => told(Cached::Inode(attr.ino)),
        MetaReply::Renamed { moved, other } => {
            told(Cached::Inode(moved.ino));
            if let Some(other) = other {
                told(Cached::Inode(other.ino));
            }
        }
        MetaReply::Committed(files) => {
            for committed in files.iter().flatten() {
                told(Cached::Inode(committed.attr.ino));
            }
        }
        _ => {}
    }
}
