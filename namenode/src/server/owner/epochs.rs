//! Epochs: how they begin, and recovery when datanodes know more than this namenode.

use harvestfs_protocol::admin::QuarantinedBlock;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, NodeId, SessionId};
use harvestfs_protocol::limits::QUARANTINED_PER_REPLY_MAX;
use harvestfs_protocol::machine;
use harvestfs_protocol::timeline::{Authority, Epoch, Position};
use harvestfs_protocol::token::Right;
use harvestfs_protocol::types::Timestamp;

use super::Owner;
use crate::engine::cluster::Quarantined;
use crate::engine::namespace::{Command, EDITION, Namespace};
use crate::journal::Lsn;
use crate::server::clock;
use crate::server::timeline::{Verdict, next_number};

/// Another epoch begins when fewer blocks or sessions than this are left in the current one.
const IDS_LEFT_MIN: u64 = Epoch::BLOCKS_MAX / 4;

/// Whether a command may be executed in recovery: those that reading needs, and those that end recovery.
pub(super) fn is_allowed_in_recovery(command: &Command) -> bool {
    matches!(
        command,
        Command::BeginEpoch { .. }
            | Command::BeginEdition { .. }
            | Command::RegisterServer { .. }
            | Command::OpenSession { .. }
            | Command::CloseSession { .. }
            | Command::NoteLease { .. }
    ) || matches!(command, Command::ReleaseOrphans { inodes, .. } if inodes.is_empty())
}

/// Returns an epoch that follows a namespace's epochs and foreign ones with these numbers.
///
/// # Errors
/// Those of [`next_number`].
pub(super) fn following(
    namespace: &Namespace,
    foreign: impl IntoIterator<Item = u32>,
) -> Result<Epoch, FsError> {
    let before = namespace.last_number().into_iter().chain(foreign);
    Ok(Epoch {
        number: next_number(clock::unix_now_s().into(), before)?,
        // Never from a seed: a copy of this namenode has the same seed.
        id: machine::random(),
    })
}

/// Checks that an epoch could follow now.
///
/// # Errors
/// Those of [`following`].
pub(super) fn check_clock(namespace: &Namespace) -> Result<(), FsError> {
    next_number(clock::unix_now_s().into(), namespace.last_number()).map(drop)
}

impl Owner {
    /// Begins an epoch. What follows from it is announced when its record is durable.
    pub(super) fn enter_epoch(&mut self, epoch: Epoch, gives_up: bool) -> Result<Lsn, FsError> {
        // The epoch begins with the term, whose first entry precedes this record: in a copy of this namenode, that
        // entry takes the position of a record that the copy lacks.
        let before = self.namespace.epochs().last();
        let first_record = before
            .and_then(|it| self.log.term_after_epoch(it.first_record))
            .unwrap_or(self.log.last_lsn() + 1);
        let command = Command::BeginEpoch {
            epoch,
            first_record,
            gives_up,
            now: Timestamp::now(),
        };
        let (_, lsn) = self.execute(&command, true)?;
        self.timeline.entered(epoch, gives_up);
        self.epoch_record = lsn;
        self.note_allocated();
        tracing::info!(%epoch, record = lsn, "an epoch begins");
        Ok(lsn)
    }

    /// Makes commands from here on execute as in this release.
    pub(super) fn enter_edition(&mut self) -> Result<(), FsError> {
        let before = self.namespace.edition();
        if before == EDITION {
            return Ok(());
        }
        let command = Command::BeginEdition {
            edition: EDITION,
            now: Timestamp::now(),
        };
        let (_, record) = self.execute(&command, true)?;
        tracing::info!(before, edition = EDITION, record, "an edition begins");
        Ok(())
    }

    /// Begins another epoch before the current one runs out of IDs.
    pub(super) fn renew_epoch(&mut self) {
        let left = (self.namespace.blocks_left()).min(self.namespace.sessions_left());
        if left >= IDS_LEFT_MIN {
            return;
        }
        let epoch = following(&self.namespace, self.timeline.foreign_numbers());
        if let Err(error) = epoch.and_then(|epoch| self.enter_epoch(epoch, false)) {
            tracing::error!(%error, "another epoch cannot be begun");
        }
    }

    /// The authority under which the namenode commands datanodes.
    pub(super) fn authority(&self) -> Authority {
        Authority {
            position: Position {
                epoch: self.timeline.epoch(),
                record: self.log.commits().last(),
            },
            recovering: self.timeline.is_recovering() || !self.leads(),
        }
    }

    pub(super) fn judge_position(&self, obeyed: Option<Position>) -> Verdict {
        let last = self.log.last_lsn();
        let settled = obeyed.is_some_and(|it| self.namespace.has_settled(it, last));
        self.timeline.judge(obeyed, settled)
    }

    /// Judges the positions of datanodes that registered while another namenode led. This one now has all that was
    /// committed: what they obeyed and it lacks was lost by all namenodes.
    pub(super) fn judge_registered(&mut self) {
        let registered = self
            .node_connections
            .iter()
            .filter_map(|(node, connection)| {
                let connected = self.connections.get(connection)?;
                Some((*node, connected.peer.name.clone(), connected.obeyed))
            });
        let mut registered: Vec<_> = registered.collect();
        // Ordered, so that a run with the same seed is repeatable.
        registered.sort_unstable_by_key(|(node, ..)| *node);
        self.timeline.takes_over();
        let judged = registered.into_iter().map(|(node, name, obeyed)| {
            // As after a start: none of them follows this one yet.
            (node, name, self.judge_position(obeyed))
        });
        for (node, name, verdict) in judged.collect::<Vec<_>>() {
            self.follow_or_recover(node, &name, verdict);
        }
    }

    /// Notes what a registered datanode knows.
    pub(super) fn follow_or_recover(&mut self, node: NodeId, name: &str, verdict: Verdict) {
        if let Verdict::Recover(obeyed) = verdict {
            let last = self.log.last_lsn();
            let shared = self.namespace.shared_up_to(obeyed.epoch, last);
            self.timeline.shares_up_to(shared);
        }
        if !self.timeline.registered(node, name, verdict) {
            return;
        }
        self.cluster.set_recovering(true);
        if let Err(reason) = self.timeline.check_serving() {
            tracing::error!(%reason, "recovery begins: a datanode knows more than this namenode");
        }
    }

    /// Lists blocks in quarantine after the given one, with tokens to read them.
    pub(super) fn quarantined(&self, after: BlockId) -> Vec<QuarantinedBlock> {
        let now_ms = self.clock.now_ms();
        let blocks = (self.cluster).quarantined(now_ms, after, QUARANTINED_PER_REPLY_MAX);
        let now_unix_ms = clock::unix_now_ms();
        let tell = |it: Quarantined| QuarantinedBlock {
            token: self.tokens.sign(it.block, Right::Read, now_unix_ms),
            block: it.block,
            length_bytes: it.length_bytes,
            nodes: it.nodes,
            kept_ms: it.kept_ms,
        };
        blocks.into_iter().map(tell).collect()
    }

    /// Ends recovery: continues without what is missing, or without the records of another namenode that runs or ran
    /// beside this one.
    pub(super) fn accept_loss(&mut self) -> Result<Lsn, FsError> {
        if !self.timeline.is_behind() {
            return Err(FsError::InvalidArgument(
                "the namenode is not in recovery: nothing is missing".into(),
            ));
        }
        let was_recovering = self.timeline.is_recovering();
        let was_from_backup = self.timeline.is_from_backup();
        let epoch = following(&self.namespace, self.timeline.foreign_numbers())?;
        let started = self.timeline.epoch();
        let lsn = self.enter_epoch(epoch, true)?;
        tracing::warn!(%epoch, "all that other namenodes wrote is given up");
        if was_from_backup {
            self.backups.accepted(lsn);
        }
        if !was_recovering {
            return Ok(lsn);
        }
        self.cluster.set_recovering(false);
        // What their clients know may be what is missing.
        let sessions = self.namespace.sessions().map(|view| view.session);
        let before: Vec<SessionId> = sessions
            .filter(|session| session.0 <= started.ids_after())
            .collect();
        for session in before {
            self.expel_when_lapsed(session);
        }
        self.release_orphans_unless_missing();
        Ok(lsn)
    }
}
