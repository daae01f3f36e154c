//! Reads every sealed replica again and again, slowly, so that damage is found while there are other replicas to
//! repair it from. Replicas that clients doubt are read out of turn.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::limits::CHUNK_BYTES;
use harvestfs_protocol::machine;

use crate::driver::budget::Budget;
use crate::driver::late::SILENCE_PAUSE;
use crate::driver::node::Node;
use crate::engine::scrub::Rounds;
use crate::store::{ChunkRange, StoreError, Volume, now};

/// Bytes read at a time.
const PIECE_BYTES: usize = 256 * 1024;

/// Verifies replicas. All reads are charged to one budget.
pub struct Scrubber {
    node: Arc<Node>,
    /// `None` if the scrubber is turned off.
    budget: Option<Budget>,
}

impl Scrubber {
    /// A scrubber that reads at most so many bytes per second; with 0 it reads nothing.
    pub fn new(node: Arc<Node>, bytes_per_second: u64) -> Arc<Self> {
        Arc::new(Self {
            node,
            budget: (bytes_per_second > 0).then(|| Budget::new(bytes_per_second)),
        })
    }

    /// Verifies all replicas, round after round, until the datanode stops.
    pub async fn run(self: Arc<Self>, interval: Duration) {
        let Some(budget) = &self.budget else {
            return;
        };
        let rounds = async {
            let mut rounds = Rounds::new(interval, machine::random());
            loop {
                rounds.begin(now());
                for volume in self.node.store.volumes() {
                    let sealed = self.node.store.sealed_of(volume.storage());
                    self.verify_all(&volume, rounds.order(sealed), budget).await;
                }
                tokio::time::sleep_until(rounds.end(now()).into()).await;
            }
        };
        tokio::select! {
            biased;
            () = self.node.stopping() => {}
            () = rounds => {}
        }
    }

    /// Reports the state of a replica that a client could not use, and verifies the replica if it is sealed.
    pub async fn verify_doubted(&self, storage: StorageId, block: BlockId) {
        self.node.store.answer(storage, block);
        let report = self.node.store.report(block);
        if let Some(budget) = &self.budget
            && report.is_some_and(|(_, report)| report.sealed)
        {
            self.verify(block, budget).await;
        }
    }

    /// Verifies replicas of a volume until the volume is down.
    async fn verify_all(&self, volume: &Volume, blocks: Vec<BlockId>, budget: &Budget) {
        for block in blocks {
            if !volume.health.is_good() {
                return;
            }
            if self.verify(block, budget).await {
                continue;
            }
            // Each round begins with the same replicas: if the others were skipped now, they would never be read.
            while volume.health.is_good() && volume.is_silent() {
                tokio::time::sleep(SILENCE_PAUSE).await;
            }
            // Only once more: the disk may fail to respond for this file alone.
            self.verify(block, budget).await;
        }
    }

    /// Verifies a replica. Returns `false` if its volume could not be accessed.
    async fn verify(&self, block: BlockId, budget: &Budget) -> bool {
        match self.read(block, budget).await {
            Ok(()) | Err(StoreError::NoSuchReplica) => true,
            // This error says nothing about the replica.
            Err(error) if error.is_of_volume() => {
                tracing::debug!(%block, %error, "the scrubber leaves a volume alone");
                false
            }
            // The store itself reports the replica.
            Err(error) => {
                self.node.metrics.scrub.count_failure();
                tracing::warn!(%block, %error, "the scrubber found a bad replica");
                true
            }
        }
    }

    async fn read(&self, block: BlockId, budget: &Budget) -> Result<(), StoreError> {
        let node = &self.node;
        let Some((_, report)) = node.store.report(block) else {
            return Ok(());
        };
        let Some(mut range) = ChunkRange::covering(0, report.length_bytes) else {
            return Ok(());
        };
        node.store.forget_checksums(block);
        while let Some(chunks) = range.take_piece(PIECE_BYTES) {
            budget.spend((chunks.len() * CHUNK_BYTES) as u64).await;
            node.busy.free().await;
            let _timer = node.metrics.scrub.timer();
            let piece = node.store.read(block, chunks, true).await?;
            node.metrics
                .read_by_scrubber
                .inc_by(piece.data.len() as u64);
        }
        Ok(())
    }
}
