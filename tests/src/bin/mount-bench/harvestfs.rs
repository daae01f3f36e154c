//! A HarvestFS cluster, started with `harvestfs up` and ended with `harvestfs down`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::cpu::Marker;
use crate::target::{
    Target, drop_kernel_caches, end_processes, force_unmount, is_mounted, log_tail,
    scratch_directory, spawn, wait_until,
};

const DATANODES: u64 = 9;
const REPLICATION: u64 = 3;
const UP_LIMIT: Duration = Duration::from_secs(180);
const DOWN_LIMIT: Duration = Duration::from_secs(60);

/// The cluster; exists on disk only between `start` and `stop`.
#[derive(Debug)]
pub struct Harvestfs {
    binary: PathBuf,
    namenodes: u32,
    label: String,
    scratch: PathBuf,
    marker: Marker,
    dir: Option<TempDir>,
}

impl Harvestfs {
    /// A cluster of the program `binary` with so many namenodes, with its data below `scratch`.
    pub fn new(binary: &Path, namenodes: u32, scratch: &Path) -> Result<Self> {
        let binary = fs::canonicalize(binary).with_context(|| {
            format!(
                "{}: not there; build it with `cargo build --release` or give --harvestfs-binary",
                binary.display()
            )
        })?;
        let label = match namenodes {
            1 => "harvestfs".to_owned(),
            _ => format!("harvestfs-{namenodes}"),
        };
        Ok(Self {
            binary,
            namenodes,
            scratch: scratch.to_owned(),
            marker: Marker::new(&label),
            label,
            dir: None,
        })
    }

    fn up(&self) -> Result<()> {
        let (data, mount) = self.paths()?;
        let mut command = Command::new(&self.binary);
        command
            .arg("up")
            .arg("--data")
            .arg(data)
            .arg("--mount")
            .arg(&mount)
            .args(["--datanodes", &DATANODES.to_string()])
            .args(["--replication", &REPLICATION.to_string()])
            .arg("--detach");
        // Builds that predate groups are measured, too.
        if self.namenodes != 1 {
            command.args(["--namenodes", &self.namenodes.to_string()]);
        }
        self.run(&mut command, UP_LIMIT)?;
        ensure!(
            is_mounted(&mount),
            "`harvestfs up --detach` returned, but nothing is mounted"
        );
        Ok(())
    }

    fn down(&self) -> Result<()> {
        let (data, mount) = self.paths()?;
        self.run(
            Command::new(&self.binary)
                .arg("down")
                .arg("--data")
                .arg(data),
            DOWN_LIMIT,
        )?;
        ensure!(
            !is_mounted(&mount),
            "`harvestfs down` returned, but the mount is still there"
        );
        Ok(())
    }

    /// Directory of the cluster's data, and path of its mount.
    fn paths(&self) -> Result<(PathBuf, PathBuf)> {
        let dir = self.dir.as_ref().context("the cluster was not started")?;
        Ok((dir.path().join("data"), dir.path().join("mnt")))
    }

    fn run(&self, command: &mut Command, limit: Duration) -> Result<()> {
        let dir = self.dir.as_ref().context("the cluster was not started")?;
        let log = dir.path().join("harvestfs.log");
        let mut child = spawn(command, &self.marker, &log)?;
        wait_for_success(&mut child, limit)
            .with_context(|| format!("{command:?}\n{}", log_tail(&log)))
    }
}

fn wait_for_success(child: &mut Child, limit: Duration) -> Result<()> {
    let mut status = None;
    let waited = wait_until("the end of the command", limit, || {
        status = child.try_wait()?;
        Ok(status.is_some())
    });
    if waited.is_err() {
        child.kill()?;
        child.wait()?;
    }
    waited?;
    match status {
        Some(status) if status.success() => Ok(()),
        Some(status) => bail!("{status}"),
        None => bail!("no exit status"),
    }
}

impl Target for Harvestfs {
    fn label(&self) -> &str {
        &self.label
    }

    fn start(&mut self) -> Result<PathBuf> {
        let dir = scratch_directory(&self.scratch, "mount-bench-harvestfs-")?;
        fs::create_dir(dir.path().join("data"))?;
        fs::create_dir(dir.path().join("mnt"))?;
        self.dir = Some(dir);
        self.up()?;
        let work = self.paths()?.1.join("work");
        fs::create_dir(&work)?;
        Ok(work)
    }

    fn make_cold(&mut self) -> Result<()> {
        rustix::fs::sync();
        self.down()?;
        drop_kernel_caches()?;
        self.up()
    }

    fn marker(&self) -> Option<&Marker> {
        Some(&self.marker)
    }

    fn free_bytes_per_byte(&self) -> u64 {
        // The cluster reports the space for content, with replicas already taken into account.
        1
    }

    fn disk(&self) -> &Path {
        &self.scratch
    }

    fn stop(&mut self) -> Result<()> {
        if self.dir.is_none() {
            return Ok(());
        }
        let (_, mount) = self.paths()?;
        let down = self.down();
        force_unmount(&mount);
        end_processes(&self.marker, DOWN_LIMIT);
        if let Some(dir) = self.dir.take() {
            dir.close()?;
        }
        down
    }
}

impl Drop for Harvestfs {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("cannot stop HarvestFS: {error:#}");
        }
    }
}
