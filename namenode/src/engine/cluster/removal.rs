//! Removal of replicas that are in excess, bad, or of blocks that do not exist; and all commands.

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::node::NodeCommand;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::token::BlockToken;
use smallvec::SmallVec;

use super::Cluster;
use super::node::{NextDelete, Node};
use super::table::{NodeIx, ReplicaState, Slot};

/// What to do with an entry of a node's list of replicas to remove.
enum Verdict {
    Send,
    Later,
    /// The replica stays.
    Keep,
}

impl Cluster {
    /// Chooses which replicas to remove from blocks that have had too many for a while.
    pub(super) fn choose_excess(&mut self) {
        for _ in 0..self.options.work_per_tick {
            let Some(&(due_ms, block)) = self.excess.front() else {
                break;
            };
            if due_ms > self.now_ms {
                break;
            }
            self.excess.pop_front();
            if let Some(slot) = self.table.slot(block) {
                self.choose_excess_of(slot);
            }
        }
    }

    fn choose_excess_of(&mut self, slot: Slot) {
        let block = self.table.known_mut(slot);
        block.excess_queued = false;
        let wanted = block.wanted();
        let mut confirmed = self.confirmed(slot);
        while confirmed.len() > wanted {
            let nodes = self.ids(confirmed.iter().copied());
            // Replicas that are to leave their server are removed first.
            let leaving = confirmed
                .iter()
                .position(|&node| self.is_leaving(slot, node));
            let Some(surplus) = leaving.or_else(|| self.policy.surplus(&self.view, &nodes)) else {
                break;
            };
            let node = confirmed.remove(surplus);
            let block = self.table.known(slot);
            let Some(index) = self.table.replica_on(slot, node) else {
                panic!(
                    "block {} has no replica on node {node}, which has one too many",
                    block.id
                );
            };
            (self.nodes[node as usize].deletes).add(block.id, block.required_bytes);
            self.table.set_state(slot, index, ReplicaState::Excess);
        }
        // Queues the block again if it still has too many replicas, of which some are not confirmed
        // yet.
        self.settle(slot);
    }

    /// Nodes whose sealed replica may be relied on when another one is removed.
    pub(super) fn confirmed(&self, slot: Slot) -> SmallVec<[NodeIx; 8]> {
        let block = self.table.known(slot);
        if planted::is(Bug::ReliesOnUnconfirmedReplicas) {
            let replicas = block.replicas.iter();
            let storages = replicas.map(|replica| self.table.home(replica.storage));
            return storages.map(|storage| storage.node).collect();
        }
        let is_doubted = |node: NodeIx| {
            let doubts = &self.nodes[node as usize].doubts;
            doubts.is_doubted(self.now_ms, block.id)
        };
        let replicas = block.replicas.iter();
        let sealed = replicas.filter(|replica| replica.state == ReplicaState::Sealed);
        sealed
            .filter(|replica| self.takeover.is_proven(replica.storage))
            .map(|replica| self.table.home(replica.storage))
            .filter(|storage| storage.usable && storage.inventoried && self.is_fresh(storage.node))
            .map(|storage| storage.node)
            .filter(|&node| !is_doubted(node))
            .collect()
    }

    /// Keeps replicas that were chosen for removal and whose datanode has not been sent the command
    /// yet.
    pub(super) fn keep_excess(&mut self, slot: Slot) {
        let block = self.table.known(slot);
        let (id, replicas) = (block.id, block.replicas.clone());
        for (index, replica) in replicas.iter().enumerate() {
            if replica.state == ReplicaState::Excess {
                self.table.set_state(slot, index, ReplicaState::Sealed);
                let node = self.table.home(replica.storage).node;
                self.nodes[node as usize].deletes.remove(id);
            }
        }
    }

    /// Takes back the commands to remove replicas of a datanode that has registered, and so dropped them. Replicas
    /// that are still there are in excess, as before the command, until its report shows what they are.
    pub(super) fn take_back_deletions(&mut self, node: NodeIx) {
        // Only these, not all that it has: the owner of the engine does nothing else meanwhile.
        for block in self.nodes[node as usize].deletes.commanded() {
            let slot = self.table.slot(block);
            let index = slot.and_then(|slot| self.table.replica_on(slot, node));
            let Some((slot, index)) = slot.zip(index) else {
                panic!("node {node} was commanded to remove block {block}, which it does not have");
            };
            let state = self.table.known(slot).replicas[index].state;
            if state == ReplicaState::Corrupt {
                // It may be gone, and its datanode reports only those that are not.
                continue;
            }
            self.nodes[node as usize].deletes.forget_command(block);
            if state == ReplicaState::Deleting {
                self.table.set_state(slot, index, ReplicaState::Excess);
                self.settle(slot);
            }
        }
    }

    /// Has the bad replicas of a block removed.
    pub(super) fn remove_bad(&mut self, slot: Slot) {
        let keeps_corrupt = self.keeps_corrupt(slot);
        let block = self.table.known(slot);
        for replica in &block.replicas {
            let storage = self.table.home(replica.storage);
            let is_bad = match replica.state {
                ReplicaState::Corrupt => !keeps_corrupt,
                // Its datanode has to report first whether it is complete.
                state => state.is_bad() && !state.awaits_seal(),
            };
            if is_bad && storage.usable {
                let deletes = &mut self.nodes[storage.node as usize].deletes;
                deletes.add_first(block.id, block.required_bytes);
            }
        }
    }

    /// Blocks that do not exist (any more) and whose removal a node has not confirmed, with the approximate size of
    /// each in bytes; in no order.
    pub(super) fn orphans_on(&self, node: &Node) -> impl Iterator<Item = (BlockId, u32)> {
        let pending = node.deletes.pending();
        pending.filter(|&(block, _)| self.table.slot(block).is_none())
    }

    /// Notes that there is a command for a node to start a repair.
    pub(super) fn command(&mut self, node: NodeIx) {
        let it = &mut self.nodes[node as usize];
        if !it.commanded {
            it.commanded = true;
            self.commanded.push(node);
        }
    }

    /// Nodes for which repairs were started since the last call: a caller that can reach them
    /// immediately need not wait for their heartbeats to ask for [`Cluster::next_commands`].
    pub fn take_commanded(&mut self) -> Vec<NodeId> {
        let nodes = std::mem::take(&mut self.commanded);
        let mut ids = Vec::with_capacity(nodes.len());
        for index in nodes {
            let node = &mut self.nodes[index as usize];
            node.commanded = false;
            ids.push(node.id);
        }
        ids
    }

    /// Commands for the reply to a node's heartbeat, at most `max`: requests for reports, quotas, repairs, seals,
    /// verifications, then deletions, which are all in one command and no more than the node may remove now. `token`
    /// signs the right to read a block.
    pub fn next_commands(
        &mut self,
        now_ms: u64,
        node: NodeId,
        max: usize,
        token: &mut dyn FnMut(BlockId) -> BlockToken,
    ) -> Vec<NodeCommand> {
        self.advance(now_ms);
        let mut commands = Vec::new();
        let Ok(index) = self.live_node(node) else {
            return commands;
        };
        if self.recovering {
            return commands;
        }
        self.takeover.answering(index);
        while commands.len() < max {
            let command = self
                .next_report(index)
                .or_else(|| self.next_quota(index))
                .or_else(|| self.next_replicate(index, token))
                .or_else(|| self.next_seal(index))
                .or_else(|| self.next_verification(index));
            match command {
                Some(command) => commands.push(command),
                None => break,
            }
        }
        if commands.len() < max {
            let blocks = self.next_deletes(index);
            if !blocks.is_empty() {
                commands.push(NodeCommand::Delete { blocks });
            }
        }
        commands
    }

    fn next_report(&mut self, node: NodeIx) -> Option<NodeCommand> {
        if self.takeover.is_unanswered(node) {
            // A report would prove nothing now, and another one would have to follow.
            return None;
        }
        let storage = self.nodes[node as usize].report.pop()?;
        Some(NodeCommand::ReportBlocks {
            storage: self.table.storages[storage as usize].id(),
        })
    }

    fn next_seal(&mut self, node: NodeIx) -> Option<NodeCommand> {
        while let Some(block) = self.nodes[node as usize].seal.pop_front() {
            let slot = self.table.slot(block);
            let replica = slot.and_then(|slot| self.table.replica_on(slot, node));
            if let Some((slot, replica)) = slot.zip(replica)
                && let Some(it) = self.table.get(slot)
                && it.replicas[replica].state.awaits_seal()
            {
                let committed_bytes = self.salvage.committed_bytes(slot);
                return Some(NodeCommand::Seal {
                    block,
                    length_bytes: committed_bytes.unwrap_or(it.required_bytes).into(),
                });
            }
        }
        None
    }

    fn next_deletes(&mut self, node: NodeIx) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        if self.safe_mode {
            return blocks;
        }
        let mut left_bytes = self.nodes[node as usize].removable_bytes;
        // Entries that have to wait are queued again: one round is enough.
        for _ in 0..self.nodes[node as usize].deletes.queued() {
            if blocks.len() >= self.options.deletes_per_command_max || left_bytes == 0 {
                break;
            }
            let retry_ms = self.now_ms + self.options.command_retry_ms;
            match self.nodes[node as usize].deletes.next(self.now_ms) {
                None => break,
                Some(NextDelete::GiveUp) => self.stop_asking_to_delete(node),
                Some(NextDelete::Send {
                    block,
                    bytes,
                    attempts,
                }) => {
                    let verdict = self.judge_deletion(node, block);
                    let deletes = &mut self.nodes[node as usize].deletes;
                    match verdict {
                        Verdict::Send => {
                            deletes.again(block, attempts + 1, retry_ms);
                            blocks.push(block);
                            // The last replica may be larger than what is left.
                            left_bytes = left_bytes.saturating_sub(bytes.into());
                        }
                        Verdict::Later => deletes.again(block, attempts, retry_ms),
                        Verdict::Keep => {
                            deletes.remove(block);
                        }
                    }
                }
            }
        }
        self.nodes[node as usize].removable_bytes = left_bytes;
        blocks
    }

    /// Whether a replica may be removed now: much may have changed since that was decided.
    fn judge_deletion(&mut self, node: NodeIx, block: BlockId) -> Verdict {
        let Some(slot) = self.table.slot(block) else {
            return Verdict::Send;
        };
        let (Some(index), Some(it)) = (self.table.replica_on(slot, node), self.table.get(slot))
        else {
            return Verdict::Keep;
        };
        let (id, wanted, state) = (it.id, it.wanted(), it.replicas[index].state);
        let confirmed = self.confirmed(slot);
        let elsewhere = !confirmed.contains(&node);
        let confirmed = confirmed.len();
        let enough = match state {
            ReplicaState::Sealed | ReplicaState::Open | ReplicaState::Unconfirmed => {
                return Verdict::Keep;
            }
            ReplicaState::Excess if confirmed > 0 && self.is_given_up(slot, node) => true,
            ReplicaState::Excess if confirmed < wanted => {
                self.keep_excess(slot);
                self.settle(slot);
                return Verdict::Keep;
            }
            ReplicaState::Excess => true,
            ReplicaState::Corrupt if self.keeps_corrupt(slot) => return Verdict::Keep,
            ReplicaState::Short | ReplicaState::Corrupt => confirmed > 0,
            // It may be a good one, and others may be lost by now.
            ReplicaState::Deleting => confirmed >= wanted.clamp(1, 2),
        };
        if !enough || self.is_storm() {
            return Verdict::Later;
        }
        assert!(
            elsewhere && confirmed > 0,
            "block {id} has {confirmed} confirmed replicas, without the one on node {node}"
        );
        self.nodes[node as usize].deletes.note_command(id);
        // A bad replica stays bad: its datanode may drop the command, and take the replica for a good one after a
        // restart.
        if state == ReplicaState::Excess {
            self.table.set_state(slot, index, ReplicaState::Deleting);
            self.settle(slot);
        }
        Verdict::Send
    }

    /// Gives up on a datanode that never confirmed that it removed a replica. It may still do so, so the replica
    /// keeps its state: it does not count, and others may be relied on. A full report resolves this: if it does not
    /// name the replica, the replica is taken out of the table; if it does, the command is sent again.
    fn stop_asking_to_delete(&mut self, node: NodeIx) {
        for storage in self.nodes[node as usize].storages.clone() {
            self.ask_for_report(node, storage);
        }
    }
}
