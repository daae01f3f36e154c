//! A datagram network in virtual time.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BinaryHeap, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use harvestfs_protocol::transport::DatagramSocket;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use rustc_hash::FxHasher;

/// The most datagrams that wait for one socket; further ones are dropped, as in the kernel.
const ARRIVED_MAX: usize = 4096;
/// The first port that is assigned when a socket is bound to port 0.
const EPHEMERAL_PORT: u16 = 32_768;

/// How datagrams get from one machine to another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Link {
    /// The percentage of datagrams that are lost.
    pub loss_percent: f64,
    /// The percentage of datagrams that arrive twice.
    pub twice_percent: f64,
    /// The most by which a datagram takes longer than the usual latency.
    pub jitter: Duration,
    /// Nothing arrives.
    pub cut: bool,
}

/// A datagram network between all machines of a simulation.
#[derive(Debug)]
pub struct Network {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    now: Duration,
    latency: Duration,
    rng: SmallRng,
    ports: BTreeMap<SocketAddr, Weak<Port>>,
    on_their_way: BinaryHeap<Reverse<OnItsWay>>,
    sent: u64,
    digest: u64,
    /// By sending and receiving machine; links that are missing here are in order.
    links: BTreeMap<(IpAddr, IpAddr), Link>,
}

struct OnItsWay {
    arrives: Duration,
    /// Datagrams that arrive at the same time are delivered in the order in which they were sent.
    number: u64,
    from: SocketAddr,
    to: SocketAddr,
    bytes: Vec<u8>,
}

impl Network {
    /// Creates a network in which every machine reaches every other one in `latency`.
    pub fn new(seed: u64, latency: Duration) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(State {
                now: Duration::ZERO,
                latency,
                rng: SmallRng::seed_from_u64(seed),
                ports: BTreeMap::new(),
                on_their_way: BinaryHeap::new(),
                sent: 0,
                digest: 0,
                links: BTreeMap::new(),
            }),
        })
    }

    /// The number of datagrams that were not lost on sending (duplicates count twice), and a digest of the time,
    /// sender, receiver and length of each one sent.
    pub fn sent(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.sent, state.digest)
    }

    /// Sets how datagrams get from one machine to another from now on.
    pub fn set_link(&self, from: IpAddr, to: IpAddr, link: Link) {
        self.state.lock().links.insert((from, to), link);
    }

    /// Opens a socket; port 0 means any free port.
    ///
    /// # Errors
    /// When the port is in use.
    pub fn bind(self: &Arc<Self>, addr: SocketAddr) -> io::Result<Arc<dyn DatagramSocket>> {
        let mut state = self.state.lock();
        let is_free = |state: &State, addr: &SocketAddr| {
            state
                .ports
                .get(addr)
                .is_none_or(|port| port.strong_count() == 0)
        };
        let addr = if addr.port() == 0 {
            let mut ports = EPHEMERAL_PORT..=u16::MAX;
            let found = ports.find(|&port| is_free(&state, &SocketAddr::new(addr.ip(), port)));
            SocketAddr::new(addr.ip(), found.ok_or(io::ErrorKind::AddrInUse)?)
        } else {
            addr
        };
        if !is_free(&state, &addr) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let port = Arc::new(Port::default());
        state.ports.insert(addr, Arc::downgrade(&port));
        Ok(Arc::new(Socket {
            network: Arc::clone(self),
            addr,
            port,
        }))
    }

    /// Advances time, and delivers the datagrams that arrive by then.
    pub fn advance(&self, now: Duration) {
        let mut state = self.state.lock();
        state.now = now;
        while state
            .on_their_way
            .peek()
            .is_some_and(|next| next.0.arrives <= now)
        {
            let Some(Reverse(next)) = state.on_their_way.pop() else {
                break;
            };
            let port = state.ports.get(&next.to).and_then(Weak::upgrade);
            if let Some(port) = port {
                port.arrive(next.bytes, next.from);
            }
        }
    }

    fn send(&self, from: SocketAddr, to: SocketAddr, datagram: &[u8]) {
        let mut state = self.state.lock();
        state.note_sent(from, to, datagram.len());
        let link = state.links.get(&(from.ip(), to.ip())).copied();
        let link = link.unwrap_or_default();
        let mut copies = 1;
        if link.cut || chance(&mut state.rng, link.loss_percent) {
            return;
        }
        if chance(&mut state.rng, link.twice_percent) {
            copies = 2;
        }
        for _ in 0..copies {
            let mut arrives = state.now + state.latency;
            if !link.jitter.is_zero() {
                arrives += link.jitter.mul_f64(state.rng.random());
            }
            state.sent += 1;
            let on_its_way = OnItsWay {
                arrives,
                number: state.sent,
                from,
                to,
                bytes: datagram.to_vec(),
            };
            state.on_their_way.push(Reverse(on_its_way));
        }
    }
}

impl State {
    fn note_sent(&mut self, from: SocketAddr, to: SocketAddr, bytes: usize) {
        let mut hasher = FxHasher::default();
        (self.digest, self.now, from, to, bytes).hash(&mut hasher);
        self.digest = hasher.finish();
    }
}

fn chance(rng: &mut SmallRng, percent: f64) -> bool {
    percent > 0.0 && rng.random::<f64>() * 100.0 < percent
}

#[derive(Debug, Default)]
struct Port {
    inbox: Mutex<Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
    arrived: VecDeque<(Vec<u8>, SocketAddr)>,
    /// The last poll took a datagram. quinn limits a batch by the time that it takes, on which nothing may depend here:
    /// a poll after one that took a datagram is pending.
    took: bool,
    waker: Option<Waker>,
}

impl Port {
    fn arrive(&self, bytes: Vec<u8>, from: SocketAddr) {
        let mut inbox = self.inbox.lock();
        if inbox.arrived.len() < ARRIVED_MAX {
            inbox.arrived.push_back((bytes, from));
        }
        let waker = inbox.waker.take();
        drop(inbox);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

#[derive(Debug)]
struct Socket {
    network: Arc<Network>,
    addr: SocketAddr,
    port: Arc<Port>,
}

impl DatagramSocket for Socket {
    fn send(&self, to: SocketAddr, datagram: &[u8]) {
        self.network.send(self.addr, to, datagram);
    }

    fn poll_receive(
        &self,
        context: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<(usize, SocketAddr)> {
        let mut inbox = self.port.inbox.lock();
        if std::mem::take(&mut inbox.took) && !inbox.arrived.is_empty() {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        match inbox.arrived.pop_front() {
            Some((bytes, from)) => {
                let length = bytes.len().min(buffer.len());
                buffer[..length].copy_from_slice(&bytes[..length]);
                inbox.took = true;
                Poll::Ready((length, from))
            }
            None => {
                inbox.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }

    fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl fmt::Debug for OnItsWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (from, to, bytes) = (self.from, self.to, self.bytes.len());
        write!(f, "{bytes} bytes from {from} to {to} at {:?}", self.arrives)
    }
}

impl Ord for OnItsWay {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.arrives, self.number).cmp(&(other.arrives, other.number))
    }
}

impl PartialOrd for OnItsWay {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for OnItsWay {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for OnItsWay {}
