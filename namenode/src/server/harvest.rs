//! What the controllers beside schedulers report about jobs on harvested resources; forgotten when they stop
//! reporting.

use std::collections::BTreeMap;

use harvestfs_protocol::harvest::{Harvest, HarvestReport};
use harvestfs_protocol::limits::{HARVEST_REPORT_EXPIRES, HARVEST_SCHEDULERS_MAX};
use serde::Serialize;

/// What the page shows of a scheduler.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WatchedScheduler {
    /// Its kind and address.
    pub scheduler: String,
    /// When its controller reported last, in milliseconds before now.
    pub age_ms: u64,
    /// Its last report.
    #[serde(flatten)]
    pub harvest: Harvest,
}

/// Totals over all schedulers, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HarvestTotals {
    /// Schedulers whose controllers report.
    pub schedulers: u64,
    /// Cores offered to them.
    pub offered_cores: u64,
    /// Memory offered to them, in MiB.
    pub offered_memory_mib: u64,
    /// Running jobs.
    pub jobs: u64,
    /// Containers of the jobs that were named.
    pub containers: u64,
    /// Cores used by these.
    pub used_cores: u64,
    /// Memory used by these, in MiB.
    pub used_memory_mib: u64,
}

/// The last report of each scheduler.
#[derive(Debug, Default)]
pub(super) struct Harvests {
    last: BTreeMap<String, (u64, Harvest)>,
}

impl Harvests {
    /// Accepts a report.
    ///
    /// # Errors
    /// If it is out of bounds, or too many other schedulers report.
    pub(super) fn take(&mut self, now_ms: u64, report: HarvestReport) -> Result<(), &'static str> {
        if let Some(fault) = report.fault() {
            return Err(fault);
        }
        self.last.retain(|_, (at_ms, _)| is_fresh(*at_ms, now_ms));
        let Some(harvest) = report.now else {
            self.last.remove(&report.scheduler);
            return Ok(());
        };
        let is_known = self.last.contains_key(&report.scheduler);
        if !is_known && self.last.len() >= HARVEST_SCHEDULERS_MAX {
            return Err("so many schedulers report already: wait until others have ended");
        }
        self.last.insert(report.scheduler, (now_ms, harvest));
        Ok(())
    }

    fn fresh(&self, now_ms: u64) -> impl Iterator<Item = (&String, u64, &Harvest)> {
        let all = self.last.iter();
        all.filter(move |(_, (at_ms, _))| is_fresh(*at_ms, now_ms))
            .map(move |(name, (at_ms, harvest))| (name, now_ms.saturating_sub(*at_ms), harvest))
    }

    pub(super) fn watched(&self, now_ms: u64) -> Vec<WatchedScheduler> {
        let watched = self
            .fresh(now_ms)
            .map(|(name, age_ms, harvest)| WatchedScheduler {
                scheduler: name.clone(),
                age_ms,
                harvest: harvest.clone(),
            });
        watched.collect()
    }

    pub(super) fn totals(&self, now_ms: u64) -> HarvestTotals {
        let mut totals = HarvestTotals::default();
        for (_, _, harvest) in self.fresh(now_ms) {
            totals.schedulers += 1;
            totals.jobs += harvest.jobs.len() as u64 + u64::from(harvest.jobs_left_out);
            for offer in &harvest.offers {
                totals.offered_cores = totals.offered_cores.saturating_add(offer.cores);
                totals.offered_memory_mib =
                    totals.offered_memory_mib.saturating_add(offer.memory_mib);
            }
            for place in harvest.jobs.iter().flat_map(|job| &job.places) {
                totals.containers += u64::from(place.containers);
                totals.used_cores += u64::from(place.cores);
                totals.used_memory_mib = totals.used_memory_mib.saturating_add(place.memory_mib);
            }
        }
        totals
    }
}

fn is_fresh(at_ms: u64, now_ms: u64) -> bool {
    u128::from(now_ms.saturating_sub(at_ms)) < HARVEST_REPORT_EXPIRES.as_millis()
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::harvest::{ClassOffer, HarvestedJob, JobPlace};

    use super::*;

    fn report(scheduler: &str, now: Option<Harvest>) -> HarvestReport {
        HarvestReport {
            scheduler: scheduler.to_owned(),
            now,
        }
    }

    fn harvest(cores: u32) -> Harvest {
        Harvest {
            offers: vec![ClassOffer {
                cores: 16,
                memory_mib: 100,
                ..ClassOffer::default()
            }],
            jobs: vec![HarvestedJob {
                places: vec![JobPlace {
                    containers: 2,
                    cores,
                    memory_mib: 7,
                    ..JobPlace::default()
                }],
                ..HarvestedJob::default()
            }],
            jobs_left_out: 1,
        }
    }

    #[test]
    fn what_is_not_repeated_is_forgotten() {
        let mut harvests = Harvests::default();
        harvests.take(0, report("a", Some(harvest(1)))).unwrap();
        harvests
            .take(20_000, report("b", Some(harvest(2))))
            .unwrap();
        harvests
            .take(20_000, report("b", Some(harvest(4))))
            .unwrap();
        let both = HarvestTotals {
            schedulers: 2,
            offered_cores: 32,
            offered_memory_mib: 200,
            jobs: 4,
            containers: 4,
            used_cores: 5,
            used_memory_mib: 14,
        };
        assert_eq!(harvests.totals(29_999), both);
        let watched = harvests.watched(30_000);
        assert_eq!((watched.len(), &watched[0].scheduler[..]), (1, "b"));
        assert_eq!(watched[0].age_ms, 10_000);
        harvests.take(30_000, report("b", None)).unwrap();
        assert_eq!(harvests.totals(30_000), HarvestTotals::default());
        assert!(harvests.last.is_empty());
    }

    #[test]
    fn schedulers_are_bounded() {
        let mut harvests = Harvests::default();
        for number in 0..HARVEST_SCHEDULERS_MAX {
            let name = number.to_string();
            harvests.take(0, report(&name, Some(harvest(1)))).unwrap();
        }
        let other = || report("other", Some(harvest(1)));
        assert!(harvests.take(1, other()).is_err());
        assert_eq!(harvests.take(1, report("0", Some(harvest(1)))), Ok(()));
        assert_eq!(harvests.take(40_000, other()), Ok(()));
        assert!(harvests.take(0, report("", None)).is_err());
    }
}
