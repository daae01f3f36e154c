//! Requests of operators about placement and repair.

use std::time::Duration;

use harvestfs_placement::PolicyKind;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, NodeId};
use harvestfs_protocol::limits::{BLOCKS_PER_REPORT_MAX, MAINTENANCE_MAX};
use harvestfs_protocol::placement::{
    BalanceChange, PlacementReply, PlacementRequest, RepairChange,
};
use harvestfs_protocol::types::{Credentials, Timestamp};

use super::Owner;
use crate::engine::namespace::{Choice, Command, Operation};

/// Largest budget that can be set: more than any disk can do in a window.
const REPAIRS_MAX: u32 = 1_000_000;
/// When to ask again while datanodes are still reporting.
const REPORTS_RETRY_MS: u32 = 500;

impl Owner {
    pub(super) fn placement(
        &mut self,
        request: PlacementRequest,
    ) -> Result<PlacementReply, FsError> {
        let now_ms = self.clock.now_ms();
        match request {
            PlacementRequest::Report { mut blocks, file } => {
                if let Some(path) = file {
                    let ino = self.find(path.as_bytes())?.ino;
                    blocks.extend(self.blocks_of_file(ino)?);
                }
                for &block in &blocks {
                    if self.namespace.block(block).is_none() {
                        return Err(invalid(format!("there is no block {block}")));
                    }
                }
                let report = self.cluster.placement_report(&blocks);
                Ok(PlacementReply::Report(report))
            }
            PlacementRequest::SetPolicy(name) => {
                let kind: PolicyKind = name.parse().map_err(|error| invalid(format!("{error}")))?;
                let choice = Choice {
                    configured: self.options.policy.name().to_owned(),
                    chosen: kind.name().to_owned(),
                };
                self.operate(Operation::Policy(choice))?;
                self.choose_policy(kind);
                Ok(PlacementReply::Done)
            }
            PlacementRequest::Repair(change) => {
                let limits = [
                    change.per_node,
                    change.urgent_per_node,
                    change.moves_per_node,
                    change.per_volume,
                    change.at_once,
                ];
                if limits
                    .into_iter()
                    .flatten()
                    .any(|limit| limit > REPAIRS_MAX)
                {
                    return Err(invalid(format!("a budget is at most {REPAIRS_MAX}")));
                }
                let limits = change.applied_to(self.cluster.repair_limits());
                if change != RepairChange::default() {
                    self.operate(Operation::Repair(Choice {
                        configured: self.options.cluster.repair_limits(),
                        chosen: limits,
                    }))?;
                    self.cluster.set_repair_limits(now_ms, &limits);
                    tracing::info!(?limits, "an operator set the budgets of repair");
                }
                Ok(PlacementReply::Repair(limits))
            }
            PlacementRequest::Balance(change) => {
                if let Some(change) = change {
                    self.change_balance(change)?;
                }
                Ok(PlacementReply::Balance(self.cluster.balance_report()))
            }
            PlacementRequest::Impact { servers, hold } => {
                let nodes = self.nodes_named(&servers)?;
                if hold {
                    self.hold_servers(&servers, true)?;
                }
                self.check_reported(&nodes)?;
                Ok(PlacementReply::Impact(self.cluster.reimage_impact(&nodes)))
            }
            PlacementRequest::Wave { servers } => {
                let nodes = self.nodes_named(&servers)?;
                self.check_reported(&nodes)?;
                Ok(PlacementReply::Wave(self.cluster.wave_outlook(&nodes)))
            }
            PlacementRequest::Release { servers } => {
                self.hold_servers(&servers, false)?;
                Ok(PlacementReply::Done)
            }
            PlacementRequest::StartMaintenance {
                servers,
                for_ms,
                force,
            } => self.start_maintenance(&servers, for_ms, force),
            PlacementRequest::EndMaintenance { servers } => {
                for node in self.nodes_named(&servers)? {
                    self.operate(Operation::Maintenance { node, until: None })?;
                    self.cluster.set_maintenance(now_ms, node, None);
                }
                tracing::info!(?servers, "maintenance is over");
                Ok(PlacementReply::Done)
            }
            PlacementRequest::SetQuota {
                server,
                storage,
                quota_bytes,
                deadline_ms,
            } => {
                let node = self.node_named(&server)?;
                let known = self
                    .cluster
                    .set_quota(now_ms, node, storage, quota_bytes, deadline_ms);
                if !known {
                    return Err(invalid(match storage {
                        Some(storage) => format!("{server} has no volume {storage}"),
                        None => format!("{server} has not reported its volumes yet"),
                    }));
                }
                tracing::info!(server, ?storage, quota_bytes, "an owner set a quota");
                Ok(PlacementReply::Done)
            }
        }
    }

    /// Restores what operators chose before the restart.
    pub(super) fn restore_operations(&mut self) {
        let configured = self.options.policy.name().to_owned();
        let chosen = self.namespace.chosen_policy();
        // A name that no policy has was written by another release: then the configured policy applies.
        let kind = chosen.and_then(|it| it.instead_of(&configured)?.parse().ok());
        if let Some(kind) = kind {
            self.choose_policy(kind);
        }
        let configured = self.options.cluster.repair_limits();
        let chosen = self.namespace.chosen_repair();
        if let Some(&limits) = chosen.and_then(|it| it.instead_of(&configured)) {
            let now_ms = self.clock.now_ms();
            self.cluster.set_repair_limits(now_ms, &limits);
            tracing::info!(?limits, "an operator's budgets of repair hold");
        }
        let configured = self.options.cluster.balance_spread_permille;
        let chosen = self.namespace.chosen_balance_spread();
        if let Some(&permille) = chosen.and_then(|it| it.instead_of(&configured)) {
            let now_ms = self.clock.now_ms();
            self.cluster.set_balance_spread(now_ms, permille);
            tracing::info!(permille, "an operator's spread of fills holds");
        }
    }

    fn change_balance(&mut self, change: BalanceChange) -> Result<(), FsError> {
        let configured = self.options.cluster.balance_spread_permille;
        let chosen = match change {
            BalanceChange::Configured if configured == 0 => {
                return Err(invalid(
                    "the configuration has balancing off: say how many percent apart servers may \
                     be, such as `harvestfs admin balance 10`"
                        .into(),
                ));
            }
            BalanceChange::Configured => configured,
            BalanceChange::Spread(permille) if permille > 1_000 => {
                return Err(invalid("servers are at most 100 percent apart".into()));
            }
            BalanceChange::Spread(permille) => permille,
        };
        self.operate(Operation::BalanceSpread(Choice { configured, chosen }))?;
        let now_ms = self.clock.now_ms();
        self.cluster.set_balance_spread(now_ms, chosen);
        tracing::info!(permille = chosen, "an operator set the spread of fills");
        Ok(())
    }

    fn choose_policy(&mut self, kind: PolicyKind) {
        let policy = kind.build(&self.options.placement);
        let now_ms = self.clock.now_ms();
        self.cluster.set_policy(now_ms, policy);
        tracing::info!(policy = kind.name(), "an operator's choice of policy holds");
    }

    fn hold_servers(&mut self, servers: &[String], held: bool) -> Result<(), FsError> {
        let now_ms = self.clock.now_ms();
        for node in self.nodes_named(servers)? {
            // An operator who waits until it is safe asks again and again.
            if self.cluster.is_draining(node) != held {
                self.operate(Operation::Hold { node, held })?;
                self.cluster.set_draining(now_ms, node, held);
            }
        }
        Ok(())
    }

    fn start_maintenance(
        &mut self,
        servers: &[String],
        for_ms: u64,
        force: bool,
    ) -> Result<PlacementReply, FsError> {
        if Duration::from_millis(for_ms) > MAINTENANCE_MAX {
            let days = MAINTENANCE_MAX.as_secs() / 86_400;
            return Err(invalid(format!("maintenance takes at most {days} days")));
        }
        let nodes = self.nodes_named(servers)?;
        if !force {
            self.check_reported(&nodes)?;
        }
        let impact = self.cluster.maintenance_impact(&nodes);
        let started = force || impact.lost == 0;
        if started {
            let now_ms = self.clock.now_ms();
            let for_ns = i64::try_from(for_ms * 1_000_000).expect("it is within the limit");
            let until = Some(Timestamp(Timestamp::now().0.saturating_add(for_ns)));
            for node in nodes {
                self.operate(Operation::Maintenance { node, until })?;
                self.cluster
                    .set_maintenance(now_ms, node, Some(now_ms + for_ms));
            }
            tracing::info!(?servers, for_s = for_ms / 1_000, "servers may be away");
        }
        Ok(PlacementReply::Maintenance { started, impact })
    }

    /// Journals an operator's change.
    fn operate(&mut self, operation: Operation) -> Result<(), FsError> {
        self.execute(&Command::Operate(operation), true).map(|_| ())
    }

    /// Fails right after a start, or after another namenode led, when it may not be known yet which replicas servers
    /// have: no server is safe to take away then.
    fn check_reported(&self, nodes: &[NodeId]) -> Result<(), FsError> {
        if self.cluster.have_reported(nodes) {
            return Ok(());
        }
        Err(FsError::Busy {
            retry_after_ms: REPORTS_RETRY_MS,
        })
    }

    fn nodes_named(&self, servers: &[String]) -> Result<Vec<NodeId>, FsError> {
        servers.iter().map(|name| self.node_named(name)).collect()
    }

    fn node_named(&self, name: &str) -> Result<NodeId, FsError> {
        let server = self.namespace.server(name);
        server
            .map(|server| server.node)
            .ok_or_else(|| invalid(format!("there is no server `{name}`")))
    }

    /// The blocks of a file's first extents, in the order of its content.
    pub(super) fn blocks_of_file(&self, ino: InodeId) -> Result<Vec<BlockId>, FsError> {
        let (extents, _) = self.namespace.extents(&Credentials::root(), ino, 0)?;
        let mut blocks: Vec<BlockId> = Vec::new();
        for extent in extents {
            if !blocks.contains(&extent.block) && blocks.len() < BLOCKS_PER_REPORT_MAX {
                blocks.push(extent.block);
            }
        }
        Ok(blocks)
    }
}

/// How much longer a server may be away, in milliseconds; `None` if it may not.
pub(super) fn left_ms(until: Option<Timestamp>) -> Option<u64> {
    let left_ns = until?.0.saturating_sub(Timestamp::now().0);
    u64::try_from(left_ns / 1_000_000)
        .ok()
        .filter(|&left_ms| left_ms > 0)
}

fn invalid(message: String) -> FsError {
    FsError::InvalidArgument(message)
}
