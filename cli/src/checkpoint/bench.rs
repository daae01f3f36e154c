//! `harvestfs checkpoint bench`: figure 2 of the paper, and the second checkpoint of table 3.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use harvestfs_chaos::report::Table;
use harvestfs_checkpoint::criu;
use harvestfs_checkpoint::process::Tree;
use harvestfs_checkpoint::store::{BENCH_PREFIX, Job, Store};
use harvestfs_protocol::durable;

use super::dump::{Afterwards, HowArgs, dump};
use super::{CheckpointArgs, Runner, fill, restore};
use crate::simulate::interrupts;
use crate::units::{self, Size};

/// Most time for the process to do what it is asked.
const ANSWER_DEADLINE: Duration = Duration::from_secs(300);
const TICK: Duration = Duration::from_millis(5);
/// How much of the memory is changed before the second checkpoint.
const CHANGED_PERCENT: u64 = 10;

/// Arguments of `harvestfs checkpoint bench`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs checkpoint bench --sizes 256MiB,1GiB --replicas 1,3")]
pub struct BenchArgs {
    /// How much memory the process has, several separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "256MiB,1GiB,2GiB,4GiB")]
    sizes: Vec<Size>,
    /// Replicas of the images on the mount, several separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,2,3")]
    replicas: Vec<u8>,
    /// A directory in memory, to compare with.
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    memory: PathBuf,
    /// A directory on a disk of this machine, to compare with.
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    disk: PathBuf,
    /// Write the records to this file, as a JSON array.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// What was measured.
#[derive(Clone, Debug, serde::Serialize)]
struct Record {
    memory_bytes: u64,
    images_on: String,
    suspend_s: f64,
    resume_s: f64,
    /// The second checkpoint, after a tenth of the memory was changed; CRIU alone cannot make one
    /// of a job that was resumed.
    second_suspend_s: Option<f64>,
    first_sent_bytes: Option<u64>,
    second_sent_bytes: Option<u64>,
}

/// Runs it.
pub fn run(args: &CheckpointArgs, command: &BenchArgs) -> anyhow::Result<()> {
    let runner = args.runner()?;
    let store = args.store()?;
    let interrupted = interrupts()?;
    let mut records = Vec::new();
    // The table is printed at the end; until then, this shows what has been measured so far.
    let mut measured = |record: Record| {
        let (suspend_s, resume_s) = (record.suspend_s, record.resume_s);
        eprintln!("  suspended in {suspend_s:.2} s, resumed in {resume_s:.2} s");
        records.push(record);
    };
    for &size in &command.sizes {
        for (name, directory) in [("memory", &command.memory), ("disk", &command.disk)] {
            eprintln!("{size} on {name}");
            measured(alone(&runner, &interrupted, size, name, directory)?);
        }
        for &replicas in &command.replicas {
            eprintln!("{size} with {replicas} replicas");
            measured(mounted(&runner, &interrupted, size, replicas, &store)?);
        }
    }
    if let Some(file) = &command.json {
        fs::write(file, serde_json::to_vec_pretty(&records)?)
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    print!("{}", table(&records));
    Ok(())
}

fn table(records: &[Record]) -> Table {
    let mut table = Table::new(&[
        "memory",
        "images on",
        "suspend",
        "resume",
        "together",
        "of disk",
        "second",
        "of first",
        "sent",
        "of first",
    ]);
    let seconds = |time: f64| format!("{time:.2} s");
    for record in records {
        let together = record.suspend_s + record.resume_s;
        let disk = records
            .iter()
            .find(|it| it.images_on == "disk" && it.memory_bytes == record.memory_bytes);
        let second = record.second_suspend_s;
        let sent = record.second_sent_bytes.zip(record.first_sent_bytes);
        table.row(&[
            Size(record.memory_bytes).to_string(),
            record.images_on.clone(),
            seconds(record.suspend_s),
            seconds(record.resume_s),
            seconds(together),
            disk.map(|it| format!("{:.2}", together / (it.suspend_s + it.resume_s)))
                .unwrap_or_default(),
            second.map(seconds).unwrap_or_default(),
            second
                .map(|second| format!("{:.2}", second / record.suspend_s))
                .unwrap_or_default(),
            sent.map(|(second, _)| units::human(second))
                .unwrap_or_default(),
            sent.map(|(second, first)| format!("{:.3}", second as f64 / first as f64))
                .unwrap_or_default(),
        ]);
    }
    table
}

/// CRIU alone, and its images made durable: what a mount is compared with.
fn alone(
    runner: &Runner,
    interrupted: &AtomicBool,
    size: Size,
    name: &str,
    directory: &Path,
) -> anyhow::Result<Record> {
    let images = tempfile::Builder::new()
        .prefix("harvestfs-checkpoint-bench-")
        .tempdir_in(directory)?;
    let mut filled = Filled::start(size, interrupted)?;
    let digest = filled.ask("digest")?;
    let started = Instant::now();
    let child = runner.criu.dump_to(filled.pid, images.path())?;
    wait("dump", child, images.path())?;
    for entry in fs::read_dir(images.path())? {
        File::open(entry?.path())?.sync_all()?;
    }
    durable::sync_directory(images.path())?;
    let suspend_s = started.elapsed().as_secs_f64();
    filled.reap()?;
    forget(images.path())?;
    let started = Instant::now();
    let pid_file = images.path().join("pid");
    let child = runner
        .criu
        .restore(images.path(), images.path(), &[], &pid_file, None)?;
    wait("restore", child, images.path())?;
    let resume_s = started.elapsed().as_secs_f64();
    filled.resumed()?;
    filled.expect(&digest)?;
    Ok(Record {
        memory_bytes: size.0,
        images_on: name.to_owned(),
        suspend_s,
        resume_s,
        second_suspend_s: None,
        first_sent_bytes: None,
        second_sent_bytes: None,
    })
}

/// As `dump` and `restore` do it, on the mount.
fn mounted(
    runner: &Runner,
    interrupted: &AtomicBool,
    size: Size,
    replicas: u8,
    store: &Store,
) -> anyhow::Result<Record> {
    // Another node may measure in the same store, in a process with the same id.
    let directory = tempfile::Builder::new()
        .prefix(BENCH_PREFIX)
        .tempdir_in(store.directory())
        .with_context(|| format!("cannot measure in {}", store.directory().display()))?;
    let record = mounted_in(runner, interrupted, size, replicas, directory.path())?;
    let path = directory.path().to_owned();
    directory
        .close()
        .with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(record)
}

fn mounted_in(
    runner: &Runner,
    interrupted: &AtomicBool,
    size: Size,
    replicas: u8,
    directory: &Path,
) -> anyhow::Result<Record> {
    rustix::fs::setxattr(
        directory,
        "user.harvestfs.replication",
        replicas.to_string().as_bytes(),
        rustix::fs::XattrFlags::empty(),
    )
    .context("cannot ask for replicas; is the store on a mount of HarvestFS?")?;
    let job = Store::open(directory.to_owned())?.job("bench".parse()?);
    let mut filled = Filled::start(size, interrupted)?;
    let digest = filled.ask("digest")?;
    let suspend = |filled: &mut Filled<'_>, job: &Job| -> anyhow::Result<(f64, u64)> {
        let started = Instant::now();
        let tree = Tree::of(filled.pid)?;
        let how = HowArgs::default();
        let checkpoint = dump(runner, job, &tree, None, &how, Afterwards::End)?.checkpoint;
        let time_s = started.elapsed().as_secs_f64();
        filled.reap()?;
        forget(&checkpoint.directory)?;
        Ok((time_s, checkpoint.manifest.sent_bytes()))
    };
    let resume = |filled: &mut Filled<'_>, job: &Job| -> anyhow::Result<f64> {
        let started = Instant::now();
        restore::restore(runner, job, None)?;
        let time_s = started.elapsed().as_secs_f64();
        filled.resumed()?;
        Ok(time_s)
    };
    let (suspend_s, first_sent_bytes) = suspend(&mut filled, &job)?;
    let resume_s = resume(&mut filled, &job)?;
    filled.expect(&digest)?;
    filled.ask(&format!("change {CHANGED_PERCENT} together"))?;
    let digest = filled.ask("digest")?;
    let (second_suspend_s, second_sent_bytes) = suspend(&mut filled, &job)?;
    resume(&mut filled, &job)?;
    filled.expect(&digest)?;
    Ok(Record {
        memory_bytes: size.0,
        images_on: format!("mount, {replicas} replicas"),
        suspend_s,
        resume_s,
        second_suspend_s: Some(second_suspend_s),
        first_sent_bytes: Some(first_sent_bytes),
        second_sent_bytes: Some(second_sent_bytes),
    })
}

fn wait(what: &'static str, mut child: Child, work: &Path) -> anyhow::Result<()> {
    Ok(criu::outcome(what, child.wait()?, work)?)
}

/// Has the kernel drop what it keeps of the images: a job is rarely resumed where they still are
/// in memory.
fn forget(directory: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(directory)? {
        let file = File::open(entry?.path())?;
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    }
    Ok(())
}

/// `harvestfs checkpoint fill` at work.
struct Filled<'a> {
    pid: i32,
    /// As it was begun or resumed: another process may get its id.
    tree: Tree,
    /// Until it was suspended for the first time.
    child: Option<Child>,
    directory: tempfile::TempDir,
    asked: u64,
    /// Set by Ctrl-C: what was begun is cleaned up then.
    interrupted: &'a AtomicBool,
}

impl<'a> Filled<'a> {
    fn start(size: Size, interrupted: &'a AtomicBool) -> anyhow::Result<Self> {
        let directory = tempfile::Builder::new()
            .prefix("harvestfs-checkpoint-fill-")
            .tempdir()?;
        // In a session of its own, since CRIU cannot restore part of ours.
        let mut child = Command::new("setsid")
            .arg(std::env::current_exe()?)
            .args(["checkpoint", "fill", &size.to_string()])
            .arg(directory.path())
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("cannot run setsid")?;
        let pid = i32::try_from(child.id())?;
        let tree = match Tree::of(pid) {
            Ok(tree) => tree,
            Err(error) => {
                end(&mut child);
                return Err(error.into());
            }
        };
        let mut filled = Self {
            pid,
            tree,
            child: Some(child),
            directory,
            asked: 0,
            interrupted,
        };
        filled.ask("digest")?;
        Ok(filled)
    }

    /// Takes note of the process that it is since it was resumed.
    fn resumed(&mut self) -> anyhow::Result<()> {
        self.tree = Tree::of(self.pid)?;
        Ok(())
    }

    /// Whether its memory is what it was.
    fn expect(&mut self, digest: &str) -> anyhow::Result<()> {
        let found = self.ask("digest")?;
        anyhow::ensure!(found == digest, "the memory was not restored");
        Ok(())
    }

    /// Takes note of the end of a process that was suspended.
    fn reap(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.wait()?;
        }
        let end = Instant::now() + ANSWER_DEADLINE;
        while Tree::of(self.pid).is_ok() {
            anyhow::ensure!(Instant::now() < end, "process {} does not end", self.pid);
            sleep(TICK);
        }
        Ok(())
    }

    fn ask(&mut self, ask: &str) -> anyhow::Result<String> {
        self.asked += 1;
        let expected = format!("{} ", self.asked);
        fill::replace(
            &self.directory.path().join("ask"),
            &format!("{expected}{ask}"),
        )?;
        let end = Instant::now() + ANSWER_DEADLINE;
        loop {
            let done = fs::read_to_string(self.directory.path().join("done")).unwrap_or_default();
            if let Some(answer) = done.strip_prefix(&expected) {
                return Ok(answer.to_owned());
            }
            anyhow::ensure!(Instant::now() < end, "the process does not answer");
            anyhow::ensure!(!self.interrupted.load(Ordering::Relaxed), "interrupted");
            sleep(TICK);
        }
    }
}

impl Drop for Filled<'_> {
    fn drop(&mut self) {
        // Present only if it was never suspended.
        if let Some(mut child) = self.child.take() {
            end(&mut child);
        }
        // Everything that it has started is ended with it. It may have ended already.
        if let Ok(tree) = self.tree.again() {
            let _ = tree.end();
        }
    }
}

fn end(child: &mut Child) {
    // It may have ended already.
    let _ = child.kill();
    let _ = child.wait();
}
