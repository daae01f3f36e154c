//! A proxy between namenodes, which forwards, records and replays datagrams.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

const DATAGRAM_BYTES_MAX: usize = 65_535;
/// Time for a thread to notice that it has to end.
const POLL: Duration = Duration::from_millis(100);
/// Maximum number of recorded datagrams.
const RECORDED_MAX: usize = 20_000;
/// Pause between replayed datagrams: without it, the kernel would drop most of them, and those of the namenodes too.
const PAUSE: Duration = Duration::from_micros(500);

/// A proxy in front of one namenode. Ends when it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
}

struct Shared {
    /// Socket to which the others send.
    front: UdpSocket,
    behind: Mutex<SocketAddr>,
    /// The sockets for sending to the namenode, by original sender.
    callers: Mutex<BTreeMap<SocketAddr, Arc<UdpSocket>>>,
    /// The datagrams sent to the namenode, each with its socket.
    recorded: Mutex<Vec<(Arc<UdpSocket>, Vec<u8>)>>,
    is_over: AtomicBool,
}

impl Proxy {
    /// Forwards datagrams for one address to another, and back.
    pub fn start(at: SocketAddr, behind: SocketAddr) -> Self {
        let front = UdpSocket::bind(at).expect("the address of one that was stopped");
        front.set_read_timeout(Some(POLL)).expect("a time-out");
        let shared = Arc::new(Shared {
            front,
            behind: Mutex::new(behind),
            callers: Mutex::default(),
            recorded: Mutex::default(),
            is_over: AtomicBool::new(false),
        });
        let passing = Arc::clone(&shared);
        thread::spawn(move || passing.pass_on());
        Self { shared }
    }

    /// Changes the address of the namenode.
    pub fn lead_to(&self, behind: SocketAddr) {
        *self.shared.behind.lock() = behind;
    }

    /// How many datagrams were recorded.
    pub fn recorded(&self) -> usize {
        self.shared.recorded.lock().len()
    }

    /// Replays everything that was recorded, from the original sockets and from others. Returns the number of
    /// datagrams.
    pub fn replay(&self) -> usize {
        let recorded = self.shared.recorded.lock().clone();
        let behind = *self.shared.behind.lock();
        let elsewhere = UdpSocket::bind("127.0.0.1:0").expect("a port");
        for (socket, datagram) in &recorded {
            for from in [&**socket, &elsewhere] {
                from.send_to(datagram, behind).expect("it is sent");
                thread::sleep(PAUSE);
            }
        }
        recorded.len()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn pass_on(self: Arc<Self>) {
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        while !self.is_over() {
            let Ok((length, caller)) = self.front.recv_from(&mut buffer) else {
                continue;
            };
            let socket = self.socket_of(caller);
            let datagram = &buffer[..length];
            // A killed namenode refuses it.
            let _ = socket.send_to(datagram, *self.behind.lock());
            let mut recorded = self.recorded.lock();
            if recorded.len() < RECORDED_MAX {
                recorded.push((socket, datagram.to_vec()));
            }
        }
    }

    fn socket_of(self: &Arc<Self>, caller: SocketAddr) -> Arc<UdpSocket> {
        let mut callers = self.callers.lock();
        let socket = callers.entry(caller).or_insert_with(|| {
            let socket = UdpSocket::bind("127.0.0.1:0").expect("a port");
            socket.set_read_timeout(Some(POLL)).expect("a time-out");
            let socket = Arc::new(socket);
            let (shared, answers) = (Arc::clone(self), Arc::clone(&socket));
            thread::spawn(move || shared.pass_back(&answers, caller));
            socket
        });
        Arc::clone(socket)
    }

    fn pass_back(&self, answers: &UdpSocket, caller: SocketAddr) {
        let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
        while !self.is_over() {
            if let Ok(length) = answers.recv(&mut buffer) {
                // The caller may have ended.
                let _ = self.front.send_to(&buffer[..length], caller);
            }
        }
    }
}
