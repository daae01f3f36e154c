//! A control group as the primary tenant, version 1 or 2.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::kernel::{KernelFile, Stalls, cores, field};
use super::{Counter, Machine, Pace, SampleError, Sampler};
use crate::gate::Load;

/// How often a missing group is searched for.
pub(super) const SEARCH_INTERVAL: Duration = Duration::from_secs(1);
/// Memory changes slowly, and reading it costs the kernel more than the rest: it is read once per this many samples.
const MEMORY_EVERY: u32 = 5;

/// Where the kernel keeps its control groups.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// A control group. It need not exist: as long as it does not, nothing shows which part of the machine the primary
/// uses, and everything that is not HarvestFS counts as the primary.
#[derive(Debug)]
pub struct Cgroup {
    root: PathBuf,
    name: PathBuf,
    machine: Machine,
    group: Option<Group>,
    searched: Option<Instant>,
    cores: u32,
}

/// The files of an existing group.
#[derive(Debug)]
struct Group {
    cpu: Cpu,
    cpu_used: Counter,
    memory: Option<Memory>,
    memory_share: Option<f64>,
    memory_due: u32,
    stalls: Stalls,
    pace: Pace,
}

/// The file with a group's CPU usage.
#[derive(Debug)]
pub(super) enum Cpu {
    /// `cpu.stat`, in microseconds.
    V2(KernelFile),
    /// `cpuacct.usage`, in nanoseconds.
    V1(KernelFile),
}

/// The files with a group's usage, and the directory of a group of version 2.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) cpu: Cpu,
    pub(super) memory: Option<Memory>,
    directory: PathBuf,
}

impl Files {
    /// Opens the files of a group below `root`, if it exists.
    pub(super) fn open(root: &Path, name: &Path) -> Option<Self> {
        let name = relative(root, name);
        let (cpu, directory) = find_cpu(root, &name)?;
        let memory = match &cpu {
            Cpu::V2(_) => Memory::open(&directory, "memory.current", Kinds::V2),
            Cpu::V1(_) => Memory::open(
                &root.join("memory").join(name),
                "memory.usage_in_bytes",
                Kinds::V1,
            ),
        };
        Some(Self {
            cpu,
            memory,
            directory,
        })
    }
}

impl Cpu {
    /// Returns the CPU time in microseconds that the group has used.
    pub(super) fn used_us(&mut self) -> Result<u64, SampleError> {
        match self {
            Self::V2(file) => file.field("usage_usec"),
            Self::V1(file) => Ok(file.number()? / 1000),
        }
    }
}

/// The files with a group's memory usage.
#[derive(Debug)]
pub(super) struct Memory {
    used: KernelFile,
    /// The breakdown by kind of memory.
    stat: KernelFile,
    kinds: Kinds,
    machine_bytes: u64,
}

/// The names of the kinds of memory in `memory.stat`.
#[derive(Debug)]
struct Kinds {
    /// File pages that were not used recently.
    inactive: &'static str,
    /// Memory that belongs to no file.
    anonymous: &'static str,
    /// Pages of files that exist only in memory, such as those of a tmpfs.
    shared: &'static str,
}

impl Kinds {
    const V2: Self = Self {
        inactive: "inactive_file",
        anonymous: "anon",
        shared: "shmem",
    };
    const V1: Self = Self {
        inactive: "total_inactive_file",
        anonymous: "total_rss",
        shared: "total_shmem",
    };
}

impl Cgroup {
    /// Creates a sampler of the group `name` below `root` ([`CGROUP_ROOT`]): a path as in `/proc/PID/cgroup`; if it
    /// begins with the root and a controller, these are skipped. `machine` is sampled while the group does not exist.
    #[must_use]
    pub fn new(root: &Path, name: &Path, machine: Machine) -> Self {
        Self {
            root: root.to_owned(),
            name: relative(root, name),
            machine,
            group: None,
            searched: None,
            cores: cores(),
        }
    }

    /// Whether the group currently exists.
    #[must_use]
    pub fn exists(&self) -> bool {
        self.group.is_some() || find_cpu(&self.root, &self.name).is_some()
    }
}

impl Sampler for Cgroup {
    fn sample(&mut self, now: Instant) -> Result<Load, SampleError> {
        if self.group.is_none() {
            let due = self
                .searched
                .is_none_or(|searched| now.saturating_duration_since(searched) >= SEARCH_INTERVAL);
            if due {
                self.searched = Some(now);
                self.group = Group::open(&self.root, &self.name);
                if self.group.is_some() {
                    tracing::info!(cgroup = %self.name.display(), "sampling the cgroup");
                }
            }
        }
        if let Some(group) = &mut self.group {
            match group.sample(now, self.cores) {
                Ok(load) => return Ok(load),
                // It was removed. It is searched for again, and the machine is sampled meanwhile.
                Err(error) => {
                    tracing::warn!(cgroup = %self.name.display(), %error, "the cgroup is gone; the whole machine counts as the primary's until it is back");
                    self.group = None;
                    self.searched = Some(now);
                }
            }
        }
        self.machine.sample(now)
    }
}

impl Group {
    fn open(root: &Path, name: &Path) -> Option<Self> {
        let Files {
            cpu,
            memory,
            directory,
        } = Files::open(root, name)?;
        let pressure = ["cpu.pressure", "memory.pressure", "io.pressure"];
        Some(Self {
            cpu,
            cpu_used: Counter::default(),
            memory,
            memory_share: None,
            memory_due: 0,
            stalls: Stalls::open(pressure.map(|file| directory.join(file))),
            pace: Pace::default(),
        })
    }

    fn sample(&mut self, now: Instant, cores: u32) -> Result<Load, SampleError> {
        let used_us = self.cpu.used_us()?;
        let used_us = self.cpu_used.growth(used_us);
        if self.memory_due == 0 {
            self.memory_due = MEMORY_EVERY;
            self.memory_share = match &mut self.memory {
                Some(memory) => Some(memory.share()?),
                None => None,
            };
        }
        self.memory_due -= 1;
        let elapsed_us = self.pace.elapsed_us(now);
        // Read in any case, so that the next value counts from this sample.
        let stalled_share = self.stalls.share(elapsed_us.unwrap_or(1));
        let (Some(elapsed_us), Some(used_us)) = (elapsed_us, used_us) else {
            return Ok(Load::default());
        };
        let load = Load {
            cpu_share: Some(used_us as f64 / (elapsed_us as f64 * f64::from(cores))),
            memory_share: self.memory_share,
            stalled_share,
        };
        Ok(load.clamped())
    }
}

impl Memory {
    fn open(directory: &Path, used: &str, kinds: Kinds) -> Option<Self> {
        let mut machine = KernelFile::open_if_there("/proc/meminfo".as_ref())?;
        Some(Self {
            used: KernelFile::open_if_there(&directory.join(used))?,
            stat: KernelFile::open_if_there(&directory.join("memory.stat"))?,
            kinds,
            machine_bytes: machine.field("MemTotal").ok()?.checked_mul(1024)?,
        })
    }

    /// Returns the memory that the group would miss, as a share of the machine's memory.
    fn share(&mut self) -> Result<f64, SampleError> {
        let used = self.used.number()?;
        let inactive = self.stat.field(self.kinds.inactive)?;
        Ok(used.saturating_sub(inactive) as f64 / self.machine_bytes.max(1) as f64)
    }

    /// Returns the memory that the kernel does not count as available to others, unlike the pages of files that are
    /// also on disk.
    pub(super) fn unavailable_bytes(&mut self) -> Result<u64, SampleError> {
        let Kinds {
            anonymous, shared, ..
        } = self.kinds;
        let text = self.stat.read()?;
        // Old kernels do not report it.
        let shared_bytes = field(text, shared).unwrap_or(0);
        let anonymous_bytes = field(text, anonymous);
        let anonymous_bytes = anonymous_bytes.ok_or_else(|| self.stat.format(anonymous))?;
        Ok(anonymous_bytes.saturating_add(shared_bytes))
    }
}

/// Returns the file with a group's CPU usage, and the directory that contains it.
fn find_cpu(root: &Path, name: &Path) -> Option<(Cpu, PathBuf)> {
    let v2 = |directory: PathBuf| {
        let file = KernelFile::open_if_there(&directory.join("cpu.stat"))?;
        Some((Cpu::V2(file), directory))
    };
    let v1 = |controller: &str| {
        let directory = root.join(controller).join(name);
        let file = KernelFile::open_if_there(&directory.join("cpuacct.usage"))?;
        Some((Cpu::V1(file), directory))
    };
    v2(root.join(name))
        .or_else(|| v1("cpuacct"))
        .or_else(|| v1("cpu,cpuacct"))
        .or_else(|| v2(root.join("unified").join(name)))
}

/// Removes the root and a controller from the front of a group's name, if they are there.
fn relative(root: &Path, name: &Path) -> PathBuf {
    let below_root = name.strip_prefix(root).ok();
    let below = below_root.unwrap_or(name.strip_prefix("/").unwrap_or(name));
    let mut parts = below.components();
    let first = parts.next().map(|part| part.as_os_str().to_owned());
    let controllers = ["cpuacct", "cpu,cpuacct", "cpu", "memory", "unified"];
    match first.as_deref().and_then(|first| first.to_str()) {
        Some(first) if below_root.is_some() && controllers.contains(&first) => {
            parts.as_path().to_owned()
        }
        _ => below.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::primary::Own;

    fn at(start: Instant, ms: u64) -> Instant {
        start + Duration::from_millis(ms)
    }

    fn set_v2(root: &Path, used_us: u64, memory: u64) {
        let group = root.join("search.slice");
        fs::create_dir_all(&group).unwrap();
        let stat = format!("usage_usec {used_us}\nuser_usec 1\n");
        fs::write(group.join("cpu.stat"), stat).unwrap();
        fs::write(group.join("memory.current"), format!("{memory}\n")).unwrap();
        fs::write(group.join("memory.stat"), "anon 5\ninactive_file 1000\n").unwrap();
        let pressure = format!("some avg10=0 total={}\nfull total=0\n", used_us / 2);
        fs::write(group.join("io.pressure"), pressure).unwrap();
    }

    fn group(root: &Path, name: &str) -> Cgroup {
        let mut group = Cgroup::new(
            root,
            name.as_ref(),
            Machine::open(Own::ThisProcess).unwrap(),
        );
        group.cores = 4;
        group
    }

    #[test]
    fn version_2_tells_cpu_memory_and_stalls() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        set_v2(root, 1_000_000, 1000);
        let mut group = group(root, "/search.slice");
        let start = Instant::now();
        assert_eq!(group.sample(start).unwrap(), Load::default());
        set_v2(root, 2_000_000, 1000);
        let load = group.sample(at(start, 500)).unwrap();
        // One second of CPU in half a second, on four cores.
        assert_eq!(load.cpu_share, Some(0.5));
        assert_eq!(load.memory_share, Some(0.0));
        assert_eq!(load.stalled_share, Some(1.0));
        // More than exists: measured at slightly different times.
        set_v2(root, 22_000_000, 1000);
        assert_eq!(group.sample(at(start, 1000)).unwrap().cpu_share, Some(1.0));
        // The counter restarts.
        set_v2(root, 5, 1000);
        assert_eq!(group.sample(at(start, 1500)).unwrap(), Load::default());
        // The machine slept.
        set_v2(root, 10, 1000);
        assert_eq!(group.sample(at(start, 3_600_000)).unwrap(), Load::default());
        // The clock went back.
        assert_eq!(group.sample(start).unwrap(), Load::default());
    }

    #[test]
    fn version_1_tells_cpu_and_memory() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        for controller in ["cpuacct", "memory"] {
            fs::create_dir_all(root.join(controller).join("search")).unwrap();
        }
        let cpu = root.join("cpuacct/search/cpuacct.usage");
        fs::write(&cpu, "1000000000\n").unwrap();
        let memory = root.join("memory/search");
        let machine = fs::read_to_string("/proc/meminfo").unwrap();
        let total = super::super::kernel::field(&machine, "MemTotal").unwrap() * 1024;
        fs::write(
            memory.join("memory.usage_in_bytes"),
            (total / 2).to_string(),
        )
        .unwrap();
        let stat = "total_inactive_file 0\ntotal_rss 3\nshmem 9\ntotal_shmem 4\n";
        fs::write(memory.join("memory.stat"), stat).unwrap();
        let mut memory = Files::open(root, "search".as_ref()).unwrap().memory;
        assert_eq!(memory.as_mut().unwrap().unavailable_bytes().unwrap(), 7);
        let name = root.join("cpuacct/search");
        let mut group = group(root, name.to_str().unwrap());
        assert!(group.exists());
        let start = Instant::now();
        group.sample(start).unwrap();
        fs::write(&cpu, "1200000000\n").unwrap();
        let load = group.sample(at(start, 100)).unwrap();
        assert_eq!(load.cpu_share, Some(0.5));
        assert!((load.memory_share.unwrap() - 0.5).abs() < 0.01);
    }

    #[test]
    fn the_machine_stands_in_for_a_group_that_is_not_there() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let mut group = group(root, "search.slice");
        assert!(!group.exists());
        let start = Instant::now();
        group.sample(start).unwrap();
        std::thread::sleep(Duration::from_millis(60));
        let of_machine = group.sample(at(start, 60)).unwrap();
        assert!(of_machine.cpu_share.is_some());
        // HarvestFS waits, too.
        assert_eq!(of_machine.stalled_share, None);
        // It appears, and is noticed; then it is removed, and missed immediately.
        set_v2(root, 0, 1000);
        group.sample(at(start, 1100)).unwrap();
        set_v2(root, 400_000, 1000);
        assert_eq!(group.sample(at(start, 1200)).unwrap().cpu_share, Some(1.0));
        fs::write(root.join("search.slice/cpu.stat"), "").unwrap();
        fs::remove_file(root.join("search.slice/cpu.stat")).unwrap();
        group.sample(at(start, 1300)).unwrap();
        assert!(!group.exists());
    }

    #[test]
    fn names_are_taken_as_people_write_them() {
        let root = Path::new(CGROUP_ROOT);
        for name in [
            "a.slice/b",
            "/a.slice/b",
            "/sys/fs/cgroup/a.slice/b",
            "/sys/fs/cgroup/cpuacct/a.slice/b",
            "/sys/fs/cgroup/unified/a.slice/b",
        ] {
            assert_eq!(relative(root, Path::new(name)), Path::new("a.slice/b"));
        }
        assert_eq!(relative(root, Path::new("cpu/b")), Path::new("cpu/b"));
    }
}
