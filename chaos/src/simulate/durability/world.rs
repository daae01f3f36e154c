//! The simulated datanodes, their owners, and time.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use harvestfs_namenode::engine::cluster::{Cluster, ClusterOptions};
use harvestfs_namenode::engine::namespace::BlockChange;
use harvestfs_protocol::ids::{BlockId, NodeId, SessionId};
use harvestfs_protocol::limits::BLOCK_BYTES_MAX;
use harvestfs_protocol::node::{IncrementalReport, ReplicaChange, ReplicaReport};
use harvestfs_protocol::types::Durability;
use rand::RngExt;
use rand::rngs::SmallRng;
use smallvec::SmallVec;

use super::{HISTORY_MONTHS, History, Options, Record, STEP_MS, SimulationError, detection_ms};
use crate::datacentre::{Datacentre, MONTH_S, Reimage};
use crate::random::stream;
use crate::simulate::fleet::{self, Fleet};

/// Blocks that are written between two calls of `progress`.
const BLOCKS_PER_PROGRESS: u32 = 4_096;
/// Steps between two calls of `progress`.
const STEPS_PER_PROGRESS: u64 = 256;

/// Number of copies, or of datanodes that have commands, of which the engine is notified in advance, in one call.
const COPIES_AHEAD: usize = 16;

/// A block that a datanode is copying.
struct Copy {
    done_ms: u64,
    block: BlockId,
    target: u32,
    target_generation: u32,
    /// The source servers, and the generation that each had when the copy started.
    sources: SmallVec<[(u32, u32); 3]>,
}

pub(super) struct World<'a> {
    history: &'a History<'a>,
    datacentre: &'a Datacentre,
    /// Number of months whose beginning the policy was informed of.
    months_known: u64,
    options: &'a Options,
    cluster: Cluster,
    /// The random generator of the engine.
    rng: SmallRng,
    fleet: Fleet,
    /// How often each server has been reimaged, whether the namenode knows or not: earlier data is gone.
    generations: Vec<u32>,
    start_s: u64,
    now_ms: u64,
    /// Future reimages, in order.
    reimages: &'a [Reimage],
    /// Reimages that the namenode does not know of yet: (time at which it will, server).
    undetected: VecDeque<(u64, u32)>,
    copies: VecDeque<Copy>,
    exposed_block_ms: u128,
    placement: Duration,
    record: Record,
    /// Reused for each report.
    report: IncrementalReport,
}

impl<'a> World<'a> {
    pub(super) fn new(
        history: &'a History<'a>,
        options: &'a Options,
    ) -> Result<Self, SimulationError> {
        let datacentre = history.datacentre();
        let start_s = u64::from(HISTORY_MONTHS) * MONTH_S;
        let end_s = start_s + u64::from(options.years) * 12 * MONTH_S;
        let first = datacentre.reimages.partition_point(|it| it.at_s < start_s);
        let end = datacentre.reimages.partition_point(|it| it.at_s < end_s);
        let detection_ms = options
            .detection_ms
            .unwrap_or_else(|| detection_ms(options.policy));
        let engine_options = ClusterOptions {
            repairs_per_window: options.repairs_per_hour,
            urgent_repairs_per_window: options.urgent_repairs_per_hour,
            repairs_per_volume_per_window: options.repairs_per_hour,
            ..fleet::engine_options()
        };
        let quota_blocks = fleet::quota_blocks(
            options.blocks,
            options.replication,
            datacentre.servers.len(),
            options.fill,
        );
        let mut world = Self {
            history,
            datacentre,
            months_known: 0,
            options,
            cluster: Cluster::new(
                engine_options,
                options.policy.build(&options.policy_options),
                0,
            ),
            rng: stream(options.seed, "engine"),
            fleet: Fleet::new(datacentre.servers.len(), quota_blocks),
            generations: vec![0; datacentre.servers.len()],
            start_s,
            now_ms: 0,
            reimages: &datacentre.reimages[first..end],
            undetected: VecDeque::new(),
            copies: VecDeque::new(),
            exposed_block_ms: 0,
            placement: Duration::ZERO,
            record: Record {
                datacentre: datacentre.name.clone(),
                policy: options.policy.name().to_owned(),
                replication: options.replication,
                seed: options.seed,
                blocks: u64::from(options.blocks),
                servers: datacentre.servers.len() as u64,
                years: options.years,
                fill: options.fill,
                repairs_per_hour: options.repairs_per_hour,
                urgent_repairs_per_hour: options.urgent_repairs_per_hour,
                detection_s: detection_ms / 1_000,
                ..Record::default()
            },
            report: IncrementalReport {
                changes: Vec::new(),
            },
        };
        for number in 0..world.fleet.servers() {
            world.register(number);
        }
        world.learn()?;
        world.cluster.tick(0, &mut world.rng);
        Ok(world)
    }

    /// At the start of a month: passes what is known by now to the policy.
    fn learn(&mut self) -> Result<(), SimulationError> {
        let month = self.now_ms / 1_000 / MONTH_S;
        if month < self.months_known {
            return Ok(());
        }
        self.months_known = month + 1;
        self.history
            .tell(&mut self.cluster, HISTORY_MONTHS + month as u32)?;
        if month == 0 {
            self.cluster.rebuild_grid(self.now_ms);
        } else {
            self.cluster.update_grid(self.now_ms);
        }
        Ok(())
    }

    /// Registers a datanode with an empty disk.
    fn register(&mut self, number: u32) {
        let at_s = self.start_s + self.now_ms / 1_000;
        let description = fleet::describe(self.datacentre, number, at_s);
        self.fleet
            .register(&mut self.cluster, self.now_ms, number, &description);
    }

    /// Reports a complete replica on a server.
    fn stored(&mut self, block: BlockId, number: u32) {
        let have = ReplicaReport {
            block,
            length_bytes: BLOCK_BYTES_MAX,
            sealed: true,
        };
        self.tell(number, ReplicaChange::Have(have));
        self.fleet.store(&mut self.cluster, self.now_ms, number);
    }

    fn tell(&mut self, number: u32, change: ReplicaChange) {
        let storage = fleet::storage(number, self.fleet.generation(number));
        self.report.changes.clear();
        self.report.changes.push((storage, change));
        let taken = self
            .cluster
            .incremental_report(self.now_ms, NodeId(number), &self.report);
        assert_eq!(taken, Ok(()), "the report of server {number}");
    }

    /// Writes all blocks, each from a random server.
    pub(super) fn fill(
        &mut self,
        progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
    ) -> Result<(), SimulationError> {
        let mut writers = stream(self.options.seed, "writers");
        for number in 0..self.options.blocks {
            if number % BLOCKS_PER_PROGRESS == 0 {
                let share = f64::from(number) / f64::from(self.options.blocks);
                proceed(progress, FILL_SHARE * share)?;
            }
            let writer = writers.random_range(0..self.fleet.servers());
            self.write(number, writer)?;
        }
        Ok(())
    }

    /// Records how many losses the engine predicts from history.
    pub(super) fn foretell(&mut self) {
        let risk = self.cluster.loss_risk(u32::MAX, 0);
        self.record.lost_blocks_bound = risk.in_a_year.0 * f64::from(self.options.years);
    }

    fn write(&mut self, number: u32, writer: u32) -> Result<(), SimulationError> {
        let block = BlockId(u64::from(number));
        let strict = fleet::rules(self.options.replication, Durability::Strict);
        let relaxed = fleet::rules(self.options.replication, Durability::Space);
        let host = Some(fleet::host(writer));
        let (now_ms, rng) = (self.now_ms, &mut self.rng);
        let started = Instant::now();
        let placed = self.cluster.place(now_ms, 1, &strict, &[], host, rng);
        self.placement += started.elapsed();
        let (placed, rules) = match placed {
            Ok(placed) => (placed, strict),
            Err(_) => {
                self.record.relaxed_blocks += 1;
                match self.cluster.place(now_ms, 1, &relaxed, &[], host, rng) {
                    Ok(placed) => (placed, relaxed),
                    Err(error) => {
                        return Err(SimulationError::Full {
                            block: number,
                            blocks: self.options.blocks,
                            reason: error.to_string(),
                        });
                    }
                }
            }
        };
        let writer = SessionId(1);
        self.cluster.apply_change(
            now_ms,
            &BlockChange::Allocated {
                block,
                rules,
                writer,
            },
        );
        let reports = placed.iter().flatten().map(|&node| (node, block));
        self.cluster.expect_reports(reports);
        // As in production, replicas are complete before their writer commits the block.
        for node in placed.iter().flatten() {
            self.stored(block, node.0);
        }
        self.cluster.apply_change(
            now_ms,
            &BlockChange::Sealed {
                block,
                length_bytes: BLOCK_BYTES_MAX,
            },
        );
        Ok(())
    }

    /// Lets the years pass.
    pub(super) fn years(
        &mut self,
        progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
    ) -> Result<(), SimulationError> {
        let end_ms = u64::from(self.options.years) * 12 * MONTH_S * 1_000;
        let mut steps = 0_u64;
        while self.now_ms < end_ms {
            if steps.is_multiple_of(STEPS_PER_PROGRESS) {
                let share = self.now_ms as f64 / end_ms as f64;
                proceed(progress, FILL_SHARE + (1.0 - FILL_SHARE) * share)?;
            }
            steps += 1;
            self.step()?;
            let next_ms = self.next_event_ms().unwrap_or(end_ms).min(end_ms);
            let exposed = u128::from(self.cluster.exposed_blocks());
            self.exposed_block_ms += exposed * u128::from(next_ms - self.now_ms);
            self.now_ms = next_ms;
        }
        Ok(())
    }

    /// The end of the step in which something happens next.
    fn next_event_ms(&self) -> Option<u64> {
        let step_after = |at_ms: u64| at_ms.div_ceil(STEP_MS) * STEP_MS;
        let wipe_ms = self.reimages.first().map(|it| self.ms_of(it));
        let detection_ms = self.undetected.front().map(|&(at_ms, _)| at_ms);
        let copy_ms = self.copies.front().map(|copy| copy.done_ms);
        let repair_ms = (self.cluster.under_repair() > 0).then_some(self.now_ms + STEP_MS);
        [wipe_ms, detection_ms, copy_ms, repair_ms]
            .into_iter()
            .flatten()
            .min()
            .map(|at_ms| step_after(at_ms).max(self.now_ms + STEP_MS))
    }

    fn ms_of(&self, reimage: &Reimage) -> u64 {
        (reimage.at_s - self.start_s) * 1_000
    }

    /// Does everything that is due by now.
    fn step(&mut self) -> Result<(), SimulationError> {
        self.learn()?;
        self.finish_copies();
        while let Some(reimage) = self.reimages.first()
            && self.ms_of(reimage) <= self.now_ms
        {
            self.wipe(reimage);
            self.reimages = &self.reimages[1..];
        }
        while let Some(&(at_ms, number)) = self.undetected.front()
            && at_ms <= self.now_ms
        {
            self.undetected.pop_front();
            self.detect(number);
        }
        self.cluster.tick(self.now_ms, &mut self.rng);
        self.start_copies();
        let waiting = self.cluster.under_repair();
        self.record.repairs_waiting_max = self.record.repairs_waiting_max.max(waiting);
        Ok(())
    }

    fn wipe(&mut self, reimage: &Reimage) {
        self.record.reimages += 1;
        self.generations[reimage.server as usize] += 1;
        let known_ms = self.ms_of(reimage) + self.record.detection_s * 1_000;
        self.undetected.push_back((known_ms, reimage.server));
    }

    fn detect(&mut self, number: u32) {
        let generation = self.generations[number as usize];
        if self.fleet.generation(number) == generation {
            // It was wiped twice before the namenode noticed the first time.
            return;
        }
        self.fleet.wipe(number, generation);
        self.register(number);
    }

    /// Starts the copies that the engine commands.
    fn start_copies(&mut self) {
        for nodes in self.cluster.take_commanded().chunks(COPIES_AHEAD) {
            self.cluster.expect_commands(nodes);
            for &node in nodes {
                self.start_copies_to(node);
            }
        }
    }

    fn start_copies_to(&mut self, node: NodeId) {
        while let Some(repair) = self.cluster.next_repair(self.now_ms, node) {
            let generation = |number: u32| self.fleet.generation(number);
            self.copies.push_back(Copy {
                done_ms: self.now_ms + STEP_MS,
                block: repair.block,
                target: node.0,
                target_generation: generation(node.0),
                sources: repair
                    .sources
                    .iter()
                    .map(|source| (source.0, generation(source.0)))
                    .collect(),
            });
        }
    }

    fn finish_copies(&mut self) {
        let due = self.copies.iter();
        let due = due.take_while(|it| it.done_ms <= self.now_ms).count();
        for number in 0..due {
            if number % COPIES_AHEAD == 0 {
                let next = self.copies.range(..COPIES_AHEAD.min(due - number));
                let next = next.map(|copy| (NodeId(copy.target), copy.block));
                self.cluster.expect_reports(next);
            }
            let Some(copy) = self.copies.pop_front() else {
                break;
            };
            let generation = |number: u32| self.generations[number as usize];
            if generation(copy.target) != copy.target_generation {
                // The target was wiped in the meantime: it reports nothing, or registers.
                continue;
            }
            let read = copy
                .sources
                .iter()
                .any(|&(number, of_then)| generation(number) == of_then);
            if read {
                self.record.repairs += 1;
                self.stored(copy.block, copy.target);
            } else {
                self.tell(copy.target, ReplicaChange::RepairFailed(copy.block));
            }
        }
    }

    pub(super) fn record(mut self) -> Record {
        // Reimages that the namenode has not noticed yet count as well.
        while let Some((at_ms, number)) = self.undetected.pop_front() {
            self.now_ms = self.now_ms.max(at_ms);
            self.detect(number);
        }
        self.cluster.tick(self.now_ms, &mut self.rng);
        self.record.lost_blocks = self.cluster.summary(self.now_ms).lost_blocks;
        self.record.single_replica_block_hours = self.exposed_block_ms as f64 / 3_600_000.0;
        self.record.placement_us_per_block =
            self.placement.as_secs_f64() * 1e6 / f64::from(self.options.blocks);
        self.record
    }
}

/// Share of a run that writing the blocks takes, for the progress display.
const FILL_SHARE: f64 = 0.4;

fn proceed(
    progress: &mut dyn FnMut(f64) -> ControlFlow<()>,
    share: f64,
) -> Result<(), SimulationError> {
    match progress(share) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(SimulationError::Interrupted),
    }
}
