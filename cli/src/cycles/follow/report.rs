//! Reports to the namenode which jobs run where on harvested resources, so that its page and metrics show them. Runs
//! separately from the controller, which must not wait for it.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::harvest::{ClassOffer, Harvest, HarvestReport, HarvestedJob, JobPlace};
use harvestfs_protocol::limits::{
    HARVEST_CLASSES_MAX, HARVEST_JOBS_MAX, HARVEST_NAME_BYTES_MAX, HARVEST_PLACES_MAX,
};
use parking_lot::Mutex;
use tokio::time::{sleep, timeout};

use super::Outage;
use super::owners::Namenode;

/// Interval of reports, several of which fit into the time for which one is valid.
const INTERVAL: Duration = Duration::from_secs(5);
/// Deadline for querying the jobs.
const DEADLINE: Duration = Duration::from_secs(10);
/// Deadline for the final report.
const END_DEADLINE: Duration = Duration::from_secs(2);

/// A node, as the controller last saw it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeNow {
    /// The HarvestFS server that runs on it.
    pub server: Option<String>,
    /// The node's host name.
    pub host: String,
    /// The label of its class.
    pub label: Option<String>,
    /// Number of cores that it offers.
    pub cores: u32,
    /// Memory that it offers, in MiB.
    pub memory_mib: u64,
}

/// The nodes by their ids, which the controller keeps up to date.
pub type Nodes = Arc<Mutex<BTreeMap<String, NodeNow>>>;

/// A running job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunningJob {
    /// Its id in the scheduler.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The user that owns it.
    pub user: String,
    /// The label that it requested.
    pub label: Option<String>,
    /// The resources that it uses on each node, by node id.
    pub on: BTreeMap<String, Used>,
}

/// The resources that a job uses on a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Number of containers or pods.
    pub containers: u32,
    /// Number of their cores.
    pub cores: u32,
    /// Their memory in MiB.
    pub memory_mib: u64,
}

impl Used {
    /// Adds one container.
    pub fn add(&mut self, cores: u32, memory_mib: u64) {
        self.containers = self.containers.saturating_add(1);
        self.cores = self.cores.saturating_add(cores);
        self.memory_mib = self.memory_mib.saturating_add(memory_mib);
    }
}

/// A source of the running jobs.
pub trait Jobs {
    /// Queries the running jobs. Also returns how many were left out.
    async fn jobs(&mut self) -> anyhow::Result<(Vec<RunningJob>, u32)>;
}

fn short(text: &str) -> String {
    let mut end = text.len().min(HARVEST_NAME_BYTES_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Builds a report within its size limits.
fn harvest(nodes: &BTreeMap<String, NodeNow>, jobs: Vec<RunningJob>, left_out: u32) -> Harvest {
    let mut offers: BTreeMap<Option<&str>, ClassOffer> = BTreeMap::new();
    // Nodes that are not controlled are not offered.
    for node in nodes.values().filter(|node| node.server.is_some()) {
        let offer = offers.entry(node.label.as_deref()).or_default();
        offer.nodes += 1;
        offer.cores += u64::from(node.cores);
        offer.memory_mib = offer.memory_mib.saturating_add(node.memory_mib);
    }
    let offers = offers.into_iter().map(|(label, offer)| ClassOffer {
        label: label.map(short),
        ..offer
    });
    let all = jobs.len();
    let mut places_left = HARVEST_PLACES_MAX;
    let mut reported = Vec::new();
    for job in jobs.into_iter().take(HARVEST_JOBS_MAX) {
        let places = job.on.into_iter().take(places_left).map(|(id, used)| {
            let node = nodes.get(&id);
            let name = node.map_or(&id, |node| node.server.as_ref().unwrap_or(&node.host));
            JobPlace {
                server: short(name),
                containers: used.containers,
                cores: used.cores,
                memory_mib: used.memory_mib,
            }
        });
        let places: Vec<JobPlace> = places.collect();
        places_left -= places.len();
        reported.push(HarvestedJob {
            id: short(&job.id),
            name: short(&job.name),
            user: short(&job.user),
            label: job.label.as_deref().map(short),
            places,
        });
    }
    let more = u32::try_from(all - reported.len()).unwrap_or(u32::MAX);
    Harvest {
        offers: offers.take(HARVEST_CLASSES_MAX).collect(),
        jobs: reported,
        jobs_left_out: left_out.saturating_add(more),
    }
}

/// Reports periodically until it is dropped or ended.
pub struct Reporter<J> {
    /// The scheduler: its kind and address.
    pub scheduler: String,
    /// The source of the running jobs.
    pub jobs: J,
    /// The receiver of the reports.
    pub namenode: Namenode,
    /// The nodes as the controller sees them.
    pub nodes: Nodes,
}

impl<J: Jobs> Reporter<J> {
    /// Reports forever.
    pub async fn run(&mut self) {
        let mut asked = Outage::new("what tells which jobs run");
        let mut told = Outage::new("the namenode, to be told which jobs run,");
        loop {
            let jobs = timeout(DEADLINE, self.jobs.jobs()).await;
            let jobs = asked.note(jobs.unwrap_or_else(|late| Err(late.into())));
            // The offers are known even if the jobs are not.
            let (jobs, left_out) = jobs.unwrap_or_default();
            let now = harvest(&self.nodes.lock().clone(), jobs, left_out);
            told.note(self.tell(Some(now)).await);
            sleep(INTERVAL).await;
        }
    }

    /// Reports that the controller ends. If this fails, the namenode finds out by itself.
    pub async fn end(&mut self) {
        let _ = timeout(END_DEADLINE, self.tell(None)).await;
    }

    async fn tell(&mut self, now: Option<Harvest>) -> anyhow::Result<()> {
        let report = HarvestReport {
            scheduler: short(&self.scheduler),
            now,
        };
        self.namenode.tell(report).await
    }
}

/// Runs a controller, and its reports concurrently.
///
/// # Errors
/// Those of the controller.
pub async fn beside<J: Jobs>(
    controller: impl Future<Output = anyhow::Result<()>>,
    mut reporter: Reporter<J>,
) -> anyhow::Result<()> {
    let ended = {
        let reports = async {
            reporter.run().await;
            pending().await
        };
        tokio::select! {
            biased;
            ended = controller => ended,
            never = reports => never,
        }
    };
    reporter.end().await;
    ended
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(server: Option<&str>, label: Option<&str>, cores: u32) -> NodeNow {
        NodeNow {
            server: server.map(str::to_owned),
            host: "host.example".to_owned(),
            label: label.map(str::to_owned),
            cores,
            memory_mib: 100,
        }
    }

    #[test]
    fn jobs_are_on_servers_and_offers_by_class() {
        let nodes: BTreeMap<String, NodeNow> = [
            ("n1", node(Some("s1"), Some("harvestfs-0"), 4)),
            ("n2", node(Some("s2"), Some("harvestfs-0"), 2)),
            ("n3", node(None, None, 8)),
            ("n4", node(Some("s4"), None, 1)),
        ]
        .map(|(id, node)| (id.to_owned(), node))
        .into();
        let mut used = Used::default();
        used.add(2, 30);
        used.add(1, 30);
        let job = RunningJob {
            name: "é".repeat(200),
            on: ["n1", "n3", "other"].map(|id| (id.to_owned(), used)).into(),
            ..RunningJob::default()
        };
        let found = harvest(&nodes, vec![job], 3);
        let offers: Vec<_> = found.offers.iter().map(|it| (it.nodes, it.cores)).collect();
        assert_eq!(offers, [(1, 1), (2, 6)]);
        let places: Vec<_> = found.jobs[0]
            .places
            .iter()
            .map(|it| &it.server[..])
            .collect();
        assert_eq!(places, ["s1", "host.example", "other"]);
        assert_eq!(found.jobs[0].places[0].cores, 3);
        assert_eq!((found.jobs[0].name.len(), found.jobs_left_out), (256, 3));
    }

    #[test]
    fn reports_are_within_their_bounds() {
        let on = |count: usize| (0..count).map(|it| (it.to_string(), Used::default()));
        let job = |count| RunningJob {
            on: on(count).collect(),
            ..RunningJob::default()
        };
        let mut jobs = vec![job(HARVEST_PLACES_MAX - 1), job(5)];
        jobs.resize(HARVEST_JOBS_MAX + 7, job(1));
        let now = harvest(&BTreeMap::new(), jobs, 1);
        assert_eq!((now.jobs[1].places.len(), now.jobs_left_out), (1, 8));
        let report = HarvestReport {
            scheduler: "yarn".to_owned(),
            now: Some(now),
        };
        assert_eq!(report.fault(), None);
    }
}
