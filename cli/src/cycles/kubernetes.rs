//! `harvestfs cycles kubernetes`: controls the nodes of a Kubernetes cluster, with labels and extended resources.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::Args;
use futures::StreamExt;
use harvestfs_cycles::controller::{Action, Node};
use harvestfs_cycles::reserve::Resources;
use harvestfs_http::client::{Bytes, Client, Method};
use harvestfs_protocol::limits::HARVEST_JOBS_MAX;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde_json::{Value, json};

use super::follow::owners::Namenode;
use super::follow::report::{self, Jobs, Reporter, RunningJob};
use super::follow::{FollowArgs, Follower, Manager, Seen};
use crate::admin::link;
use crate::cluster::ClusterArgs;
use crate::daemon::StopSignal;

/// The label of a node's class.
const CLASS_LABEL: &str = "harvestfs.io/class";
/// What pods ask for: cores that owners leave.
const CORES: &str = "harvestfs.io/cores";
/// What pods ask for: MiB of memory that owners leave.
const MEMORY_MIB: &str = "harvestfs.io/memory-mib";

/// Requests at a time.
const AT_A_TIME: usize = 16;
/// Nodes in one answer.
const NODES_PER_ANSWER: u32 = 500;
const MERGE_PATCH: &str = "application/merge-patch+json";

/// Arguments of `harvestfs cycles kubernetes`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
                  harvestfs cycles kubernetes --api-server http://127.0.0.1:8001\n  \
                  harvestfs cycles kubernetes --api-server https://kubernetes.default.svc \\\n      \
                  --ca /var/run/secrets/kubernetes.io/serviceaccount/ca.crt \\\n      \
                  --token-file /var/run/secrets/kubernetes.io/serviceaccount/token")]
pub struct KubernetesArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    /// Address of the API server; `kubectl proxy` gives one without TLS on this machine.
    #[arg(long, value_name = "URL")]
    api_server: String,
    /// Certificates of authorities in PEM, for https.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// File of the bearer token; read anew each time, for it changes.
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    #[command(flatten)]
    follow: FollowArgs,
}

/// An API server.
#[derive(Debug)]
pub struct Kubernetes {
    address: String,
    ca: Option<PathBuf>,
    token_file: Option<PathBuf>,
}

#[derive(Deserialize)]
struct NodeList {
    metadata: ListMetadata,
    items: Vec<KubernetesNode>,
}

#[derive(Deserialize)]
struct ListMetadata {
    #[serde(default, rename = "continue")]
    go_on: Option<String>,
}

#[derive(Deserialize)]
struct KubernetesNode {
    metadata: Metadata,
    status: Status,
}

#[derive(Deserialize)]
struct Metadata {
    name: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Status {
    #[serde(default)]
    capacity: BTreeMap<String, String>,
    #[serde(default)]
    allocatable: BTreeMap<String, String>,
}

/// A quantity such as `4`, `3500m` or `16Gi`.
fn quantity(text: &str) -> Option<f64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.');
    let (number, unit) = text.split_at(digits.unwrap_or(text.len()));
    let factor = match unit {
        "" => 1.0,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => f64::from(1 << 10),
        "Mi" => f64::from(1 << 20),
        "Gi" => f64::from(1 << 30),
        "Ti" => f64::from(1 << 20) * f64::from(1 << 20),
        _ => return None,
    };
    Some(number.parse::<f64>().ok()? * factor)
}

impl KubernetesNode {
    /// None without the size of the node, which its kubelet says soon.
    fn seen(self) -> Option<Seen> {
        let (capacity, allocatable) = (&self.status.capacity, &self.status.allocatable);
        let number = |from: &BTreeMap<String, String>, name| quantity(from.get(name)?);
        let total = Resources {
            cores: number(capacity, "cpu")?.floor() as u32,
            memory_mib: (number(capacity, "memory")? / f64::from(1 << 20)).floor() as u64,
        };
        // Both are set to the same value: if they differ, one was lost.
        let offered = |name| {
            let told = [capacity, allocatable].map(|from| number(from, name).unwrap_or(0.0));
            (told[0] == told[1]).then_some(told[0])
        };
        let capacity = match (offered(CORES), offered(MEMORY_MIB)) {
            (Some(cores), Some(memory_mib)) => Resources {
                cores: cores as u32,
                memory_mib: memory_mib as u64,
            },
            _ => Resources {
                cores: u32::MAX,
                memory_mib: u64::MAX,
            },
        };
        Some(Seen {
            host: self.metadata.name.clone(),
            memory_share: None,
            node: Node {
                labels: self
                    .metadata
                    .labels
                    .get(CLASS_LABEL)
                    .cloned()
                    .into_iter()
                    .collect(),
                id: self.metadata.name,
                server: None,
                capacity,
                total: Some(total),
            },
        })
    }
}

impl Kubernetes {
    /// At an address.
    pub fn new(address: &str, ca: Option<&Path>, token_file: Option<&Path>) -> Self {
        Self {
            address: address.to_owned(),
            ca: ca.map(Path::to_owned),
            token_file: token_file.map(Path::to_owned),
        }
    }

    fn client(&self) -> anyhow::Result<Client> {
        let read = |path: &PathBuf| {
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
        };
        let authorities = self.ca.as_ref().map(read).transpose()?;
        let client = Client::new(&self.address, authorities.as_deref())?;
        let Some(token) = self.token_file.as_ref().map(read).transpose()? else {
            return Ok(client);
        };
        let token = String::from_utf8(token).context("the token is no text")?;
        Ok(client.with_header("authorization", &format!("Bearer {}", token.trim()))?)
    }
}

/// What a node is told: its path, and what is different from now on.
fn patch(action: Action) -> (String, Value) {
    let path = |node: &str| {
        format!(
            "/api/v1/nodes/{}",
            utf8_percent_encode(node, NON_ALPHANUMERIC)
        )
    };
    match action {
        Action::Label { node, label } => {
            let labels = json!({ "metadata": { "labels": { CLASS_LABEL: label } } });
            (path(&node), labels)
        }
        Action::Resize { node, capacity, .. } => {
            let offered = json!({
                CORES: capacity.cores.to_string(),
                MEMORY_MIB: capacity.memory_mib.to_string(),
            });
            // The kubelet copies the capacity to the allocatable resources, but only after some seconds.
            let status = json!({ "status": { "capacity": &offered, "allocatable": &offered } });
            (format!("{}/status", path(&node)), status)
        }
    }
}

impl Manager for Kubernetes {
    const NAME: &'static str = "the API server";

    async fn nodes(&mut self) -> anyhow::Result<Vec<Seen>> {
        let client = self.client()?;
        let mut nodes = Vec::new();
        let mut go_on = String::new();
        loop {
            let path = format!("/api/v1/nodes?limit={NODES_PER_ANSWER}{go_on}");
            let list: NodeList = serde_json::from_slice(&client.get(&path).await?)
                .with_context(|| format!("{} is no API server of Kubernetes", self.address))?;
            nodes.extend(list.items.into_iter().filter_map(KubernetesNode::seen));
            match list.metadata.go_on.filter(|it| !it.is_empty()) {
                None => return Ok(nodes),
                Some(place) => {
                    let place = utf8_percent_encode(&place, NON_ALPHANUMERIC);
                    go_on = format!("&continue={place}");
                }
            }
        }
    }

    async fn apply(&mut self, actions: Vec<Action>) -> Vec<anyhow::Error> {
        if actions.is_empty() {
            return Vec::new();
        }
        let client = match self.client() {
            Ok(client) => client,
            Err(error) => return vec![error],
        };
        let client = &client;
        let told = futures::stream::iter(actions).map(|action| async move {
            let (path, patch) = patch(action);
            let body = Bytes::from(patch.to_string());
            client.ask(Method::PATCH, &path, MERGE_PATCH, body).await
        });
        let told: Vec<_> = told.buffer_unordered(AT_A_TIME).collect().await;
        told.into_iter()
            .filter_map(|told| Some(told.err()?.into()))
            .collect()
    }
}

#[derive(Deserialize)]
struct PodList {
    metadata: ListMetadata,
    items: Vec<Pod>,
}

#[derive(Deserialize)]
struct Pod {
    metadata: PodMetadata,
    spec: PodSpec,
}

#[derive(Deserialize)]
struct PodMetadata {
    name: String,
    #[serde(default)]
    namespace: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodSpec {
    #[serde(default)]
    node_name: Option<String>,
    #[serde(default)]
    node_selector: BTreeMap<String, String>,
    #[serde(default)]
    service_account_name: String,
    containers: Vec<PodContainer>,
}

#[derive(Deserialize)]
struct PodContainer {
    #[serde(default)]
    resources: PodResources,
}

#[derive(Default, Deserialize)]
struct PodResources {
    #[serde(default)]
    requests: BTreeMap<String, String>,
}

impl Pod {
    /// None unless it asks for what owners leave, and runs somewhere.
    fn job(self) -> Option<RunningJob> {
        let node = self.spec.node_name?;
        let asked = |name| -> f64 {
            let containers = self.spec.containers.iter();
            let asked = containers.filter_map(|it| quantity(it.resources.requests.get(name)?));
            asked.sum()
        };
        let (cores, memory_mib) = (asked(CORES), asked(MEMORY_MIB));
        if cores <= 0.0 && memory_mib <= 0.0 {
            return None;
        }
        let mut job = RunningJob {
            id: format!("{}/{}", self.metadata.namespace, self.metadata.name),
            name: self.metadata.name,
            user: self.spec.service_account_name,
            label: self.spec.node_selector.get(CLASS_LABEL).cloned(),
            on: BTreeMap::new(),
        };
        let used = job.on.entry(node).or_default();
        used.add(cores as u32, memory_mib as u64);
        Some(job)
    }
}

impl Jobs for Kubernetes {
    async fn jobs(&mut self) -> anyhow::Result<(Vec<RunningJob>, u32)> {
        let client = self.client()?;
        let mut jobs = Vec::new();
        let mut left_out = 0_u32;
        let mut go_on = String::new();
        loop {
            let running = "fieldSelector=status.phase%3DRunning";
            let path = format!("/api/v1/pods?{running}&limit={NODES_PER_ANSWER}{go_on}");
            let list: PodList = serde_json::from_slice(&client.get(&path).await?)
                .with_context(|| format!("{} is no API server of Kubernetes", self.address))?;
            for job in list.items.into_iter().filter_map(Pod::job) {
                if jobs.len() < HARVEST_JOBS_MAX {
                    jobs.push(job);
                } else {
                    left_out = left_out.saturating_add(1);
                }
            }
            match list.metadata.go_on.filter(|it| !it.is_empty()) {
                None => return Ok((jobs, left_out)),
                Some(place) => {
                    let place = utf8_percent_encode(&place, NON_ALPHANUMERIC);
                    go_on = format!("&continue={place}");
                }
            }
        }
    }
}

/// Runs `harvestfs cycles kubernetes`.
///
/// # Errors
/// When arguments are of no use.
pub fn run(args: &KubernetesArgs) -> anyhow::Result<()> {
    let kubernetes = || {
        Kubernetes::new(
            &args.api_server,
            args.ca.as_deref(),
            args.token_file.as_deref(),
        )
    };
    let (kubernetes, jobs) = (kubernetes(), kubernetes());
    // Fails early, since errors in the arguments are permanent.
    kubernetes.client()?;
    let owners = Namenode::new(&args.cluster);
    link::block_on(async {
        let mut signals = StopSignal::listen()?;
        let mut follower = Follower::new(&args.follow, false, kubernetes, owners, None);
        println!(
            "ready: nodes of {} follow their owners until Ctrl-C",
            args.api_server
        );
        let reporter = Reporter {
            scheduler: format!("Kubernetes at {}", args.api_server),
            jobs,
            namenode: Namenode::new(&args.cluster),
            nodes: follower.shown(),
        };
        report::beside(follower.run(signals.received()), reporter).await
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_numbers() {
        let same = [
            ("4", 4.0),
            ("3500m", 3.5),
            ("16Gi", 17_179_869_184.0),
            ("2k", 2_000.0),
            ("1.5M", 1_500_000.0),
            ("32Ki", 32_768.0),
        ];
        for (text, number) in same {
            assert_eq!(quantity(text), Some(number), "{text}");
        }
        for wrong in ["", "m", "4 Gi", "four", "1Zi", "-1"] {
            assert_eq!(quantity(wrong), None, "{wrong}");
        }
    }
}
