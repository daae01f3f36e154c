//! A network of its own for each server, so that links can be cut, lossy and slow.
//!
//! Namespaces are held by threads, links are TAP devices whose other end this process holds, and a switch in this
//! process forwards frames between them. So nothing is left behind even if the process is killed: no name, no rule and
//! no interface outlives its last thread.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rand::RngExt;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::LiveError;
use crate::random;

/// Where a process runs.
#[derive(Clone, Debug)]
pub(crate) enum Home {
    /// In the namespace of the calling thread.
    Here,
    /// In the namespace that a thread holds.
    Namespace(mpsc::Sender<Request>),
}

/// A process to start, and where to send the result.
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
    links: Arc<Vec<Link>>,
}

/// The faults of the link of a port.
#[derive(Debug, Default)]
struct Link {
    /// Its side of a partition: 0 is that of the clients, and of all parts that are not cut off.
    side: AtomicU32,
    /// The percentage of lost frames, in each direction.
    loss_percent: AtomicU32,
    /// The delay of frames, in each direction.
    delay_ms: AtomicU32,
    /// Its machine is suspended: no frame gets through.
    is_down: AtomicBool,
}

/// A delayed frame: when it is due, its destination, and its bytes.
type Late = Reverse<(Instant, usize, Vec<u8>)>;

/// The most frames in flight; further ones are lost, as in the queue of a switch.
const LATE_FRAMES_MAX: usize = 4_096;

/// The address of a port: 0 for the namenode and the clients, then the servers.
pub(crate) fn address(port: usize) -> [u8; 4] {
    let number = port + 1;
    // Below 65,000 for every scenario that is accepted.
    [10, 77, (number / 250) as u8, (number % 250) as u8 + 1]
}

impl Network {
    /// Moves this thread into a network of its own, and makes one for each server. Threads that are started later share
    /// this thread's network; those that are already running do not. `seed` decides which frames a lossy link loses.
    pub fn new(servers: usize, seed: u64) -> Result<Self, LiveError> {
        let refused = |error: io::Error| {
            LiveError::Machine(format!(
                "partitions, loss and delay need network namespaces and TAP devices, that is root and \
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
                    // The thread holds the namespace, and is the parent of the processes there.
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
        let links: Arc<Vec<Link>> = Arc::new(ports.iter().map(|_| Link::default()).collect());
        let ports = Arc::new(ports);
        let (late, arriving) = mpsc::sync_channel(LATE_FRAMES_MAX);
        {
            let ports = Arc::clone(&ports);
            thread::Builder::new()
                .name("late".into())
                .spawn(move || deliver_late(&ports, &arriving))
                .map_err(refused)?;
        }
        for port in 0..ports.len() {
            let mut switch = Switch {
                ports: Arc::clone(&ports),
                links: Arc::clone(&links),
                late: late.clone(),
                rng: random::stream(seed, &format!("link {port}")),
            };
            thread::Builder::new()
                .name(format!("switch-{port}"))
                .spawn(move || switch.forward(port))
                .map_err(refused)?;
        }
        Ok(Self { homes, links })
    }

    /// Where a server's processes run.
    pub fn home(&self, server: usize) -> Home {
        self.homes[server].clone()
    }

    /// Cuts a server off from all parts that are not cut off, or ends that.
    pub fn set_cut(&self, server: usize, cut: bool) {
        self.link(server)
            .side
            .store(u32::from(cut), Ordering::Relaxed);
    }

    /// Takes the link of a server down, or up again.
    pub fn set_down(&self, server: usize, down: bool) {
        self.link(server).is_down.store(down, Ordering::Relaxed);
    }

    /// Sets the percentage of lost frames from and to a server.
    pub fn set_loss(&self, server: usize, percent: u32) {
        let loss = &self.link(server).loss_percent;
        loss.store(percent, Ordering::Relaxed);
    }

    /// Sets the delay of all frames from and to a server.
    pub fn set_delay(&self, server: usize, ms: u32) {
        self.link(server).delay_ms.store(ms, Ordering::Relaxed);
    }

    fn link(&self, server: usize) -> &Link {
        // Port 0 is the namenode's.
        &self.links[server + 1]
    }
}

/// Moves this thread into a new network with one link, whose other end is returned.
fn enter(port: usize) -> io::Result<File> {
    // SAFETY: `unshare` with NEWNET gives this thread another network namespace. It does not
    // unshare the table of file descriptors, which is what would make it unsafe.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    let tap = open_tap()?;
    let [a, b, c, d] = address(port);
    // Locally administered (the second bit of the first byte), so never assigned to hardware.
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

/// The largest frame on a link.
const FRAME_BYTES_MAX: usize = 9_100;

/// Forwards frames from one port to the others.
struct Switch {
    ports: Arc<Vec<File>>,
    links: Arc<Vec<Link>>,
    late: mpsc::SyncSender<Late>,
    rng: rand::rngs::SmallRng,
}

impl Switch {
    /// Forwards the frames that arrive at a port, until the process ends.
    fn forward(&mut self, from: usize) {
        let mut frame = [0; FRAME_BYTES_MAX];
        while let Ok(length) = (&self.ports[from]).read(&mut frame) {
            let frame = &frame[..length];
            let Some(destination) = frame.get(..6) else {
                continue;
            };
            let only = port_of(destination);
            for to in 0..self.ports.len() {
                if to != from && only.is_none_or(|only| only == to) {
                    self.send(from, to, frame);
                }
            }
        }
    }

    /// Sends a frame to a port. A full queue loses frames, as in a switch.
    fn send(&mut self, from: usize, to: usize, frame: &[u8]) {
        let ends = [&self.links[from], &self.links[to]];
        let [side, other] = ends.map(|it| it.side.load(Ordering::Relaxed));
        let lost = ends.into_iter().any(|link| {
            if link.is_down.load(Ordering::Relaxed) {
                return true;
            }
            let percent = link.loss_percent.load(Ordering::Relaxed);
            percent > 0 && self.rng.random_range(0..100) < percent
        });
        if side != other || lost {
            return;
        }
        let delays_ms = ends.map(|it| it.delay_ms.load(Ordering::Relaxed));
        let delay_ms: u32 = delays_ms.into_iter().sum();
        if delay_ms == 0 {
            let _ = (&self.ports[to]).write(frame);
        } else {
            let due = Instant::now() + Duration::from_millis(delay_ms.into());
            let _ = self.late.try_send(Reverse((due, to, frame.to_vec())));
        }
    }
}

/// Delivers frames when they are due, until the process ends.
fn deliver_late(ports: &[File], arriving: &mpsc::Receiver<Late>) {
    let mut waiting: BinaryHeap<Late> = BinaryHeap::new();
    loop {
        let next = match waiting.peek() {
            Some(Reverse((due, _, _))) => {
                arriving.recv_timeout(due.saturating_duration_since(Instant::now()))
            }
            None => arriving.recv().map_err(Into::into),
        };
        match next {
            Ok(frame) if waiting.len() < LATE_FRAMES_MAX => waiting.push(frame),
            Ok(_) | Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        while let Some(Reverse((due, _, _))) = waiting.peek()
            && *due <= now
            && let Some(Reverse((_, to, frame))) = waiting.pop()
        {
            let _ = (&ports[to]).write(&frame);
        }
    }
}

/// The port with this hardware address; `None` if the frame is for all ports.
fn port_of(mac: &[u8]) -> Option<usize> {
    match *mac {
        [0x02, 0x77, 10, 77, high, low] => {
            (usize::from(high) * 250 + usize::from(low)).checked_sub(2)
        }
        _ => None,
    }
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
