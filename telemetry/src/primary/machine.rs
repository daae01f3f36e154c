//! The whole machine, less HarvestFS's own processes, as the primary tenant.
//!
//! Interrupts and the kernel's own work, including that for HarvestFS, count as the primary's: this errs on the
//! owner's side. Time stolen by a hypervisor belongs to neither, and cannot be used either.
//!
//! How long tasks wait is not reported: the kernel does not show whose tasks they are, and HarvestFS's own, which run
//! only when nothing else wants the CPU, wait most.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::cgroup::{CGROUP_ROOT, Files, SEARCH_INTERVAL};
use super::kernel::{KernelFile, field};
use super::{Counter, Pace, SampleError, Sampler};
use crate::gate::Load;

/// How often new processes are searched for.
const SCAN_INTERVAL: Duration = Duration::from_secs(2);
/// How often all processes are examined again: a process id may have been reused.
const RESCAN_INTERVAL: Duration = Duration::from_secs(60);
/// Memory changes slowly: it is read once per this many samples.
const MEMORY_EVERY: u32 = 5;
/// Most own processes whose usage is subtracted. More than ever run on one machine; bounds the number of open files.
const OWN_MAX: usize = 256;

/// What belongs to HarvestFS itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Own {
    /// All processes that run the same executable as this one or, where their owner hides that, have the same name.
    /// What such a process used before it is noticed (at most two seconds) counts as the primary's.
    SameExecutable,
    /// This process.
    ThisProcess,
    /// Everything in a control group: exact, and the cheapest option. The name is as for [`super::Cgroup::new`].
    /// While the group does not exist, it counts as empty; it must exist at the start, or else its name is taken to be
    /// wrong.
    Cgroup(PathBuf),
}

/// A sampler of the whole machine, less HarvestFS's own processes.
#[derive(Debug)]
pub struct Machine {
    stat: KernelFile,
    meminfo: Option<KernelFile>,
    own: OwnUse,
    /// CPU time in ticks: of all but idle tasks, and in total.
    active: Counter,
    total: Counter,
    pace: Pace,
    memory_share: Option<f64>,
    memory_due: u32,
}

impl Machine {
    /// Opens the kernel's files.
    ///
    /// # Errors
    /// If `/proc/stat` or the source of the own usage cannot be read.
    pub fn open(own: Own) -> Result<Self, SampleError> {
        Ok(Self {
            stat: KernelFile::open("/proc/stat".as_ref())?,
            meminfo: KernelFile::open_if_there("/proc/meminfo".as_ref()),
            own: OwnUse::open(own, CGROUP_ROOT.as_ref())?,
            active: Counter::default(),
            total: Counter::default(),
            pace: Pace::default(),
            memory_share: None,
            memory_due: 0,
        })
    }
}

impl Sampler for Machine {
    fn sample(&mut self, now: Instant) -> Result<Load, SampleError> {
        let Some((active, total)) = cpu_ticks(self.stat.read()?) else {
            return Err(self.stat.format("the line `cpu`"));
        };
        let own = self.own.sample(now);
        if self.memory_due == 0 {
            self.memory_due = MEMORY_EVERY;
            self.memory_share = match &mut self.meminfo {
                Some(meminfo) => memory_share(meminfo.read()?, self.own.memory_bytes()),
                None => None,
            };
        }
        self.memory_due -= 1;
        let (active, total) = (self.active.growth(active), self.total.growth(total));
        let elapsed_us = self.pace.elapsed_us(now);
        let (Some(active), Some(total), Some(_)) = (active, total, elapsed_us) else {
            return Ok(Load::default());
        };
        if total == 0 {
            return Ok(Load::default());
        }
        let load = Load {
            cpu_share: Some((active as f64 - own) / total as f64),
            memory_share: self.memory_share,
            stalled_share: None,
        };
        Ok(load.clamped())
    }
}

/// Parses `/proc/stat`: the ticks of all cores in which something ran, and the total.
fn cpu_ticks(text: &str) -> Option<(u64, u64)> {
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    // user nice system idle iowait irq softirq steal; guests are part of user and nice.
    let mut ticks = [0u64; 7];
    let mut fields = line.split_ascii_whitespace();
    for tick in &mut ticks {
        *tick = fields.next()?.parse().ok()?;
    }
    let [user, nice, system, idle, iowait, irq, softirq] = ticks;
    let busy = [user, nice, system, irq, softirq];
    let active = busy.iter().try_fold(0u64, |sum, &it| sum.checked_add(it))?;
    Some((active, active.checked_add(idle)?.checked_add(iowait)?))
}

/// Parses `/proc/meminfo`: the share of the memory that anything but HarvestFS uses.
fn memory_share(text: &str, own_bytes: u64) -> Option<f64> {
    let total = field(text, "MemTotal")?;
    let available = field(text, "MemAvailable")?;
    let used = total
        .saturating_sub(available)
        .saturating_sub(own_bytes / 1024);
    (total > 0).then(|| used as f64 / total as f64)
}

/// The usage of HarvestFS itself.
#[derive(Debug)]
struct OwnUse {
    own: Own,
    identity: Identity,
    processes: HashMap<u32, Process>,
    /// Ids of processes that do not belong to HarvestFS.
    others: std::collections::HashSet<u32>,
    scanned: Option<Instant>,
    rescanned: Option<Instant>,
    /// Only with [`Own::Cgroup`].
    group: Option<OwnGroup>,
}

/// The control group of [`Own::Cgroup`].
#[derive(Debug)]
struct OwnGroup {
    root: PathBuf,
    name: PathBuf,
    /// `None` while the group does not exist.
    files: Option<(Files, Counter)>,
    searched: Option<Instant>,
}

#[derive(Debug)]
struct Process {
    stat: KernelFile,
    ticks: Counter,
    resident_pages: u64,
}

/// How own processes are recognised.
#[derive(Debug)]
struct Identity {
    /// Device and inode of the executable.
    executable: Option<(u64, u64)>,
    name: String,
}

impl Identity {
    fn of(process: &str) -> Option<Self> {
        let base = Path::new("/proc").join(process);
        let stat = std::fs::read(base.join("stat")).ok()?;
        let name = ProcessStat::parse(&String::from_utf8_lossy(&stat))?
            .name
            .to_owned();
        let executable = std::fs::metadata(base.join("exe")).ok();
        Some(Self {
            executable: executable.map(|file| (file.dev(), file.ino())),
            name,
        })
    }

    fn is_same(&self, other: &Self) -> bool {
        match (self.executable, other.executable) {
            (Some(own), Some(other)) if own == other => true,
            // The binary was replaced by a newer one, or the owner hides it.
            _ => self.name == other.name,
        }
    }
}

impl OwnGroup {
    fn open(root: &Path, name: &Path) -> Result<Self, SampleError> {
        let files =
            Files::open(root, name).ok_or_else(|| SampleError::NoCgroup(name.to_owned()))?;
        Ok(Self {
            root: root.to_owned(),
            name: name.to_owned(),
            files: Some((files, Counter::default())),
            searched: None,
        })
    }

    /// Returns the ticks used since the previous sample.
    fn sample(&mut self, now: Instant) -> f64 {
        let is_due = self
            .searched
            .is_none_or(|searched| now.saturating_duration_since(searched) >= SEARCH_INTERVAL);
        if self.files.is_none() && is_due {
            self.searched = Some(now);
            let found = Files::open(&self.root, &self.name);
            self.files = found.map(|files| (files, Counter::default()));
            if self.files.is_some() {
                tracing::info!(own_cgroup = %self.name.display(), "the cgroup is back");
            }
        }
        let Some((files, counter)) = &mut self.files else {
            return 0.0;
        };
        match files.cpu.used_us() {
            Ok(used_us) => {
                let growth_us = counter.growth(used_us).unwrap_or(0);
                growth_us as f64 * ticks_per_second() / 1e6
            }
            // It was removed, and nothing that was in it runs any more. It is searched for again.
            Err(error) => {
                tracing::warn!(own_cgroup = %self.name.display(), %error, "the cgroup is gone; nothing is subtracted from what the machine uses until it is back");
                self.files = None;
                self.searched = Some(now);
                0.0
            }
        }
    }

    fn memory_bytes(&mut self) -> u64 {
        let memory = self.files.as_mut().and_then(|(it, _)| it.memory.as_mut());
        // A group that was removed meanwhile has none.
        memory.map_or(0, |memory| memory.unavailable_bytes().unwrap_or(0))
    }
}

impl OwnUse {
    /// Searches for control groups below `root`.
    fn open(own: Own, root: &Path) -> Result<Self, SampleError> {
        let group = match &own {
            Own::Cgroup(name) => Some(OwnGroup::open(root, name)?),
            Own::SameExecutable | Own::ThisProcess => None,
        };
        let identity = Identity::of("self").unwrap_or(Identity {
            executable: None,
            name: String::new(),
        });
        Ok(Self {
            own,
            identity,
            processes: HashMap::new(),
            others: std::collections::HashSet::new(),
            scanned: None,
            rescanned: None,
            group,
        })
    }

    /// Returns the ticks used since the previous sample.
    fn sample(&mut self, now: Instant) -> f64 {
        if let Some(group) = &mut self.group {
            return group.sample(now);
        }
        self.scan(now);
        let mut ticks = 0;
        self.processes.retain(|_, process| {
            // A process that has ended can no longer be read.
            let stat = process.stat.read().ok().and_then(ProcessStat::parse);
            let Some(stat) = stat else {
                return false;
            };
            ticks += process.ticks.growth(stat.cpu_ticks).unwrap_or(0);
            process.resident_pages = stat.resident_pages;
            true
        });
        ticks as f64
    }

    fn memory_bytes(&mut self) -> u64 {
        if let Some(group) = &mut self.group {
            return group.memory_bytes();
        }
        let pages: u64 = self.processes.values().map(|it| it.resident_pages).sum();
        pages * rustix::param::page_size() as u64
    }

    fn scan(&mut self, now: Instant) {
        let is_due = |last: Option<Instant>, interval| {
            last.is_none_or(|last| now.saturating_duration_since(last) >= interval)
        };
        if !is_due(self.scanned, SCAN_INTERVAL) {
            return;
        }
        self.scanned = Some(now);
        if is_due(self.rescanned, RESCAN_INTERVAL) {
            self.rescanned = Some(now);
            self.others.clear();
        }
        if self.own == Own::ThisProcess {
            self.add(std::process::id());
            return;
        }
        let Ok(entries) = std::fs::read_dir("/proc") else {
            return;
        };
        let ids = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for id in ids {
            if self.processes.contains_key(&id) || self.others.contains(&id) {
                continue;
            }
            let identity = Identity::of(&u32::to_string(&id));
            if identity.is_some_and(|identity| self.identity.is_same(&identity)) {
                self.add(id);
            } else {
                self.others.insert(id);
            }
        }
    }

    fn add(&mut self, id: u32) {
        if self.processes.len() >= OWN_MAX || self.processes.contains_key(&id) {
            return;
        }
        if let Some(stat) = KernelFile::open_if_there(format!("/proc/{id}/stat").as_ref()) {
            let process = Process {
                stat,
                ticks: Counter::default(),
                resident_pages: 0,
            };
            self.processes.insert(id, process);
        }
    }
}

/// The used fields of `/proc/PID/stat`.
struct ProcessStat<'a> {
    name: &'a str,
    cpu_ticks: u64,
    resident_pages: u64,
}

impl<'a> ProcessStat<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        // The name may contain anything, including parentheses.
        let (head, tail) = text.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        let mut fields = tail.split_ascii_whitespace();
        // Fields are counted from the state, the third one in proc(5): utime is the 14th.
        let user: u64 = fields.nth(11)?.parse().ok()?;
        let system: u64 = fields.next()?.parse().ok()?;
        // rss is the 24th.
        let resident_pages = fields.nth(8)?.parse().ok()?;
        Some(Self {
            name,
            cpu_ticks: user.checked_add(system)?,
            resident_pages,
        })
    }
}

fn ticks_per_second() -> f64 {
    rustix::param::clock_ticks_per_second() as f64
}

#[cfg(test)]
mod tests {
    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    #[test]
    fn what_proc_tells_is_understood() {
        let stat = "cpu  10 20 30 400 50 6 7 8 9 9\ncpu0 1 2 3\n";
        assert_eq!(cpu_ticks(stat), Some((73, 523)));
        assert_eq!(cpu_ticks("cpu 1 2"), None);
        assert_eq!(cpu_ticks(""), None);
        let line = "21120 (a (b) c) R 21105 21105 14706 0 -1 4194304 99 0 0 0 11 22 0 0 20 0 1 0 \
                    1282439 3133440 410 18446744073709551615 1";
        let parsed = ProcessStat::parse(line).unwrap();
        assert_eq!(parsed.name, "a (b) c");
        assert_eq!(parsed.cpu_ticks, 33);
        assert_eq!(parsed.resident_pages, 410);
        assert!(ProcessStat::parse("1 (x) R 1").is_none());
        let text = "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\n";
        assert_eq!(memory_share(text, 100 * 1024), Some(0.3));
        assert_eq!(memory_share(text, u64::MAX), Some(0.0));
    }

    #[test]
    fn own_work_is_not_the_primarys() {
        // Other tests run at the same time, in this very process, so that they are all subtracted.
        let mut without = Machine::open(Own::ThisProcess).unwrap();
        let start = Instant::now();
        without.sample(start).unwrap();
        let (mut own_ticks, mut spun) = (0.0, 0u64);
        let cpu_time = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
        // Where other programs run too, that takes longer.
        let (begin, end) = (cpu_time(), start + Duration::from_secs(20));
        while cpu_time() - begin < Duration::from_millis(150) && Instant::now() < end {
            spun = std::hint::black_box(spun + 1);
        }
        own_ticks += without.own.sample(Instant::now());
        assert!(
            own_ticks >= 10.0,
            "{own_ticks} ticks of this process were found"
        );
        assert_eq!(without.own.processes.len(), 1);
        assert!(without.own.memory_bytes() > 100 * 1024);
    }

    #[test]
    fn processes_of_the_same_executable_are_found() {
        let mut machine = Machine::open(Own::SameExecutable).unwrap();
        machine.sample(Instant::now()).unwrap();
        assert!(machine.own.processes.contains_key(&std::process::id()));
        assert!(!machine.own.others.is_empty());
        assert!(!machine.own.processes.contains_key(&1));
    }

    #[test]
    fn an_own_cgroup_that_was_removed_uses_nothing_until_it_is_back() {
        let directory = tempfile::tempdir().unwrap();
        let (root, name) = (directory.path(), PathBuf::from("guests.slice"));
        let own = Own::Cgroup(name.clone());
        let missing = OwnUse::open(own.clone(), root).unwrap_err();
        assert!(matches!(missing, SampleError::NoCgroup(_)), "{missing}");
        let group = root.join(&name);
        let stat = group.join("cpu.stat");
        let set_used_s = |seconds: u64| {
            std::fs::create_dir_all(&group).unwrap();
            std::fs::write(&stat, format!("usage_usec {seconds}000000\n")).unwrap();
        };
        set_used_s(5);
        let mut machine = Machine::open(Own::ThisProcess).unwrap();
        machine.own = OwnUse::open(own, root).unwrap();
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert_eq!(machine.own.sample(at(0)), 0.0);
        set_used_s(7);
        assert_eq!(machine.own.sample(at(400)), 2.0 * ticks_per_second());
        // The open files have no more values, like those of a cgroup that was removed.
        std::fs::write(&stat, "").unwrap();
        std::fs::remove_dir_all(&group).unwrap();
        machine.sample(at(800)).unwrap();
        assert_eq!(machine.own.sample(at(1200)), 0.0);
        // It is back, and has used more or less than the one before.
        set_used_s(6);
        assert_eq!(machine.own.sample(at(2000)), 0.0);
        set_used_s(7);
        assert_eq!(machine.own.sample(at(2400)), ticks_per_second());
    }

    #[test]
    fn the_memory_of_an_own_cgroup_is_not_the_primarys() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let own_bytes = field(&meminfo, "MemTotal").unwrap() * 1024;
        let group = root.join("guests.slice");
        std::fs::create_dir(&group).unwrap();
        for (file, text) in [
            ("cpu.stat", "usage_usec 1\n".to_owned()),
            ("memory.current", format!("{}\n", 2 * own_bytes)),
            // Pages of files do not count: they are part of what is available. Those of a volume in memory are not.
            (
                "memory.stat",
                format!(
                    "anon {}\nfile {own_bytes}\nshmem 4096\ninactive_file 7\n",
                    own_bytes - 4096
                ),
            ),
        ] {
            std::fs::write(group.join(file), text).unwrap();
        }
        let mut machine = Machine::open(Own::ThisProcess).unwrap();
        machine.own = OwnUse::open(Own::Cgroup("guests.slice".into()), root).unwrap();
        assert_eq!(machine.own.memory_bytes(), own_bytes);
        machine.sample(Instant::now()).unwrap();
        assert_eq!(machine.memory_share, Some(0.0));
        // A group that was removed has none.
        std::fs::write(group.join("memory.stat"), "").unwrap();
        assert_eq!(machine.own.memory_bytes(), 0);
    }
}
