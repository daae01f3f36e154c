//! Where blocks are, and why: what operators see of placement.

use std::collections::BTreeMap;

use harvestfs_placement::{CELLS, Cell, Constraints, ServerView};
use harvestfs_protocol::history::TenantName;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::{BLOCKS_PER_REPORT_MAX, TENANTS_PER_REPLY_MAX};
use harvestfs_protocol::placement::{
    BlockPlace, CellReport, DomainKind, DomainLoss, GridCell, PlacementReport, ReplicaPlace,
    TenantReport,
};
use harvestfs_protocol::types::Durability;

use super::Cluster;
use super::node::Node;
use super::safety::{BLOCKS_LOOKED_AT_MAX, WORST_MAX};
use super::table::{Block, NodeIx, ReplicaState, Slot};
use crate::engine::count::Count;

/// The space of the live servers of a failure domain.
#[derive(Default)]
struct Space {
    servers: u32,
    used_bytes: u64,
    free_bytes: u64,
}

impl Cluster {
    /// Reports the policy, its grid, diversity, and where these blocks are; unknown blocks are left
    /// out. O(servers).
    #[must_use]
    pub fn placement_report(&self, blocks: &[BlockId]) -> PlacementReport {
        PlacementReport {
            policy: self.policy.kind().name().into(),
            cells: self.cells(),
            tenants: self.tenants(),
            blocks_by_score: self.totals.scores.map(Count::get).to_vec(),
            misplaced_blocks: self.totals.misplaced.get(),
            moves_waiting: self.queue.moves(),
            losses: self.losses(),
            risk: self.loss_risk(BLOCKS_LOOKED_AT_MAX, WORST_MAX),
            blocks: self.block_places(blocks),
        }
    }

    /// See [`PlacementReport::cells`].
    #[must_use]
    pub fn cells(&self) -> Vec<CellReport> {
        let cells = self.view.cell_spaces().into_iter().enumerate();
        let cells = cells.map(|(number, space)| CellReport {
            cell: (number < CELLS)
                .then(|| Cell::all().nth(number).map(grid_cell))
                .flatten(),
            tenants: space.tenants,
            servers: space.servers,
            capacity_bytes: self.bytes_of(space.capacity_blocks),
            free_bytes: self.bytes_of(space.free_blocks),
        });
        cells.collect()
    }

    /// See [`PlacementReport::tenants`].
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantReport> {
        let details = self.view.grid_tenants();
        assert_eq!(
            details.len(),
            self.view.tenants().len(),
            "what the grid has to know of tenants, and tenants"
        );
        let tenants = self.view.tenants().iter().zip(&details);
        let tenants = tenants
            .filter(|(tenant, _)| tenant.servers > 0)
            .take(TENANTS_PER_REPLY_MAX)
            .map(|(tenant, it)| TenantReport {
                tenant: TenantName {
                    environment: tenant.key.environment.clone(),
                    machine_function: tenant.key.machine_function.clone(),
                },
                cell: tenant.cell().map(grid_cell),
                servers: tenant.servers,
                has_history: tenant.profile.is_some(),
                reimages_per_1000: per_1000(it.reimages),
                peak_cpu_permille: (it.peak * 1_000.0) as u16,
                free_bytes: self.bytes_of(it.free_blocks),
            });
        tenants.collect()
    }

    /// Where these blocks are; unknown ones are left out.
    #[must_use]
    pub fn block_places(&self, blocks: &[BlockId]) -> Vec<BlockPlace> {
        let blocks = blocks.iter().take(BLOCKS_PER_REPORT_MAX);
        blocks
            .filter_map(|&block| self.block_place(block))
            .collect()
    }

    /// The size of so many whole blocks. Saturates: datanodes may report any quota.
    fn bytes_of(&self, blocks: u64) -> u64 {
        blocks.saturating_mul(self.options.block_bytes)
    }

    /// See [`PlacementReport::losses`]. O(volumes).
    fn losses(&self) -> Vec<DomainLoss> {
        // Saturates throughout: datanodes may report any numbers for their volumes.
        let mut free_bytes = 0_u64;
        let mut domains: [BTreeMap<&str, Space>; DomainKind::ALL.len()] = Default::default();
        for node in self.nodes.iter().filter(|node| node.is_alive()) {
            let (used, free) = self.used_and_free_bytes(node);
            free_bytes = free_bytes.saturating_add(free);
            for (domains, kind) in domains.iter_mut().zip(DomainKind::ALL) {
                let space = domains.entry(kind.of(&node.server)).or_default();
                space.servers += 1;
                space.used_bytes = space.used_bytes.saturating_add(used);
                space.free_bytes = space.free_bytes.saturating_add(free);
            }
        }
        let worst = DomainKind::ALL.into_iter().zip(domains);
        let worst = worst.filter_map(|(kind, domains)| {
            // The total is the same for all: the domain with the most used and free space leaves the
            // least for its data.
            let (name, space) = domains
                .into_iter()
                .max_by_key(|(_, space)| space.used_bytes.saturating_add(space.free_bytes))?;
            Some(DomainLoss {
                kind,
                name: name.to_owned(),
                servers: space.servers,
                used_bytes: space.used_bytes,
                free_elsewhere_bytes: free_bytes - space.free_bytes,
            })
        });
        worst.collect()
    }

    /// Used and free bytes of the healthy volumes of a server. Saturates: datanodes may report any numbers.
    pub(super) fn used_and_free_bytes(&self, node: &Node) -> (u64, u64) {
        let volumes = node.storages.iter();
        let volumes = volumes.map(|&index| &self.table.storages[index as usize].status);
        let healthy = volumes.filter(|volume| volume.healthy);
        healthy.fold((0, 0), |(used, free): (u64, u64), volume| {
            // The owner may have lowered the quota below what is used.
            let of_volume = volume.quota_bytes.saturating_sub(volume.used_bytes);
            (
                used.saturating_add(volume.used_bytes),
                free.saturating_add(of_volume),
            )
        })
    }

    pub(super) fn block_place(&self, id: BlockId) -> Option<BlockPlace> {
        Some(self.place_of(self.table.slot(id)?))
    }

    /// Where the block in a slot is. The slot must have one.
    pub(super) fn place_of(&self, slot: Slot) -> BlockPlace {
        let block = self.table.known(slot);
        let due = self.due(block);
        assert!(
            due <= block.wanted(),
            "block {} can have {due} replicas, more than it wants: {:?}",
            block.id,
            block.rules
        );
        let holders = self.holders(slot, block);
        let held = self.held(&holders);
        let promised = self.promised(block);
        let given_up = match block.rules.durability {
            Durability::Strict => self.given_up(&block.rules),
            Durability::Space => Constraints::NONE,
        };
        let broken = promised.without(held);
        let names = |constraints: Constraints| constraints.names().map(String::from).collect();
        let replicas = block.replicas.iter().filter_map(|replica| {
            let storage = self.table.home(replica.storage);
            let state = if storage.usable {
                state_name(replica.state)
            } else {
                "gone"
            };
            self.replica_place(slot, storage.node, state, &holders)
        });
        let awaited = holders
            .iter()
            .filter(|&&node| self.table.replica_on(slot, node).is_none())
            .filter_map(|&node| self.replica_place(slot, node, "awaited", &holders));
        BlockPlace {
            block: block.id,
            replication: block.rules.replication,
            strict: is_strict(block),
            held: names(held),
            broken: names(broken),
            given_up: names(given_up.without(held)),
            // At most the wanted number, which is a `u8`.
            possible: due as u8,
            lost_in_a_year: self.lost_in_a_year(slot),
            replicas: replicas.chain(awaited).collect(),
        }
    }

    fn replica_place(
        &self,
        slot: Slot,
        node: NodeIx,
        state: &str,
        holders: &[NodeIx],
    ) -> Option<ReplicaPlace> {
        let server = self.view.server_at(node as usize)?;
        let it = &self.nodes[node as usize].server;
        let shares = holders
            .iter()
            .filter(|&&other| other != node && holders.contains(&node))
            .filter_map(|&other| Some((other, self.view.server_at(other as usize)?)))
            .flat_map(|(other, view)| {
                let name = &self.nodes[other as usize].server.name;
                let shared = self.shared(server, view);
                shared
                    .names()
                    .map(|it| (it.into(), name.clone()))
                    .collect::<Vec<_>>()
            });
        Some(ReplicaPlace {
            server: it.name.clone(),
            rack: it.rack.clone(),
            tenant: TenantName {
                environment: it.environment.clone(),
                machine_function: it.machine_function.clone(),
            },
            cell: self.view.cell_of(server).map(grid_cell),
            reimages_per_1000: per_1000(self.view.reimage_rate(server)),
            state: state.into(),
            leaving: self.is_leaving(slot, node),
            shares: shares.collect(),
        })
    }

    /// What two servers have in common.
    fn shared(&self, a: &ServerView, b: &ServerView) -> Constraints {
        let cells = (self.view.cell_of(a), self.view.cell_of(b));
        let same = |key: fn(Cell) -> usize| match cells {
            (Some(a), Some(b)) => key(a) == key(b),
            _ => false,
        };
        [
            (Constraints::ENVIRONMENT, a.environment == b.environment),
            (Constraints::MACHINE_FUNCTION, a.function == b.function),
            (Constraints::RACK, a.rack == b.rack),
            (Constraints::COLUMN, same(Cell::column)),
            (Constraints::ROW, same(Cell::row)),
        ]
        .into_iter()
        .filter(|(_, shared)| *shared)
        .fold(Constraints::NONE, |all, (constraint, _)| {
            all.union(constraint)
        })
    }
}

fn is_strict(block: &Block) -> bool {
    block.rules.durability == Durability::Strict
}

pub(super) fn grid_cell(cell: Cell) -> GridCell {
    GridCell {
        row: cell.row() as u8,
        column: cell.column() as u8,
    }
}

fn per_1000(reimages_per_server_month: f64) -> u32 {
    (reimages_per_server_month * 1_000.0).round() as u32
}

fn state_name(state: ReplicaState) -> &'static str {
    match state {
        ReplicaState::Sealed => "sealed",
        ReplicaState::Open => "open",
        ReplicaState::Unconfirmed => "unconfirmed",
        ReplicaState::Short => "short",
        ReplicaState::Corrupt => "corrupt",
        ReplicaState::Excess => "excess",
        ReplicaState::Deleting => "deleting",
    }
}
