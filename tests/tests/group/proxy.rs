//! Between namenodes: passes datagrams on, records them, and plays them again.

use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;

const DATAGRAM_BYTES_MAX: usize = 65_535;
/// How long it takes until a thread sees that it is to end.
const POLL: Duration = Duration::from_millis(100);
/// More are not recorded.
const RECORDED_MAX: usize = 20_000;
/// Between two of those that are played again: all at once, the kernel would drop most.
const PAUSE: Duration = Duration::from_micros(50);

/// A proxy in front of one namenode. Ends when it is dropped.
pub struct Proxy {
    shared: Arc<Shared>,
}

struct Shared {
    /// Where the others send to.
    front: UdpSocket,
    behind: Mutex<SocketAddr>,
    /// The sockets that speak to the namenode, by whom they speak for.
    callers: Mutex<BTreeMap<SocketAddr, Arc<UdpSocket>>>,
    /// What was sent to the namenode, and on which socket.
    recorded: Mutex<Vec<(Arc<UdpSocket>, Vec<u8>)>>,
    is_over: AtomicBool,
}

impl Proxy {
    /// Passes on what comes for an address to another one, and back.
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

    /// The namenode is elsewhere from now on.
    pub fn lead_to(&self, behind: SocketAddr) {
        *self.shared.behind.lock() = behind;
    }

    /// How many datagrams were recorded.
    pub fn recorded(&self) -> usize {
        self.shared.recorded.lock().len()
    }

    /// Sends everything that was recorded again: as it came, and from elsewhere. Says how many datagrams that were.
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
            // One that is killed refuses.
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
                // It may be gone.
                let _ = self.front.send_to(&buffer[..length], caller);
            }
        }
    }
}
