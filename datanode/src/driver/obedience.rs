//! Which namenode is obeyed: none that knows less than one that was obeyed before.

use std::time::Duration;

use harvestfs_protocol::timeline::{Authority, Position};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};

use crate::store::{BlockStore, StoreError};

/// How much later than in memory it may be on the disk how far a namenode was; a new epoch, and what
/// comes before a deletion, are written at once.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);

/// Why a namenode is not obeyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// It says itself that it has no authority.
    #[error("the namenode is in recovery: it lacks what this datanode, or another one, obeyed")]
    Recovering,
    /// It is of an epoch before, or beside, the one obeyed.
    #[error(
        "the namenode is at {}, but this datanode obeyed {obeyed} of another one, which started \
         later: two namenodes run, or an old copy was put back",
        authority.position
    )]
    Older {
        /// What was obeyed.
        obeyed: Position,
        /// What the namenode says.
        authority: Authority,
    },
}

/// What was obeyed, in memory and on the disks.
pub struct Obedience {
    state: Mutex<State>,
    /// Held while it is written.
    writing: AsyncMutex<()>,
    begun: Notify,
}

#[derive(Clone, Copy, Debug)]
struct State {
    obeyed: Option<Position>,
    written: Option<Position>,
    recovering: bool,
}

impl Obedience {
    /// With what the disks say.
    pub fn new(obeyed: Option<Position>) -> Self {
        Self {
            state: Mutex::new(State {
                obeyed,
                written: obeyed,
                recovering: false,
            }),
            writing: AsyncMutex::new(()),
            begun: Notify::new(),
        }
    }

    /// How far the namenode was that was obeyed.
    pub fn obeyed(&self) -> Option<Position> {
        self.state.lock().obeyed
    }

    /// Whether a namenode that says so is to be obeyed; takes note of it.
    ///
    /// # Errors
    /// Why not.
    pub fn obey(&self, authority: &Authority) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let was_recovering = std::mem::replace(&mut state.recovering, authority.recovering);
        let obeyed = match judge(state.obeyed, authority) {
            Ok(obeyed) => obeyed,
            Err(refusal) => {
                if authority.recovering && !was_recovering {
                    let obeyed = state.obeyed.map(|it| it.to_string());
                    tracing::warn!(position = %authority.position, obeyed, "{refusal}; it is not obeyed");
                }
                return Err(refusal);
            }
        };
        let begins = state.obeyed.map(|it| it.epoch) != Some(obeyed.epoch);
        state.obeyed = Some(obeyed);
        drop(state);
        if begins {
            tracing::info!(epoch = %obeyed.epoch, "an epoch of the namenode is obeyed");
            self.begun.notify_one();
        }
        Ok(())
    }

    /// Has it on the disks what was obeyed until now.
    ///
    /// # Errors
    /// What the last disk says, when no disk has it.
    pub async fn write(&self, store: &BlockStore) -> Result<(), StoreError> {
        let _alone = self.writing.lock().await;
        let State {
            obeyed, written, ..
        } = *self.state.lock();
        if let Some(position) = obeyed
            && obeyed != written
        {
            store.write_obeyed(position).await?;
            self.state.lock().written = obeyed;
        }
        Ok(())
    }

    /// Writes it whenever it has changed, a new epoch at once.
    pub async fn keep_written(&self, store: &BlockStore) {
        loop {
            // Whichever comes first.
            let _ = tokio::time::timeout(WRITE_INTERVAL, self.begun.notified()).await;
            if let Err(error) = self.write(store).await {
                tracing::warn!(%error, "the namenode that was obeyed is not written down");
                tokio::time::sleep(WRITE_INTERVAL).await;
            }
        }
    }
}

/// What is obeyed after this.
fn judge(obeyed: Option<Position>, authority: &Authority) -> Result<Position, Refusal> {
    if authority.recovering {
        return Err(Refusal::Recovering);
    }
    let position = authority.position;
    match obeyed {
        Some(obeyed) if obeyed.epoch == position.epoch => Ok(Position {
            record: obeyed.record.max(position.record),
            ..obeyed
        }),
        Some(obeyed) if obeyed.epoch.number >= position.epoch.number => Err(Refusal::Older {
            obeyed,
            authority: *authority,
        }),
        Some(_) | None => Ok(position),
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::timeline::Epoch;

    use super::*;

    fn at(number: u32, id: u64, record: u64) -> Authority {
        Authority {
            position: Position {
                epoch: Epoch { number, id },
                record,
            },
            recovering: false,
        }
    }

    #[test]
    fn none_is_obeyed_that_is_older_or_beside() {
        let obedience = Obedience::new(None);
        for (authority, is_obeyed) in [
            (at(5, 1, 10), true),
            (at(5, 1, 20), true),
            // Replies may overtake each other.
            (at(5, 1, 15), true),
            (at(5, 2, 99), false),
            (at(4, 1, 99), false),
            (at(6, 2, 3), true),
            (at(5, 1, 30), false),
        ] {
            let recovering = Authority {
                recovering: true,
                ..authority
            };
            assert_eq!(obedience.obey(&recovering), Err(Refusal::Recovering));
            let before = obedience.obeyed();
            let obeyed = obedience.obey(&authority);
            assert_eq!(obeyed.is_ok(), is_obeyed, "{authority:?}");
            if !is_obeyed {
                assert_eq!(obedience.obeyed(), before);
            }
        }
        let end = at(6, 2, 3).position;
        assert_eq!(obedience.obeyed(), Some(end));
        let again = Obedience::new(Some(at(5, 1, 20).position));
        again.obey(&at(5, 1, 15)).unwrap();
        assert_eq!(again.obeyed(), Some(at(5, 1, 20).position));
    }
}
