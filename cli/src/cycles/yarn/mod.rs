//! `harvestfs cycles yarn`: controls the nodes of a Hadoop ResourceManager.

mod jobs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::Args;
use futures::StreamExt;
use harvestfs_cycles::controller::{Action, Node};
use harvestfs_cycles::reserve::Resources;
use harvestfs_http::client::{Bytes, Client, ClientError, Method};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::json;

use super::follow::owners::Namenode;
use super::follow::report::{self, Reporter};
use super::follow::{FollowArgs, Follower, Manager, Seen, State};
use crate::admin::link;
use crate::cluster::ClusterArgs;
use crate::daemon::StopSignal;

/// Requests to the ResourceManager at a time.
const AT_A_TIME: usize = 16;
/// Before all paths.
const ROOT: &str = "/ws/v1/cluster";
const JSON: &str = "application/json";

/// Arguments of `harvestfs cycles yarn`.
#[derive(Debug, Args)]
#[command(
    after_help = "Needs Hadoop 3.4 or newer, with node labels (yarn.node-labels.enabled) and queues that may use the labels\n\
                  harvestfs-0, harvestfs-1 and so on: see docs/CYCLES.md.\n\n\
                  Examples:\n  \
                  harvestfs cycles yarn --resource-manager http://rm.example:8088 --user yarn\n  \
                  harvestfs cycles yarn --resource-manager http://127.0.0.1:8088 --server datanode-1=localhost:45454"
)]
pub struct YarnArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Address of the ResourceManager's web services, http://HOST:8088 or https://HOST:8090; given several times, those that take
    /// over from each other.
    #[arg(
        long,
        env = "HARVESTFS_RESOURCE_MANAGER",
        value_name = "URL",
        required = true
    )]
    resource_manager: Vec<String>,
    /// The user that the ResourceManager is told (`simple` authentication): one of yarn.admin.acl. There is no Kerberos.
    #[arg(long, default_value = "yarn", value_name = "USER")]
    user: String,
    /// Certificates of authorities in PEM, for https; on Debian /etc/ssl/certs/ca-certificates.crt.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// How long containers that eat into an owner's reserve may take to end by themselves before YARN kills them, the youngest
    /// first.
    #[arg(long, default_value = "0s", value_name = "TIME")]
    grace: humantime::Duration,
    /// Where it is kept what nodes have in all [default: cycles-yarn.json beside the client's configuration].
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// Take what nodes have now for all that they have, where another controller's labels are on them and nothing is known of it.
    #[arg(long)]
    adopt: bool,
    #[command(flatten)]
    follow: FollowArgs,
}

/// A ResourceManager, or several of which one is active.
#[derive(Debug)]
pub struct Yarn {
    clients: Vec<Client>,
    /// The one that answered last.
    active: usize,
    user: String,
    /// Milliseconds in which what is too much has to end.
    grace_ms: i64,
    /// Labels that it knows.
    added: BTreeSet<String>,
}

#[derive(Deserialize)]
struct NodesAnswer {
    nodes: Option<Nodes>,
}

#[derive(Deserialize)]
struct Nodes {
    #[serde(default)]
    node: OneOrMany<YarnNode>,
}

/// Lists of one element are that element in some versions.
#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    Many(Vec<T>),
    One(T),
}

impl<T> Default for OneOrMany<T> {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl<T> From<OneOrMany<T>> for Vec<T> {
    fn from(it: OneOrMany<T>) -> Self {
        match it {
            OneOrMany::Many(all) => all,
            OneOrMany::One(one) => vec![one],
        }
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct YarnNode {
    id: String,
    state: String,
    node_host_name: String,
    total_resource: YarnResource,
    #[serde(default)]
    node_labels: OneOrMany<String>,
    /// In percent of what the server has.
    mem_utilization: Option<f64>,
    resource_utilization: Option<Utilization>,
}

#[derive(Deserialize)]
struct YarnResource {
    memory: u64,
    #[serde(rename = "vCores")]
    v_cores: u32,
}

#[derive(Deserialize)]
struct Utilization {
    #[serde(rename = "nodePhysicalMemoryMB")]
    node_mib: f64,
    #[serde(rename = "aggregatedContainersPhysicalMemoryMB")]
    containers_mib: f64,
}

impl YarnNode {
    /// Memory that is in use and not by containers.
    fn memory_share(&self) -> Option<f64> {
        let used = self.resource_utilization.as_ref()?;
        let share = self.mem_utilization? / 100.0;
        let others = share * (1.0 - used.containers_mib / used.node_mib);
        others.is_finite().then(|| others.clamp(0.0, 1.0))
    }

    fn seen(self) -> Seen {
        Seen {
            memory_share: self.memory_share(),
            host: self.node_host_name,
            node: Node {
                id: self.id,
                server: None,
                capacity: Resources {
                    cores: self.total_resource.v_cores,
                    memory_mib: self.total_resource.memory,
                },
                total: None,
                labels: self.node_labels.into(),
            },
        }
    }
}

impl Yarn {
    /// Of these addresses.
    ///
    /// # Errors
    /// When one of them is none.
    pub fn new(
        addresses: &[String],
        user: &str,
        authorities: Option<&[u8]>,
        grace_ms: i64,
    ) -> Result<Self, ClientError> {
        let clients = addresses.iter().map(|address| {
            let client = Client::new(address, authorities)?;
            // Required by the protection against cross-site request forgery.
            client.with_header("x-xsrf-header", "harvestfs")
        });
        Ok(Self {
            clients: clients.collect::<Result<_, _>>()?,
            active: 0,
            user: utf8_percent_encode(user, NON_ALPHANUMERIC).to_string(),
            grace_ms,
            added: BTreeSet::new(),
        })
    }

    async fn post(&self, path: &str, body: serde_json::Value) -> Result<Bytes, ClientError> {
        let path = format!("{ROOT}/{path}?user.name={}", self.user);
        let body = Bytes::from(body.to_string());
        self.clients[self.active]
            .ask(Method::POST, &path, JSON, body)
            .await
    }

    async fn ask_for_nodes(&self) -> anyhow::Result<Vec<Seen>> {
        let path = format!("{ROOT}/nodes?user.name={}", self.user);
        let client = &self.clients[self.active];
        let body = client.get(&path).await?;
        let answer: NodesAnswer = serde_json::from_slice(&body).with_context(|| {
            format!(
                "{} answered {path} with something else than a ResourceManager of Hadoop 3.4 or newer that is active",
                client.address()
            )
        })?;
        let nodes: Vec<YarnNode> = answer.nodes.map_or_else(Vec::new, |it| it.node.into());
        let nodes = nodes.into_iter().filter(|node| node.state == "RUNNING");
        Ok(nodes.map(YarnNode::seen).collect())
    }

    async fn label(&mut self, labels: BTreeMap<String, Option<String>>) -> anyhow::Result<()> {
        let new: BTreeSet<String> = labels.values().flatten().cloned().collect();
        let new: Vec<String> = new.difference(&self.added).cloned().collect();
        if !new.is_empty() {
            // Not exclusive: jobs without a label may use idle resources there.
            let infos = new
                .iter()
                .map(|label| json!({ "name": label, "exclusivity": "false" }));
            let body = json!({ "nodeLabelInfo": infos.collect::<Vec<_>>() });
            self.post("add-node-labels", body)
                .await
                .context("labels cannot be added (is yarn.node-labels.enabled set?)")?;
            self.added.extend(new);
        }
        let entries = labels.iter().map(|(node, label)| {
            let labels: Vec<&String> = label.iter().collect();
            json!({ "nodeId": node, "labels": labels })
        });
        let body = json!({ "nodeToLabels": entries.collect::<Vec<_>>() });
        let replaced = self.post("replace-node-to-labels", body).await;
        if replaced.is_err() {
            // The ResourceManager may have forgotten the labels.
            self.added.clear();
        }
        replaced.context("nodes cannot be labelled")?;
        Ok(())
    }

    async fn resize(&self, node: &str, capacity: Resources, evict: bool) -> anyhow::Result<()> {
        let body = json!({
            "resource": { "memory": capacity.memory_mib, "vCores": capacity.cores },
            "overCommitTimeout": if evict { self.grace_ms } else { -1 },
        });
        let id = utf8_percent_encode(node, NON_ALPHANUMERIC);
        self.post(&format!("nodes/{id}/resource"), body)
            .await
            .with_context(|| format!("the capacity of {node} cannot be changed"))?;
        Ok(())
    }
}

impl Manager for Yarn {
    const NAME: &'static str = "the ResourceManager";

    async fn nodes(&mut self) -> anyhow::Result<Vec<Seen>> {
        let nodes = self.ask_for_nodes().await;
        if nodes.is_err() {
            // Another one may be active, and may not know the labels.
            self.active = (self.active + 1) % self.clients.len();
            self.added.clear();
        }
        nodes
    }

    async fn apply(&mut self, actions: Vec<Action>) -> Vec<anyhow::Error> {
        let mut labels = BTreeMap::new();
        let mut sizes = Vec::new();
        for action in actions {
            match action {
                Action::Label { node, label } => {
                    labels.insert(node, label);
                }
                Action::Resize {
                    node,
                    capacity,
                    evict,
                } => sizes.push((node, capacity, evict)),
            }
        }
        // The owners' needs come first, so capacities are changed before labels.
        let this = &*self;
        let resized = futures::stream::iter(sizes).map(|(node, capacity, evict)| async move {
            this.resize(&node, capacity, evict).await
        });
        let resized: Vec<anyhow::Result<()>> = resized.buffer_unordered(AT_A_TIME).collect().await;
        let mut errors: Vec<anyhow::Error> = resized.into_iter().filter_map(Result::err).collect();
        if !labels.is_empty()
            && let Err(error) = self.label(labels).await
        {
            errors.push(error);
        }
        errors
    }
}

/// Runs `harvestfs cycles yarn`.
///
/// # Errors
/// When arguments contradict each other, or the state cannot be stored.
pub fn run(args: &YarnArgs) -> anyhow::Result<()> {
    let authorities = args
        .ca
        .as_deref()
        .map(|path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display())));
    let grace_ms = i64::try_from(args.grace.as_millis())
        .ok()
        .filter(|ms| *ms <= i64::from(i32::MAX))
        .ok_or_else(|| anyhow!("--grace is longer than YARN waits"))?;
    let authorities = authorities.transpose()?;
    let yarn = || {
        Yarn::new(
            &args.resource_manager,
            &args.user,
            authorities.as_deref(),
            grace_ms,
        )
    };
    let (yarn, jobs) = (yarn()?, yarn()?);
    let state = match &args.state {
        Some(path) => path.clone(),
        None => args
            .cluster
            .client_file("admin")?
            .with_file_name("cycles-yarn.json"),
    };
    let state = State::load(state)?;
    let owners = Namenode::new(&args.cluster);
    link::block_on(async {
        let mut signals = StopSignal::listen()?;
        let mut follower = Follower::new(&args.follow, args.adopt, yarn, owners, Some(state));
        println!(
            "ready: nodes of {} follow their owners until Ctrl-C",
            args.resource_manager.join(", ")
        );
        let reporter = Reporter {
            scheduler: format!("YARN at {}", args.resource_manager.join(", ")),
            jobs,
            namenode: Namenode::new(&args.cluster),
            nodes: follower.shown(),
        };
        report::beside(follower.run(signals.received()), reporter).await
    })
}
