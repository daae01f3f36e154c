//! Starts a copy of the namenode's directory beside the namenode, and has a datanode follow it.

use harvestfs_protocol::admin::ClusterStatus;

use super::LiveError;
use super::admin::Admin;
use super::cluster::Cluster;
use super::faults::Scene;
use super::ledger::Contents;
use super::plan::Part;
use super::rollback::wait_for_status;
use crate::random;

/// The directory of the copy.
pub(crate) const DOUBLE: &str = "namenode-double";

/// A server whose datanode follows the copy.
pub(crate) struct Astray {
    server: usize,
    /// The blocks on its disk before.
    before: Contents,
}

impl Scene<'_> {
    /// Copies the namenode's directory, starts the namenode again and the copy beside it, and has one
    /// server's datanode register with the copy, which has to find out that it is one.
    pub async fn start_double(
        &mut self,
        seed: u64,
        go_on: &dyn Fn() -> bool,
    ) -> Result<(), LiveError> {
        // If such faults overlap, the first one counts.
        if self.astray.is_some() {
            return Ok(());
        }
        self.copy_namenode(DOUBLE, go_on).await?;
        // Once a datanode has obeyed the namenode again, it knows more than the copy.
        let usable = self.cluster.usable_servers();
        let all = |_: &Cluster<'_>, status: &ClusterStatus| {
            status.recovery.is_none() && status.nodes_alive >= usable.len() as u64
        };
        if !self.wait_for_status(go_on, all).await? {
            let text = "not all datanodes register after the namenode was copied";
            self.watch.broken.push(text.into());
            return Ok(());
        }
        let mut rng = random::stream(seed, "double");
        let Some(&server) = random::sample(&mut rng, &usable, 1).first() else {
            self.watch
                .note("no copy beside the namenode: other faults hit all servers");
            return Ok(());
        };
        self.cluster.kill(Part::Server(server));
        let before = self.cluster.contents(server)?;
        let copied = self.cluster.path(DOUBLE);
        let address = self.cluster.start_double(&copied, server)?;
        let name = self.cluster.name(Part::Server(server));
        self.watch
            .note(&format!("{name} goes astray to a copy of the namenode"));
        let mut admin = Admin::new(&self.cluster.path(""), &[address])?;
        let recovering = |_: &Cluster<'_>, status: &ClusterStatus| {
            status.recovery.is_some() && status.nodes_alive > 0
        };
        let recovers = wait_for_status(&mut self.cluster, &mut admin, go_on, recovering).await?;
        if recovers {
            self.watch
                .note("the copy beside the namenode is in recovery");
        } else {
            let text = "a copy beside the namenode takes a datanode and does not go into recovery";
            self.watch.broken.push(text.into());
        }
        self.astray = Some(Astray { server, before });
        Ok(())
    }

    /// Ends the copy. Checks that the datanode still has everything and that the namenode takes it back.
    pub async fn end_double(&mut self, go_on: &dyn Fn() -> bool) -> Result<(), LiveError> {
        let Some(Astray { server, before }) = self.astray.take() else {
            return Ok(());
        };
        self.cluster.end_double();
        let after = self.cluster.contents(server)?;
        let name = self.cluster.name(Part::Server(server));
        for block in before.keys().filter(|block| !after.contains_key(block)) {
            let text =
                format!("a copy beside the namenode has block {block:016x} removed from {name}");
            self.watch.broken.push(text);
        }
        self.cluster.start(Part::Server(server))?;
        let wrong = "the namenode does not take back a datanode that was astray";
        let back = |cluster: &Cluster<'_>, status: &ClusterStatus| {
            // A datanode is ready once it has registered.
            status.recovery.is_none() && cluster.is_ready(Part::Server(server))
        };
        if self.wait_for_status(go_on, back).await? {
            self.watch.note("the namenode has the datanode back");
        } else {
            self.watch.broken.push(wrong.into());
        }
        Ok(())
    }

    /// Excuses the copy for missing blocks on a server whose disk another fault affects.
    pub fn excuse_double(&mut self, server: usize) {
        if let Some(astray) = &mut self.astray
            && astray.server == server
        {
            astray.before.clear();
        }
    }
}
