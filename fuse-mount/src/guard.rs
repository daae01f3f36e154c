//! A process that breaks a mount's connection to the kernel when the mount's process is killed.
//!
//! A thread that makes the kernel drop pages may wait there for a read that this mount was to answer. It cannot be
//! killed, and keeps the connection open; so after a SIGKILL nothing would ever end its wait, nor that of programs
//! that use the mount. The kernel signals the guard when its parent is killed, and the guard makes the kernel abort
//! the connection. The guard itself does not hold the connection open. It opens the abort file when the mount begins:
//! device numbers are reused by the next mount as soon as one is gone.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use rustix::process::{Signal, getpgrp, getpid, set_parent_process_death_signal, setsid};

/// The environment variable that passes the device of the mount to the guard.
const DEVICE_VARIABLE: &str = "HARVESTFS_GUARD_DEVICE";
/// Where the kernel's list of connections is usually mounted.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";

/// A running guard. It ends when this is dropped, or with the process.
#[derive(Debug)]
pub(crate) struct Guard {
    _ends_with: ChildStdin,
}

impl Guard {
    /// Starts a guard. `device` is that of the mount, as shown in the kernel's table of mounts.
    pub(crate) fn start(device: &str) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command
            .env(DEVICE_VARIABLE, device)
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        let (sender, started) = mpsc::channel();
        // The kernel signals the guard when this thread dies: it must live as long as the process.
        thread::Builder::new()
            .name("mount-guard".into())
            .spawn(move || {
                let mut child = match command.spawn() {
                    Ok(child) => child,
                    Err(error) => {
                        // The receiver is waiting.
                        let _ = sender.send(Err(error));
                        return;
                    }
                };
                let pipe = child
                    .stdin
                    .take()
                    .ok_or_else(|| io::Error::other("it has no pipe"));
                let _ = sender.send(pipe);
                // Its exit status does not matter.
                let _ = child.wait();
            })?;
        let pipe = started
            .recv()
            .map_err(|_| io::Error::other("its thread ended"))??;
        Ok(Self { _ends_with: pipe })
    }
}

/// Checks whether this process is a guard. A program that mounts has to call this before anything else: if the result
/// is not `None`, the guard has done its work, successfully or not.
pub(crate) fn asked() -> Option<bool> {
    let device = std::env::var(DEVICE_VARIABLE).ok()?;
    Some(match watch(&device) {
        Ok(()) => true,
        Err(error) => {
            let _ = writeln!(
                io::stderr(),
                "the mount has no guard: cannot watch over device {device}: {error}"
            );
            false
        }
    })
}

fn watch(device: &str) -> io::Result<()> {
    let mut connection = connection(device)?;
    let (killed, sender) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(Signal::USR1.as_raw(), sender)?;
    // Signals that end a mount in an orderly way are often sent to all its processes.
    if getpgrp() != getpid() {
        setsid()?;
    }
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        signal_hook::flag::register(signal.as_raw(), Arc::<AtomicBool>::default())?;
    }
    set_parent_process_death_signal(Some(Signal::USR1))?;
    let stdin = io::stdin();
    loop {
        let mut polled = [
            PollFd::new(&killed, PollFlags::IN),
            PollFd::new(&stdin, PollFlags::IN),
        ];
        match poll(&mut polled, None) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
            // The kernel ignores this for a connection that has already ended.
            Ok(_) if !polled[0].revents().is_empty() => return connection.write_all(b"1"),
            // The process has ended as a whole, and the connection with it.
            Ok(_) => return Ok(()),
        }
    }
}

/// The file that aborts the connection of a mount when it is written to.
fn connection(device: &str) -> io::Result<File> {
    let number = device.split_once(':').map(|(_, number)| number);
    let name = format!("{}/abort", number.ok_or(Errno::INVAL)?);
    let opened = File::options()
        .write(true)
        .open(format!("{CONNECTIONS}/{name}"));
    match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let opened = openat(connections()?, name, OFlags::WRONLY, Mode::empty())?;
            Ok(File::from(opened))
        }
        opened => opened,
    }
}

/// The kernel's list of connections, in a detached mount of its own.
fn connections() -> io::Result<OwnedFd> {
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let mount = fsmount(
        &context,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    Ok(mount)
}
