//! Begins and ends faults of the parts of a cluster.

use std::{fs, io};

use super::Cluster;
use crate::live::LiveError;
use crate::live::disk::FailingDisk;
use crate::live::mounted::Order;
use crate::live::plan::{Part, namenode_name};
use crate::live::scenario::Scenario;

/// The present faults of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Condition {
    /// Its process is not running.
    pub down: bool,
    /// Its process is stopped.
    pub hung: bool,
    /// Its primary is made busy.
    pub busy: bool,
    /// It is cut off.
    pub cut: bool,
    /// Its disk is full.
    pub full: bool,
    /// Its disk was emptied while its process ran.
    pub cleared: bool,
}

/// How often emptying a directory is tried while a datanode writes to it.
const ATTEMPTS_MAX: u32 = 10;
const FILLER: &str = "of-the-owner";
/// The part of a namenode's directory that is on a disk whose syncs can fail: a copy can still replace the directory.
const NAMENODE_DATA: &str = "data";

impl Cluster<'_> {
    /// The number of parts that need networks of their own.
    pub fn ports(scenario: &Scenario) -> usize {
        let several = Some(scenario.cluster.namenodes).filter(|count| *count > 1);
        Self::first_namenode_port(scenario) + several.unwrap_or(0)
    }

    pub(super) fn first_namenode_port(scenario: &Scenario) -> usize {
        scenario.cluster.servers.len() + scenario.mounts.count
    }

    /// The number of a part's link in the network.
    pub(super) fn port(&self, part: Part) -> Option<usize> {
        match part {
            Part::Server(server) => Some(server),
            Part::Mount(mount) => Some(self.scenario.cluster.servers.len() + mount),
            // A single namenode is on the network of the clients and the harness.
            Part::Namenode(_) if self.namenodes.len() == 1 => None,
            Part::Namenode(number) => Some(Self::first_namenode_port(self.scenario) + number),
        }
    }

    /// Notifies the programs that a fault of their mount begins or ends.
    fn disturb(&mut self, part: Part, begins: bool) {
        if let Part::Mount(mount) = part {
            self.order(Order::Disturbed { mount, begins });
        }
    }

    /// Sends SIGSTOP or SIGCONT.
    pub fn set_hung(&mut self, part: Part, hung: bool) {
        self.disturb(part, hung);
        if let Some(process) = self.parts.get(&part) {
            if hung {
                process.pause();
            } else {
                process.resume();
            }
            if let Part::Server(server) = part {
                self.conditions[server].hung = hung;
            }
        }
    }

    /// Stops a part and takes its link down, or ends both: what is sent to it in the meantime is lost.
    pub fn set_asleep(&mut self, part: Part, asleep: bool) {
        if let (Some(network), Some(port)) = (self.network, self.port(part)) {
            network.set_down(port, asleep);
        }
        self.set_hung(part, asleep);
    }

    /// Cuts a part off, or ends that.
    pub fn set_cut(&mut self, part: Part, cut: bool) {
        self.disturb(part, cut);
        if let (Some(network), Some(port)) = (self.network, self.port(part)) {
            network.set_cut(port, cut);
            if let Part::Server(server) = part {
                self.conditions[server].cut = cut;
            }
        }
    }

    /// Sets the percentage of lost frames from and to a part; 0 ends the fault.
    pub fn set_loss(&mut self, part: Part, percent: u32) {
        self.disturb(part, percent > 0);
        if let (Some(network), Some(port)) = (self.network, self.port(part)) {
            network.set_loss(port, percent);
        }
    }

    /// Sets the delay of frames from and to a part; 0 ends the fault.
    pub fn set_delay(&mut self, part: Part, ms: u32) {
        self.disturb(part, ms > 0);
        if let (Some(network), Some(port)) = (self.network, self.port(part)) {
            network.set_delay(port, ms);
        }
    }

    /// Sets how long each access to a server's disk takes; 0 ends the fault.
    pub fn set_slow(&self, server: usize, ms: u32) {
        if let Some(disk) = self.slow.get(&server) {
            disk.set_delay(ms);
        }
    }

    /// Has a part write to a disk whose syncs can fail. The part must not have run before: the disk begins with the
    /// contents of the directory.
    pub(super) fn add_failing_disk(&mut self, part: Part) -> Result<(), LiveError> {
        let at = match part {
            Part::Server(server) => self.volume(server),
            Part::Namenode(number) => self.path(&namenode_name(number)).join(NAMENODE_DATA),
            Part::Mount(mount) => unreachable!("mount {mount} has no disk"),
        };
        let quota_bytes = (self.scenario.cluster.quota_mib as usize) << 20;
        let disk = FailingDisk::over(&at, quota_bytes)
            .map_err(LiveError::io(format!("mount a disk at {}", at.display())))?;
        self.failing.insert(part, disk);
        Ok(())
    }

    /// Has the next sync of a disk fail.
    pub fn fail_next_sync(&self, part: Part) {
        if let Some(disk) = self.failing.get(&part) {
            disk.fail_next_sync(None);
        }
    }

    /// Whether a sync of its disk is still to fail.
    pub fn awaits_failed_sync(&self, part: Part) -> bool {
        let disk = self.failing.get(&part);
        disk.is_some_and(FailingDisk::is_to_fail)
    }

    /// Kills a part as a loss of power would, which loses what its disk has not stored.
    pub fn lose_power(&mut self, part: Part) {
        self.kill(part);
        if let Some(disk) = self.failing.get(&part) {
            disk.lose_power();
        }
    }

    /// Empties a disk.
    pub fn wipe(&self, server: usize) -> Result<(), LiveError> {
        let volume = self.volume(server);
        let empty = || -> std::io::Result<()> {
            let entries = match fs::read_dir(&volume) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
                entries => entries?,
            };
            for entry in entries {
                let entry = entry?;
                // The file that fills the disk belongs to the owner, and stays.
                if entry.file_name() == FILLER {
                    continue;
                }
                remove(&entry)?;
            }
            Ok(())
        };
        empty().map_err(LiveError::io(format!("empty {}", volume.display())))
    }

    /// Whether a datanode has made a volume of a disk.
    pub fn has_volume(&self, server: usize) -> bool {
        self.volume(server).join("VERSION").exists()
    }

    /// Fills a disk, or frees it again.
    pub fn set_full(&mut self, server: usize, full: bool) -> Result<(), LiveError> {
        let path = self.volume(server).join(FILLER);
        if full {
            let file = fs::File::create(&path);
            let mut file = file.map_err(LiveError::io(format!("make {}", path.display())))?;
            let piece = vec![0; 1 << 16];
            // Until no space is left.
            while std::io::Write::write_all(&mut file, &piece).is_ok() {}
        } else if path.exists() {
            fs::remove_file(&path).map_err(LiveError::io(format!("remove {}", path.display())))?;
        }
        self.conditions[server].full = full;
        Ok(())
    }
}

/// Removes a file or directory. A running datanode may write to the directory in the meantime.
fn remove(entry: &fs::DirEntry) -> io::Result<()> {
    if !entry.file_type()?.is_dir() {
        return fs::remove_file(entry.path());
    }
    let mut attempts = 1;
    loop {
        match fs::remove_dir_all(entry.path()) {
            Err(error)
                if error.kind() == io::ErrorKind::DirectoryNotEmpty && attempts < ATTEMPTS_MAX =>
            {
                attempts += 1;
            }
            removed => return removed,
        }
    }
}
