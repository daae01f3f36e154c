//! One request to the namenode until it is answered: how long it is retried, when it is sent again,
//! and in which session.

use std::time::{Duration, Instant};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::mutation::Repeated;

use crate::error::ClientError;

/// Deadline of one attempt. A mutation may wait at the namenode until other caches have been
/// invalidated, at most for the length of a lease.
pub(crate) const ATTEMPT_DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const RETRY_PAUSE_MIN: Duration = Duration::from_millis(5);
pub(crate) const RETRY_PAUSE_MAX: Duration = Duration::from_millis(500);

/// How long an operation waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// For a namenode that does not answer.
    pub(crate) unreachable: Duration,
    /// For a namenode that is busy.
    pub(crate) busy: Duration,
}

/// The state of one request across its attempts.
pub(crate) struct Call {
    started: Instant,
    patience: Patience,
    /// The session that it belongs to, if it is a mutation: it is not sent in any other session.
    generation: Option<u64>,
    pause: Duration,
    /// When the namenode first answered that it is busy.
    busy_since: Option<Instant>,
    maybe_executed: bool,
}

/// The outcome of an attempt that got no reply.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The namenode refused the request.
    Refused(FsError),
    /// The request cannot be sent at all.
    NotEncodable(String),
    /// No answer arrived, for this reason.
    NoAnswer(String),
}

/// A request that was given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unanswered {
    pub(crate) error: ClientError,
    /// Whether an attempt got no answer, or none that tells whether it was executed.
    pub(crate) maybe_executed: bool,
}

impl Unanswered {
    /// The namenode did not execute the request, for this reason.
    pub(crate) fn refused(error: impl Into<ClientError>) -> Self {
        Self {
            error: error.into(),
            maybe_executed: false,
        }
    }

    /// Whether the request was executed is unknown, for this reason.
    pub(crate) fn unknown(error: ClientError) -> Self {
        Self {
            error,
            maybe_executed: true,
        }
    }

    /// Whether the request may have been executed, or may be yet, and an answer under the same
    /// number may still tell: as far as is known, its session has not ended.
    pub(crate) fn may_be_learned(&self) -> bool {
        let is_passing = matches!(
            self.error,
            ClientError::Unreachable { .. }
                | ClientError::Fs(FsError::Busy { .. } | FsError::Recovery(_))
        );
        self.maybe_executed && is_passing
    }
}

impl From<Unanswered> for ClientError {
    fn from(unanswered: Unanswered) -> Self {
        unanswered.error
    }
}

impl Call {
    pub(crate) fn new(patience: Patience, generation: Option<u64>, now: Instant) -> Self {
        Self {
            started: now,
            patience,
            generation,
            pause: RETRY_PAUSE_MIN,
            busy_since: None,
            maybe_executed: false,
        }
    }

    /// Returns how long the request still waits for a connection or an answer. While it waits for a busy
    /// namenode, that patience is the minimum: otherwise its last attempts would have hardly any time.
    pub(crate) fn left(&self, now: Instant) -> Duration {
        let left = self.patience.unreachable.saturating_sub(self.waited(now));
        let busy_left = self.busy_since.map(|since| {
            let waited = now.saturating_duration_since(since);
            self.patience.busy.saturating_sub(waited)
        });
        left.max(busy_left.unwrap_or_default())
    }

    /// Returns how long an attempt may take on a connection in the session with this generation.
    ///
    /// # Errors
    /// The request belongs to another session.
    pub(crate) fn attempt(&self, generation: u64, now: Instant) -> Result<Duration, Unanswered> {
        if self.generation.is_some_and(|own| own != generation) {
            return Err(self.unanswered(FsError::SessionExpired.into()));
        }
        Ok(self.left(now).clamp(RETRY_PAUSE_MAX, ATTEMPT_DEADLINE))
    }

    /// Returns after how long a failed attempt is to be repeated.
    ///
    /// # Errors
    /// The request is given up.
    pub(crate) fn failed(
        &mut self,
        failure: Failure,
        now: Instant,
    ) -> Result<Duration, Unanswered> {
        let is_over = self.left(now).is_zero();
        match failure {
            Failure::Refused(FsError::Busy { retry_after_ms }) => {
                let pause = Duration::from_millis(retry_after_ms.into());
                // Until now it waited for something else: for a connection, or for other requests
                // that had to be answered first.
                let since = *self.busy_since.get_or_insert(now);
                if now.saturating_duration_since(since) + pause > self.patience.busy {
                    return Err(self.unanswered(FsError::Busy { retry_after_ms }.into()));
                }
                Ok(pause)
            }
            Failure::Refused(FsError::SessionExpired) if self.generation.is_none() && !is_over => {
                Ok(self.pause)
            }
            // It may have executed the request while it led, and the present leader may know about that.
            Failure::Refused(error @ FsError::NotLeader { .. }) => {
                self.lost(error.to_string(), now)
            }
            Failure::Refused(error) => Err(self.unanswered(error.into())),
            Failure::NotEncodable(text) => {
                Err(self.unanswered(FsError::InvalidArgument(text).into()))
            }
            Failure::NoAnswer(reason) => self.lost(reason, now),
        }
    }

    /// Handles an attempt that got no answer.
    fn lost(&mut self, reason: String, now: Instant) -> Result<Duration, Unanswered> {
        self.maybe_executed = true;
        if self.left(now).is_zero() {
            let waited = self.waited(now);
            return Err(self.unanswered(ClientError::Unreachable { waited, reason }));
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(RETRY_PAUSE_MAX);
        Ok(pause)
    }

    /// Gives the request up for this reason.
    pub(crate) fn unanswered(&self, error: ClientError) -> Unanswered {
        Unanswered {
            error,
            maybe_executed: self.maybe_executed,
        }
    }

    fn waited(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }
}

/// How a mutation continues that was given up in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Again {
    /// It has failed.
    No,
    /// It is sent in the next session, with a number of that session.
    InNextSession,
    /// It is sent with another number, if closed files can be released first: what was removed here
    /// a moment ago counts against a quota until the namenode knows that it is not open.
    AfterRelease,
}

/// In which ways a mutation may still be repeated.
pub(crate) struct Repeats {
    repeated: Repeated,
    /// Whether removed files were released already: a quota that still refuses the mutation is full.
    released: bool,
}

impl Repeats {
    pub(crate) fn new(repeated: Repeated, released: bool) -> Self {
        Self { repeated, released }
    }

    /// Decides how a mutation continues that was given up. `is_closed`: there will be no next session.
    pub(crate) fn after(&mut self, given_up: &Unanswered, is_closed: bool) -> Again {
        match &given_up.error {
            ClientError::Fs(FsError::SessionExpired) if !is_closed => match self.repeated {
                Repeated::AlsoIfExecuted => Again::InNextSession,
                // It was definitely refused: the next session may execute it.
                Repeated::InNextSession if !given_up.maybe_executed => Again::InNextSession,
                Repeated::InNextSession | Repeated::Never => Again::No,
            },
            ClientError::Fs(FsError::QuotaExceeded)
                if !std::mem::replace(&mut self.released, true) =>
            {
                Again::AfterRelease
            }
            _ => Again::No,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    const PATIENCE: Patience = Patience {
        unreachable: Duration::from_secs(60),
        busy: Duration::from_secs(30),
    };

    fn call(generation: Option<u64>) -> (Call, Instant) {
        let now = some_time();
        (Call::new(PATIENCE, generation, now), now)
    }

    #[test]
    fn a_mutation_is_not_sent_in_another_session() {
        let (mut mutation, now) = call(Some(3));
        assert!(mutation.attempt(3, now).is_ok());
        let refused = mutation.attempt(4, now).unwrap_err();
        assert_eq!(refused.error, FsError::SessionExpired.into());
        assert!(!refused.maybe_executed, "it was not sent");
        let lost = Failure::NoAnswer("lost".into());
        assert!(mutation.failed(lost, now).is_ok());
        assert!(mutation.attempt(4, now).unwrap_err().maybe_executed);
        let expired = Failure::Refused(FsError::SessionExpired);
        assert!(mutation.failed(expired.clone(), now).is_err());

        let (mut query, now) = call(None);
        assert!(query.attempt(3, now).is_ok() && query.attempt(4, now).is_ok());
        assert_eq!(query.failed(expired.clone(), now), Ok(RETRY_PAUSE_MIN));
        assert!(query.failed(expired, now + PATIENCE.unreachable).is_err());
    }

    #[test]
    fn a_busy_namenode_is_waited_for_however_late_it_was_asked() {
        let (mut call, start) = call(Some(3));
        let asked = start + PATIENCE.busy * 2;
        let busy = FsError::Busy {
            retry_after_ms: 1_000,
        };
        let mut after =
            |waited: Duration| call.failed(Failure::Refused(busy.clone()), asked + waited);
        let pause = Duration::from_secs(1);
        assert_eq!(after(Duration::ZERO), Ok(pause));
        assert_eq!(after(PATIENCE.busy - pause), Ok(pause));
        let given_up = Unanswered::refused(busy.clone());
        assert_eq!(after(PATIENCE.busy), Err(given_up));
    }

    #[test]
    fn an_attempt_has_what_is_left_of_patience_with_a_busy_namenode() {
        let (mut call, start) = call(Some(3));
        let asked = start + PATIENCE.unreachable;
        assert_eq!(call.attempt(3, asked), Ok(RETRY_PAUSE_MAX));
        let busy = FsError::Busy {
            retry_after_ms: 1_000,
        };
        assert!(call.failed(Failure::Refused(busy), asked).is_ok());
        assert_eq!(call.attempt(3, asked), Ok(ATTEMPT_DEADLINE));
        let left = Duration::from_secs(5);
        let later = asked + PATIENCE.busy - left;
        assert_eq!(call.attempt(3, later), Ok(left));
        let lost = Failure::NoAnswer("lost".into());
        assert!(call.failed(lost.clone(), later).is_ok());
        assert!(call.failed(lost, asked + PATIENCE.busy).is_err());
    }

    #[test]
    fn what_may_have_been_executed_is_not_done_again_in_another_session() {
        let mut repeats = Repeats::new(Repeated::InNextSession, false);
        let mut given_up = Unanswered {
            error: FsError::SessionExpired.into(),
            maybe_executed: false,
        };
        assert_eq!(repeats.after(&given_up, false), Again::InNextSession);
        assert_eq!(repeats.after(&given_up, true), Again::No);
        given_up.maybe_executed = true;
        assert_eq!(repeats.after(&given_up, false), Again::No);
        given_up.error = FsError::QuotaExceeded.into();
        assert_eq!(repeats.after(&given_up, false), Again::AfterRelease);
        assert_eq!(repeats.after(&given_up, false), Again::No, "once is enough");
    }

    #[test]
    fn what_may_have_been_executed_is_learned_only_in_its_session() {
        let away = ClientError::Unreachable {
            waited: PATIENCE.unreachable,
            reason: "lost".into(),
        };
        let busy = ClientError::from(FsError::Busy { retry_after_ms: 1 });
        let recovering = ClientError::from(FsError::Recovery("put back".into()));
        for error in [away, busy, recovering] {
            assert!(Unanswered::unknown(error.clone()).may_be_learned());
            assert!(!Unanswered::refused(error).may_be_learned());
        }
        for error in [FsError::SessionExpired.into(), ClientError::Closed] {
            assert!(!Unanswered::unknown(error).may_be_learned());
        }
    }

    /// The outcome of an attempt, and how much of its deadline it takes, in percent.
    fn attempt() -> impl Strategy<Value = (Failure, u32)> {
        let failure = prop_oneof![
            4 => Just(Failure::NoAnswer("lost".into())),
            2 => (1u32..20_000).prop_map(|ms| {
                Failure::Refused(FsError::Busy { retry_after_ms: ms })
            }),
            1 => Just(Failure::Refused(FsError::SessionExpired)),
            1 => Just(Failure::Refused(FsError::NotLeader { leader: None })),
        ];
        (failure, 0u32..=100)
    }

    proptest! {
        /// In virtual time: an operation ends neither before its patience is exhausted nor long
        /// after, where the two kinds of patience may add up, and it reports that it may have been
        /// executed exactly if an attempt got no answer.
        #[test]
        fn patience_is_kept(attempts in prop::collection::vec(attempt(), 1..20)) {
            let (mut call, start) = call(None);
            let mut now = start;
            let mut lost = false;
            let mut busy_since: Option<Instant> = None;
            let mut last_pause = Duration::ZERO;
            for (failure, percent) in attempts.iter().cycle() {
                let deadline = call.attempt(1, now).unwrap();
                prop_assert!(deadline <= ATTEMPT_DEADLINE);
                now += deadline * *percent / 100;
                lost |= matches!(
                    failure,
                    Failure::NoAnswer(_) | Failure::Refused(FsError::NotLeader { .. })
                );
                let waited = now - start;
                let is_busy = matches!(failure, Failure::Refused(FsError::Busy { .. }));
                let busy_for = match is_busy {
                    true => now - *busy_since.get_or_insert(now),
                    false => Duration::ZERO,
                };
                let is_patient = waited < PATIENCE.unreachable
                    || busy_since.is_some_and(|since| now - since < PATIENCE.busy);
                match call.failed(failure.clone(), now) {
                    Ok(pause) => {
                        prop_assert!(!pause.is_zero());
                        match failure {
                            Failure::Refused(FsError::Busy { .. }) => {
                                prop_assert!(busy_for + pause <= PATIENCE.busy);
                            }
                            _ => {
                                prop_assert!(is_patient);
                                prop_assert!(pause >= last_pause && pause <= RETRY_PAUSE_MAX);
                                last_pause = pause;
                            }
                        }
                        now += pause;
                    }
                    Err(given_up) => {
                        prop_assert_eq!(given_up.maybe_executed, lost);
                        match given_up.error {
                            ClientError::Unreachable { waited: said, .. } => {
                                prop_assert_eq!(said, waited);
                                prop_assert!(!is_patient);
                            }
                            ClientError::Fs(FsError::Busy { retry_after_ms }) => {
                                let pause = Duration::from_millis(retry_after_ms.into());
                                prop_assert!(busy_for + pause > PATIENCE.busy);
                            }
                            ClientError::Fs(FsError::SessionExpired) => {
                                prop_assert!(!is_patient);
                            }
                            other => prop_assert!(false, "{other:?}"),
                        }
                        let longest = PATIENCE.unreachable + PATIENCE.busy + RETRY_PAUSE_MAX * 4;
                        prop_assert!(waited <= longest, "{waited:?}");
                        return Ok(());
                    }
                }
            }
        }
    }
}
