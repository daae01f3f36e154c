//! Free ports of this machine, for parts whose address others have to know before they listen.

use std::collections::BTreeSet;
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};

use parking_lot::Mutex;

/// Well-known services listen below it.
const FIRST: u16 = 10_000;
/// Attempts to find a port that is free, in each way.
const ATTEMPTS: usize = 1000;

/// All ports that this process has handed out: most are taken only later, and some are given up for a while, when a
/// part is restarted.
static HANDED_OUT: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// An address of this machine, at a port that is free for TCP and UDP and that no other call in this process returns.
///
/// # Panics
/// When no port is free.
pub fn free_address() -> SocketAddr {
    let below = (0..ATTEMPTS).map_while(|_| random_port());
    let mut ports = below.chain((0..ATTEMPTS).map(|_| ephemeral_port()));
    let mut handed_out = HANDED_OUT.lock();
    let port = ports.find(|port| is_free(*port) && handed_out.insert(*port));
    (Ipv4Addr::LOCALHOST, port.expect("a free port")).into()
}

/// Finds distinct free addresses.
pub fn free_addresses(count: usize) -> Vec<SocketAddr> {
    (0..count).map(|_| free_address()).collect()
}

/// A random port, unlike those of other processes, that the kernel gives to nobody who does not ask for it: every
/// command and every mount has a socket of its own, which could otherwise take the port before the part listens, or
/// while it is restarted. `None` if there is no such port.
fn random_port() -> Option<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let end: u16 = range.split_whitespace().next()?.parse().ok()?;
    let count = end.checked_sub(FIRST).filter(|count| *count > 0)?;
    // Each of these has other keys.
    let random = RandomState::new().hash_one(FIRST);
    Some(FIRST + (random % u64::from(count)) as u16)
}

/// A port that the kernel selects.
fn ephemeral_port() -> u16 {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    socket.local_addr().expect("it is bound").port()
}

fn is_free(port: u16) -> bool {
    let address = (Ipv4Addr::LOCALHOST, port);
    UdpSocket::bind(address).is_ok() && TcpListener::bind(address).is_ok()
}
