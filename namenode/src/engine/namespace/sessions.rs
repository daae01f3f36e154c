//! Sessions, and the memory of the replies to their mutations.

use std::collections::{BTreeMap, VecDeque};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::SessionId;
use harvestfs_protocol::limits::{LABEL_BYTES_MAX, MUTATIONS_IN_FLIGHT_MAX, SESSIONS_MAX};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::Timestamp;

use super::Namespace;
use super::command::{Effects, Outcome};
use super::views::SessionView;

/// All open sessions.
#[derive(Debug, Default)]
pub(super) struct SessionTable {
    pub sessions: BTreeMap<SessionId, Session>,
    /// The id of the last session opened.
    pub last: u64,
}

/// A client's session.
#[derive(Debug)]
pub(super) struct Session {
    pub client: String,
    pub opened: Timestamp,
    /// The client has received the replies to all mutations below this number.
    pub answered_below: u64,
    /// Outcomes whose replies the client has not confirmed, by ascending sequence number.
    pub replies: VecDeque<(u64, Outcome)>,
    /// Its lease has expired, and it has not come back since. A later leader does not wait for it, and refuses what it
    /// replays.
    pub has_lapsed: bool,
}

impl Session {
    pub fn new(client: String, opened: Timestamp, answered_below: u64) -> Self {
        Self {
            client,
            opened,
            answered_below,
            replies: VecDeque::new(),
            has_lapsed: false,
        }
    }

    pub fn view(&self, session: SessionId) -> SessionView<'_> {
        SessionView {
            session,
            client: &self.client,
            opened: self.opened,
        }
    }

    pub fn remembered(&self, sequence: u64) -> Option<&Outcome> {
        let index = self
            .replies
            .binary_search_by_key(&sequence, |(number, _)| *number)
            .ok()?;
        self.replies.get(index).map(|(_, outcome)| outcome)
    }

    fn forget_below(&mut self, answered_below: u64) {
        self.answered_below = self.answered_below.max(answered_below);
        while self
            .replies
            .front()
            .is_some_and(|(number, _)| *number < self.answered_below)
        {
            self.replies.pop_front();
        }
    }

    /// Appends a reply from a snapshot. Returns false when it is out of order.
    pub fn restore_reply(&mut self, sequence: u64, outcome: Outcome) -> bool {
        let ordered = self.replies.back().is_none_or(|(last, _)| *last < sequence);
        self.replies.push_back((sequence, outcome));
        ordered && sequence >= self.answered_below
    }

    fn remember(&mut self, sequence: u64, outcome: Outcome) {
        // Usually the greatest so far, so this is a push to the end.
        let index = self
            .replies
            .partition_point(|(number, _)| *number < sequence);
        let next = self.replies.get(index).map(|(number, _)| *number);
        assert_ne!(
            next,
            Some(sequence),
            "a mutation of {} was carried out twice",
            self.client
        );
        self.replies.insert(index, (sequence, outcome));
        assert!(
            self.replies.len() <= MUTATIONS_IN_FLIGHT_MAX,
            "{} replies to {} are remembered, up to {sequence}",
            self.replies.len(),
            self.client
        );
    }
}

impl SessionTable {
    pub fn get(&self, session: SessionId) -> Result<&Session, FsError> {
        self.sessions.get(&session).ok_or(FsError::SessionExpired)
    }

    /// Checks the sequence number of a mutation that was not applied before.
    pub fn check_sequence(
        &self,
        session: SessionId,
        sequence: u64,
        answered_below: u64,
    ) -> Result<(), FsError> {
        let session = self.get(session)?;
        if sequence < session.answered_below.max(answered_below).max(1) {
            return Err(FsError::Protocol(format!(
                "mutation {sequence} was confirmed as answered before"
            )));
        }
        let confirmed = session
            .replies
            .partition_point(|(number, _)| *number < answered_below);
        let kept = session.replies.len() - confirmed;
        if kept >= MUTATIONS_IN_FLIGHT_MAX {
            return Err(FsError::Protocol(format!(
                "more than {MUTATIONS_IN_FLIGHT_MAX} mutations are not confirmed as answered"
            )));
        }
        Ok(())
    }

    /// Remembers the outcome of a mutation whose number [`Self::check_sequence`] has accepted.
    pub fn answered(
        &mut self,
        session: SessionId,
        sequence: u64,
        answered_below: u64,
        outcome: &Outcome,
    ) {
        let Some(session) = self.sessions.get_mut(&session) else {
            panic!("mutation {sequence} of session {session} was carried out, which is not open");
        };
        session.forget_below(answered_below);
        if !planted::is(Bug::ForgetsAnswers) {
            session.remember(sequence, outcome.clone());
        }
    }
}

impl Namespace {
    pub(super) fn open_session(
        &mut self,
        client: &str,
        now: Timestamp,
    ) -> Result<Outcome, FsError> {
        if client.len() > LABEL_BYTES_MAX {
            return Err(FsError::InvalidArgument(
                "the client's name is too long".into(),
            ));
        }
        if self.sessions.sessions.len() >= SESSIONS_MAX {
            return Err(FsError::Busy {
                retry_after_ms: 1_000,
            });
        }
        self.sessions.last += 1;
        let id = SessionId(self.sessions.last);
        let opened = Session::new(client.to_owned(), now, 1);
        let known = self.sessions.sessions.insert(id, opened);
        assert!(known.is_none(), "session {id} was opened twice");
        Ok(Outcome::Session(id))
    }

    /// Whether the lease of a session has expired, and the session has not come back since. From this, a later leader
    /// knows that it need not wait for the session.
    #[must_use]
    pub fn has_lapsed(&self, session: SessionId) -> bool {
        let session = self.sessions.sessions.get(&session);
        session.is_some_and(|session| session.has_lapsed)
    }

    pub(super) fn note_lease(
        &mut self,
        session: SessionId,
        has_lapsed: bool,
    ) -> Result<Outcome, FsError> {
        let session = self.sessions.sessions.get_mut(&session);
        session.ok_or(FsError::SessionExpired)?.has_lapsed = has_lapsed;
        Ok(Outcome::Done)
    }

    pub(super) fn close_session(
        &mut self,
        session: SessionId,
        effects: &mut Effects,
    ) -> Result<Outcome, FsError> {
        self.sessions
            .sessions
            .remove(&session)
            .ok_or(FsError::SessionExpired)?;
        self.blocks.close_writer(session, effects);
        Ok(Outcome::Done)
    }
}
