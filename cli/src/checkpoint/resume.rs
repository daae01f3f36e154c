//! `harvestfs checkpoint resume`: Algorithm 2, with the actual locations of the replicas.

use std::io::{Read, Seek, Write};
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use harvestfs_checkpoint::adaptive::{Bandwidth, Resumption, Site, resume};
use harvestfs_checkpoint::manifest::JobName;
use harvestfs_checkpoint::node::Node;
use harvestfs_checkpoint::store::{Job, PROBE_PREFIX};
use tempfile::NamedTempFile;

use super::locations::missing_bytes;
use super::restore::{find, restore};
use super::{CheckpointArgs, Runner};
use crate::units::{self, Size};

/// What is written and read when no checkpoint was made on this node yet.
const PROBE_BYTES: usize = 64 << 20;

/// Arguments of `harvestfs checkpoint resume`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs checkpoint resume train\n  \
    harvestfs checkpoint resume train --remote dn3=2GiB --dry-run")]
pub struct ResumeArgs {
    /// Name of the job.
    job: JobName,
    /// Name of the datanode on this node [default: the name of this machine].
    #[arg(long, value_name = "NAME")]
    datanode: Option<String>,
    /// Another node that could take the job: its datanode, and what checkpoints and restores there
    /// still have to move.
    #[arg(long, value_name = "NAME[=SIZE]")]
    remote: Option<Remote>,
    /// Only say where it would be resumed.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Clone, Debug)]
struct Remote {
    datanode: String,
    queued: Size,
}

impl FromStr for Remote {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (datanode, queued) = match text.split_once('=') {
            Some((datanode, queued)) => (datanode, queued.parse()?),
            None => (text, Size(0)),
        };
        Ok(Self {
            datanode: datanode.to_owned(),
            queued,
        })
    }
}

/// Runs it.
pub fn run(args: &CheckpointArgs, command: &ResumeArgs) -> anyhow::Result<()> {
    let runner = args.runner()?;
    let job = args.job(&command.job)?;
    let checkpoint = find(&job, None)?;
    let store = args.store()?;
    let bandwidth = match bandwidth(&runner.node, store.directory(), command.dry_run) {
        // There is no choice: a store in which nothing can be written does not keep the job from being resumed here.
        Err(error) if command.remote.is_none() && !command.dry_run => {
            eprintln!("harvestfs: how long it takes is not known: {error:#}");
            return restore_here(&runner, &job);
        }
        bandwidth => bandwidth?,
    };
    let size_bytes = checkpoint.manifest.size_bytes();
    let site = |datanode: &str, queued_bytes: u64| -> anyhow::Result<Site> {
        Ok(Site {
            bandwidth,
            missing_bytes: missing_bytes(&checkpoint, datanode)? as f64,
            queue_s: queued_bytes as f64 / bandwidth.read_bytes_per_s,
        })
    };
    let datanode = command.datanode.as_ref().unwrap_or(&runner.node_name);
    let local = site(datanode, runner.node.queued_bytes())?;
    let remote = match &command.remote {
        Some(remote) => Some((remote, site(&remote.datanode, remote.queued.0)?)),
        None => None,
    };
    let say = |name: &str, site: &Site| {
        println!(
            "{name}: {:.1} s ({} not there)",
            site.overhead_s(size_bytes as f64),
            units::human(site.missing_bytes as u64)
        );
    };
    say(datanode, &local);
    if let Some((remote, site)) = &remote {
        say(&remote.datanode, site);
    }
    let other = remote.as_ref().map(|(_, site)| site);
    match (resume(Some(size_bytes as f64), &local, other), remote) {
        (Resumption::Remote, Some((remote, _))) => println!(
            "resume it there: on {}, run `harvestfs checkpoint restore {}`",
            remote.datanode,
            job.name()
        ),
        _ if command.dry_run => println!("resume it here"),
        _ => restore_here(&runner, &job)?,
    }
    Ok(())
}

fn restore_here(runner: &Runner, job: &Job) -> anyhow::Result<()> {
    let (number, pid) = restore(runner, job, None)?;
    println!("{} {number}: runs as process {pid}", job.name());
    Ok(())
}

/// What this node's checkpoints were measured to move per second. Before the first one, a file is
/// written to the store, read from it and removed. A dry run does not remember what it measured.
pub fn bandwidth(node: &Node, store: &Path, is_dry_run: bool) -> anyhow::Result<Bandwidth> {
    let mut measured = node.measured();
    if measured.write_bytes_per_s.is_none() || measured.read_bytes_per_s.is_none() {
        let (write, read) = probe(store)?;
        if measured.write_bytes_per_s.is_none() {
            measured.wrote(PROBE_BYTES as u64, write);
        }
        if measured.read_bytes_per_s.is_none() {
            measured.read(PROBE_BYTES as u64, read);
        }
        if !is_dry_run {
            node.remember(&measured)?;
        }
    }
    let (Some(write_bytes_per_s), Some(read_bytes_per_s)) =
        (measured.write_bytes_per_s, measured.read_bytes_per_s)
    else {
        anyhow::bail!("the store is too slow or too fast to be measured");
    };
    Ok(Bandwidth {
        write_bytes_per_s,
        read_bytes_per_s,
        // Reads already came over the network wherever there was no local replica.
        network_bytes_per_s: read_bytes_per_s,
    })
}

fn probe(store: &Path) -> anyhow::Result<(Duration, Duration)> {
    // The name cannot be guessed, and is never opened again: others may be able to create links in the store.
    tempfile::Builder::new()
        .prefix(PROBE_PREFIX)
        .tempfile_in(store)
        .and_then(probe_with)
        .with_context(|| format!("cannot measure {}", store.display()))
}

fn probe_with(named: NamedTempFile) -> std::io::Result<(Duration, Duration)> {
    let mut bytes = vec![1; PROBE_BYTES];
    let mut file = named.as_file();
    let started = Instant::now();
    file.write_all(&bytes)?;
    file.sync_all()?;
    let write = started.elapsed();
    rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed)?;
    let started = Instant::now();
    file.rewind()?;
    file.read_exact(&mut bytes)?;
    let read = started.elapsed();
    named.close()?;
    Ok((write, read))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_dry_run_remembers_nothing() {
        let directory = tempfile::tempdir().expect("a directory");
        let node = Node::open(&directory.path().join("node")).expect("it is made");
        let store = directory.path().join("store");
        let error = bandwidth(&node, &store, true).expect_err("there is no store");
        assert!(error.to_string().contains("cannot measure"), "{error}");
        fs::create_dir(&store).expect("it is made");
        bandwidth(&node, &store, true).expect("it is measured");
        assert_eq!(node.measured().write_bytes_per_s, None);
        let left = fs::read_dir(&store).expect("it is there").count();
        assert_eq!(left, 0, "what was written to measure is removed");
        bandwidth(&node, &store, false).expect("it is measured");
        fs::remove_dir(&store).expect("it is empty");
        bandwidth(&node, &store, true).expect("it is remembered, and not measured");
    }

    #[test]
    fn a_store_is_measured_without_a_look_at_links() {
        let directory = tempfile::tempdir().expect("a directory");
        let target = directory.path().join("target");
        fs::write(&target, "untouched").expect("it is written");
        let store = directory.path().join("store");
        fs::create_dir(&store).expect("it is made");
        let link = store.join(format!("{PROBE_PREFIX}{}", std::process::id()));
        std::os::unix::fs::symlink(&target, &link).expect("a link");
        probe(&store).expect("it is measured");
        assert_eq!(fs::read(&target).expect("it is there"), b"untouched");
        let left = fs::read_dir(&store).expect("it is there");
        assert_eq!(left.count(), 1, "more is left than the link");
    }
}
