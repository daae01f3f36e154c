//! A network of its own for each server, so that links can be cut, and a mount table of its own
//! for the run, so that disks can be full.
//!
//! Namespaces are held by threads, links are TAP devices whose other end this process holds, and
//! frames go from one to the other through a switch in this process. So nothing is left behind
//! whatever becomes of the process: no name, no rule, no interface outlives its last thread.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::AsRawFd,
    process::{Child, Command},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
        mpsc,
    },
    thread,
};

use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::LiveError;

/// Where a process runs.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    /// Where this thread runs.
    Here,
    /// In the namespace that a thread holds.
    Namespace(mpsc::Sender<Request>),
}

/// A process to start, and where to tell of it.
#[derive(Debug)]
pub(crate) struct Request {
    command: Command,
    started: mpsc::Sender<io::Result<Child>>,
}

impl Home {
    /// Starts a process there.
    pub fn spawn(&self, mut command: Command) -> io::Result<Child> {
        let Self::Namespace(thread) = self else {
            return command.spawn();
        };
        let (started, result) = mpsc::channel();
        let gone = || io::Error::other("the thread of the network namespace has ended");
        let request = Request { command, started };
        thread.send(request).map_err(|_| gone())?;
        result.recv().map_err(|_| gone())?
    }
}

/// The networks of all servers, and the switch between them.
#[derive(Debug)]
pub(crate) struct Network {
    homes: Vec<Home>,
    /// On which side of a partition a port is: 0 is the namenode's and the clients' side.
    sides: Arc<Vec<AtomicU32>>,
}

/// The address of a port: 0 for the namenode and the clients, then the servers.
pub(crate) fn address(port: usize) -> [u8; 4] {
    let number = port + 1;
    // Below 65,000 for every scenario that is accepted.
    [10, 77, (number / 250) as u8, (number % 250) as u8 + 1]
}

impl Network {
    /// Moves this thread into a network of its own, and makes one for each server. Threads that are
    /// started later share this thread's network; those that run already do not.
    pub fn new(servers: usize) -> Result<Self, LiveError> {
        let refused = |error: io::Error| {
            LiveError::Machine(format!(
                "partitions need network namespaces and TAP devices, that is root and \
                 /dev/net/tun and the program `ip` ({error})"
            ))
        };
        let mut ports = vec![enter(0).map_err(refused)?];
        let mut homes = Vec::new();
        for server in 0..servers {
            let (home, requests) = mpsc::channel::<Request>();
            let (made, tap) = mpsc::channel();
            thread::Builder::new()
                .name(format!("net-{}", server + 1))
                .spawn(move || {
                    let port = enter(server + 1);
                    let failed = port.is_err();
                    if made.send(port).is_err() || failed {
                        return;
                    }
                    // The thread holds the namespace, and is the parent of what runs there.
                    for mut request in requests {
                        let child = request.command.spawn();
                        if request.started.send(child).is_err() {
                            return;
                        }
                    }
                })
                .map_err(refused)?;
            let gone = |_| io::Error::other("a thread ended");
            ports.push(
                tap.recv()
                    .map_err(gone)
                    .and_then(|it| it)
                    .map_err(refused)?,
            );
            homes.push(Home::Namespace(home));
        }
        let sides: Arc<Vec<AtomicU32>> =
            Arc::new(ports.iter().map(|_| AtomicU32::new(0)).collect());
        let ports = Arc::new(ports);
        for port in 0..ports.len() {
            let (ports, sides) = (Arc::clone(&ports), Arc::clone(&sides));
            thread::Builder::new()
                .name(format!("switch-{port}"))
                .spawn(move || forward(&ports, &sides, port))
                .map_err(refused)?;
        }
        Ok(Self { homes, sides })
    }

    /// Where a server's processes run.
    pub fn home(&self, server: usize) -> Home {
        self.homes.get(server).cloned().unwrap_or(Home::Here)
    }

    /// Cuts a server off from all that are not cut off, or ends that.
    pub fn set_cut(&self, server: usize, cut: bool) {
        if let Some(side) = self.sides.get(server + 1) {
            side.store(u32::from(cut), Ordering::Relaxed);
        }
    }
}

/// Moves this thread into a new network with one link, whose other end is returned.
fn enter(port: usize) -> io::Result<File> {
    // SAFETY: `unshare` with NEWNET gives this thread another network namespace. It does not
    // unshare the table of file descriptors, which is what would make it unsafe.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    let tap = open_tap()?;
    let [a, b, c, d] = address(port);
    // Of a kind that is never given to hardware (the second bit of the first byte).
    let mac = format!("02:77:{a:02x}:{b:02x}:{c:02x}:{d:02x}");
    let address = format!("{a}.{b}.{c}.{d}/16");
    for arguments in [
        vec!["link", "set", "lo", "up"],
        vec!["link", "set", LINK, "address", &mac, "mtu", "9000", "up"],
        vec!["addr", "add", &address, "dev", LINK],
    ] {
        let output = Command::new("ip").args(&arguments).output()?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(io::Error::other(format!(
                "ip {}: {said}",
                arguments.join(" ")
            )));
        }
    }
    Ok(tap)
}

const LINK: &str = "chaos0";

/// Makes the link in the network of this thread; it is gone when the file is closed.
fn open_tap() -> io::Result<File> {
    let tap = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    // SAFETY: `ifreq` is plain data, for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, &from) in request.ifr_name.iter_mut().zip(LINK.as_bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes an `ifreq`; this one lives until the call returns, and the
    // descriptor is open as long as `tap`.
    let result = unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETIFF as _, &raw mut request) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(tap)
}

/// Largest frame on a link.
const FRAME_BYTES_MAX: usize = 9_100;

/// Takes what comes from one port to where it goes, until the process ends.
fn forward(ports: &[File], sides: &[AtomicU32], from: usize) {
    let mut frame = [0; FRAME_BYTES_MAX];
    while let Ok(length) = (&ports[from]).read(&mut frame) {
        let Some(destination) = frame.get(..length).and_then(|it| it.get(..6)) else {
            continue;
        };
        let only = port_of(destination);
        for (to, port) in ports.iter().enumerate() {
            let wanted = to != from && only.is_none_or(|only| only == to);
            let side = |port: usize| sides[port].load(Ordering::Relaxed);
            if wanted && side(from) == side(to) {
                // A full queue loses frames, as a switch does.
                let _ = (&*port).write(&frame[..length]);
            }
        }
    }
}

/// The port with this hardware address; none when the frame is for all.
fn port_of(mac: &[u8]) -> Option<usize> {
    match *mac {
        [0x02, 0x77, 10, 77, high, low] => {
            (usize::from(high) * 250 + usize::from(low)).checked_sub(2)
        }
        _ => None,
    }
}

/// Moves this thread, and those that are started later, into a mount table of their own: what is
/// mounted there is gone when the last of its processes ends.
pub(crate) fn own_mounts() -> Result<(), LiveError> {
    let refused = |error: io::Error| {
        LiveError::Machine(format!(
            "full disks need a mount namespace, that is root ({error})"
        ))
    };
    // SAFETY: as in `enter`: NEWNS does not unshare the table of file descriptors.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(|error| refused(error.into()))?;
    let private =
        rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).map_err(|error| refused(error.into()))
}

/// Mounts a disk of memory.
pub(crate) fn mount_disk(at: &std::path::Path, mib: u64) -> Result<(), LiveError> {
    let options = std::ffi::CString::new(format!("size={mib}m,mode=700"))
        .map_err(|error| LiveError::Machine(error.to_string()))?;
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", at, "tmpfs", flags, options.as_c_str())
        .map_err(LiveError::io(format!("mount a tmpfs at {}", at.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_name_ports() {
        for port in [0, 1, 101, 248, 249, 250, 499] {
            let [a, b, c, d] = address(port);
            assert_eq!(port_of(&[2, 0x77, a, b, c, d]), Some(port));
        }
        assert_eq!(port_of(&[0xff; 6]), None);
    }
}
