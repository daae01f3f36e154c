//! A controller for a resource manager: labels nodes with their classes, and adapts their capacity to their owners'
//! use.

pub mod owners;
pub mod report;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use harvestfs_cycles::controller::{
    Action, Controller, LABEL_PREFIX, Node, Remembered, Server, Settings,
};

use self::owners::Owners;
use self::report::NodeNow;
use super::stored;

/// The longest wait for something that is gone.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// The shortest time between two looks: without any, resource manager and namenode would be asked all the time.
const INTERVAL_MIN: Duration = Duration::from_millis(50);

/// How owners are followed.
#[derive(Clone, Debug, Args)]
pub struct FollowArgs {
    /// The node that a server of HarvestFS is, where the node's host name (or the part of it before the first dot) is not the
    /// name of the server; can be given several times.
    #[arg(long = "server", value_name = "SERVER=NODE", value_parser = parse_pair)]
    servers: Vec<(String, String)>,
    /// Between two looks at owners and nodes; 50ms or more.
    #[arg(long, default_value = "500ms", value_name = "TIME", value_parser = parse_interval)]
    interval: humantime::Duration,
    /// How long an owner must have used less before jobs are given more.
    #[arg(long, default_value = "10s", value_name = "TIME")]
    grow_after: humantime::Duration,
    /// How long an owner's use must be unknown before no more jobs begin on its server; what runs there goes on.
    #[arg(long, default_value = "30s", value_name = "TIME")]
    unknown_after: humantime::Duration,
    /// Give all nodes back as they were when this ends by Ctrl-C or SIGTERM: without labels, with all that they have. Without
    /// this, all stays as it is then.
    #[arg(long)]
    restore_on_exit: bool,
}

fn parse_pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((server, node)) if !server.is_empty() && !node.is_empty() => {
            Ok((server.to_owned(), node.to_owned()))
        }
        _ => Err("write SERVER=NODE".to_owned()),
    }
}

fn parse_interval(text: &str) -> Result<humantime::Duration, String> {
    let interval = text
        .parse::<humantime::Duration>()
        .map_err(|error| error.to_string())?;
    if Duration::from(interval) < INTERVAL_MIN {
        return Err(format!(
            "it is less than {}",
            humantime::format_duration(INTERVAL_MIN)
        ));
    }
    Ok(interval)
}

impl FollowArgs {
    /// For the controller.
    pub fn settings(&self, adopt: bool) -> Settings {
        let ms = |time: humantime::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Settings {
            grow_after_ms: ms(self.grow_after),
            unknown_after_ms: ms(self.unknown_after),
            adopt,
        }
    }
}

/// A node as a resource manager shows it.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Without its server.
    pub node: Node,
    /// Its host name.
    pub host: String,
    /// The share of its memory that is used by others than jobs, if that is measured.
    pub memory_share: Option<f64>,
}

fn is_ours(label: &str) -> bool {
    label.starts_with(LABEL_PREFIX)
}

/// A resource manager.
pub trait Manager {
    /// For messages.
    const NAME: &'static str;

    /// Its nodes that work.
    async fn nodes(&mut self) -> anyhow::Result<Vec<Seen>>;

    /// Tells it what is to be; returns what failed.
    async fn apply(&mut self, actions: Vec<Action>) -> Vec<anyhow::Error>;
}

/// Where what the next controller has to know is stored.
#[derive(Debug)]
pub struct State {
    path: PathBuf,
    stored: BTreeMap<String, Remembered>,
}

impl State {
    /// Reads the file, if it is there.
    ///
    /// # Errors
    /// When it cannot be read, or holds something else.
    pub fn load(path: PathBuf) -> anyhow::Result<Self> {
        let stored = stored::load(&path)?;
        Ok(Self { path, stored })
    }

    /// What was stored.
    pub fn remembered(&self) -> BTreeMap<String, Remembered> {
        self.stored.clone()
    }

    fn keep(&mut self, remembered: BTreeMap<String, Remembered>) -> anyhow::Result<()> {
        if remembered == self.stored {
            return Ok(());
        }
        stored::store(&self.path, &remembered).with_context(|| {
            format!(
                "cannot write {}: name another file with --state",
                self.path.display()
            )
        })?;
        self.stored = remembered;
        Ok(())
    }
}

/// Something that is gone now and then; said once each time.
#[derive(Debug)]
struct Outage {
    of: &'static str,
    failures: u32,
}

impl Outage {
    fn new(of: &'static str) -> Self {
        Self { of, failures: 0 }
    }

    fn note<T>(&mut self, result: anyhow::Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                if self.failures > 0 {
                    tracing::info!("{} is back", self.of);
                }
                self.failures = 0;
                Some(value)
            }
            Err(error) => {
                if self.failures == 0 {
                    tracing::warn!("{} is waited for: {error:#}", self.of);
                }
                self.failures = self.failures.saturating_add(1);
                None
            }
        }
    }

    /// Until the next attempt: longer each time, to a limit.
    fn wait(&self, interval: Duration) -> Duration {
        let longer = interval.saturating_mul(1 << self.failures.min(10));
        longer.min(BACKOFF_MAX.max(interval))
    }
}

/// A controller with what it works on.
pub struct Follower<'a, M, O> {
    args: &'a FollowArgs,
    manager: M,
    owners: O,
    controller: Controller,
    state: Option<State>,
    began: Instant,
    managers: Outage,
    namenodes: Outage,
    /// What failed in the turn before: said once.
    failed: BTreeSet<String>,
    /// The nodes of the last turn, for reports.
    shown: report::Nodes,
}

impl<'a, M: Manager, O: Owners> Follower<'a, M, O> {
    /// With what is known from before, if the resource manager needs that.
    pub fn new(
        args: &'a FollowArgs,
        adopt: bool,
        manager: M,
        owners: O,
        state: Option<State>,
    ) -> Self {
        let remembered = state.as_ref().map(State::remembered).unwrap_or_default();
        Self {
            args,
            manager,
            owners,
            controller: Controller::new(args.settings(adopt), remembered),
            state,
            began: Instant::now(),
            managers: Outage::new(M::NAME),
            namenodes: Outage::new("the namenode"),
            failed: BTreeSet::new(),
            shown: report::Nodes::default(),
        }
    }

    /// The nodes as this last saw them, kept up to date.
    pub fn shown(&self) -> report::Nodes {
        Arc::clone(&self.shown)
    }

    /// Follows the owners until it is told to end.
    ///
    /// # Errors
    /// When what the next controller has to know cannot be stored, or nodes cannot be given back at the end.
    pub async fn run(&mut self, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
        let mut stop = pin!(stop);
        loop {
            // The next controller repeats what is interrupted here.
            let wait = tokio::select! {
                biased;
                () = &mut stop => break,
                wait = self.turn() => wait?,
            };
            tokio::select! {
                biased;
                () = &mut stop => break,
                () = tokio::time::sleep(wait) => {}
            }
        }
        self.end().await
    }

    async fn turn(&mut self) -> anyhow::Result<Duration> {
        let (classes, seen) = tokio::join!(self.owners.ask(), self.manager.nodes());
        let classes = self.namenodes.note(classes);
        let interval: Duration = self.args.interval.into();
        let Some(seen) = self.managers.note(seen) else {
            return Ok(self.managers.wait(interval));
        };
        let mut servers = classes.as_ref().map(owners::servers).unwrap_or_default();
        let hosts: Vec<String> = seen.iter().map(|seen| seen.host.clone()).collect();
        let nodes: Vec<Node> = seen
            .into_iter()
            .map(|seen| self.matched(seen, &mut servers))
            .collect();
        self.show(&nodes, hosts);
        let now_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let unsure = self.controller.unsure().clone();
        let actions = self.controller.step(now_ms, &nodes, &servers);
        for node in self.controller.unsure().difference(&unsure) {
            tracing::warn!(
                "{node} was made smaller before and it is not known by how much: its capacity is left alone. Give --state the \
                 file that the controller before had, or start once with --adopt when the node has all that it is to have"
            );
        }
        if let Some(state) = &mut self.state {
            state.keep(self.controller.remembered())?;
        }
        self.apply(actions).await;
        // Even without news of the servers, it continues at the usual rate, so that nodes are updated in time.
        Ok(interval)
    }

    fn show(&self, nodes: &[Node], hosts: Vec<String>) {
        let shown = nodes.iter().zip(hosts).map(|(node, host)| {
            let labels = node.labels.iter();
            // A manager that does not know the capacity reports the maximum value.
            let most = node.total.unwrap_or(node.capacity);
            let now = NodeNow {
                server: node.server.clone(),
                host,
                label: labels.into_iter().find(|it| is_ours(it)).cloned(),
                cores: node.capacity.cores.min(most.cores),
                memory_mib: node.capacity.memory_mib.min(most.memory_mib),
            };
            (node.id.clone(), now)
        });
        *self.shown.lock() = shown.collect();
    }

    async fn apply(&mut self, actions: Vec<Action>) {
        for action in &actions {
            match action {
                Action::Resize { node, capacity, .. } => tracing::info!(
                    "{node}: {} cores and {} MiB for jobs",
                    capacity.cores,
                    capacity.memory_mib
                ),
                Action::Label { node, label } => {
                    let label = label.as_deref().unwrap_or("none");
                    tracing::info!("{node}: label {label}");
                }
            }
        }
        let errors = self.manager.apply(actions).await;
        let failed: BTreeSet<String> = errors.iter().map(|error| format!("{error:#}")).collect();
        for error in failed.difference(&self.failed) {
            tracing::warn!("{error}; it is tried again");
        }
        self.failed = failed;
    }

    /// Finds the server that a node is, and adds what is measured there.
    fn matched(&self, seen: Seen, servers: &mut BTreeMap<String, Server>) -> Node {
        let mut node = seen.node;
        let named = |it: &&(String, String)| it.1 == node.id || it.1 == seen.host;
        let short = seen.host.split('.').next().unwrap_or_default();
        let is_named = |server: &str| self.args.servers.iter().any(|it| it.0 == server);
        node.server = match self.args.servers.iter().find(named) {
            Some((server, _)) => Some(server.clone()),
            None => [seen.host.as_str(), short]
                .into_iter()
                .find(|name| servers.contains_key(*name) && !is_named(name))
                .map(str::to_owned)
                // There may be no news of the server now.
                .or_else(|| {
                    let is_known = self.controller.knows(&node.id);
                    is_known.then(|| seen.host.clone())
                }),
        };
        if let (Some(server), Some(share)) = (&node.server, seen.memory_share)
            && let Some(server) = servers.get_mut(server)
            && let Some(owner) = &mut server.owner
        {
            owner.memory = Some(share);
        }
        node
    }

    async fn end(&mut self) -> anyhow::Result<()> {
        if !self.args.restore_on_exit {
            println!(
                "owners are not followed any more: labels and capacities of nodes stay as they are"
            );
            return Ok(());
        }
        let nodes = self.manager.nodes().await;
        let nodes = nodes.context("nodes could not be given back")?;
        let nodes: Vec<Node> = nodes.into_iter().map(|seen| seen.node).collect();
        let actions = self.controller.restore(&nodes);
        let count = actions.len();
        let mut errors = self.manager.apply(actions).await;
        if let Some(error) = errors.pop() {
            return Err(error.context("nodes could not be given back"));
        }
        println!("nodes have what they had before: {count} changes");
        Ok(())
    }
}

#[cfg(test)]
mod tests;
