//! Replaces the namenode's directory by an older copy, which has to be detected, and puts the newer one back.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use harvestfs_protocol::admin::ClusterStatus;
use harvestfs_protocol::limits::LEASE;

use super::LiveError;
use super::admin::Admin;
use super::cluster::Cluster;
use super::faults::Scene;
use super::mounted::Order;
use super::plan::Part;

const DIRECTORY: &str = "namenode";
/// The older copy.
pub(crate) const COPY: &str = "namenode-copy";
/// The name of the newer directory while the copy is in its place.
const NEWER: &str = "namenode-newer";
/// How soon a datanode has to register with the copy, so that this finds out that it is one, and how soon the
/// newer one has to serve again: this takes a while on a machine that is also used otherwise.
const DEADLINE: Duration = Duration::from_secs(180);
/// Time for datanodes to execute what a namenode commanded before it was killed.
const COMMANDS: Duration = Duration::from_secs(2);
/// Time in which the copy would have replicas removed, if it did.
const REMOVALS: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(100);

impl Scene<'_> {
    /// Copies the namenode's directory beside it. The namenode is down while that takes place, and serves
    /// again afterwards.
    pub async fn copy_namenode(
        &mut self,
        to: &str,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), LiveError> {
        let Self { cluster, .. } = self;
        cluster.kill(Part::Namenode(0));
        copy(&cluster.path(DIRECTORY), &cluster.path(to))?;
        // Once datanodes have obeyed it again, they know more than the copy, however long copying took.
        let wrong = "the namenode does not serve after its directory was copied";
        self.start_namenode(false, ["the namenode was copied", wrong], go_on)
            .await
    }

    /// Starts the namenode from the copy, which has to find out that it is one and must not remove anything;
    /// then from its own directory again. What is acknowledged in the meantime does not count.
    pub async fn put_copy_back(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LiveError> {
        let [current, copied, newer] = [DIRECTORY, COPY, NEWER].map(|name| self.cluster.path(name));
        // If such faults overlap, the first to end uses the copy.
        if !copied.exists() {
            return Ok(());
        }
        self.turn_doubt();
        self.cluster.kill(Part::Namenode(0));
        tokio::time::sleep(COMMANDS).await;
        let before = self.replicas()?;
        rename(&current, &newer)?;
        rename(&copied, &current)?;
        let wrong = "an older copy of the namenode's directory does not go into recovery";
        self.start_namenode(true, ["the older copy is in recovery", wrong], go_on)
            .await?;
        tokio::time::sleep(REMOVALS).await;
        let after = self.replicas()?;
        for (server, block) in before.iter().filter(|replica| !after.contains(replica)) {
            let name = self.cluster.name(Part::Server(*server));
            let text = format!("an older copy has block {block:016x} removed from {name}");
            self.watch.broken.push(text);
        }
        self.cluster.kill(Part::Namenode(0));
        let copy_ended = tokio::time::Instant::now();
        fs::remove_dir_all(&current)
            .map_err(LiveError::io(format!("remove {}", current.display())))?;
        rename(&newer, &current)?;
        let wrong = "the newer directory of the namenode does not end the recovery";
        self.start_namenode(false, ["the newer directory is back", wrong], go_on)
            .await?;
        // Caches trust the copy's answers for the length of a lease.
        tokio::time::sleep_until(copy_ended + LEASE).await;
        self.turn_doubt();
        Ok(())
    }

    /// Notes that promises to clients and programs do not count from now on, or count again.
    fn turn_doubt(&mut self) {
        self.doubt.turn();
        self.cluster.order(Order::Doubt);
    }

    /// Starts the namenode, which must then be in recovery, or must not be. Notes that this is so, or what is
    /// wrong.
    async fn start_namenode(
        &mut self,
        in_recovery: bool,
        [right, wrong]: [&str; 2],
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), LiveError> {
        self.cluster.start(Part::Namenode(0))?;
        if self.wait_for_namenode(in_recovery, go_on).await? {
            self.watch.note(right);
        } else {
            self.watch.broken.push(wrong.to_owned());
        }
        Ok(())
    }

    /// All replicas, as pairs of server and block.
    fn replicas(&self) -> Result<Vec<(usize, u64)>, LiveError> {
        let mut replicas = Vec::new();
        for server in 0..self.cluster.conditions.len() {
            let contents = self.cluster.contents(server)?;
            replicas.extend(contents.into_keys().map(|block| (server, block)));
        }
        Ok(replicas)
    }

    /// Waits until the namenode serves, in recovery or not. Returns whether that was in time.
    async fn wait_for_namenode(
        &mut self,
        in_recovery: bool,
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool, LiveError> {
        self.wait_for_status(go_on, |_, status| {
            status.recovery.is_some() == in_recovery
                // Before a datanode has registered, the namenode cannot know.
                && status.nodes_alive > 0
        })
        .await
    }

    /// Waits until the namenode serves and a condition holds. Returns whether that was in time.
    pub(crate) async fn wait_for_status(
        &mut self,
        go_on: &dyn Fn() -> bool,
        is_right: impl Fn(&Cluster<'_>, &ClusterStatus) -> bool,
    ) -> Result<bool, LiveError> {
        wait_for_status(&mut self.cluster, &mut self.admin, go_on, is_right).await
    }
}

/// Waits until a namenode serves and a condition holds. Returns whether that was in time.
pub(crate) async fn wait_for_status(
    cluster: &mut Cluster<'_>,
    admin: &mut Admin,
    go_on: &dyn Fn() -> bool,
    is_right: impl Fn(&Cluster<'_>, &ClusterStatus) -> bool,
) -> Result<bool, LiveError> {
    let end = Instant::now() + DEADLINE;
    while Instant::now() < end {
        if !go_on() {
            return Err(LiveError::Interrupted);
        }
        if let Some(ended) = cluster.ended_by_itself() {
            return Err(LiveError::Cluster(ended));
        }
        let status = admin.status().await;
        if status.is_some_and(|status| is_right(cluster, &status)) {
            return Ok(true);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(false)
}

/// Copies a directory, replacing the destination.
fn copy(from: &Path, to: &Path) -> Result<(), LiveError> {
    let what = format!("copy {} to {}", from.display(), to.display());
    if to.exists() {
        fs::remove_dir_all(to).map_err(LiveError::io(what.clone()))?;
    }
    let output = Command::new("cp").arg("-a").args([from, to]).output();
    let output = output.map_err(LiveError::io(what.clone()))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(LiveError::Cluster(format!(
        "cannot {what}: {}",
        said.trim()
    )))
}

fn rename(from: &Path, to: &Path) -> Result<(), LiveError> {
    let what = format!("rename {} to {}", from.display(), to.display());
    fs::rename(from, to).map_err(LiveError::io(what))
}
