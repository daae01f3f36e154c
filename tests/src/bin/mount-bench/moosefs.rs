//! A MooseFS cluster on one machine: one master, nine chunk servers, goal 3, one mount.
//!
//! Everything is as Debian ships it, except what a private cluster needs (directories, ports, the
//! user it runs as) and the trash, which is off so that a removed file is really removed.
//! Chunk servers refuse to talk over 127.0.0.1, so the loopback interface gets [`ADDRESS`] for as
//! long as the cluster runs.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::cpu::Marker;
use crate::target::{
    Target, drop_kernel_caches, end_processes, force_unmount, is_mounted, log_tail,
    scratch_directory, spawn, wait_until,
};

const CHUNK_SERVERS: usize = 9;
const GOAL: u64 = 3;
const START_LIMIT: Duration = Duration::from_secs(60);
const STOP_LIMIT: Duration = Duration::from_secs(60);
/// From the range reserved for benchmarks (RFC 2544), which no relevant network uses.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// The metadata file with which a master starts for the first time.
const EMPTY_METADATA: &str = "MFSM NEW";
const PROGRAMS: [(&str, &str); 7] = [
    ("ip", "iproute2"),
    ("mfsmaster", "moosefs-master"),
    ("mfschunkserver", "moosefs-chunkserver"),
    ("mfsmount", "moosefs-client"),
    ("mfssetgoal", "moosefs-client"),
    ("mfssettrashtime", "moosefs-client"),
    ("mfscli", "moosefs-cli"),
];

/// The cluster; runs between `start` and `stop`.
#[derive(Debug)]
pub struct Moosefs {
    scratch: PathBuf,
    marker: Marker,
    running: Option<Running>,
}

#[derive(Debug)]
struct Running {
    dir: TempDir,
    client_port: u16,
    servers: Vec<Server>,
    mount: Option<Child>,
    /// Dropped after everything else.
    _address: LoopbackAddress,
}

#[derive(Debug)]
struct Server {
    name: String,
    process: Child,
}

impl Moosefs {
    /// A cluster with its data below `scratch`.
    pub fn new(scratch: &Path) -> Result<Self> {
        for (program, package) in PROGRAMS {
            let found = find_program(program).is_some();
            ensure!(
                found,
                "--moosefs: {program} is missing; install it with `apt-get install {package}`"
            );
        }
        ensure!(
            rustix::process::geteuid().is_root(),
            "--moosefs needs root: for an address and for a mount with allow_other"
        );
        Ok(Self {
            scratch: scratch.to_owned(),
            marker: Marker::new("moosefs"),
            running: None,
        })
    }

    fn running(&mut self) -> Result<&mut Running> {
        self.running.as_mut().context("the cluster was not started")
    }

    /// Starts a MooseFS program in the foreground, with its output in a log of its own.
    fn spawn(&self, dir: &Path, log: &str, program: &str, arguments: &[&str]) -> Result<Child> {
        let path = find_program(program).with_context(|| format!("{program} is missing"))?;
        let mut command = Command::new(path);
        spawn(command.args(arguments), &self.marker, &dir.join(log))
    }

    fn start_servers(&mut self) -> Result<()> {
        let address = LoopbackAddress::add()?;
        let [metalogger_port, server_port, client_port] = free_ports()?;
        let dir = scratch_directory(&self.scratch, "mount-bench-moosefs-")?;
        let root = dir.path().to_owned();
        fs::create_dir(root.join("mnt"))?;
        self.running = Some(Running {
            dir,
            client_port,
            servers: Vec::new(),
            mount: None,
            _address: address,
        });

        let master = root.join("master");
        fs::create_dir(&master)?;
        fs::write(master.join("metadata.mfs"), EMPTY_METADATA)?;
        fs::write(
            master.join("exports.cfg"),
            format!("{ADDRESS} / rw,alldirs,admin,maproot=0:0\n"),
        )?;
        fs::write(master.join("topology.cfg"), "")?;
        let data = master.display();
        fs::write(
            master.join("master.cfg"),
            format!(
                "WORKING_USER = root\nWORKING_GROUP = root\nDATA_PATH = {data}\n\
                 EXPORTS_FILENAME = {data}/exports.cfg\nTOPOLOGY_FILENAME = {data}/topology.cfg\n\
                 MATOML_LISTEN_HOST = {ADDRESS}\nMATOML_LISTEN_PORT = {metalogger_port}\n\
                 MATOCS_LISTEN_HOST = {ADDRESS}\nMATOCS_LISTEN_PORT = {server_port}\n\
                 MATOCL_LISTEN_HOST = {ADDRESS}\nMATOCL_LISTEN_PORT = {client_port}\n"
            ),
        )?;
        self.start_server("master", "mfsmaster", &master.join("master.cfg"))?;
        self.wait_for_servers(|| Ok(TcpStream::connect((ADDRESS, client_port)).is_ok()))?;

        for number in 1..=CHUNK_SERVERS {
            let [port] = free_ports()?;
            let data = root.join(format!("chunkserver{number}"));
            fs::create_dir_all(data.join("chunks"))?;
            fs::write(
                data.join("hdd.cfg"),
                format!("{}\n", data.join("chunks").display()),
            )?;
            let data = data.display();
            fs::write(
                root.join(format!("chunkserver{number}.cfg")),
                format!(
                    "WORKING_USER = root\nWORKING_GROUP = root\nDATA_PATH = {data}\n\
                     HDD_CONF_FILENAME = {data}/hdd.cfg\nMASTER_HOST = {ADDRESS}\n\
                     MASTER_PORT = {server_port}\nCSSERV_LISTEN_HOST = {ADDRESS}\n\
                     CSSERV_LISTEN_PORT = {port}\n"
                ),
            )?;
            let name = format!("chunkserver{number}");
            let config = root.join(format!("{name}.cfg"));
            self.start_server(&name, "mfschunkserver", &config)?;
        }
        self.wait_for_servers(|| Ok(connected_chunk_servers(client_port)? == CHUNK_SERVERS))
    }

    fn start_server(&mut self, name: &str, program: &str, config: &Path) -> Result<()> {
        let dir = self.running()?.dir.path().to_owned();
        let config = config.display().to_string();
        let log = format!("{name}.log");
        let process = self.spawn(&dir, &log, program, &["-f", "-c", &config, "start"])?;
        self.running()?.servers.push(Server {
            name: name.to_owned(),
            process,
        });
        Ok(())
    }

    /// Waits for `ready`; fails immediately when a server ends, with the end of its log.
    fn wait_for_servers(&mut self, ready: impl Fn() -> Result<bool>) -> Result<()> {
        let running = self.running()?;
        let dir = running.dir.path().to_owned();
        let servers = &mut running.servers;
        wait_until("MooseFS to start", START_LIMIT, || {
            for Server { name, process } in servers.iter_mut() {
                if let Some(status) = process.try_wait()? {
                    let log = log_tail(&dir.join(format!("{name}.log")));
                    bail!("MooseFS {name} ended with {status}\n{log}");
                }
            }
            ready()
        })
    }

    fn mount(&mut self) -> Result<()> {
        let running = self.running()?;
        let root = running.dir.path().to_owned();
        let mount = mount_point(&root);
        let port = running.client_port.to_string();
        let path = mount.display().to_string();
        let child = self.spawn(
            &root,
            "mount.log",
            "mfsmount",
            &["-f", "-H", &ADDRESS.to_string(), "-P", &port, &path],
        )?;
        self.running()?.mount = Some(child);
        wait_until("mfsmount", START_LIMIT, || Ok(is_mounted(&mount)))
            .with_context(|| log_tail(&root.join("mount.log")))
    }

    fn unmount(&mut self) -> Result<()> {
        let running = self.running()?;
        let mount = mount_point(running.dir.path());
        run_quietly("umount", &[&mount.display().to_string()])?;
        if let Some(mut child) = running.mount.take() {
            wait_until("mfsmount to end", STOP_LIMIT, || {
                Ok(child.try_wait()?.is_some())
            })?;
        }
        Ok(())
    }
}

impl Target for Moosefs {
    fn label(&self) -> &str {
        "moosefs"
    }

    fn start(&mut self) -> Result<PathBuf> {
        self.start_servers()?;
        self.mount()?;
        let mount = mount_point(self.running()?.dir.path());
        // A chunk server first scans its directories, then reports its space.
        wait_until("space in MooseFS", START_LIMIT, || {
            Ok(rustix::fs::statvfs(&mount)?.f_bavail > 0)
        })?;
        let path = mount.display().to_string();
        run_quietly("mfssetgoal", &["-r", &GOAL.to_string(), &path])?;
        run_quietly("mfssettrashtime", &["-r", "0", &path])?;
        let work = mount.join("work");
        fs::create_dir(&work)?;
        Ok(work)
    }

    fn make_cold(&mut self) -> Result<()> {
        rustix::fs::sync();
        self.unmount()?;
        drop_kernel_caches()?;
        self.mount()
    }

    fn marker(&self) -> Option<&Marker> {
        Some(&self.marker)
    }

    fn free_bytes_per_byte(&self) -> u64 {
        GOAL
    }

    fn disk(&self) -> &Path {
        &self.scratch
    }

    fn stop(&mut self) -> Result<()> {
        let Some(mut running) = self.running.take() else {
            return Ok(());
        };
        force_unmount(&mount_point(running.dir.path()));
        end_processes(&self.marker, STOP_LIMIT);
        let servers = running.servers.iter_mut().map(|server| &mut server.process);
        for child in servers.chain(running.mount.iter_mut()) {
            child.wait()?;
        }
        running.dir.close()?;
        Ok(())
    }
}

impl Drop for Moosefs {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            eprintln!("cannot stop MooseFS: {error:#}");
        }
    }
}

/// [`ADDRESS`] on the loopback interface, until dropped.
#[derive(Debug)]
struct LoopbackAddress;

impl LoopbackAddress {
    fn add() -> Result<Self> {
        run_quietly("ip", &["address", "add", &ADDRESS.to_string(), "dev", "lo"])?;
        Ok(Self)
    }
}

impl Drop for LoopbackAddress {
    fn drop(&mut self) {
        let deleted = run_quietly("ip", &["address", "del", &ADDRESS.to_string(), "dev", "lo"]);
        if let Err(error) = deleted {
            eprintln!("{error:#}");
        }
    }
}

fn mount_point(root: &Path) -> PathBuf {
    root.join("mnt")
}

/// The number of chunk servers that the master sees and that report space.
fn connected_chunk_servers(client_port: u16) -> Result<usize> {
    let path = find_program("mfscli").context("mfscli is missing")?;
    let output = Command::new(path)
        .args(["-H", &ADDRESS.to_string(), "-P", &client_port.to_string()])
        .args(["-SCS", "-n", "-s", ","])
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().filter(|line| is_connected(line)).count())
}

/// Whether a line of `mfscli -SCS -n -s,` shows a chunk server that is up.
fn is_connected(line: &str) -> bool {
    line.contains(&ADDRESS.to_string())
        && !line.contains("disconnected")
        && !line.contains("DISCONNECTED")
}

/// A program of the `PATH`, or of the directories that a user's `PATH` lacks.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin"].map(PathBuf::from))
        .map(|dir| dir.join(name))
        .find(|path| path.is_file())
}

fn run_quietly(program: &str, arguments: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {program}"))?;
    ensure!(
        output.status.success(),
        "{program} {}: {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Ports on loopback that were just free.
fn free_ports<const N: usize>() -> Result<[u16; N]> {
    // All are held until all are known, so that they differ.
    let mut listeners = Vec::with_capacity(N);
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = TcpListener::bind((ADDRESS, 0))?;
        *port = listener.local_addr()?.port();
        listeners.push(listener);
    }
    Ok(ports)
}
