//! Records on the disks which namenode is obeyed.

use std::net::SocketAddr;
use std::time::Duration;

use harvestfs_protocol::ids::StorageId;
use harvestfs_protocol::timeline::{Authority, Epoch, Position};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Mutex as AsyncMutex, Notify};

use crate::engine;
use crate::engine::link::LinkId;
use crate::engine::link::obedience::{Judgement, Refusal};
use crate::store::{BlockStore, StoreError};

/// How far the position of the obeyed namenode on disk may lag behind memory; a new epoch, and the position that
/// precedes a deletion, are written immediately.
const WRITE_INTERVAL: Duration = Duration::from_secs(5);

/// The position that was obeyed, in memory and on the disks.
pub struct Obedience {
    state: Mutex<engine::link::obedience::Obedience>,
    /// Held while the position is written. Contains the volumes that have the position written last.
    have_it: AsyncMutex<Vec<StorageId>>,
    begun: Notify,
}

impl Obedience {
    /// Starts with the position on the disks, and at most so many links at a time.
    pub fn new(obeyed: Option<Position>, links_max: usize) -> Self {
        let state = engine::link::obedience::Obedience::new(obeyed, links_max);
        Self {
            state: Mutex::new(state),
            have_it: AsyncMutex::default(),
            begun: Notify::new(),
        }
    }

    /// The position of the namenode that was obeyed last.
    pub fn obeyed(&self) -> Option<Position> {
        self.state.lock().obeyed()
    }

    /// Locks the current state.
    pub fn lock(&self) -> MutexGuard<'_, engine::link::obedience::Obedience> {
        self.state.lock()
    }

    /// Takes note that, according to a volume, this position was obeyed before the start.
    pub fn found(&self, obeyed: Position) {
        self.state.lock().found(obeyed);
    }

    /// As [`Obedience::found`], according to volumes that were there from the start.
    pub fn recalled(&self, obeyed: Position) {
        self.state.lock().recalled(obeyed);
    }

    /// Whether a command given in this epoch is still valid.
    pub fn holds(&self, epoch: Epoch) -> bool {
        self.state.lock().holds(epoch)
    }

    /// Decides whether to obey the namenode on a link, at this address, given the authority that it claims, and takes
    /// note of it. Returns the position that is obeyed now. Of several namenodes, it is normal that some are standbys.
    ///
    /// # Errors
    /// Why the namenode is not obeyed.
    pub fn obey(
        &self,
        link: LinkId,
        addr: SocketAddr,
        authority: &Authority,
        is_only: bool,
    ) -> Result<Position, Refusal> {
        let mut state = self.state.lock();
        let Judgement { result, is_news } = state.judge(link, authority);
        let obeyed = state.obeyed();
        drop(state);
        match result {
            Ok(obeyed) if is_news => {
                tracing::info!(%addr, epoch = %obeyed.epoch, "an epoch of the namenode is obeyed");
                self.begun.notify_one();
            }
            Err(Refusal::Recovering) if is_news && !is_only => {
                tracing::info!(%addr, position = %authority.position, "the namenode stands by, or is in recovery");
            }
            Err(refusal) if is_news => {
                let obeyed = obeyed.map(|it| it.to_string());
                tracing::warn!(%addr, position = %authority.position, obeyed, "{refusal}; it is not obeyed");
            }
            Ok(_) | Err(_) => {}
        }
        result
    }

    /// Makes the position obeyed so far durable.
    ///
    /// # Errors
    /// The error of the last disk, if no disk has the position.
    pub async fn write(&self, store: &BlockStore) -> Result<(), StoreError> {
        let mut have_it = self.have_it.lock().await;
        let to_write = self.state.lock().to_write();
        if let Some(position) = to_write {
            self.write_now(position, store, &mut have_it).await?;
        }
        Ok(())
    }

    /// As [`Obedience::write`], but also writes if a usable disk lacks the position: the one that has it may fail.
    async fn spread(&self, store: &BlockStore) -> Result<(), StoreError> {
        let mut have_it = self.have_it.lock().await;
        let volumes = store.volumes();
        let mut usable = volumes.iter().filter(|it| it.check_usable().is_ok());
        let is_lacking = usable.any(|it| !have_it.contains(&it.storage()));
        let to_write = {
            let state = self.state.lock();
            let to_spread = state.to_spread().filter(|_| is_lacking);
            state.to_write().or(to_spread)
        };
        if let Some(position) = to_write {
            self.write_now(position, store, &mut have_it).await?;
        }
        Ok(())
    }

    async fn write_now(
        &self,
        position: Position,
        store: &BlockStore,
        have_it: &mut Vec<StorageId>,
    ) -> Result<(), StoreError> {
        *have_it = store.write_obeyed(position).await?;
        self.state.lock().wrote(position);
        Ok(())
    }

    /// Takes note that another volume has joined, which may lack the position that the others have.
    pub fn has_joined(&self) {
        self.begun.notify_one();
    }

    /// Writes the position whenever it has changed or a disk lacks it; a new epoch immediately.
    pub async fn keep_written(&self, store: &BlockStore) {
        loop {
            // Whichever comes first.
            let _ = tokio::time::timeout(WRITE_INTERVAL, self.begun.notified()).await;
            if let Err(error) = self.spread(store).await {
                tracing::warn!(%error, "the namenode that was obeyed is not written down");
                tokio::time::sleep(WRITE_INTERVAL).await;
            }
        }
    }
}
