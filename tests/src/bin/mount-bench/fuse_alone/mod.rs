//! A FUSE file system in memory: no network, no disk, no other process to wait for. Each request
//! is answered immediately by the thread that read it. The time of this target for a row is that of
//! the kernel, `/dev/fuse` and the copies of the content.
//!
//! The server is a separate process (this program with a hidden option), so that processor time is
//! counted as for the other targets, and no thread waits for an answer from its own process, which
//! the kernel could not kill then.

mod server;
mod tree;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use anyhow::{Result, bail};
use harvestfs_fuse_mount::kernel_options::raise_read_ahead;
use tempfile::TempDir;

pub use self::server::serve;
use crate::cpu::Marker;
use crate::target::{
    Target, drop_kernel_caches, end_processes, force_unmount, is_mounted, log_tail,
    scratch_directory, spawn, wait_until,
};

/// The option of this program that makes it the server.
pub const SERVE_OPTION: &str = "serve-fuse";
const START_LIMIT: Duration = Duration::from_secs(20);
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// The file system; exists between `start` and `stop`.
#[derive(Debug)]
pub struct FuseAlone {
    scratch: PathBuf,
    marker: Marker,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    dir: TempDir,
    mount: PathBuf,
    server: Child,
}

impl FuseAlone {
    /// A file system that is mounted below `scratch`, where none of the data is stored.
    pub fn new(scratch: &Path) -> Self {
        Self {
            scratch: scratch.to_owned(),
            marker: Marker::new("fuse"),
            running: None,
        }
    }
}

impl Target for FuseAlone {
    fn label(&self) -> &str {
        "fuse"
    }

    fn start(&mut self) -> Result<PathBuf> {
        let dir = scratch_directory(&self.scratch, "mount-bench-fuse-")?;
        let mount = fs::canonicalize(dir.path())?.join("mnt");
        fs::create_dir(&mount)?;
        let log = dir.path().join("server.log");
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(format!("--{SERVE_OPTION}")).arg(&mount);
        let server = spawn(&mut command, &self.marker, &log)?;
        let running = self.running.insert(Running { dir, mount, server });
        wait_until("the FUSE file system in memory", START_LIMIT, || {
            if let Some(status) = running.server.try_wait()? {
                bail!("it ended with {status}\n{}", log_tail(&log));
            }
            Ok(is_mounted(&running.mount))
        })?;
        if let Err(error) = raise_read_ahead(&running.mount) {
            eprintln!("the kernel's read-ahead stays as it is: {error}");
        }
        let work = running.mount.join("work");
        fs::create_dir(&work)?;
        Ok(work)
    }

    /// The content stays in the server's memory.
    fn make_cold(&mut self) -> Result<()> {
        drop_kernel_caches()
    }

    fn marker(&self) -> Option<&Marker> {
        Some(&self.marker)
    }

    fn free_bytes_per_byte(&self) -> u64 {
        1
    }

    fn disk(&self) -> &Path {
        // It frees memory some time after a file was removed, and reports what is free.
        self.running
            .as_ref()
            .map_or(&self.scratch, |running| &running.mount)
    }

    fn stop(&mut self) -> Result<()> {
        let Some(mut running) = self.running.take() else {
            return Ok(());
        };
        force_unmount(&running.mount);
        end_processes(&self.marker, STOP_LIMIT);
        running.server.wait()?;
        running.dir.close()?;
        Ok(())
    }
}

impl Drop for FuseAlone {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("cannot stop the FUSE file system in memory: {error:#}");
        }
    }
}
