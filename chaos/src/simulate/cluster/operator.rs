//! An operator who watches a namenode all the time, from a machine that no fault affects. When the newest
//! directory is back and remains of the copy keep it from serving, the operator accepts their loss.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use harvestfs_protocol::admin::ClusterStatus;

use crate::live::admin::Admin;

const INTERVAL: Duration = Duration::from_millis(500);

/// What an operator sees of one namenode. Clones share one view.
#[derive(Clone, Default)]
pub struct Look(Rc<Seen>);

#[derive(Default)]
struct Seen {
    /// Increases whenever another namenode is about to serve.
    turn: Cell<u64>,
    /// The namenode that serves is an older copy.
    is_copy: Cell<bool>,
    is_overlooked: Cell<bool>,
    is_settled: Cell<bool>,
    /// There was a copy, so remains of it may have to be given up.
    may_give_up: Cell<bool>,
    given_up: Cell<u64>,
}

impl Look {
    /// An older copy is about to serve.
    pub fn begin_copy(&self) {
        self.turn(true);
        self.0.may_give_up.set(true);
    }

    /// The newest namenode is about to serve again.
    pub fn end_copy(&self) {
        self.turn(false);
    }

    fn turn(&self, is_copy: bool) {
        self.0.turn.set(self.0.turn.get() + 1);
        self.0.is_copy.set(is_copy);
        self.0.is_settled.set(false);
        self.0.is_overlooked.set(false);
    }

    /// Whether the older copy serves with datanodes that know more than it does, and has not noticed.
    pub fn is_overlooked(&self) -> bool {
        self.0.is_overlooked.get()
    }

    /// Whether the newest namenode serves and is not in recovery.
    pub fn is_settled(&self) -> bool {
        self.0.is_settled.get()
    }

    /// How often the operator accepted a loss.
    pub fn given_up(&self) -> u64 {
        self.0.given_up.get()
    }

    /// Watches until the last other clone of this view is dropped.
    pub async fn keep_looking(self, mut admin: Admin) {
        while Rc::strong_count(&self.0) > 1 {
            tokio::time::sleep(INTERVAL).await;
            let turn = self.0.turn.get();
            let Some(status) = admin.status().await else {
                continue;
            };
            // A status that came from another namenode says nothing about this one.
            if self.0.turn.get() == turn && status.nodes_alive > 0 {
                self.judge(&status, &mut admin).await;
            }
        }
    }

    async fn judge(&self, status: &ClusterStatus, admin: &mut Admin) {
        let seen = &*self.0;
        let is_recovering = status.recovery.is_some();
        if seen.is_copy.get() {
            seen.is_overlooked.set(!is_recovering);
        } else if is_recovering || !status.refused_nodes.is_empty() {
            if seen.may_give_up.get() && admin.accept_loss().await {
                seen.given_up.set(seen.given_up.get() + 1);
                seen.is_settled.set(false);
            }
        } else {
            seen.is_settled.set(true);
        }
    }
}
