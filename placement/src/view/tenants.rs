//! Tenants, their history and their place in the grid; draws of servers by cell.

use std::cmp::Ordering;

use harvestfs_telemetry::hours::WeekHours;

use super::{
    DRAWS_MAX, EnvironmentId, FunctionId, Lane, NodeId, OUTSIDE, Place, Rng, RngExt, ServerView,
    SmallVec, StorageClass, TenantId, TenantKey, TenantProfile, View, draw_from, number_of,
};
use crate::grid::{CALM_POINTS, CELLS, Cell, Grid, GridTenant, Scope, calm_points};

/// Lower bound of reimage rates, in reimages per server and month: one in eight years, longer than a history of three
/// years can show.
const REIMAGES_MIN: f64 = 0.01;
/// The weight of a free block of a server, times its tenant's reimage rate.
const FACTOR_SCALE: f64 = 16.0;

/// One tenant.
#[derive(Clone, Debug)]
pub struct TenantView {
    /// Its name.
    pub key: TenantKey,
    /// Its environment.
    pub environment: EnvironmentId,
    /// Its machine function.
    pub function: FunctionId,
    /// Its history, if any.
    pub profile: Option<TenantProfile>,
    /// Number of its servers.
    pub servers: u32,
    /// Reimages per server and month with which the grid was built.
    pub(super) reimages: f64,
    pub(super) place: Place,
    pub(super) factor: u32,
    /// See [`calm_points`].
    pub(super) calm: u8,
    /// Hours of the week in which it was busy, as far as history shows.
    pub(super) busy_hours: WeekHours,
}

impl TenantView {
    /// Returns its cell; `None` while it is outside the grid.
    #[must_use]
    pub fn cell(&self) -> Option<Cell> {
        cell_at(self.place)
    }
}

/// The space in a cell, or outside the grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CellSpace {
    /// Number of tenants.
    pub tenants: u32,
    /// Number of servers.
    pub servers: u32,
    /// Total space, used or free, in blocks.
    pub capacity_blocks: u64,
    /// Free space in blocks.
    pub free_blocks: u64,
}

fn cell_at(place: Place) -> Option<Cell> {
    (place != OUTSIDE).then(|| {
        let place = usize::from(place);
        Cell::new(place / crate::grid::SIDE, place % crate::grid::SIDE)
    })
}

fn factor(reimages: f64) -> u32 {
    // At least 1: every open server can be drawn.
    ((FACTOR_SCALE / reimages.max(REIMAGES_MIN)) as u32).max(1)
}

impl View {
    pub(super) fn tenant_for(&mut self, environment: &str, function: &str) -> TenantId {
        let key = TenantKey {
            environment: environment.into(),
            machine_function: function.into(),
        };
        if let Some(&known) = self.tenant_ids.get(&key) {
            return known;
        }
        let id = TenantId(self.tenants.len() as u32);
        let tenant = TenantView {
            environment: number_of(&mut self.environments, environment, EnvironmentId),
            function: number_of(&mut self.functions, function, FunctionId),
            key: key.clone(),
            profile: None,
            servers: 0,
            reimages: 0.0,
            place: OUTSIDE,
            factor: factor(1.0),
            calm: CALM_POINTS,
            busy_hours: WeekHours::NONE,
        };
        self.tenants.push(tenant);
        self.tenant_ids.insert(key, id);
        id
    }

    /// Notes the history of a tenant, which need not be known yet. It takes effect when the grid is rebuilt.
    pub fn set_tenant_profile(&mut self, key: &TenantKey, profile: TenantProfile) {
        let id = self.tenant_for(&key.environment, &key.machine_function);
        self.tenants[id.number()].profile = Some(profile);
    }

    /// Notes which tenants history shows reimaged together, replacing what was noted before. `harvest` avoids putting
    /// replicas of a block on both, where it has the choice. Unknown tenants are left out.
    pub fn set_together<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = (&'a TenantKey, &'a TenantKey)>,
    ) {
        self.together.clear();
        for (a, b) in pairs {
            if let (Some(&a), Some(&b)) = (self.tenant_ids.get(a), self.tenant_ids.get(b)) {
                self.together.insert((a.min(b), a.max(b)));
            }
        }
    }

    /// Whether history shows two tenants reimaged together; a tenant is always together with itself.
    #[must_use]
    pub fn go_together(&self, a: TenantId, b: TenantId) -> bool {
        a == b || self.together.contains(&(a.min(b), a.max(b)))
    }

    pub(crate) fn knows_together(&self) -> bool {
        !self.together.is_empty()
    }

    /// A counter that grows when a tenant gets its first server, and so has no cell yet.
    #[must_use]
    pub fn populated_tenants(&self) -> u32 {
        self.populated_tenants
    }

    /// Returns all tenants, including those without servers.
    #[must_use]
    pub fn tenants(&self) -> &[TenantView] {
        &self.tenants
    }

    /// Returns the cell of a server; `None` when its tenant is outside the grid.
    #[must_use]
    pub fn cell_of(&self, server: &ServerView) -> Option<Cell> {
        cell_at(self.tenants[server.tenant.number()].place)
    }

    /// Returns what the grid has to know about the tenants, in the order of [`View::tenants`]. A tenant without
    /// history counts as the average server of those with history or, if there is none, as never reimaged and never
    /// busy.
    #[must_use]
    pub fn grid_tenants(&self) -> Vec<GridTenant> {
        let known = || {
            let all = self.tenants.iter();
            all.filter_map(|it| Some((f64::from(it.servers), it.profile?)))
        };
        let servers: f64 = known().map(|(servers, _)| servers).sum();
        let mean = |value: fn(&TenantProfile) -> f64| {
            let sum: f64 = known()
                .map(|(servers, it)| servers * number(value(&it)))
                .sum();
            if servers > 0.0 { sum / servers } else { 0.0 }
        };
        let reimages = mean(|it| it.reimages_per_server_month);
        let peak = mean(|it| it.peak_cpu_share);
        let busy_share = mean(|it| it.busy_share);
        let mut tenants: Vec<GridTenant> = self
            .tenants
            .iter()
            .map(|it| GridTenant {
                servers: it.servers,
                free_blocks: 0,
                capacity_blocks: 0,
                reimages: it
                    .profile
                    .map_or(reimages, |it| number(it.reimages_per_server_month)),
                busy_share: it.profile.map_or(busy_share, |it| number(it.busy_share)),
                peak: it.profile.map_or(peak, |it| number(it.peak_cpu_share)),
            })
            .collect();
        for server in &self.servers {
            let tenant = &mut tenants[server.tenant.number()];
            let free = server.room.blocks(None);
            tenant.free_blocks += u64::from(free);
            tenant.capacity_blocks += u64::from(server.capacity_blocks.max(free));
        }
        tenants
    }

    /// Returns the cells in which the tenants would be if the grid were rebuilt now.
    #[must_use]
    pub fn plan_grid(&self, scope: Scope) -> Grid {
        self.plan(&self.grid_tenants(), scope)
    }

    /// Takes tenants with the same history in the order of their names, not in the order in which they happened to
    /// register.
    fn plan(&self, tenants: &[GridTenant], scope: Scope) -> Grid {
        let mut by_name: Vec<usize> = (0..tenants.len()).collect();
        by_name.sort_by(|&a, &b| self.tenants[a].key.cmp(&self.tenants[b].key));
        let sorted: Vec<GridTenant> = by_name.iter().map(|&it| tenants[it]).collect();
        Grid::build(&sorted, scope).reordered(&by_name)
    }

    /// Returns the reimages per month of a server's tenant with which the grid was built; at least 0.01.
    #[must_use]
    pub fn reimage_rate(&self, server: &ServerView) -> f64 {
        self.tenants[server.tenant.number()]
            .reimages
            .max(REIMAGES_MIN)
    }

    /// Returns the approximate mean of [`View::reimage_rate`] over all servers.
    #[must_use]
    pub fn mean_reimage_rate(&self) -> f64 {
        self.mean_reimages.max(REIMAGES_MIN)
    }

    /// Assigns the tenants to cells again, by their history and the space of their servers.
    pub fn rebuild_grid(&mut self, scope: Scope) {
        let tenants = self.grid_tenants();
        let grid = self.plan(&tenants, scope);
        self.apply(&tenants, |number| grid.cell(number));
    }

    /// Applies new reimage rates; every tenant stays in its cell.
    pub fn refresh_rates(&mut self) {
        let tenants = self.grid_tenants();
        let cells: Vec<Option<Cell>> = self.tenants.iter().map(TenantView::cell).collect();
        self.apply(&tenants, |number| cells[number]);
    }

    fn apply(&mut self, tenants: &[GridTenant], cell: impl Fn(usize) -> Option<Cell>) {
        let servers = |it: &GridTenant| f64::from(it.servers);
        let all: f64 = tenants.iter().map(servers).sum();
        let sum: f64 = tenants.iter().map(|it| servers(it) * it.reimages).sum();
        self.best_first = best_first(tenants);
        self.mean_reimages = if all > 0.0 { sum / all } else { 0.0 };
        let calm = calm_points(tenants);
        assert_eq!(
            (tenants.len(), calm.len(), self.best_first.len()),
            (self.tenants.len(), self.tenants.len(), self.tenants.len()),
            "what the grid was built with is not what there is"
        );
        let tenants = tenants.iter().zip(calm);
        for (number, (tenant, (it, calm))) in self.tenants.iter_mut().zip(tenants).enumerate() {
            tenant.place = cell(number).map_or(OUTSIDE, |cell| cell.number() as Place);
            tenant.reimages = it.reimages;
            tenant.factor = factor(it.reimages);
            tenant.calm = calm;
            tenant.busy_hours = match tenant.profile {
                Some(profile) => profile.busy_hours,
                // As the average server, which may be busy in any hour.
                None if it.busy_share > 0.0 => WeekHours::ALL,
                None => WeekHours::NONE,
            };
        }
        self.indexes = Default::default();
        self.places = Default::default();
        for slot in 0..self.servers.len() {
            self.positions[slot] = self.join(slot as u32);
        }
        for slot in 0..self.servers.len() {
            self.refresh(slot as u32);
        }
    }

    /// Returns the share of the space, 0 to 1, whose tenant is in a different cell in `grid`.
    #[must_use]
    pub fn moved_share(&self, grid: &Grid) -> f64 {
        let (mut moved, mut all) = (0.0, 0.0);
        for (number, (tenant, it)) in self.tenants.iter().zip(self.grid_tenants()).enumerate() {
            // Each server counts as one block, in case no space is known yet.
            let space = it.capacity_blocks as f64 + f64::from(it.servers);
            all += space;
            if tenant.cell() != grid.cell(number) {
                moved += space;
            }
        }
        if all > 0.0 { moved / all } else { 0.0 }
    }

    /// Returns the space of each cell, in the order of [`Cell::all`], and then the space outside the grid.
    #[must_use]
    pub fn cell_spaces(&self) -> [CellSpace; CELLS + 1] {
        let mut spaces = [CellSpace::default(); CELLS + 1];
        for (tenant, it) in self.tenants.iter().zip(self.grid_tenants()) {
            if tenant.servers == 0 {
                continue;
            }
            let space = &mut spaces[usize::from(tenant.place)];
            space.tenants += 1;
            space.servers += tenant.servers;
            space.capacity_blocks += it.capacity_blocks;
            space.free_blocks += it.free_blocks;
        }
        spaces
    }

    /// Returns the tenants from the best to the worst: the least reimaged third of the space first, and within a
    /// third, those with the lowest peaks first.
    #[must_use]
    pub fn best_first(&self) -> &[TenantId] {
        &self.best_first
    }

    /// Draws a server of a tenant, with the same probability for each that is open and accepted.
    pub(crate) fn draw_in_tenant(
        &self,
        lane: Lane,
        class: Option<StorageClass>,
        tenant: TenantId,
        rng: &mut dyn Rng,
        accept: impl Fn(&ServerView) -> bool,
    ) -> Option<NodeId> {
        let servers = self.index(lane, class).tenants.in_group(tenant.0);
        let slot = draw_from(servers, rng, |&slot| accept(&self.servers[slot as usize]))?;
        let server = &self.servers[slot as usize];
        assert_eq!(server.tenant, tenant, "{} of another tenant", server.node);
        Some(server.node)
    }

    /// Draws a tenant with an accepted open server in a cell (`None`: outside the grid), each with the same
    /// probability, then one of those servers, each with the same probability.
    pub(crate) fn draw_by_tenant(
        &self,
        lane: Lane,
        class: Option<StorageClass>,
        cell: Option<Cell>,
        rng: &mut dyn Rng,
        accept: impl Fn(&ServerView) -> bool,
    ) -> Option<NodeId> {
        let place = cell.map_or(OUTSIDE, |cell| cell.number() as Place);
        let tenants = self.index(lane, class).open_tenants.in_group(place.into());
        let draw = |tenant: u32, rng: &mut dyn Rng| {
            self.draw_in_tenant(lane, class, TenantId(tenant), rng, &accept)
        };
        for _ in 0..DRAWS_MAX.min(tenants.len() as u32) {
            let tenant = tenants[rng.random_range(0..tenants.len())];
            // Servers of a tenant share everything that constraints concern except the rack.
            if let Some(node) = draw(tenant, rng) {
                return Some(node);
            }
        }
        let mut left: SmallVec<[u32; 64]> = SmallVec::from_slice(tenants);
        while !left.is_empty() {
            let tenant = left.swap_remove(rng.random_range(0..left.len()));
            if let Some(node) = draw(tenant, rng) {
                return Some(node);
            }
        }
        None
    }

    /// Draws an accepted open server of a cell (`None`: outside the grid) with probability proportional to its free
    /// space over its tenant's reimage rate.
    pub(crate) fn draw_by_weight(
        &self,
        lane: Lane,
        class: Option<StorageClass>,
        cell: Option<Cell>,
        rng: &mut dyn Rng,
        accept: impl Fn(&ServerView) -> bool,
    ) -> Option<NodeId> {
        let place = cell.map_or(usize::from(OUTSIDE), Cell::number);
        let index = self.index(lane, class);
        let members = &self.places[place];
        for _ in 0..DRAWS_MAX {
            let position = index.trees[place].draw(rng)?;
            let server = &self.servers[members[position as usize] as usize];
            if accept(server) {
                return Some(server.node);
            }
        }
        let mut total = 0;
        let mut drawn = None;
        for (position, &slot) in members.iter().enumerate() {
            let blocks = index.blocks(slot);
            let server = &self.servers[slot as usize];
            // A server that moved is still listed in its former place.
            if blocks == 0 || self.positions[slot as usize] != position as u32 || !accept(server) {
                continue;
            }
            let tenant = &self.tenants[server.tenant.number()];
            if usize::from(tenant.place) != place {
                continue;
            }
            let weight = u64::from(blocks) * u64::from(tenant.factor);
            total += weight;
            if rng.random_range(0..total) < weight {
                drawn = Some(server.node);
            }
        }
        drawn
    }

    /// Returns the approximate free blocks on the open servers of each cell, in the order of [`Cell::all`], then
    /// outside the grid.
    pub(crate) fn open_space(&self, lane: Lane, class: Option<StorageClass>) -> &[u64; CELLS + 1] {
        &self.index(lane, class).space
    }

    /// Returns the approximate free blocks on the open servers of each cell whose tenants have calm points, in the
    /// order of [`Cell::all`], then outside the grid.
    pub(crate) fn calm_space(&self, lane: Lane, class: Option<StorageClass>) -> &[u64; CELLS + 1] {
        &self.index(lane, class).calm_space
    }

    /// Returns what a replica on a server contributes to [`CALM_POINTS`], as of the last build of the grid: all of
    /// them before there is any history.
    pub(crate) fn calm_points(&self, server: &ServerView) -> u8 {
        self.tenants[server.tenant.number()].calm
    }

    /// Returns the hours of the week in which a server's tenant was busy: none before there is any history.
    pub(crate) fn busy_hours(&self, server: &ServerView) -> WeekHours {
        self.tenants[server.tenant.number()].busy_hours
    }
}

/// Converts a number from history into one that can be sorted and summed.
fn number(value: f64) -> f64 {
    if value.is_finite() {
        value.max(0.0)
    } else {
        0.0
    }
}

fn best_first(tenants: &[GridTenant]) -> Vec<TenantId> {
    let columns = Grid::build(tenants, Scope::Everything);
    // A tenant without servers is in no column, and nothing is drawn from it.
    let column = |tenant: usize| columns.cell(tenant).map_or(0, Cell::column);
    let mut order: Vec<usize> = (0..tenants.len()).collect();
    order.sort_by(|&a, &b| -> Ordering {
        let (of_a, of_b) = (&tenants[a], &tenants[b]);
        (column(a).cmp(&column(b)))
            .then(of_a.peak.total_cmp(&of_b.peak))
            .then(of_a.reimages.total_cmp(&of_b.reimages))
    });
    order.into_iter().map(|it| TenantId(it as u32)).collect()
}
