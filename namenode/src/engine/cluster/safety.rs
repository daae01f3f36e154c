//! An upper bound on the blocks that are lost by chance, from the history of reimages and the places of
//! replicas.

use harvestfs_cycles::safety::{BlockReplica, BlockRisk, REPAIRED_WITHIN_S};
use harvestfs_placement::TenantId;
use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::placement::{ExpectedLosses, LossRisk, WaveOutlook};
use harvestfs_telemetry::coincidence::{Coincidence, Week};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use super::Cluster;
use super::table::{NodeIx, Slot};

/// Blocks that a report looks at: takes some milliseconds.
pub(super) const BLOCKS_LOOKED_AT_MAX: u32 = 16_384;
/// Blocks that a report names as being at most risk.
pub(super) const WORST_MAX: usize = 5;

type Replicas = SmallVec<[BlockReplica; 4]>;

/// How reimages coincide according to history, by the tenants of the view.
#[derive(Debug)]
pub(super) struct Foretold {
    week: Week,
    /// For each tenant, by its number, the probability that another of its servers is reimaged along
    /// with one of them. Tenants that were added later are missing.
    together: Vec<f64>,
}

impl Foretold {
    /// The probability of a tenant; the worst case is assumed for one without history.
    fn together(&self, tenant: TenantId) -> f64 {
        self.together.get(tenant.number()).copied().unwrap_or(1.0)
    }
}

impl Cluster {
    /// Stores how reimages coincide; to be called after [`Cluster::set_profiles`].
    pub fn set_coincidence(&mut self, coincidence: &Coincidence) {
        let tenants = self.view.tenants().iter();
        let share = |key| coincidence.together.get(key).copied().unwrap_or(1.0);
        self.foretold = Some(Foretold {
            week: coincidence.week,
            together: tenants.map(|tenant| share(&tenant.key)).collect(),
        });
    }

    /// The replicas of a block on these nodes. Tenants that history shows reimaged together count as one environment.
    fn block_replicas(&self, foretold: &Foretold, holders: &[NodeIx]) -> Replicas {
        let servers = holders.iter();
        let servers = servers.filter_map(|&node| self.view.server_at(node as usize));
        let servers: SmallVec<[_; 4]> = servers.collect();
        let mut replicas = Replicas::new();
        for (place, server) in servers.iter().enumerate() {
            let mut environment = place as u32;
            for (other, known) in servers[..place].iter().enumerate() {
                let shared = known.environment == server.environment
                    || self.view.go_together(known.tenant, server.tenant);
                let theirs = replicas[other].environment;
                if shared && theirs != environment {
                    // This replica links the two: whatever is reimaged with either is reimaged with
                    // both.
                    let from = environment;
                    replicas
                        .iter_mut()
                        .filter(|it| it.environment == from)
                        .for_each(|it| it.environment = theirs);
                    environment = theirs;
                }
            }
            replicas.push(BlockReplica {
                environment,
                reimages_per_month: self.view.reimage_rate(server),
                together: foretold.together(server.tenant),
            });
        }
        replicas
    }

    /// The replicas of the block in a slot that survive the loss of nodes; `None` for a block without bytes or one
    /// that is already lost.
    fn survivors(
        &self,
        foretold: &Foretold,
        slot: Slot,
        without: &FxHashSet<NodeIx>,
    ) -> Option<Replicas> {
        let block = self.table.get(slot).filter(|it| it.required_bytes > 0)?;
        let mut holders = self.holders(slot, block);
        if holders.is_empty() {
            return None;
        }
        holders.retain(|node| !without.contains(node));
        Some(self.block_replicas(foretold, &holders))
    }

    /// An upper bound on the probability that the block in a slot is lost within a year.
    pub(super) fn lost_in_a_year(&self, slot: Slot) -> Option<ExpectedLosses> {
        let foretold = self.foretold.as_ref()?;
        let replicas = self.survivors(foretold, slot, &FxHashSet::default())?;
        let bound = BlockRisk::new(&replicas).in_a_year(&foretold.week);
        Some(ExpectedLosses(bound))
    }

    /// The losses to expect in a year of all blocks that are not lost yet, extrapolated from at most
    /// `looked_at_max` of them. O(those).
    #[must_use]
    pub fn loss_risk(&self, looked_at_max: u32, worst_max: usize) -> LossRisk {
        let mut risk = LossRisk {
            blocks: 0,
            looked_at: 0,
            in_a_year: ExpectedLosses::default(),
            worst: Vec::new(),
        };
        if self.foretold.is_none() {
            return risk;
        }
        let slots = self.table.slots_end();
        let step = slots.div_ceil(looked_at_max.max(1)).max(1);
        let mut looked_into = 0_u64;
        let mut sum = 0.0;
        let mut bounds: Vec<(BlockId, ExpectedLosses)> = Vec::new();
        for slot in (0..slots).step_by(step as usize) {
            looked_into += 1;
            let Some(bound) = self.lost_in_a_year(slot) else {
                continue;
            };
            sum += bound.0;
            risk.looked_at += 1;
            if worst_max > 0 {
                bounds.push((self.table.known(slot).id, bound));
            }
        }
        if risk.looked_at == 0 {
            return risk;
        }
        // The slots that were not looked at have blocks in the same proportion.
        let times = f64::from(slots) / looked_into as f64;
        risk.blocks = (risk.looked_at as f64 * times).round() as u64;
        risk.in_a_year = ExpectedLosses(sum * times);
        bounds.sort_by(|a, b| b.1.0.total_cmp(&a.1.0).then(a.0.cmp(&b.0)));
        bounds.truncate(worst_max);
        risk.worst = bounds;
        risk
    }

    /// What would become of data if these nodes were reimaged together, until all is repaired. O(blocks on them).
    #[must_use]
    pub fn wave_outlook(&self, nodes: &[NodeId]) -> WaveOutlook {
        let nodes = nodes.iter().filter_map(|&node| self.node_index(node));
        let nodes: FxHashSet<NodeIx> = nodes.collect();
        let impact = self.impact(&nodes);
        let (mut servers_left, mut used_bytes, mut free_elsewhere_bytes) = (0, 0_u64, 0_u64);
        for (node, index) in self.nodes.iter().zip(0..) {
            let (used, free) = self.used_and_free_bytes(node);
            if nodes.contains(&index) {
                used_bytes = used_bytes.saturating_add(used);
            } else if node.is_alive() {
                servers_left += 1;
                free_elsewhere_bytes = free_elsewhere_bytes.saturating_add(free);
            }
        }
        let limits = self.options.repair_limits();
        let per_window = u64::from(servers_left) * u64::from(limits.per_node);
        let repair_ms = impact.waiting.saturating_mul(limits.window_ms);
        let repair_s = match per_window {
            0 if impact.waiting > 0 => None,
            0 => Some(0),
            _ => Some(repair_ms.div_ceil(per_window).div_ceil(1_000)),
        };
        let lost = self
            .foretold
            .as_ref()
            .zip(repair_s)
            .map(|(foretold, repair_s)| {
                let within_s = repair_s.max(REPAIRED_WITHIN_S.into());
                let share = foretold.week.worst(within_s);
                let (_, slots) = self.slots_on_any(&nodes);
                let survivors = slots
                    .into_iter()
                    .filter_map(|slot| self.survivors(foretold, slot, &nodes));
                let bounds =
                    survivors.map(|replicas| BlockRisk::new(&replicas).at_once(share).min(1.0));
                ExpectedLosses(bounds.sum())
            });
        WaveOutlook {
            impact,
            servers_left,
            used_bytes,
            free_elsewhere_bytes,
            repair_s,
            lost,
        }
    }
}
