//! Decides when to kill, when to checkpoint and where to resume: Algorithms 1 and 2 of the paper
//! "Improving Preemptive Scheduling with Application-Transparent Checkpointing in Shared Clusters"
//! (Li et al., Middleware '15). Does no I/O, so that the simulation and the command share the code.

/// The bandwidth of a node's checkpoints, in bytes per second; each value is greater than 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Storing images.
    pub write_bytes_per_s: f64,
    /// Reading them.
    pub read_bytes_per_s: f64,
    /// Fetching them from another node.
    pub network_bytes_per_s: f64,
}

/// A task that may be preempted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Victim {
    /// Bytes that a checkpoint of it has to write.
    pub dump_bytes: f64,
    /// Bytes that resuming it has to read.
    pub restore_bytes: f64,
    /// Work that is lost when it is killed: seconds since its start or its last checkpoint.
    pub progress_s: f64,
    /// Whether there is an earlier checkpoint to compare a new one with.
    pub has_checkpoint: bool,
}

/// What to do with a victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preemption {
    /// It is killed, and later restarts from its last checkpoint or from the beginning.
    Kill,
    /// All of its memory is stored.
    Checkpoint,
    /// What changed since the last checkpoint is stored.
    Incremental,
}

impl Victim {
    /// Cost of a checkpoint in seconds, with `queue_s` seconds of other checkpoints ahead of it on its
    /// node.
    #[must_use]
    pub fn overhead_s(&self, bandwidth: &Bandwidth, queue_s: f64) -> f64 {
        self.dump_bytes / bandwidth.write_bytes_per_s
            + self.restore_bytes / bandwidth.read_bytes_per_s
            + queue_s
    }

    /// Algorithm 1: takes a checkpoint when killing the victim would lose more work than that costs.
    #[must_use]
    pub fn preempt(&self, bandwidth: &Bandwidth, queue_s: f64) -> Preemption {
        if self.progress_s > self.overhead_s(bandwidth, queue_s) {
            self.checkpoint()
        } else {
            Preemption::Kill
        }
    }

    /// The kind of checkpoint that is taken of it if one is taken.
    #[must_use]
    pub fn checkpoint(&self) -> Preemption {
        if self.has_checkpoint {
            Preemption::Incremental
        } else {
            Preemption::Checkpoint
        }
    }

    /// Cost of preempting it in seconds, the cheaper way; victims are ordered by this.
    #[must_use]
    pub fn cost_s(&self, bandwidth: &Bandwidth, queue_s: f64) -> f64 {
        self.progress_s.min(self.overhead_s(bandwidth, queue_s))
    }
}

/// Sorts victims by the given cost in seconds, the cheapest first. The sort is stable.
pub fn order_victims<T>(victims: &mut [T], cost_s: impl Fn(&T) -> f64) {
    victims.sort_by(|one, other| cost_s(one).total_cmp(&cost_s(other)));
}

/// Where a preempted task resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resumption {
    /// From the beginning: it has no checkpoint.
    Restart,
    /// From its checkpoint, on the local node.
    Local,
    /// From its checkpoint, on another node.
    Remote,
}

/// A node on which a task could be resumed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Site {
    /// Bandwidth of the node.
    pub bandwidth: Bandwidth,
    /// Bytes of the images that have no replica on the node.
    pub missing_bytes: f64,
    /// Seconds of checkpoints and restores that are queued ahead of it on the node.
    pub queue_s: f64,
}

impl Site {
    /// Seconds until a task with images of `restore_bytes` runs. In the paper, a node has all of a task's
    /// images or none; here, only the bytes without a replica on the node cross the network.
    #[must_use]
    pub fn overhead_s(&self, restore_bytes: f64) -> f64 {
        self.missing_bytes / self.bandwidth.network_bytes_per_s
            + restore_bytes / self.bandwidth.read_bytes_per_s
            + self.queue_s
    }
}

/// Algorithm 2: decides where to resume a task. `restore_bytes` is `None` when it has no checkpoint.
#[must_use]
pub fn resume(restore_bytes: Option<f64>, local: &Site, remote: Option<&Site>) -> Resumption {
    let Some(bytes) = restore_bytes else {
        return Resumption::Restart;
    };
    match remote {
        Some(remote) if remote.overhead_s(bytes) < local.overhead_s(bytes) => Resumption::Remote,
        _ => Resumption::Local,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BANDWIDTH: Bandwidth = Bandwidth {
        write_bytes_per_s: 100.0,
        read_bytes_per_s: 200.0,
        network_bytes_per_s: 50.0,
    };

    fn victim(progress_s: f64) -> Victim {
        Victim {
            dump_bytes: 1000.0,
            restore_bytes: 1000.0,
            progress_s,
            has_checkpoint: false,
        }
    }

    #[test]
    fn the_overhead_is_writing_reading_and_waiting() {
        assert_eq!(victim(0.0).overhead_s(&BANDWIDTH, 3.0), 10.0 + 5.0 + 3.0);
    }

    #[test]
    fn what_has_done_less_than_a_checkpoint_costs_is_killed() {
        let decide = |progress_s, queue_s| victim(progress_s).preempt(&BANDWIDTH, queue_s);
        assert_eq!(decide(14.9, 0.0), Preemption::Kill);
        assert_eq!(decide(15.0, 0.0), Preemption::Kill);
        assert_eq!(decide(15.1, 0.0), Preemption::Checkpoint);
        assert_eq!(decide(15.1, 1.0), Preemption::Kill);
    }

    #[test]
    fn a_second_checkpoint_is_incremental() {
        let second = Victim {
            has_checkpoint: true,
            dump_bytes: 100.0,
            ..victim(6.5)
        };
        assert_eq!(second.preempt(&BANDWIDTH, 0.0), Preemption::Incremental);
    }

    #[test]
    fn the_cheapest_victim_goes_first() {
        let mut victims = [victim(100.0), victim(2.0), victim(8.0)];
        order_victims(&mut victims, |it| it.cost_s(&BANDWIDTH, 0.0));
        let order: Vec<f64> = victims.iter().map(|it| it.progress_s).collect();
        assert_eq!(order, [2.0, 8.0, 100.0]);
    }

    #[test]
    fn a_task_is_resumed_where_that_costs_less() {
        let site = |missing_bytes, queue_s| Site {
            bandwidth: BANDWIDTH,
            missing_bytes,
            queue_s,
        };
        let here = site(0.0, 0.0);
        assert_eq!(resume(None, &here, None), Resumption::Restart);
        assert_eq!(resume(Some(1000.0), &here, None), Resumption::Local);
        let there = site(1000.0, 0.0);
        assert_eq!(resume(Some(1000.0), &here, Some(&there)), Resumption::Local);
        // 20 s of network cost less than 21 s in the queue.
        let busy = site(0.0, 21.0);
        assert_eq!(
            resume(Some(1000.0), &busy, Some(&there)),
            Resumption::Remote
        );
        // With a replica on both nodes the shorter queue decides.
        assert_eq!(resume(Some(1000.0), &busy, Some(&here)), Resumption::Remote);
    }

    proptest! {
        /// No decision costs more than the better of its two ways.
        #[test]
        fn the_cost_is_that_of_the_better_way(
            progress_s in 0.0..1e6f64, bytes in 0.0..1e9f64, queue_s in 0.0..1e4f64,
        ) {
            let it = Victim { dump_bytes: bytes, restore_bytes: bytes, ..victim(progress_s) };
            let cost_s = match it.preempt(&BANDWIDTH, queue_s) {
                Preemption::Kill => progress_s,
                _ => it.overhead_s(&BANDWIDTH, queue_s),
            };
            prop_assert_eq!(cost_s, it.cost_s(&BANDWIDTH, queue_s));
        }
    }
}
