//! The policy of a writer when no datanode accepts its data: it retries as long as its patience lasts.

use std::time::{Duration, Instant};

use harvestfs_protocol::error::{DataError, FsError};

use crate::engine::session::call::Patience;
use crate::error::ClientError;

/// Immediate attempts to get data onto datanodes before pausing between attempts.
const QUICK_ATTEMPTS: u32 = 3;
/// Bounds of these pauses, which double.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(250);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(2);
/// How long a writer waits for room: long enough for the namenode to learn that a disk is full and
/// to name another, or for deleted replicas to be removed.
const NO_SPACE_PATIENCE: Duration = Duration::from_secs(10);

/// Consecutive failures without any byte acknowledged in between. Merely setting up a pipeline is
/// no progress: the next packet may break it again.
pub(crate) struct Trouble {
    since: Instant,
    attempts: u32,
}

impl Trouble {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            since: now,
            attempts: 0,
        }
    }

    /// Returns how long to pause after another failure; zero means to retry immediately.
    ///
    /// # Errors
    /// Patience is exhausted, or retrying is futile: the reason why the data could not be written.
    pub(crate) fn failed(
        &mut self,
        error: ClientError,
        patience: Patience,
        now: Instant,
    ) -> Result<Duration, ClientError> {
        self.attempts += 1;
        let busy = match &error {
            ClientError::Write(DataError::Busy { retry_after_ms })
            | ClientError::Fs(FsError::Busy { retry_after_ms }) => {
                let retry_after = Duration::from_millis((*retry_after_ms).into());
                Some(retry_after.clamp(RETRY_PAUSE_MIN, RETRY_PAUSE_MAX))
            }
            _ => None,
        };
        let is_full = matches!(
            error,
            ClientError::Write(DataError::NoSpace)
                | ClientError::Fs(FsError::NoSpace | FsError::InsufficientDiversity { .. })
        );
        let owners_are_busy = matches!(
            &error,
            ClientError::Fs(FsError::TooFewDatanodes(shortage)) if shortage.is_of_busy_ones()
        );
        let patience = match busy {
            Some(_) => patience.busy,
            None if owners_are_busy => patience.busy,
            None if is_full => patience.unreachable.min(NO_SPACE_PATIENCE),
            None => patience.unreachable,
        };
        let waited = now.saturating_duration_since(self.since);
        // A call that found no namenode has already waited for one.
        let waited_enough = matches!(error, ClientError::Unreachable { .. });
        if waited_enough || !error.is_transient() || waited >= patience {
            return Err(match error {
                _ if busy.is_some() => ClientError::AllServersBusy { waited },
                ClientError::Write(DataError::NoSpace) => FsError::NoSpace.into(),
                other => other,
            });
        }
        if let ClientError::Fs(FsError::TooFewDatanodes(_)) = &error
            && self.attempts == 1
        {
            tracing::warn!(%error, "what was written waits");
        }
        if self.attempts <= QUICK_ATTEMPTS && matches!(error, ClientError::Write(_)) {
            return Ok(Duration::ZERO);
        }
        let pause = busy.unwrap_or_else(|| self.pause());
        Ok(pause.min(patience - waited))
    }

    fn pause(&self) -> Duration {
        let doublings = self.attempts.saturating_sub(QUICK_ATTEMPTS + 1).min(8);
        (RETRY_PAUSE_MIN * 2u32.pow(doublings)).min(RETRY_PAUSE_MAX)
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

    fn disk() -> ClientError {
        ClientError::Write(DataError::Disk("broken".into()))
    }

    #[test]
    fn what_cannot_be_helped_is_not_tried_again() {
        let now = some_time();
        let after = |error: ClientError| Trouble::new(now).failed(error, PATIENCE, now);
        assert!(after(FsError::QuotaExceeded.into()).is_err());
        let unreachable = ClientError::Unreachable {
            waited: PATIENCE.unreachable,
            reason: "lost".into(),
        };
        assert_eq!(after(unreachable.clone()), Err(unreachable));
        assert_eq!(after(disk()), Ok(Duration::ZERO));
    }

    fn failure() -> impl Strategy<Value = ClientError> {
        prop_oneof![
            Just(disk()),
            Just(ClientError::Write(DataError::NoSpace)),
            (0u32..5_000).prop_map(|retry_after_ms| {
                ClientError::Write(DataError::Busy { retry_after_ms })
            }),
        ]
    }

    proptest! {
        /// In virtual time: a lasting failure is reported when patience is exhausted, neither
        /// earlier nor much later; a few attempts follow immediately, then the pauses are bounded.
        #[test]
        fn patience_is_kept(error in failure(), attempt_ms in 0u64..3_000) {
            let patience = match error {
                ClientError::Write(DataError::NoSpace) => NO_SPACE_PATIENCE,
                ClientError::Write(DataError::Busy { .. }) => PATIENCE.busy,
                _ => PATIENCE.unreachable,
            };
            let start = some_time();
            let (mut now, mut trouble) = (start, Trouble::new(start));
            for attempt in 1.. {
                now += Duration::from_millis(attempt_ms);
                let waited = now - start;
                match trouble.failed(error.clone(), PATIENCE, now) {
                    Ok(pause) => {
                        prop_assert!(waited < patience);
                        prop_assert!(pause <= RETRY_PAUSE_MAX);
                        prop_assert_eq!(pause.is_zero(), attempt <= QUICK_ATTEMPTS);
                        now += pause;
                    }
                    Err(given_up) => {
                        prop_assert!(waited >= patience);
                        prop_assert!(waited <= patience + Duration::from_millis(attempt_ms));
                        let is_as_expected = match error {
                            ClientError::Write(DataError::NoSpace) => {
                                given_up == FsError::NoSpace.into()
                            }
                            ClientError::Write(DataError::Busy { .. }) => {
                                given_up == ClientError::AllServersBusy { waited }
                            }
                            _ => given_up == error,
                        };
                        prop_assert!(is_as_expected, "{given_up:?}");
                        break;
                    }
                }
            }
        }
    }
}
