//! What placement policies know about tenants: only the past, as the namenode's own analysis
//! (`harvestfs_telemetry`) would derive it.

use harvestfs_namenode::engine::cluster::Cluster;
use harvestfs_telemetry::coincidence::Coincidence;
use harvestfs_telemetry::history::{self, HistoryError};
use harvestfs_telemetry::hours::WeekHours;
use harvestfs_telemetry::profile::{Pattern, TenantKey, TenantProfile};
use harvestfs_telemetry::reimages::{Estimator, MONTHS as MONTHS_KEPT, Months, rates, together};
use harvestfs_telemetry::spectrum::{Shape, Spectra};

use crate::datacentre::facts::Monthly;
use crate::datacentre::{Datacentre, MONTH_S, SLOT_S};

/// The history of a datacentre, as far as policies may know it.
pub struct History<'a> {
    datacentre: &'a Datacentre,
    monthly: Monthly,
    /// The CPU use of each tenant in the month before the simulated time.
    loads: Vec<TenantLoad>,
}

#[derive(Clone, Copy, Debug)]
struct TenantLoad {
    average: f64,
    peak: f64,
    busy_share: f64,
    busy_hours: WeekHours,
    pattern: Pattern,
}

impl TenantLoad {
    fn of(shape: Option<Shape>, busy_hours: WeekHours) -> Self {
        let average = shape.as_ref().map_or(0.0, |it| it.average);
        Self {
            average,
            peak: shape.as_ref().map_or(0.0, |it| it.peak),
            busy_share: shape.as_ref().map_or(0.0, |it| it.busy_share),
            busy_hours,
            pattern: shape
                .and_then(|it| it.pattern)
                .unwrap_or(Pattern::Unpredictable),
        }
    }
}

impl<'a> History<'a> {
    /// The history of a datacentre whose simulated time starts with the given month; CPU use is known for the
    /// month before.
    #[must_use]
    pub fn new(datacentre: &'a Datacentre, first_month: u32) -> Self {
        let month = first_month.saturating_sub(1);
        let tenants = datacentre.tenants.iter();
        let loads = tenants.map(|tenant| tenant.load.month(month)).collect();
        Self::with_loads(datacentre, loads)
    }

    /// As `new`, with the given CPU use: a series of samples per tenant.
    #[must_use]
    pub fn with_loads(datacentre: &'a Datacentre, loads: Vec<Vec<f32>>) -> Self {
        let mut spectra = Spectra::default();
        let loads = loads
            .into_iter()
            .map(|samples| {
                let samples = samples.into_iter().map(Some);
                // Hours are only compared with each other, so every month may be taken to begin with a week.
                let busy_hours = WeekHours::busy(0, SLOT_S as u32, samples.clone());
                TenantLoad::of(spectra.shape(SLOT_S as u32, samples), busy_hours)
            })
            .collect();
        Self {
            datacentre,
            monthly: Monthly::count(datacentre),
            loads,
        }
    }

    /// The datacentre.
    #[must_use]
    pub fn datacentre(&self) -> &'a Datacentre {
        self.datacentre
    }

    /// What is known about each tenant when a month starts; `None` for those that had no server before.
    #[must_use]
    pub fn profiles(&self, month: u32) -> Vec<Option<TenantProfile>> {
        let known: Vec<Months> = (0..self.loads.len())
            .map(|tenant| self.months(tenant, month))
            .collect();
        let rates = rates(&known, &Estimator::default());
        let tenants = self.loads.iter().zip(rates).enumerate();
        tenants
            .map(|(tenant, (load, rate))| {
                self.monthly.rate(tenant, month)?;
                Some(TenantProfile {
                    reimages_per_server_month: rate,
                    peak_cpu_share: load.peak,
                    average_cpu_share: load.average,
                    busy_share: load.busy_share,
                    busy_hours: load.busy_hours,
                    pattern: load.pattern,
                })
            })
            .collect()
    }

    /// Passes what is known when a month starts to the engine. It takes effect on the grid when that is rebuilt.
    ///
    /// # Errors
    /// As [`History::pairs`].
    pub fn tell(&self, cluster: &mut Cluster, month: u32) -> Result<(), HistoryError> {
        let tenants = self.datacentre.tenants.iter().zip(self.profiles(month));
        cluster.set_profiles(tenants.filter_map(|(tenant, it)| Some((&tenant.key, it?))));
        let until_s = u64::from(month) * MONTH_S;
        let known = self.known(until_s)?;
        let pairs = pairs(&known, until_s);
        cluster.set_together(pairs.iter().map(|(first, second)| (first, second)));
        cluster.set_coincidence(&Coincidence::of(&known, until_s as u32));
        Ok(())
    }

    /// Tenants that were reimaged together before a month starts, those most at risk first.
    ///
    /// # Errors
    /// When the namenode could not keep the history of so many servers or tenants.
    pub fn pairs(&self, month: u32) -> Result<Vec<(TenantKey, TenantKey)>, HistoryError> {
        let until_s = u64::from(month) * MONTH_S;
        Ok(pairs(&self.known(until_s)?, until_s))
    }

    /// What the namenode would know at the given time.
    fn known(&self, until_s: u64) -> Result<history::History, HistoryError> {
        let tenants = &self.datacentre.tenants;
        let mut known = history::History::default();
        for (number, server) in self.datacentre.servers.iter().enumerate() {
            for (index, &(from_s, owner)) in server.owners.iter().enumerate() {
                if index == 0 || from_s < until_s {
                    let key = &tenants[owner as usize].key;
                    known.owns(&format!("s{number}"), key, from_s as u32)?;
                }
            }
        }
        let reimages = self.datacentre.reimages.iter();
        for reimage in reimages.take_while(|it| it.at_s < until_s) {
            known.reimaged(&format!("s{}", reimage.server), reimage.at_s as u32)?;
        }
        Ok(known)
    }

    /// Reimages and servers of a tenant before a month, the newest first.
    fn months(&self, tenant: usize, end: u32) -> Months {
        let mut months = Months::default();
        for back in 0..(end as usize).min(MONTHS_KEPT) {
            let month = end as usize - 1 - back;
            months.reimages[back] = self.monthly.reimages[tenant][month];
            months.server_months[back] = self.monthly.servers[tenant][month];
        }
        months
    }
}

fn pairs(known: &history::History, until_s: u64) -> Vec<(TenantKey, TenantKey)> {
    let keys: Vec<&TenantKey> = known.tenants().map(|(_, key)| key).collect();
    let key = |tenant: history::TenantId| keys[tenant.0 as usize].clone();
    let pairs = together(known, until_s as u32).into_iter();
    pairs
        .map(|pair| (key(pair.first), key(pair.second)))
        .collect()
}
