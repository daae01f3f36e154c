//! Keeps it on the disks which namenode is obeyed.

use std::time::Duration;

use harvestfs_protocol::timeline::{Authority, Position};
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, Notify};

use crate::engine;
use crate::engine::link::obedience::{Judgement, Refusal};
use crate::store::{BlockStore, StoreError};

/// How much later than in memory it may be on the disk how far a namenode was; a new epoch, and what
/// comes before a deletion, are written at once.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);

/// What was obeyed, in memory and on the disks.
pub struct Obedience {
    state: Mutex<engine::link::obedience::Obedience>,
    /// Held while it is written.
    writing: AsyncMutex<()>,
    begun: Notify,
}

impl Obedience {
    /// With what the disks say.
    pub fn new(obeyed: Option<Position>) -> Self {
        Self {
            state: Mutex::new(engine::link::obedience::Obedience::new(obeyed)),
            writing: AsyncMutex::new(()),
            begun: Notify::new(),
        }
    }

    /// How far the namenode was that was obeyed.
    pub fn obeyed(&self) -> Option<Position> {
        self.state.lock().obeyed()
    }

    /// How far the namenode was that was obeyed, as the disks say.
    pub fn written(&self) -> Option<Position> {
        self.state.lock().written()
    }

    /// Whether a namenode that says so is to be obeyed; takes note of it.
    ///
    /// # Errors
    /// Why not.
    pub fn obey(&self, authority: &Authority) -> Result<(), Refusal> {
        let mut state = self.state.lock();
        let Judgement { result, is_news } = state.judge(authority);
        let obeyed = state.obeyed();
        drop(state);
        match result {
            Ok(obeyed) if is_news => {
                tracing::info!(epoch = %obeyed.epoch, "an epoch of the namenode is obeyed");
                self.begun.notify_one();
            }
            Err(refusal) if is_news => {
                let obeyed = obeyed.map(|it| it.to_string());
                tracing::warn!(position = %authority.position, obeyed, "{refusal}; it is not obeyed");
            }
            Ok(_) | Err(_) => {}
        }
        result.map(drop)
    }

    /// Has it on the disks what was obeyed until now.
    ///
    /// # Errors
    /// What the last disk says, when no disk has it.
    pub async fn write(&self, store: &BlockStore) -> Result<(), StoreError> {
        let _alone = self.writing.lock().await;
        let to_write = self.state.lock().to_write();
        if let Some(position) = to_write {
            store.write_obeyed(position).await?;
            self.state.lock().wrote(position);
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
