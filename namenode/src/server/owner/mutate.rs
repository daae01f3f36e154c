//! Mutations: executed once, answered as [`MutationFacts`] says.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, NodeId, SessionId};
use harvestfs_protocol::limits::{MUTATIONS_IN_FLIGHT_MAX, REPLICATION_MAX};
use harvestfs_protocol::meta::mutation::{
    AllocateBlocks, Answered, Creates, Entails, MutationFacts, SetAttr,
};
use harvestfs_protocol::meta::{
    Cached, MetaCall, MetaOp, MetaReply, Mutated, Mutation, MutationCall,
};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::{Attr, Credentials, PlacementRules, Timestamp};

use super::meta::{Asker, TOO_MUCH_RETRY_AFTER_MS, check_block_count};
use super::replay::is_replay;
use super::session::{peer_limit, unexpected_outcome};
use super::{Answer, Owner};
use crate::engine::namespace::{Command, Outcome};
use crate::journal::Lsn;
use crate::server::metrics::Responder;
use crate::server::sessions::{ConnectionId, OpenTo};

/// The extended attribute of a directory after whose time the namenode removes what is in it.
const LIFETIME_XATTR: &[u8] = b"user.harvestfs.lifetime_s";

/// A mutation that was executed.
struct Done {
    /// Its number at the gate.
    id: u64,
    mutated: Mutated,
    /// The record that its reply has to wait for.
    record: Option<Lsn>,
    waits_for_others: bool,
}

impl Owner {
    pub(super) fn mutate(
        &mut self,
        asker: Asker,
        connection: ConnectionId,
        credentials: Credentials,
        mut call: MutationCall,
        responder: Responder,
    ) {
        let facts = call.mutation.facts();
        if !self.may_replay(asker.session, &call)
            && self.is_mutation_ahead_of_commits(asker.session, facts.awaits)
        {
            let op = MetaOp::Mutation(call);
            return self.defer(connection, MetaCall { credentials, op }, responder);
        }
        let creates = facts.creates;
        let Some(responder) = self.answer_repeated(asker, (call.sequence, creates), responder)
        else {
            return;
        };
        let may_be_early = match facts.answered {
            Answered::Durable => false,
            Answered::DurableUnlessRelaxed => {
                call.relaxed && self.may_be_relaxed(asker.session, &call.mutation)
            }
            Answered::AtOnce => !self.is_lost_with_leader(&call.mutation),
        };
        let all_noted = self.note_lapsed_before(asker.session, &call);
        let inodes = facts.inodes.iter();
        let follows_others = self.answered_early.has_of_others(asker.session, inodes);
        let is_early = may_be_early && all_noted && !follows_others;
        if let Err(error) = self.refuse_overtaken(asker.session, &mut call) {
            return responder.send(&Err(error));
        }
        let numbered = Some((asker.session, call.sequence));
        let mut pipelines = Vec::new();
        let done = self
            .prepare(asker, &credentials, &call, &mut pipelines)
            .and_then(|()| self.execute_mutation(asker, credentials, call, !is_early, pipelines));
        match done {
            Ok(Done {
                id,
                mutated,
                record,
                waits_for_others,
            }) => {
                let answer = Answer {
                    responder,
                    response: Ok(Reply::Mutated(mutated)),
                    mutation: numbered,
                };
                self.answer_mutation(id, answer, record, waits_for_others);
            }
            // It may show something that is not durable yet.
            Err(error) => self.answer(responder, Err(error), self.undurable.last()),
        }
    }

    /// Whether a change may be lost in a crash: any attribute but the size, of a file that never had content and is
    /// delegated to the session. Not while it is recorded that the session's lease has run out: the next leader would
    /// refuse a replay of the change.
    fn may_be_relaxed(&self, session: SessionId, mutation: &Mutation) -> bool {
        let Mutation::SetAttr(SetAttr { ino, changes }) = mutation else {
            return false;
        };
        let never_had_content = || {
            let attr = self.namespace.attr(*ino);
            attr.is_ok_and(|attr| attr.content_version == 0)
        };
        changes.size_bytes.is_none()
            && !self.namespace.has_lapsed(session)
            && self.delegations.is_held(session, *ino)
            && never_had_content()
    }

    /// Whether a commit that is answered immediately would be lost with this namenode, while another takes over
    /// within a moment: other sessions could build on the state without the commit before its client has replayed it.
    fn is_lost_with_leader(&self, mutation: &Mutation) -> bool {
        !self.log.is_alone() && matches!(mutation, Mutation::Commit(_))
    }

    /// Answers a mutation that was executed before, and gives the responder back otherwise. The current state of the
    /// directories is not part of the answer.
    fn answer_repeated(
        &mut self,
        asker: Asker,
        (sequence, creates): (u64, Creates),
        responder: Responder,
    ) -> Option<Responder> {
        let session = self.sessions.get(asker.session)?;
        // A resumed session has declared what it holds, and did not know of the file that it was creating.
        let held_file = |reply: &MetaReply| {
            let created = reply.attrs().next().map(|attr| attr.ino);
            created.filter(|_| creates == Creates::HeldFile)
        };
        if let Some(&waiting) = session.unanswered.get(&sequence)
            && let Some(answer) = self.gate.get_mut(waiting)
        {
            // The first attempt's connection is lost, or its client would not ask again.
            answer.responder = responder;
            if let Ok(Reply::Mutated(mutated)) = &answer.response
                && let Some(ino) = held_file(&mutated.reply)
                && let Err(error) = self.hold(asker.session, ino, OpenTo::Read)
            {
                tracing::warn!(%ino, %error, "a created file is not held");
            }
            return None;
        }
        let Some(outcome) = self.namespace.remembered_reply(asker.session, sequence) else {
            return Some(responder);
        };
        let reply = match outcome.clone() {
            Outcome::Blocks(blocks) => self.locate_again(asker, blocks),
            outcome => Ok(reply_of(outcome)),
        };
        if let Ok(reply) = &reply
            && let Some(ino) = held_file(reply)
            && let Err(error) = self.hold(asker.session, ino, OpenTo::Read)
        {
            responder.send(&Err(error));
            return None;
        }
        let mutated = reply.map(|reply| Mutated {
            reply,
            directories: Vec::new(),
        });
        let answer = Answer {
            responder,
            response: mutated.map(Reply::Mutated),
            mutation: Some((asker.session, sequence)),
        };
        let id = self.gate.next_id();
        let now_ms = self.clock.now_ms();
        let (announcements, waits_for_others) = if planted::is(Bug::AnswersFoundChangesAtOnce) {
            (Vec::new(), false)
        } else {
            self.leases.found_changed(now_ms, asker.session, id)
        };
        self.announce(announcements);
        self.answer_mutation(id, answer, None, waits_for_others);
        None
    }

    /// Checks what the engine cannot know, and chooses where new blocks go.
    fn prepare(
        &mut self,
        asker: Asker,
        credentials: &Credentials,
        call: &MutationCall,
        pipelines: &mut Vec<Vec<NodeId>>,
    ) -> Result<(), FsError> {
        self.timeline.check_serving()?;
        if call.sequence == 0 {
            return Err(FsError::Protocol("mutations are numbered from 1".into()));
        }
        let session = self.sessions.get(asker.session);
        let session = session.ok_or(FsError::SessionExpired)?;
        let too_much = session.unanswered.len() >= MUTATIONS_IN_FLIGHT_MAX;
        let holds = call.mutation.facts().creates == Creates::HeldFile;
        if too_much || holds && session.holds_len() >= self.options.holds_per_session_max {
            return Err(FsError::Busy {
                retry_after_ms: TOO_MUCH_RETRY_AFTER_MS,
            });
        }
        if let Mutation::AllocateBlocks(AllocateBlocks {
            count,
            rules,
            exclude,
        }) = &call.mutation
        {
            let Some(file) = call.file else {
                return Err(FsError::InvalidArgument(
                    "blocks are allocated for a file".into(),
                ));
            };
            self.namespace.check_room_for_data(file)?;
            let max = self.options.blocks_per_session_max;
            if self.namespace.blocks_written_by(asker.session, max) + *count as usize > max {
                return Err(peer_limit("blocks that a session writes", max));
            }
            *pipelines = self.place(asker, *count, rules, exclude)?;
        }
        if let Mutation::CloneRange(op) = &call.mutation {
            self.namespace.check_clone(op)?;
        }
        self.check_lifetime(credentials, &call.mutation)
    }

    /// Refuses a change of a directory's lifetime by anybody but its owner and root: what has outlived it is removed
    /// with the rights of root. Not checked by the engine, since records of earlier releases are carried out as they
    /// are.
    fn check_lifetime(
        &self,
        credentials: &Credentials,
        mutation: &Mutation,
    ) -> Result<(), FsError> {
        let (ino, name) = match mutation {
            Mutation::SetXattr(op) => (op.ino, op.name.as_slice()),
            Mutation::RemoveXattr(op) => (op.ino, op.name.as_slice()),
            _ => return Ok(()),
        };
        if name != LIFETIME_XATTR || credentials.uid == 0 {
            return Ok(());
        }
        if self.namespace.attr(ino)?.uid == credentials.uid {
            Ok(())
        } else {
            Err(FsError::NotPermitted)
        }
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
        credentials: Credentials,
        call: MutationCall,
        awaited: bool,
        pipelines: Vec<Vec<NodeId>>,
    ) -> Result<Done, FsError> {
        let numbers = (call.sequence, call.answered_below);
        let is_replay = is_replay(&call);
        let now = Timestamp::now();
        let op = self
            .namespace
            .to_carry_out(&credentials, call.mutation, now);
        let target = self.namespace.removal_target(&op);
        let command = Command::Mutate {
            session: asker.session,
            sequence: call.sequence,
            answered_below: call.answered_below,
            credentials,
            now,
            held_elsewhere: target.is_some_and(|ino| {
                self.sessions.may_be_held(ino) && !planted::is(Bug::FreesHeldFiles)
            }),
            op,
        };
        let (applied, lsn) = self.execute(&command, awaited)?;
        let Command::Mutate { op: mutation, .. } = command else {
            unreachable!("it was made above");
        };
        let id = self.gate.next_id();
        let effects = applied.effects;
        if !awaited {
            let changed = effects.inodes.iter().copied();
            self.answered_early.note(asker.session, lsn, changed);
        }
        // The answer may show a change of another session, which must not be seen before it is durable.
        let shown = self.undurable.record_of(effects.inodes.iter().copied());
        let author = self.author_of(&effects, asker.session);
        let now_ms = self.clock.now_ms();
        let (announcements, waits_for_others) =
            self.leases
                .changed(now_ms, author, &effects.inodes, &effects.entries, id);
        self.announce(announcements);
        if !is_replay && !effects.inodes.is_empty() && self.only_replays(asker.session) {
            let notice = (self.leases).forget(now_ms, asker.session, &effects.inodes);
            self.announce(vec![notice]);
        }
        self.leases
            .changed_by(asker.session, numbers, &effects.inodes, &effects.entries);
        let reply = match applied.reply {
            Outcome::Blocks(blocks) => self.located_in_pipelines(&blocks, pipelines),
            outcome => reply_of(outcome),
        };
        let facts = mutation.facts();
        let directories = self.namespace.directories_of(&facts);
        self.grant(asker.session, &facts, &reply, &directories);
        self.note_changed(asker.session, &mutation, is_replay);
        // A replayed commit need not be the last one: the session returns the delegation when it has replayed
        // everything.
        let reply = if is_replay {
            reply
        } else {
            self.follow_mutation(asker.session, &mutation, reply)
        };
        Ok(Done {
            id,
            mutated: Mutated { reply, directories },
            record: if awaited { Some(lsn) } else { shown },
            waits_for_others,
        })
    }

    /// Notes what the session may cache of the reply to its mutation.
    fn grant(
        &mut self,
        session: SessionId,
        facts: &MutationFacts,
        reply: &MetaReply,
        directories: &[Attr],
    ) {
        let names = facts.entries.into_iter().flatten();
        for (dir, _) in names {
            self.leases.granted(session, Cached::Entries(dir));
        }
        for attr in reply.attrs().chain(directories) {
            self.leases.granted(session, Cached::Inode(attr.ino));
        }
        if let (Creates::EmptyDirectory, MetaReply::Attr(attr)) = (facts.creates, reply) {
            self.leases.granted(session, Cached::Entries(attr.ino));
        }
    }

    /// Does what the server itself has to do after a mutation.
    fn follow_mutation(
        &mut self,
        session: SessionId,
        mutation: &Mutation,
        reply: MetaReply,
    ) -> MetaReply {
        let facts = mutation.facts();
        if let (Creates::HeldFile, MetaReply::Attr(attr)) = (facts.creates, &reply) {
            // There is room: it was checked before the file was created.
            if let Err(error) = self.hold(session, attr.ino, OpenTo::Read) {
                panic!("{} was created and is not held: {error}", attr.ino);
            }
        }
        match facts.entails {
            Entails::Nothing => {}
            Entails::Delegation => {
                if let MetaReply::Attr(attr) = reply {
                    return self.created(session, attr);
                }
            }
            Entails::DelegationsReturned(files) => {
                for file in files {
                    self.delegation_returned(session, file.ino);
                }
            }
            Entails::Sealed(blocks) => {
                let now_ms = self.clock.now_ms();
                for sealed in blocks {
                    self.cluster
                        .sealed_by_client(now_ms, sealed.block, &sealed.replicas);
                }
            }
        }
        reply
    }

    /// The reply about a regular file that its session has created.
    fn created(&mut self, session: SessionId, attr: Attr) -> MetaReply {
        let Ok(rules) = self.namespace.rules_of(attr.ino) else {
            return MetaReply::Attr(attr);
        };
        // A quota may refuse what is written, and `close` has to report that.
        let delegated =
            !self.namespace.is_limited(attr.ino) && self.delegations.give(session, attr.ino);
        MetaReply::Created {
            attr,
            rules,
            delegated,
        }
    }

    /// New blocks, with the datanodes that were chosen for them.
    fn located_in_pipelines(
        &mut self,
        blocks: &[BlockId],
        pipelines: Vec<Vec<NodeId>>,
    ) -> MetaReply {
        assert_eq!(
            blocks.len(),
            pipelines.len(),
            "each new block has a pipeline"
        );
        let mut located = Vec::with_capacity(blocks.len());
        for (&block, nodes) in blocks.iter().zip(pipelines) {
            self.cluster.set_pipeline(block, &nodes);
            let Some(view) = self.namespace.block(block) else {
                panic!("{block} was allocated and does not exist");
            };
            located.push((block, view.rules, nodes));
        }
        MetaReply::Located(self.located_for_writing(located))
    }

    /// Returns the answer to a repeated allocation: the blocks with their placement. A block is placed again if a
    /// restart has forgotten where it was placed, or if so many of those servers are unreachable that a new block
    /// would not be written to the others alone. Nothing can have been written to the block without this answer.
    fn locate_again(&mut self, asker: Asker, blocks: Vec<BlockId>) -> Result<MetaReply, FsError> {
        let mut located = Vec::with_capacity(blocks.len());
        for block in blocks {
            let Some(view) = self.namespace.block(block) else {
                continue;
            };
            let mut nodes = self.cluster.replicas(block, Some(asker.ip));
            let needed = usize::from(self.cluster.needed_by_new(&view.rules));
            let is_unwritten = view.committed_bytes == 0;
            if nodes.is_empty() || is_unwritten && nodes.len() < needed {
                let placed = self.place(asker, 1, &view.rules, &[]);
                // The remaining nodes are better than none.
                if nodes.is_empty() || placed.is_ok() {
                    nodes = placed?.concat();
                    self.cluster.set_pipeline(block, &nodes);
                }
            }
            located.push((block, view.rules, nodes));
        }
        Ok(MetaReply::Located(self.located_for_writing(located)))
    }
}

fn reply_of(outcome: Outcome) -> MetaReply {
    match outcome {
        Outcome::Done => MetaReply::Done,
        Outcome::Meta(reply) => reply,
        other => unexpected_outcome(&other),
    }
}
