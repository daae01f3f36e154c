//! Deletions that the namenode commands, no faster than the owner bears.
//!
//! A file system that tells its disk at each commit what became free (ext4 with `discard`) makes every
//! sync wait behind that, the owner's too (docs/PERFORMANCE.md has figures). So a datanode says with
//! each heartbeat how much it can delete, and spreads that over the time to the next one. What it has no
//! command for yet is still there for the namenode, which may need it. Where space is short, nothing
//! waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::HEARTBEAT_INTERVAL;

use crate::driver::budget::Budget;
use crate::driver::node::Node;
use crate::store::StoreError;

/// Between two looks whether space became short.
const PRESSURE_INTERVAL: Duration = Duration::from_millis(500);

/// Deletes replicas within a budget.
pub struct Removals {
    node: Arc<Node>,
    budget: Budget,
    /// What is to be deleted and is still there, in bytes.
    left_bytes: AtomicU64,
    /// Commands given before a registration hold no longer; this is its number.
    registration: AtomicU64,
}

/// Replicas that are to be deleted.
pub struct Doomed {
    blocks: Vec<BlockId>,
    registration: u64,
    left: Left,
}

/// Bytes that count as left until this is dropped.
struct Left {
    removals: Arc<Removals>,
    bytes: u64,
}

impl Left {
    fn less(&mut self, bytes: u64) {
        // A replica is a little larger than the data in it.
        let bytes = bytes.min(self.bytes);
        let before = self.removals.left_bytes.fetch_sub(bytes, Ordering::Relaxed);
        assert!(
            before >= self.bytes,
            "{} bytes are left to delete among {before} in all",
            self.bytes
        );
        self.bytes -= bytes;
    }
}

impl Drop for Left {
    fn drop(&mut self) {
        self.less(self.bytes);
    }
}

impl Removals {
    /// With a budget of so many bytes in a second; 0 means no limit.
    pub fn new(node: Arc<Node>, bytes_per_second: u64) -> Arc<Self> {
        Arc::new(Self {
            node,
            budget: Budget::new(bytes_per_second),
            left_bytes: AtomicU64::new(0),
            registration: AtomicU64::new(0),
        })
    }

    /// Bytes of replicas that may be commanded to be deleted now.
    pub fn removable_bytes(&self) -> u64 {
        let payable_bytes = self.budget.left_within(HEARTBEAT_INTERVAL);
        let wanted_bytes = payable_bytes.max(self.pressure_bytes());
        wanted_bytes.saturating_sub(self.left_bytes.load(Ordering::Relaxed))
    }

    /// Bytes that should be deleted beyond the rate.
    pub fn pressure_bytes(&self) -> u64 {
        self.node.store.pressure_bytes()
    }

    /// Waits until more should be deleted than `known_bytes`, or than the least since.
    pub async fn pressure_grows(&self, mut known_bytes: u64) {
        loop {
            // First: a caller that sends a heartbeat at each answer sends at most one in this time.
            tokio::time::sleep(PRESSURE_INTERVAL).await;
            let bytes = self.pressure_bytes();
            if bytes > known_bytes {
                return;
            }
            known_bytes = bytes;
        }
    }

    /// What was commanded and not begun is not done: the namenode may want it otherwise when this
    /// datanode has registered again.
    pub fn forget_commands(&self) {
        self.registration.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes what is to be deleted.
    pub fn announce(self: &Arc<Self>, blocks: Vec<BlockId>) -> Doomed {
        let reports = blocks.iter().map(|&block| self.node.store.report(block));
        let bytes = reports.flatten().map(|(_, it)| it.length_bytes).sum();
        self.left_bytes.fetch_add(bytes, Ordering::Relaxed);
        Doomed {
            blocks,
            registration: self.registration.load(Ordering::Relaxed),
            left: Left {
                removals: self.clone(),
                bytes,
            },
        }
    }

    /// Deletes what was announced.
    pub async fn delete(&self, doomed: Doomed) {
        // First: an older copy of the namenode has to learn that a later one was obeyed.
        if let Err(error) = self.node.obedience.write(&self.node.store).await {
            tracing::warn!(%error, "nothing is deleted: the namenode that was obeyed cannot be written down");
            return;
        }
        let mut left = doomed.left;
        for block in doomed.blocks {
            if self.registration.load(Ordering::Relaxed) != doomed.registration {
                break;
            }
            if let Err(error) = self.delete_one(block, &mut left).await {
                tracing::warn!(%block, %error, "cannot delete a replica");
            }
        }
    }

    async fn delete_one(&self, block: BlockId, left: &mut Left) -> Result<(), StoreError> {
        let Some(mut removal) = self.node.store.start_removal(block).await? else {
            return Ok(());
        };
        while !self.is_pressed() {
            let (rest, cut) = removal.cut().await?;
            removal = rest;
            match cut {
                Ok(0) => break,
                Ok(bytes) => {
                    left.less(bytes);
                    self.pay(bytes).await;
                }
                Err(error) => {
                    tracing::debug!(%block, %error, "the rest is deleted in one piece");
                    break;
                }
            }
        }
        let bytes = removal.finish().await?;
        left.less(bytes);
        self.pay(bytes).await;
        Ok(())
    }

    fn is_pressed(&self) -> bool {
        self.pressure_bytes() > 0
    }

    async fn pressed(&self) {
        while !self.is_pressed() {
            tokio::time::sleep(PRESSURE_INTERVAL).await;
        }
    }

    /// Waits until the rate allows what was deleted, or space is short.
    async fn pay(&self, bytes: u64) {
        tokio::select! {
            // First: what is deleted while space is short is not paid for.
            biased;
            () = self.pressed() => {}
            () = self.budget.spend(bytes) => {}
        }
    }
}
