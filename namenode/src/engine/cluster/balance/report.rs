//! What operators see of balancing.

use harvestfs_protocol::placement::{BalanceReport, ClassBalance, ServerFill, VolumeBalance};
use harvestfs_protocol::types::StorageClass;
use rustc_hash::FxHashMap;

use super::{CLASSES, Cluster, Fill, NodeIx};
use crate::engine::cluster::places::grid_cell;

/// The number of too full volumes, and of too empty servers, that are named for each class.
const NAMED_MAX: usize = 10;

impl Cluster {
    /// How evenly volumes are filled, what moves for that, and what is in the way. O(volumes).
    #[must_use]
    pub fn balance_report(&self) -> BalanceReport {
        let classes: Vec<ClassBalance> = CLASSES
            .into_iter()
            .filter_map(|class| self.class_balance(class))
            .collect();
        let too_full: u64 = classes.iter().map(|it| it.volumes_too_full).sum();
        let looked_at = self.balance.last_round.len() as u64;
        assert!(
            too_full <= looked_at,
            "{too_full} volumes are too full, {looked_at} were looked at"
        );
        let (moving, blocks) = (self.balance.moving.len(), self.table.len());
        assert!(moving <= blocks, "{moving} blocks move, of {blocks}");
        BalanceReport {
            spread_permille: self.options.balance_spread_permille,
            pause: self.balance_pause(),
            limits: self.repair_limits(),
            moves_under_way: moving as u64,
            moves_done: self.balance.moves_done,
            moves_failed: self.balance.moves_failed,
            classes,
        }
    }

    /// `None` when no server has volumes of the class.
    fn class_balance(&self, class: StorageClass) -> Option<ClassBalance> {
        let mut nodes: FxHashMap<NodeIx, Fill> = FxHashMap::default();
        let mut fullest_volume = 0;
        for (home, storage) in self.table.storages_with_homes() {
            if home.usable && storage.class() == class {
                let fill = Fill::of(storage);
                nodes.entry(home.node).or_default().add(fill);
                fullest_volume = fullest_volume.max(fill.permille());
            }
        }
        let mut fills: Vec<(u64, NodeIx)> = nodes
            .into_iter()
            .map(|(node, fill)| (fill.permille(), node))
            .collect();
        fills.sort_unstable();
        let (least, _) = *fills.first()?;
        let (median, _) = fills[fills.len() / 2];
        let (most, _) = *fills.last()?;

        let spread = u64::from(self.options.balance_spread_permille);
        let is_empty = |fill: u64| spread > 0 && fullest_volume.saturating_sub(fill) > spread;
        let last_round = self.balance.last_round.iter().copied();
        let too_full: Vec<_> = last_round
            .map(|(volume, outcome)| (volume, &self.table.storages[volume as usize], outcome))
            .filter(|(_, storage, _)| storage.class() == class)
            .collect();
        Some(ClassBalance {
            class,
            servers: fills.len() as u64,
            least_permille: least,
            median_permille: median,
            most_permille: most,
            volumes_too_full: too_full.len() as u64,
            too_full: too_full
                .into_iter()
                .take(NAMED_MAX)
                .map(|(volume, storage, outcome)| VolumeBalance {
                    server: self
                        .server_fill(self.table.home(volume).node, Fill::of(storage).permille()),
                    storage: storage.id(),
                    outcome,
                })
                .collect(),
            servers_too_empty: fills.iter().filter(|it| is_empty(it.0)).count() as u64,
            too_empty: fills
                .iter()
                .take_while(|it| is_empty(it.0))
                .take(NAMED_MAX)
                .map(|&(fill, node)| self.server_fill(node, fill))
                .collect(),
        })
    }

    fn server_fill(&self, node: NodeIx, fill_permille: u64) -> ServerFill {
        let server = self.view.server_at(node as usize);
        ServerFill {
            server: self.node_name(node).to_owned(),
            cell: server
                .and_then(|server| self.view.cell_of(server))
                .map(grid_cell),
            fill_permille,
        }
    }
}
