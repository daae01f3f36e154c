//! `harvestfs up` and `down`: a whole cluster on this machine, for a first look, for development
//! and for tests. Every part is a process of its own, as it would be in a datacentre.

mod layout;
mod lock;
mod mount_point;
mod namenodes;
mod part;
mod supervisor;

use std::fs::File;
use std::io::{ErrorKind, IsTerminal};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_fuse_mount::kernel_options::open_device;
use harvestfs_placement::PolicyKind;
use rustix::process::{Pid, Signal, kill_process};

use self::layout::Layout;
use self::lock::{open_lock, try_lock};
use crate::cluster::variable;
use crate::init::{self, LayoutArgs};
use crate::primary::Cast;
use crate::signals::{self, Ending};
use crate::units::Size;

/// Longest time for the whole cluster to start.
const START_DEADLINE: Duration = Duration::from_secs(120);
/// Longest time for the whole cluster to stop: the mount, datanodes and namenodes one after another, and cleaning up a
/// dead mount.
const STOP_DEADLINE: Duration = Duration::from_secs(225);
/// How long to wait while the lock of a cluster is in a transient state.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);
const LOCK_POLL: Duration = Duration::from_millis(10);
/// Time between two checks whether the background process is ready or has ended.
const CHILD_POLL: Duration = Duration::from_millis(20);

/// `harvestfs up`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
        harvestfs up\n  \
        harvestfs up --detach --data /srv/try --datanodes 5\n  \
        harvestfs up --namenodes 3                the cluster goes on when one of them is killed\n  \
        harvestfs up --mount /mnt/harvestfs       where other users can reach it, if root runs it")]
pub struct UpArgs {
    /// Directory of the cluster; made when it does not exist [default: ~/.local/share/harvestfs].
    #[arg(long, env = "HARVESTFS_DATA")]
    data: Option<PathBuf>,
    /// Directory to mount on [default: `mnt` in the directory of the cluster, which other users
    /// cannot enter].
    #[arg(long, env = "HARVESTFS_MOUNT")]
    mount: Option<PathBuf>,
    /// Number of namenodes, 1, 3 or 5; for a new cluster [default: 1]. Of several, a majority has to run: one leads,
    /// and another one takes over when it ends.
    #[arg(long, value_name = "N", value_parser = init::namenode_count)]
    namenodes: Option<usize>,
    /// Number of datanodes; for a new cluster [default: 9].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=500))]
    datanodes: Option<u16>,
    /// Space that each datanode may use; for a new cluster [default: its share of four fifths of the
    /// free space, at most 64GiB].
    #[arg(long)]
    quota: Option<Size>,
    #[command(flatten)]
    layout: LayoutArgs,
    /// Policy that chooses servers for replicas, from now on: `stock`, `greedy`, `history` or
    /// `harvest` [default: `harvest`].
    #[arg(long, env = "HARVESTFS_POLICY")]
    policy: Option<PolicyKind>,
    /// Make the primary tenant of each server replay recorded CPU use: a file of series, of which
    /// each datanode gets one, or a directory of such files.
    #[arg(long, env = "HARVESTFS_PRIMARY_TRACE", value_name = "PATH")]
    primary_trace: Option<PathBuf>,
    /// Speed of the replay, as a multiple of the recorded speed.
    #[arg(
        long,
        default_value_t = 1.0,
        value_name = "N",
        requires = "primary_trace"
    )]
    trace_speed: f64,
    /// Return when the mount is ready; `harvestfs down` ends it.
    #[arg(long)]
    detach: bool,
}

impl UpArgs {
    fn cast(&self) -> anyhow::Result<Option<Cast>> {
        let path = self.primary_trace.as_ref();
        path.map(|path| Cast::open(path, self.trace_speed))
            .transpose()
    }
}

/// `harvestfs down`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  harvestfs down --data /srv/try")]
pub struct DownArgs {
    /// Directory of the cluster [default: ~/.local/share/harvestfs].
    #[arg(long, env = "HARVESTFS_DATA")]
    data: Option<PathBuf>,
}

/// Runs `harvestfs up`.
///
/// # Errors
/// When something is missing on the machine, or the cluster cannot start.
pub fn up(args: &UpArgs) -> anyhow::Result<()> {
    check_machine()?;
    let data = data_directory(args.data.as_deref())?;
    let is_new = !data.exists();
    init::make_private_directory(&data)?;
    // Before taking its lock, since other users can hold that as long as they have access.
    Layout::close_to_others(&data)?;
    // Before anything else: only one `up` at a time may create or change files, and none while a cluster runs.
    let lock = take_lock(&data)?;
    let prepared = Layout::announce_begin(&data).and_then(|()| Layout::prepare(args));
    if prepared.is_err() && is_new {
        // Removes the directory only if it contains nothing but what was written above.
        let _ = std::fs::remove_file(Layout::end_path(&data));
        let _ = std::fs::remove_file(Layout::lock_path(&data));
        let _ = std::fs::remove_dir(&data);
    }
    let mut layout = prepared?;
    if args.detach {
        return detach(args, &layout, lock);
    }
    let result = supervisor::run(&mut layout);
    // While the lock is still held, as `down` waits for that.
    let announced = Layout::announce_end(&data, &result);
    // The process id in it is no longer valid. The file stays, as another process may be waiting for its lock.
    let emptied = lock.set_len(0);
    drop(lock);
    result
        .and(announced)
        .and(emptied.context("cannot empty the file with the process id"))
}

/// Runs `harvestfs down`.
///
/// # Errors
/// When no cluster runs there, it does not stop in time, or not all of it stops in good order.
pub fn down(args: &DownArgs) -> anyhow::Result<()> {
    let began = Instant::now();
    let data = data_directory(args.data.as_deref())?;
    let lock_path = Layout::lock_path(&data);
    let lock = File::open(&lock_path).map_err(|error| {
        let what = match error.kind() {
            ErrorKind::NotFound => format!("no cluster was ever started in {}", data.display()),
            _ => format!("cannot open {}", lock_path.display()),
        };
        anyhow::Error::new(error).context(what)
    })?;
    let pid = loop {
        if try_lock(&lock) {
            // An `up` that is starting would mistake it for the lock of another one.
            drop(lock);
            bail!("no cluster is running in {}", data.display());
        }
        // An `up` that is starting takes the lock before it writes its process id.
        let text = std::fs::read_to_string(&lock_path)?;
        let pid = text.trim().parse().ok();
        // The id may be that of a killed `up`, and may have been reused by another process.
        if let Some(pid) = pid.and_then(Pid::from_raw)
            && lock::is_open_in(&lock, pid)?
        {
            break pid;
        }
        if began.elapsed() > LOCK_PATIENCE {
            bail!(
                "{0} does not hold the id of the process that has it locked: `fuser {0}` finds that",
                lock_path.display()
            );
        }
        thread::sleep(LOCK_POLL);
    };
    mount_point::refuse_if_mounted_below(&data)?;
    kill_process(pid, Signal::TERM)
        .with_context(|| format!("cannot stop the process {}", pid.as_raw_nonzero()))?;
    let deadline = Instant::now() + STOP_DEADLINE;
    while !try_lock(&lock) {
        if Instant::now() > deadline {
            bail!(
                "the cluster did not stop within {} s; see {}",
                STOP_DEADLINE.as_secs(),
                Layout::log_directory(&data).display()
            );
        }
        thread::sleep(Duration::from_millis(20));
    }
    match Layout::failed_in(&data)? {
        Some(failed) if failed.is_empty() => {}
        Some(failed) => bail!(
            "the cluster in {} stopped, but not all of it in good order:\n{failed}",
            data.display()
        ),
        None => bail!(
            "`harvestfs up` in {} was killed before it had stopped everything, or could not say how that went: \
             what is left ends by itself; see {}",
            data.display(),
            Layout::log_directory(&data).display()
        ),
    }
    println!("Stopped. Everything is kept in {}.", data.display());
    Ok(())
}

/// Starts this command again in a process group of its own and waits until the mount is ready. Ctrl-C, SIGTERM or
/// closing the terminal meanwhile ends both, so that no cluster starts unnoticed; under nohup(1), closing the terminal
/// does not.
///
/// The background process inherits the lock, so that no other `up` can take it in between.
fn detach(args: &UpArgs, layout: &Layout, lock: File) -> anyhow::Result<()> {
    let ready = layout.ready_path();
    remove_if_there(&ready)?;
    let log_path = Layout::log_directory(&layout.data).join("up.log");
    let log = File::options()
        .create(true)
        .append(true)
        .open(&log_path)
        .with_context(|| format!("cannot open {}", log_path.display()))?;
    // `setsid` of util-linux would do; a new process group is enough, since nothing reads the
    // terminal and Ctrl-C goes to the foreground group only.
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("up").arg("--data").arg(&layout.data);
    if let Some(mount) = &args.mount {
        command.arg("--mount").arg(mount);
    }
    if let Some(trace) = &args.primary_trace {
        command
            .arg("--primary-trace")
            .arg(std::path::absolute(trace)?);
        command
            .arg("--trace-speed")
            .arg(args.trace_speed.to_string());
    }
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    // Before there is a background process that would continue starting.
    let mut ending = {
        let _context = runtime.enter();
        Ending::listen().context("cannot wait for signals")?
    };
    // `down` waits for the process id of the background process.
    lock.set_len(0)?;
    let mut child = command
        .envs([crate::logging::environment()])
        // The policy is in the configuration by now, or overridden by a flag.
        .env_remove("HARVESTFS_POLICY")
        .stdin(lock)
        // Its output is printed below, and does not belong in a log, since it contains the page's token.
        .stdout(Stdio::null())
        .stderr(log)
        .spawn()
        .context("cannot start the background process")?;
    // The lock is held as long as any process has the file open.
    drop(command);
    runtime.block_on(async {
        let signal = tokio::select! {
            biased;
            signal = ending.received() => signal,
            ready = wait_until_ready(&mut child, layout, &log_path) => return ready,
        };
        give_up(&mut child, &mut ending, &log_path).await;
        signals::end_by(signal)
    })?;
    println!("{}", layout.welcome()?);
    println!(
        "Stop it with:  harvestfs down --data {}",
        layout.data.display()
    );
    Ok(())
}

async fn wait_until_ready(
    child: &mut Child,
    layout: &Layout,
    log_path: &Path,
) -> anyhow::Result<()> {
    let ready = layout.ready_path();
    let deadline = Instant::now() + START_DEADLINE;
    while !ready.exists() {
        if let Some(status) = child.try_wait()? {
            bail!(
                "the cluster did not start ({status}); the end of {}:\n{}",
                log_path.display(),
                tail(log_path)
            );
        }
        if Instant::now() > deadline {
            bail!(
                "the cluster was not ready within {} s; `harvestfs down --data {}` ends it",
                START_DEADLINE.as_secs(),
                layout.data.display()
            );
        }
        tokio::time::sleep(CHILD_POLL).await;
    }
    Ok(())
}

/// Stops the process that is starting in the background, and waits until it has ended or another signal comes.
async fn give_up(child: &mut Child, ending: &mut Ending, log_path: &Path) {
    eprintln!("Stopping what has started ...");
    // Fails if it has ended already, which is just what is wanted.
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    let stopped = async {
        while matches!(child.try_wait(), Ok(None)) {
            tokio::time::sleep(CHILD_POLL).await;
        }
    };
    let has_stopped = tokio::select! {
        biased;
        _ = ending.received() => false,
        stopped = tokio::time::timeout(STOP_DEADLINE, stopped) => stopped.is_ok(),
    };
    if !has_stopped {
        eprintln!("It still stops; see {}", log_path.display());
    }
}

fn tail(path: &Path) -> String {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => return format!("(it cannot be read: {error})"),
    };
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(5)..].join("\n")
}

/// Checks what a mount needs. The error says in one sentence what is missing and how to get it.
fn check_machine() -> anyhow::Result<()> {
    if !Path::new("/dev/fuse").exists() {
        bail!(
            "/dev/fuse is missing: load the kernel's FUSE module (`modprobe fuse`), or give the \
             container the device (`--device /dev/fuse`)"
        );
    }
    open_device()
        .context("/dev/fuse cannot be opened: its mode must let you read and write it (0666)")?;
    if !rustix::process::geteuid().is_root() && find_program("fusermount3").is_none() {
        bail!(
            "fusermount3 is missing; users other than root need it to mount: `apt install fuse3`"
        );
    }
    Ok(())
}

/// Finds a program in `PATH`.
fn find_program(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}

/// The directory of the cluster: as given, or the user's.
pub fn data_directory(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let path = match given {
        Some(path) => path.to_owned(),
        None => default_data_directory()?,
    };
    std::path::absolute(&path).with_context(|| format!("{} is no path", path.display()))
}

fn default_data_directory() -> anyhow::Result<PathBuf> {
    if let Some(directory) = variable("XDG_DATA_HOME") {
        return Ok(directory.join("harvestfs"));
    }
    let home = variable("HOME").context("HOME is not set; say where with --data DIR")?;
    Ok(home.join(".local/share/harvestfs"))
}

/// Takes the lock, which alone decides whether a cluster runs; the process id in its file is for `down`.
fn take_lock(data: &Path) -> anyhow::Result<File> {
    let path = Layout::lock_path(data);
    let lock = match lock::handed_on(&path)? {
        Some(lock) => lock,
        None => open_lock(&path)?,
    };
    let deadline = Instant::now() + LOCK_PATIENCE;
    // `down` holds it only briefly.
    while !try_lock(&lock) {
        if Instant::now() > deadline {
            bail!(already_running(data));
        }
        thread::sleep(LOCK_POLL);
    }
    lock.set_len(0)?;
    let number = format!("{}\n", std::process::id());
    // A process that held it before has written at the file offset that both share.
    std::os::unix::fs::FileExt::write_all_at(&lock, number.as_bytes(), 0)?;
    Ok(lock)
}

/// Includes where to look at the cluster, but the token of its page only if a person reads it on a terminal.
fn already_running(data: &Path) -> String {
    let page = match Layout::page_addresses_of(data, std::io::stderr().is_terminal()) {
        Ok(address) => format!(": look at it at {address}"),
        Err(error) => format!("; its page cannot be opened: {error:#}"),
    };
    format!("a cluster is running in {} already{page}", data.display())
}

fn remove_if_there(path: &Path) -> anyhow::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
