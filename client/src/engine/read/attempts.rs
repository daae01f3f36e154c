//! Reading a range of a block from its replicas: what follows when one replica fails to deliver it,
//! and when all do.

use std::time::{Duration, Instant};

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::transport::TransportError;

use crate::engine::session::call::Patience;
use crate::error::ClientError;

const RETRY_PAUSE_MIN: Duration = Duration::from_millis(50);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(1);

/// Why one replica did not deliver the whole range.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    Data(DataError),
    Transport(TransportError),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Data(error) => error.fmt(f),
            Self::Transport(error) => error.fmt(f),
        }
    }
}

impl From<TransportError> for Failure {
    fn from(error: TransportError) -> Self {
        Self::Transport(error)
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self::Data(error)
    }
}

/// What a failure says about a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The server is busy: its owner needs it for this long.
    Busy { retry_after_ms: u32 },
    /// Nothing: the token has expired or is not valid.
    NoRight,
    /// The replica is bad: it is not asked again, and the failure is reported to the namenode.
    Bad,
    /// Its datanode failed: it is asked last, and the failure is reported to the namenode.
    Failed,
}

/// The result of asking every replica once.
#[derive(Default)]
pub(crate) struct Round {
    /// The shortest time after which a busy replica may be asked again.
    retry_after: Option<Duration>,
    /// Whether one failed for another reason than being busy.
    other_failure: bool,
    last: String,
}

impl Round {
    /// Creates a round in which no replica could be asked.
    pub(crate) fn without_replica(reason: String) -> Self {
        Self {
            last: reason,
            ..Self::default()
        }
    }

    /// Notes that the datanode with this name did not deliver the whole range.
    pub(crate) fn failed(&mut self, name: &str, failure: &Failure) -> Verdict {
        self.last = format!("{name}: {failure}");
        let verdict = match failure {
            Failure::Data(DataError::Busy { retry_after_ms }) => {
                let retry_after = Duration::from_millis((*retry_after_ms).into());
                let shortest = self.retry_after.map_or(retry_after, |r| r.min(retry_after));
                self.retry_after = Some(shortest);
                return Verdict::Busy {
                    retry_after_ms: *retry_after_ms,
                };
            }
            Failure::Data(DataError::TokenExpired | DataError::BadToken(_)) => Verdict::NoRight,
            Failure::Data(
                DataError::Corrupt { .. }
                | DataError::NoSuchReplica
                | DataError::ShortReplica { .. },
            ) => Verdict::Bad,
            Failure::Data(_) | Failure::Transport(_) => Verdict::Failed,
        };
        self.other_failure = true;
        verdict
    }
}

/// The rounds of one read.
pub(crate) struct Attempts {
    block: BlockId,
    patience: Patience,
    started: Instant,
    pause: Duration,
}

impl Attempts {
    pub(crate) fn new(block: BlockId, patience: Patience, now: Instant) -> Self {
        Self {
            block,
            patience,
            started: now,
            pause: RETRY_PAUSE_MIN,
        }
    }

    /// Ends a round without data; returns the pause after which the block is to be located again.
    /// `chance`, from 0 to 1, spreads the return of readers that were all refused at the same moment.
    ///
    /// # Errors
    /// The reason for the failure, once patience is exhausted.
    pub(crate) fn after(
        &mut self,
        round: Round,
        chance: f64,
        now: Instant,
    ) -> Result<Duration, ClientError> {
        let block = self.block;
        assert!(
            (0.0..=1.0).contains(&chance),
            "the return to {block} is spread by {chance}"
        );
        assert!(
            round.other_failure || round.retry_after.is_none() || !round.last.is_empty(),
            "a replica of {block} is busy for {:?}, and none was asked",
            round.retry_after
        );
        let waited = now.saturating_duration_since(self.started);
        if let Some(retry_after) = round.retry_after.filter(|_| !round.other_failure) {
            if waited + retry_after > self.patience.busy {
                return Err(ClientError::AllReplicasBusy { block, waited });
            }
            return Ok(retry_after.mul_f64(1.0 + chance / 5.0));
        }
        // All replicas have failed: perhaps they are elsewhere by now.
        if waited > self.patience.unreachable {
            return Err(ClientError::NoReplica {
                block,
                reason: round.last,
            });
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(RETRY_PAUSE_MAX);
        Ok(pause)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    const BLOCK: BlockId = BlockId(1);
    const PATIENCE: Patience = Patience {
        unreachable: Duration::from_secs(20),
        busy: Duration::from_secs(5),
    };

    #[test]
    fn only_what_is_wrong_with_a_replica_speaks_against_it() {
        let verdict = |error| Round::default().failed("datanode-1", &Failure::Data(error));
        let busy = DataError::Busy { retry_after_ms: 7 };
        assert_eq!(verdict(busy), Verdict::Busy { retry_after_ms: 7 });
        assert_eq!(verdict(DataError::TokenExpired), Verdict::NoRight);
        assert_eq!(verdict(DataError::Corrupt { offset: 0 }), Verdict::Bad);
        assert_eq!(verdict(DataError::NoSuchReplica), Verdict::Bad);
        assert_eq!(verdict(DataError::Disk("slow".into())), Verdict::Failed);
    }

    fn failure() -> impl Strategy<Value = DataError> {
        prop_oneof![
            3 => (1u32..2_000).prop_map(|retry_after_ms| DataError::Busy { retry_after_ms }),
            1 => Just(DataError::Disk("broken".into())),
            1 => Just(DataError::TokenExpired),
        ]
    }

    proptest! {
        /// In virtual time: a read whose replicas are all busy fails within its patience for that;
        /// one whose replicas fail continues for as long as datanodes may be unreachable. Both end.
        #[test]
        fn patience_is_kept(
            rounds in prop::collection::vec(prop::collection::vec(failure(), 1..4), 1..20),
            chance in 0.0f64..1.0,
            round_ms in 1u64..500,
        ) {
            let start = some_time();
            let mut attempts = Attempts::new(BLOCK, PATIENCE, start);
            let mut now = start;
            for failures in rounds.iter().cycle() {
                now += Duration::from_millis(round_ms);
                let mut round = Round::default();
                for error in failures {
                    round.failed("datanode-1", &Failure::Data(error.clone()));
                }
                let busy: Option<Vec<u32>> = failures
                    .iter()
                    .map(|error| match error {
                        DataError::Busy { retry_after_ms } => Some(*retry_after_ms),
                        _ => None,
                    })
                    .collect();
                let shortest = busy.and_then(|busy| busy.into_iter().min());
                let shortest = shortest.map(|ms| Duration::from_millis(ms.into()));
                let waited = now - start;
                match (attempts.after(round, chance, now), shortest) {
                    (Ok(pause), Some(shortest)) => {
                        prop_assert!(waited + shortest <= PATIENCE.busy);
                        prop_assert!(pause >= shortest && pause <= shortest * 6 / 5);
                        now += pause;
                    }
                    (Ok(pause), None) => {
                        prop_assert!(waited <= PATIENCE.unreachable);
                        prop_assert!(pause <= RETRY_PAUSE_MAX);
                        now += pause;
                    }
                    (Err(ClientError::AllReplicasBusy { .. }), Some(shortest)) => {
                        prop_assert!(waited + shortest > PATIENCE.busy);
                        break;
                    }
                    (Err(ClientError::NoReplica { reason, .. }), None) => {
                        prop_assert!(waited > PATIENCE.unreachable);
                        prop_assert!(reason.contains("datanode-1"), "{reason}");
                        break;
                    }
                    (unexpected, _) => prop_assert!(false, "{unexpected:?}"),
                }
            }
        }
    }
}
