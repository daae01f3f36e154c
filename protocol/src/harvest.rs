//! Reports of the controllers beside schedulers: which jobs run on harvested resources, so that operators can
//! see it.

use serde::{Deserialize, Serialize};

use crate::limits::{
    HARVEST_CLASSES_MAX, HARVEST_JOBS_MAX, HARVEST_NAME_BYTES_MAX, HARVEST_PLACES_MAX,
};

/// The report of a controller. It is valid for [`crate::limits::HARVEST_REPORT_EXPIRES`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestReport {
    /// The scheduler: its kind and address. A report replaces the previous one of the same scheduler.
    pub scheduler: String,
    /// The current state; none when the controller ends.
    pub now: Option<Harvest>,
}

/// The harvested resources that a scheduler is offered, and the jobs that it runs on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Harvest {
    /// What the nodes offer to jobs, by label.
    pub offers: Vec<ClassOffer>,
    /// The jobs that run, at most [`HARVEST_JOBS_MAX`], with at most [`HARVEST_PLACES_MAX`] places of all jobs
    /// together.
    pub jobs: Vec<HarvestedJob>,
    /// Number of jobs that are not in `jobs`.
    pub jobs_left_out: u32,
}

/// The resources that the nodes with a label offer to jobs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClassOffer {
    /// The label of a class; none for nodes in no class.
    pub label: Option<String>,
    /// Number of nodes.
    pub nodes: u32,
    /// Number of cores of all of them.
    pub cores: u64,
    /// Memory of all of them in MiB.
    pub memory_mib: u64,
}

/// A job that runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HarvestedJob {
    /// Its id in the scheduler.
    pub id: String,
    /// Its name for people.
    pub name: String,
    /// The user who runs it.
    pub user: String,
    /// The label of the class that it requested.
    pub label: Option<String>,
    /// The servers on which it runs.
    pub places: Vec<JobPlace>,
}

/// A server on which a job runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobPlace {
    /// Name of the server; that of the node when it is not a server of the cluster.
    pub server: String,
    /// Number of containers or pods.
    pub containers: u32,
    /// Number of their cores.
    pub cores: u32,
    /// Their memory in MiB.
    pub memory_mib: u64,
}

impl HarvestReport {
    /// Returns what is wrong with it, if anything.
    #[must_use]
    pub fn fault(&self) -> Option<&'static str> {
        let is_long = |text: &String| text.len() > HARVEST_NAME_BYTES_MAX;
        if self.scheduler.is_empty() || is_long(&self.scheduler) {
            return Some("a scheduler's name is from 1 to 256 bytes long");
        }
        let now = self.now.as_ref()?;
        let places: usize = now.jobs.iter().map(|job| job.places.len()).sum();
        if now.offers.len() > HARVEST_CLASSES_MAX {
            return Some("too many classes");
        }
        if now.jobs.len() > HARVEST_JOBS_MAX || places > HARVEST_PLACES_MAX {
            return Some("too many jobs, or places of them");
        }
        let names = now.jobs.iter().flat_map(|job| {
            let servers = job.places.iter().map(|place| &place.server);
            let label = job.label.iter();
            [&job.id, &job.name, &job.user]
                .into_iter()
                .chain(label)
                .chain(servers)
        });
        let labels = now.offers.iter().filter_map(|offer| offer.label.as_ref());
        let has_long_name = names.chain(labels).any(is_long);
        has_long_name.then_some("a name is at most 256 bytes long")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_bounded() {
        let job = |places| HarvestedJob {
            places: vec![JobPlace::default(); places],
            ..HarvestedJob::default()
        };
        let report = |harvest| HarvestReport {
            scheduler: "yarn".to_owned(),
            now: Some(harvest),
        };
        let jobs = |jobs| Harvest {
            jobs,
            ..Harvest::default()
        };
        let most = jobs(vec![job(HARVEST_PLACES_MAX)]);
        assert_eq!(report(most).fault(), None);
        let places = jobs(vec![job(HARVEST_PLACES_MAX), job(1)]);
        assert!(report(places).fault().is_some());
        let many = jobs(vec![job(0); HARVEST_JOBS_MAX + 1]);
        assert!(report(many).fault().is_some());
        let mut long = job(1);
        long.places[0].server = "x".repeat(HARVEST_NAME_BYTES_MAX + 1);
        assert!(report(jobs(vec![long])).fault().is_some());
        let ended = |scheduler: String| HarvestReport {
            scheduler,
            now: None,
        };
        assert!(ended(String::new()).fault().is_some());
        assert_eq!(ended("x".repeat(HARVEST_NAME_BYTES_MAX)).fault(), None);
    }
}
