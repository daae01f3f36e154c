//! Groups of namenodes in a cluster of real processes.

use std::net::SocketAddr;
use std::path::Path;

use crate::cluster::{Cluster, HEALTHY_DEADLINE};
use crate::ports::free_address;
use crate::wait_until;

impl Cluster {
    /// Creates the directory of another namenode, and starts it. It is in no group yet. Returns its number.
    ///
    /// # Panics
    /// When that fails.
    pub fn make_namenode(&mut self) -> usize {
        self.make_namenode_with(&[], |_| ())
    }

    /// Same as [`Cluster::make_namenode`]; `prepare` is called with its directory before it is started.
    pub fn make_namenode_on(&mut self, prepare: impl FnOnce(&Path)) -> usize {
        self.make_namenode_with(&[], prepare)
    }

    /// Same as [`Cluster::make_namenode`], for another cluster of the same authority.
    pub fn make_namenode_of(&mut self, cluster: &str) -> usize {
        self.make_namenode_with(&["--cluster", cluster], |_| ())
    }

    fn make_namenode_with(&mut self, more: &[&str], prepare: impl FnOnce(&Path)) -> usize {
        let number = self.namenodes.len() + 1;
        let address = free_address();
        self.namenodes.push(address);
        let name = Self::namenode_name(number);
        let out = self.path(&name).to_string_lossy().into_owned();
        let listen = address.to_string();
        let init = ["init", "namenode", "--out", &out, "--listen", &listen];
        self.output_of(&[&init[..], more].concat());
        self.set_restart_wait_of(&name, 0);
        prepare(&self.path(&name));
        self.start_namenode_number(number);
        number
    }

    pub(crate) fn start_namenode_with(&mut self, number: usize, flags: &[&str]) {
        let name = Self::namenode_name(number);
        let config = self.path(&name).join("namenode.toml");
        let mut arguments: Vec<&Path> = vec!["namenode".as_ref(), "--policy".as_ref()];
        arguments.extend([self.policy.as_ref(), "--config".as_ref(), &*config]);
        arguments.extend(flags.iter().map(Path::new));
        self.start_part(&name, &arguments);
    }

    /// Starts a namenode that may end immediately, without waiting until it is ready.
    pub fn begin_namenode(&mut self, number: usize) {
        let name = Self::namenode_name(number);
        let config = self.path(&name).join("namenode.toml");
        let policy = format!("--policy={}", self.policy);
        let arguments = ["namenode", &policy, "--config"].map(Path::new);
        self.begin_part(&name, &[&arguments[..], &[&*config]].concat());
    }

    /// Starts a namenode that listens at another address than the others believe, so that a proxy can be placed between
    /// them. Returns that address.
    pub fn start_namenode_behind(&mut self, number: usize) -> SocketAddr {
        let address = free_address();
        self.start_namenode_with(number, &[&format!("--listen={address}")]);
        address
    }

    /// The namenodes, as listed by `harvestfs admin namenode list --json` once one of them leads: the command gives up
    /// sooner than an election ends on a busy machine.
    ///
    /// # Panics
    /// When none leads for long.
    #[must_use]
    pub fn group(&self) -> serde_json::Value {
        let mut group = None;
        wait_until("a namenode leads", HEALTHY_DEADLINE, || {
            group = self.group_with_leader();
            group.is_some()
        });
        group.expect("waited for")
    }

    /// Same as [`Cluster::group`], without waiting; `None` if no namenode leads.
    fn group_with_leader(&self) -> Option<serde_json::Value> {
        let output = self.command(&["admin", "namenode", "list", "--json"]);
        let is_led = output.status.success();
        is_led.then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
    }

    /// Whether a namenode leads, and all others have acknowledged everything in its journal.
    #[must_use]
    pub fn all_follow(&self) -> bool {
        let Some(group) = self.group_with_leader() else {
            return false;
        };
        let mut members = group["members"].as_array().expect("members").iter();
        members.all(|it| it["id"] == group["leader"] || it["acknowledged"] == group["last"])
    }

    /// The number, from 1, of the leader.
    ///
    /// # Panics
    /// When there is none for long.
    #[must_use]
    pub fn leader(&self) -> usize {
        let mut leader = None;
        wait_until("a namenode leads", HEALTHY_DEADLINE, || {
            let output = self.command(&["admin", "namenode", "list", "--json"]);
            let group: serde_json::Value =
                serde_json::from_slice(&output.stdout).unwrap_or_default();
            let members = group["members"].as_array().cloned().unwrap_or_default();
            let leads = members.iter().find(|it| it["id"] == group["leader"]);
            leader = leads.and_then(|it| self.number_of(&it["addr"]));
            leader.is_some()
        });
        leader.expect("waited for")
    }

    /// The number, from 1, of the namenode at an address.
    fn number_of(&self, addr: &serde_json::Value) -> Option<usize> {
        let addr: SocketAddr = addr.as_str()?.parse().ok()?;
        let at = self.namenodes.iter().position(|it| *it == addr)?;
        Some(at + 1)
    }
}
