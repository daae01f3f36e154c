//! Carries out deletions on the namenode's command.

use std::sync::Arc;

use harvestfs_protocol::ids::BlockId;
use parking_lot::Mutex;

use super::commands::Mandate;
use crate::driver::budget::sleep_until;
use crate::driver::node::Node;
use crate::engine;
use crate::engine::link::LinkId;
use crate::engine::link::heartbeats::PRESSURE_INTERVAL;
use crate::engine::removal::{Order, Step, Steps, Withheld};
use crate::store::{StoreError, now};

/// Deletes replicas within a budget.
pub struct Removals {
    node: Arc<Node>,
    state: Mutex<engine::removal::Removals>,
}

/// Replicas that are to be deleted.
pub struct Doomed {
    blocks: Vec<BlockId>,
    left: Left,
}

/// An order whose bytes count as still to be deleted until this is dropped.
struct Left {
    removals: Arc<Removals>,
    /// `None` only while this is being dropped.
    order: Option<Order>,
}

impl Drop for Left {
    fn drop(&mut self) {
        if let Some(order) = self.order.take() {
            self.removals.state.lock().end(order);
        }
    }
}

const HAS_ORDER: &str = "what is left to delete has its order until it is dropped";

impl Removals {
    /// With a budget of so many bytes per second; 0 means no limit.
    pub fn new(node: Arc<Node>, bytes_per_second: u64, links_max: usize) -> Arc<Self> {
        let state = engine::removal::Removals::new(bytes_per_second, links_max);
        Arc::new(Self {
            node,
            state: Mutex::new(state),
        })
    }

    /// Bytes of replicas whose deletion may be commanded now.
    pub fn removable_bytes(&self) -> u64 {
        let pressure_bytes = self.pressure_bytes();
        self.state.lock().removable_bytes(pressure_bytes, now())
    }

    /// Bytes that should be deleted beyond the rate.
    pub fn pressure_bytes(&self) -> u64 {
        self.node.store.pressure_bytes()
    }

    /// Cancels commands of the namenode on a link that have not been started: it may decide differently once this
    /// datanode has registered again.
    pub fn forget_commands(&self, link: LinkId) {
        self.state.lock().registering(link);
    }

    /// Takes note of replicas that are to be deleted.
    pub fn announce(self: &Arc<Self>, blocks: Vec<BlockId>, by: Mandate) -> Doomed {
        let reports = blocks.iter().map(|&block| self.node.store.report(block));
        let bytes = reports.flatten().map(|(_, it)| it.length_bytes).sum();
        let order = self.state.lock().ordered(by.link, bytes, by.obeyed);
        Doomed {
            blocks,
            left: Left {
                removals: self.clone(),
                order: Some(order),
            },
        }
    }

    /// Deletes replicas that were announced.
    pub async fn delete(&self, doomed: Doomed) {
        // First: an older copy of the namenode must be able to learn that a later one was obeyed.
        if let Err(error) = self.node.obedience.write(&self.node.store).await {
            tracing::warn!(%error, "nothing is deleted: the namenode that was obeyed cannot be written down");
            return;
        }
        let Doomed { blocks, mut left } = doomed;
        let order = left.order.as_mut().expect(HAS_ORDER);
        for block in blocks {
            if let Err(reason) = self.may_delete(order) {
                tracing::debug!(%reason, "the rest of a command to delete is not done");
                break;
            }
            if let Err(error) = self.delete_one(block, order).await {
                tracing::warn!(%block, %error, "cannot delete a replica");
            }
        }
    }

    fn may_delete(&self, order: &Order) -> Result<(), Withheld> {
        let obedience = self.node.obedience.lock();
        self.state.lock().may_delete(order, &obedience)
    }

    async fn delete_one(&self, block: BlockId, order: &mut Order) -> Result<(), StoreError> {
        let Some(mut removal) = self.node.store.start_removal(block).await? else {
            return Ok(());
        };
        let mut steps = Steps::default();
        while steps.next(self.is_pressed()) == Step::Cut {
            let (rest, cut) = removal.cut().await?;
            removal = rest;
            let bytes = cut.unwrap_or_else(|error| {
                tracing::debug!(%block, %error, "the rest is deleted in one piece");
                0
            });
            steps.cut(bytes);
            if bytes > 0 {
                self.pay(order, bytes).await;
            }
        }
        let bytes = removal.finish().await?;
        self.pay(order, bytes).await;
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

    /// Waits until the rate allows for the deleted bytes, or space is short.
    async fn pay(&self, order: &mut Order, bytes: u64) {
        let now = now();
        let is_pressed = self.is_pressed();
        let paid_at = self.state.lock().deleted(order, bytes, is_pressed, now);
        tokio::select! {
            biased;
            () = self.pressed() => {}
            () = sleep_until(paid_at, now) => {}
        }
    }
}
