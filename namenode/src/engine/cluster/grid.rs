//! The policy and its grid: when the grid is rebuilt, and what history contributes to it.

use harvestfs_placement::{Policy, PolicyKind, View};
use harvestfs_telemetry::profile::{TenantKey, TenantProfile};

use super::Cluster;

/// The grid is left as it is while rebuilding it would move less than this share of the space to
/// another cell: such moves break the constraints of blocks that are already written.
const MOVED_SHARE_MIN: f64 = 0.05;
/// The same after a strict block was refused: another grid may have room where this one has none.
const MOVED_SHARE_AFTER_REFUSAL_MIN: f64 = 0.01;

/// When the grid has to be checked.
#[derive(Debug, Default)]
pub(super) struct GridState {
    /// [`View::populated_tenants`] when it was built; 0 before the first time.
    tenants: u32,
    /// When it was built or checked last.
    checked_ms: u64,
    /// A strict block was refused: perhaps a cell is full.
    refused: bool,
    /// How often it was built.
    builds: u64,
}

impl Cluster {
    /// The policy in force.
    #[must_use]
    pub fn policy(&self) -> PolicyKind {
        self.policy.kind()
    }

    /// What placement knows: servers, tenants, grid.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// Replaces the policy, at any time. New blocks and repairs follow it from now on, and the
    /// grid is rebuilt for it; replicas that break its constraints are moved within the repair
    /// budgets.
    pub fn set_policy(&mut self, now_ms: u64, policy: Box<dyn Policy>) {
        self.advance(now_ms);
        self.policy = policy;
        self.rebuild_grid(now_ms);
    }

    /// Stores what history shows about tenants. It takes effect when the grid is rebuilt.
    pub fn set_profiles<'a>(
        &mut self,
        profiles: impl IntoIterator<Item = (&'a TenantKey, TenantProfile)>,
    ) {
        for (key, profile) in profiles {
            self.view.set_tenant_profile(key, profile);
        }
    }

    /// Stores which tenants are reimaged together according to history.
    pub fn set_together<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = (&'a TenantKey, &'a TenantKey)>,
    ) {
        self.view.set_together(pairs);
    }

    /// Rebuilds the grid from the current history and space of the tenants. O(servers); afterwards
    /// O(blocks), a bounded number per tick.
    pub fn rebuild_grid(&mut self, now_ms: u64) {
        self.advance(now_ms);
        self.view.rebuild_grid(self.policy.scope());
        self.demands.note_change();
        self.look_at_all_blocks();
        self.grid = GridState {
            tenants: self.view.populated_tenants(),
            checked_ms: self.now_ms,
            refused: false,
            builds: self.grid.builds + 1,
        };
    }

    /// Updates the grid after history has changed: rebuilds it if that moves enough space to other
    /// cells, or else only refreshes the reimage rates.
    pub fn update_grid(&mut self, now_ms: u64) {
        self.advance(now_ms);
        self.grid.refused = false;
        self.grid.checked_ms = self.now_ms;
        if !self.rebuild_grid_if_moves(MOVED_SHARE_MIN) {
            self.view.refresh_rates();
        }
    }

    /// Rebuilds the grid if that moves at least this share of the space to other cells; returns
    /// whether it did.
    fn rebuild_grid_if_moves(&mut self, share_min: f64) -> bool {
        let plan = self.view.plan_grid(self.policy.scope());
        let share = self.view.moved_share(&plan);
        assert!(
            (0.0..=1.0).contains(&share),
            "rebuilding the grid moves {share} of all space"
        );
        let moves = share >= share_min;
        if moves {
            self.rebuild_grid(self.now_ms);
        }
        moves
    }

    /// Schedules all blocks to be settled: the diversity of each may have changed.
    pub(super) fn look_at_all_blocks(&mut self) {
        if !self.safe_mode && self.options.watch_diversity {
            self.settle_from = Some(0);
        }
    }

    /// Rebuilds the grid if there are new tenants that hold enough space to be worth it. Otherwise they
    /// can wait outside the grid: nothing is known about them yet.
    pub(super) fn place_new_tenants(&mut self) {
        let tenants = self.view.populated_tenants();
        if self.grid.tenants == tenants {
            return;
        }
        assert!(
            self.grid.tenants < tenants,
            "{} tenants had servers when the grid was built, {tenants} ever",
            self.grid.tenants
        );
        self.rebuild_grid_if_moves(MOVED_SHARE_MIN);
        self.grid.tenants = tenants;
    }

    /// Whether no grid was built yet.
    pub(super) fn grid_is_unknown(&self) -> bool {
        self.grid.tenants == 0
    }

    /// Notes that a strict block found no place.
    pub(super) fn note_refusal(&mut self) {
        self.grid.refused = true;
    }

    /// Rebuilds the grid if that would change it enough: checked once per
    /// [`ClusterOptions::grid_interval_ms`](super::ClusterOptions), and soon after a refusal.
    pub(super) fn check_grid(&mut self) {
        let interval_ms = if self.grid.refused {
            self.options.grid_retry_ms
        } else {
            self.options.grid_interval_ms
        };
        if self.ms_since(self.grid.checked_ms) < interval_ms {
            return;
        }
        let refused = std::mem::take(&mut self.grid.refused);
        self.grid.checked_ms = self.now_ms;
        self.rebuild_grid_if_moves(if refused {
            MOVED_SHARE_AFTER_REFUSAL_MIN
        } else {
            MOVED_SHARE_MIN
        });
    }
}
