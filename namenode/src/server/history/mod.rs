//! The history of the primary tenants, beside the engine.
//!
//! A low-priority thread, the historian, owns the history, its files and the daily analysis. The owner of the engine
//! only collects what heartbeats report and hands over a batch every two minutes. However long the historian takes,
//! it delays no request: what it cannot take in time waits here in bounded space, and the oldest slots are dropped
//! and counted.

mod requests;
mod store;
mod worker;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self as std_mpsc, TrySendError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::history::{HistoryReply, HistoryRequest};
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::machine;
use harvestfs_telemetry::analysis::Analysis;
use harvestfs_telemetry::history::{Collector, ServerMean, Slot};
use harvestfs_telemetry::profile::TenantKey;
use tokio::sync::mpsc;

pub(super) use self::requests::{pattern, permille, tenant_name};
use self::worker::Worker;
use super::metrics::Responder;

/// Maximum number of messages that wait for the historian.
const QUEUED_MAX: usize = 64;
/// Maximum number of slots that wait for room in the queue: an hour.
const SLOTS_WAITING_MAX: usize = 30;

/// A server as the journal knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownServer {
    pub name: String,
    pub tenant: TenantKey,
    /// When it was first registered, in seconds since 1970.
    pub registered_s: u32,
    /// When it was reimaged, in seconds since 1970.
    pub reimages: Vec<u32>,
}

/// Messages to the historian.
enum Message {
    /// Servers that registered, or are known from the journal, with the time of the message.
    Servers(u32, BTreeMap<NodeId, KnownServer>),
    /// What servers used in a slot that is over.
    Slot(Slot, Vec<ServerMean>),
    /// A request of an operator.
    Request(HistoryRequest, Responder),
}

/// What the historian reports.
pub(super) enum Finished {
    /// An answer is ready.
    Answer(Result<HistoryReply, FsError>, Responder),
    /// History was analysed.
    Analysis(Arc<Analysis>),
}

/// The owner's handle on the historian.
pub(super) struct Historian {
    messages: Option<std_mpsc::SyncSender<Message>>,
    finished: mpsc::Receiver<Finished>,
    cancelled: Arc<AtomicBool>,
    slots_lost: Arc<std::sync::atomic::AtomicU64>,
    thread: Option<JoinHandle<()>>,
    collector: Collector,
    /// Servers not handed over yet. Bounded by the number of servers.
    servers: BTreeMap<NodeId, KnownServer>,
    slots: VecDeque<(Slot, Vec<ServerMean>)>,
}

impl Historian {
    /// Starts the thread, which reads the files first.
    ///
    /// # Errors
    /// If the system cannot provide a thread.
    pub(super) fn start(dir: PathBuf, analysis_interval: Duration) -> std::io::Result<Self> {
        let (messages, inbox) = std_mpsc::sync_channel(QUEUED_MAX);
        let (outbox, finished) = mpsc::channel(QUEUED_MAX);
        let cancelled = Arc::new(AtomicBool::new(false));
        let slots_lost = Arc::default();
        let worker = Worker {
            dir,
            analysis_interval,
            inbox,
            outbox,
            cancelled: Arc::clone(&cancelled),
            slots_lost: Arc::clone(&slots_lost),
        };
        // A simulation covers hours, and history weeks: a simulated namenode has none.
        let simulated = machine::is_simulated();
        let thread = if simulated {
            None
        } else {
            let thread = thread::Builder::new().name("historian".to_owned());
            Some(thread.spawn(move || worker.run())?)
        };
        Ok(Self {
            messages: (!simulated).then_some(messages),
            finished,
            cancelled,
            slots_lost,
            thread,
            collector: Collector::default(),
            servers: BTreeMap::new(),
            slots: VecDeque::new(),
        })
    }

    /// Notes a server that registered, or is known from the journal.
    pub(super) fn server(&mut self, node: NodeId, server: KnownServer) {
        self.servers.insert(node, server);
    }

    /// Notes the CPU use of the primary tenant from a heartbeat.
    pub(super) fn observe(&mut self, node: NodeId, cpu_permille: u16) {
        self.collector.observe(node.0, cpu_permille);
    }

    /// Hands over what is due. Never waits.
    pub(super) fn tick(&mut self, now_s: u32) {
        if let Some((slot, means)) = self.collector.advance(now_s)
            && !means.is_empty()
        {
            if self.slots.len() >= SLOTS_WAITING_MAX {
                self.slots.pop_front();
                self.slots_lost.fetch_add(1, Ordering::Relaxed);
            }
            self.slots.push_back((slot, means));
        }
        if !self.servers.is_empty() {
            let servers = std::mem::take(&mut self.servers);
            if let Err(Message::Servers(_, servers)) = self.send(Message::Servers(now_s, servers)) {
                self.servers = servers;
                // Slots mean nothing without their servers.
                return;
            }
        }
        while let Some((slot, means)) = self.slots.pop_front() {
            if let Err(Message::Slot(slot, means)) = self.send(Message::Slot(slot, means)) {
                self.slots.push_front((slot, means));
                return;
            }
        }
    }

    /// Hands over a request. It is answered by [`Finished::Answer`], or here if too many messages wait.
    pub(super) fn request(&mut self, request: HistoryRequest, responder: Responder) {
        if let Err(Message::Request(_, responder)) = self.send(Message::Request(request, responder))
        {
            let busy = FsError::Busy {
                retry_after_ms: 1_000,
            };
            responder.send(&Err(busy));
        }
    }

    fn send(&self, message: Message) -> Result<(), Message> {
        let Some(messages) = &self.messages else {
            return Err(message);
        };
        match messages.try_send(message) {
            Ok(()) => Ok(()),
            Err(TrySendError::Full(message) | TrySendError::Disconnected(message)) => Err(message),
        }
    }

    /// The next result. Cancellation-safe.
    pub(super) async fn finished(&mut self) -> Option<Finished> {
        self.finished.recv().await
    }

    /// Hands over what is left and waits for the thread, which abandons a running analysis. Blocks for about a second
    /// at most.
    pub(super) fn stop(&mut self, now_s: u32) {
        self.tick(now_s);
        self.cancelled.store(true, Ordering::Relaxed);
        // Otherwise the thread could not hand over its results.
        self.finished.close();
        self.messages = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the historian panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_telemetry::history::SLOT_S;

    use super::store::Store;
    use super::*;

    const NOW: u32 = 20_500 * 86_400;

    fn server(name: &str, function: &str, reimages: &[u32]) -> KnownServer {
        KnownServer {
            name: name.to_owned(),
            tenant: TenantKey {
                environment: "e".to_owned(),
                machine_function: function.to_owned(),
            },
            registered_s: NOW - 1_000,
            reimages: reimages.to_vec(),
        }
    }

    #[test]
    fn what_heartbeats_tell_is_on_disk_two_minutes_later() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let day = Duration::from_secs(86_400);
        let mut historian = Historian::start(path.clone(), day).unwrap();
        historian.server(NodeId(1), server("s1", "a", &[]));
        historian.server(NodeId(2), server("s2", "a", &[NOW - 500]));
        for slot in 0..10 {
            historian.tick(NOW + slot * SLOT_S);
            for _ in 0..40 {
                historian.observe(NodeId(1), 200);
                historian.observe(NodeId(2), 600);
                // Never registered: passed over.
                historian.observe(NodeId(9), 1_000);
            }
        }
        // The server goes to another tenant, and is wiped for it.
        historian.server(NodeId(2), server("s2", "b", &[NOW - 500, NOW + 1_300]));
        historian.tick(NOW + 10 * SLOT_S + 100);
        historian.stop(NOW + 11 * SLOT_S);

        let (store, history) = Store::open(path);
        assert_eq!(store.problems(), &[] as &[String]);
        let tenant = |function| history.find_tenant(&server("", function, &[]).tenant);
        let (a, b) = (tenant("a").unwrap(), tenant("b").unwrap());
        let shares = |id| {
            history
                .month(id, NOW + 20 * SLOT_S)
                .flatten()
                .collect::<Vec<_>>()
        };
        // In the last slot only the first server was still the tenant's.
        assert_eq!(shares(a)[..9], [0.4; 9]);
        assert_eq!((shares(a)[9], shares(b)), (0.2, vec![0.6]));
        let second = history.find_server("s2").unwrap();
        let second = &history.servers()[second.0 as usize];
        assert_eq!(second.reimages(), [NOW - 500, NOW + 1_300]);
        // Wiped by the tenant that gave it away.
        assert_eq!(second.owner_before(NOW + 1_300), Some(a));
        assert_eq!(second.owner(), Some(b));
    }

    #[test]
    fn a_historian_that_cannot_keep_up_costs_slots_not_memory() {
        let dir = tempfile::tempdir().unwrap();
        let day = Duration::from_secs(86_400);
        let mut historian = Historian::start(dir.path().join("history"), day).unwrap();
        // As if its queue were full.
        let messages = historian.messages.take();
        for slot in 0..100 {
            historian.tick(NOW + slot * SLOT_S);
            historian.observe(NodeId(1), 200);
        }
        assert_eq!(historian.slots.len(), SLOTS_WAITING_MAX);
        assert_eq!(
            historian.slots_lost.load(Ordering::Relaxed),
            99 - SLOTS_WAITING_MAX as u64
        );
        historian.messages = messages;
        historian.tick(NOW + 200 * SLOT_S);
        assert!(historian.slots.is_empty());
        historian.stop(NOW + 201 * SLOT_S);
    }
}
