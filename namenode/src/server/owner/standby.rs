//! Standby mode, and taking over. While another namenode leads, the engine follows what is committed, datanodes
//! report, and everybody else is redirected to the leader.

use harvestfs_protocol::admin::AdminRequest;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::GroupRequest;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::rpc::Request;

use super::{Owner, epochs, locate};
use crate::consensus::{Committed, Leadership, Term};
use crate::engine::namespace::{Command, Outcome};
use crate::journal::Lsn;
use crate::server::NamenodeError;
use crate::server::metrics::Responder;

/// The role of this namenode in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// Another one leads, or none.
    Standby,
    /// It leads and serves.
    Leader(Term),
}

impl Owner {
    pub(super) fn leads(&self) -> bool {
        matches!(self.part, Part::Leader(_))
    }

    /// Whether it fulfils its role: it leads, or follows as one of several.
    pub(super) fn serves(&self) -> bool {
        self.leads() || !self.log.is_alone()
    }

    /// Whether it may answer just now: a leader that may have been deposed answers nothing until it knows.
    pub(super) fn may_answer(&self) -> bool {
        !self.leads() || self.log.has_lease()
    }

    /// The reply to a client while this namenode does not lead.
    pub(super) fn not_leader(&self) -> FsError {
        let leader = match *self.leadership.borrow() {
            Leadership::Other(addr) => Some(addr),
            Leadership::Nobody | Leadership::This(_) => None,
        };
        FsError::NotLeader { leader }
    }

    /// Refuses requests that only the leader answers. Returns the others.
    pub(super) fn unless_standby(
        &self,
        request: Request,
        responder: Responder,
    ) -> Option<(Request, Responder)> {
        if self.leads() || matches!(request, Request::Node(_)) {
            return Some((request, responder));
        }
        // Any of them may be asked for a backup and for the list of members: a standby believes in a failed leader
        // until there is another one, and the caller has to learn of the other members.
        if let Request::Admin(AdminRequest::Backup(_) | AdminRequest::Group(GroupRequest::List)) =
            request
        {
            return Some((request, responder));
        }
        responder.send(&Err(self.not_leader()));
        None
    }

    /// Handles a committed entry that this namenode did not execute.
    pub(super) fn on_committed(&mut self, committed: Committed) -> Result<(), NamenodeError> {
        self.check_not_replaced()?;
        match committed {
            Committed::Command { lsn, command } => self.follow(lsn, &command)?,
            Committed::Term { lsn, term } => {
                // A successor's entries may be committed before this member learns that it no longer leads.
                if matches!(self.part, Part::Leader(own) if own < term) {
                    return Err(NamenodeError::Deposed);
                }
                self.log.followed(lsn);
                self.begun_term = Some(term);
            }
            Committed::Members { lsn } => {
                if self.leads() {
                    self.group.committed();
                } else {
                    self.log.followed(lsn);
                }
            }
        }
        self.take_over_if_elected()
    }

    fn follow(&mut self, lsn: Lsn, command: &[u8]) -> Result<(), NamenodeError> {
        let command =
            Command::decode(command).map_err(|source| NamenodeError::Record { lsn, source })?;
        let applied = self.namespace.apply(&command);
        let applied = applied.map_err(|source| NamenodeError::of_replay(lsn, source))?;
        self.log.followed(lsn);
        let now_ms = self.clock.now_ms();
        for change in &applied.effects.blocks {
            self.cluster.apply_change(now_ms, change);
        }
        match (command, applied.reply) {
            (Command::RegisterServer { server, .. }, Outcome::Node(node)) => {
                self.cluster.add_server(node, &server);
                self.tell_historian(node, &server.name);
            }
            (Command::Operate(_), _) => self.restore_operations(),
            (Command::BeginEpoch { .. }, _) => self.note_allocated(),
            (Command::RaiseVersion { .. }, _) => self.note_version(),
            _ => {}
        }
        Ok(())
    }

    /// Fails if the engine may have applied what another leader replaced: then it starts again, from the journal.
    fn check_not_replaced(&self) -> Result<(), NamenodeError> {
        if self.log.is_replaced() {
            return Err(NamenodeError::Deposed);
        }
        Ok(())
    }

    /// Takes over if this namenode was elected and has all that was committed before. Fails if it was deposed.
    pub(super) fn take_over_if_elected(&mut self) -> Result<(), NamenodeError> {
        self.check_not_replaced()?;
        let leadership = *self.leadership.borrow();
        match (self.part, leadership) {
            (Part::Standby, Leadership::This(term))
                if self.begun_term == Some(term) || planted::is(Bug::LeadsBeforeItHasAll) =>
            {
                self.part = Part::Leader(term);
                self.log.lead(term);
                self.take_over().map_err(NamenodeError::TakeOver)
            }
            (Part::Leader(led), now) if now != Leadership::This(led) => Err(NamenodeError::Deposed),
            // Otherwise nobody would learn of the next leader as long as a slow disk has something to write.
            (Part::Leader(_), _) if self.log.is_outvoted() => Err(NamenodeError::Deposed),
            _ => Ok(()),
        }
    }

    fn take_over(&mut self) -> Result<(), FsError> {
        let epoch = epochs::following(&self.namespace, [])?;
        // First of all: no two timelines may have different records at the same position.
        self.enter_epoch(epoch, false)?;
        self.enter_edition()?;
        let now_ms = self.clock.now_ms();
        self.cluster.take_over(now_ms);
        if self.timeline.is_recovering() {
            self.cluster.set_recovering(true);
            tracing::warn!(
                "this namenode was restored from a backup, and changes nothing before `harvestfs admin recover \
                 --accept-loss`"
            );
        }
        self.judge_registered();
        for server in self.namespace.servers() {
            self.cluster.set_draining(now_ms, server.node, server.held);
            let until_ms =
                super::placement::left_ms(server.maintenance_until).map(|left_ms| now_ms + left_ms);
            self.cluster.set_maintenance(now_ms, server.node, until_ms);
        }
        for view in self.namespace.sessions() {
            (self.sessions).restored(now_ms, view.session, view.client.to_owned());
            if self.namespace.has_lapsed(view.session) {
                self.leases.restored_lapsed(now_ms, view.session);
                self.overtaken.was_missed(view.session);
            } else {
                self.leases.restored(now_ms, view.session);
            }
        }
        self.release_orphans_unless_missing();
        self.complete_change();
        tracing::info!(%epoch, "this namenode leads");
        Ok(())
    }

    /// Restores what follows from the namespace: the servers and blocks that are known to exist.
    pub(super) fn restore_soft_state(&mut self) {
        let now_ms = self.clock.now_ms();
        for server in self.namespace.servers() {
            self.cluster.add_server(server.node, server.server);
            self.historian
                .server(server.node, super::history::known(&server));
        }
        for view in self.namespace.blocks() {
            for change in locate::changes_of(&view) {
                self.cluster.apply_change(now_ms, &change);
            }
        }
        self.restore_operations();
        self.note_allocated();
        self.note_version();
        self.cluster.set_recovering(true);
        // Before it could stand for election.
        self.stay_out_if_clock_is_wrong();
    }

    pub(super) fn note_allocated(&mut self) {
        self.cluster.set_allocated(
            self.namespace.allocated_ranges(),
            self.namespace.unsettled_blocks(),
        );
    }
}
