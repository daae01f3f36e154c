//! The historian's thread.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self as std_mpsc, RecvTimeoutError};
use std::time::{Duration, Instant};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::history::{HistoryReply, HistoryRequest};
use harvestfs_protocol::ids::NodeId;
use harvestfs_telemetry::analysis::{Analysis, analyse};
use harvestfs_telemetry::history::records::{ServerRecord, append};
use harvestfs_telemetry::history::{
    History, HistoryError, Recorded, SLOT_S, ServerId, ServerMean, Slot,
};

use super::store::Store;
use super::{Finished, KnownServer, Message};
use crate::server::clock;

/// Niceness of the thread, as for checkpoints: low enough to go unnoticed while still making progress.
const NICENESS: i32 = 10;

/// The inputs of the thread.
pub(super) struct Worker {
    pub dir: PathBuf,
    pub analysis_interval: Duration,
    pub inbox: std_mpsc::Receiver<Message>,
    pub outbox: tokio::sync::mpsc::Sender<Finished>,
    pub cancelled: Arc<AtomicBool>,
    pub slots_lost: Arc<AtomicU64>,
}

/// History and its files.
pub(super) struct Historic {
    pub history: History,
    pub store: Store,
    /// The numbers in history of the nodes that registered.
    nodes: Vec<Option<ServerId>>,
    pub analysis: Option<Arc<Analysis>>,
    pub analysis_ms: u64,
    pub slots_recorded: u64,
}

impl Worker {
    pub(super) fn run(self) {
        if let Err(error) = rustix::process::setpriority_process(None, NICENESS) {
            tracing::warn!(%error, "the historian works at the usual priority");
        }
        let (store, history) = Store::open(self.dir.clone());
        tracing::info!(
            tenants = history.tenants().len(),
            servers = history.servers().len(),
            reimages = history.reimages(),
            "history was read"
        );
        let mut historic = Historic {
            history,
            store,
            nodes: Vec::new(),
            analysis: None,
            analysis_ms: 0,
            slots_recorded: 0,
        };
        // The result of the previous run is lost, so the first analysis is due immediately.
        let mut due = Instant::now();
        loop {
            if Instant::now() >= due {
                due = Instant::now() + self.analysis_interval;
                if historic.history.tenants().len() > 0 {
                    self.analyse(&mut historic);
                }
            }
            let wait = due.saturating_duration_since(Instant::now());
            match self.inbox.recv_timeout(wait) {
                Ok(Message::Servers(at_s, servers)) => {
                    let first = historic.nodes.is_empty();
                    historic.servers(at_s, &servers);
                    if first && historic.analysis.is_none() {
                        // The cluster is new, or has no history: at least its reimages count.
                        due = Instant::now();
                    }
                }
                Ok(Message::Slot(slot, means)) => historic.slot(slot, &means),
                Ok(Message::Request(request, responder)) => {
                    if matches!(request, HistoryRequest::Analyse) {
                        due = Instant::now() + self.analysis_interval;
                        self.analyse(&mut historic);
                    }
                    let slots_lost = self.slots_lost.load(Ordering::Relaxed);
                    let reply = historic.answer(request, clock::unix_now_s(), slots_lost);
                    self.tell(Finished::Answer(reply, responder));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn analyse(&self, historic: &mut Historic) {
        let started = Instant::now();
        let cancelled = || self.cancelled.load(Ordering::Relaxed);
        let Some(analysis) = analyse(&historic.history, clock::unix_now_s(), cancelled) else {
            return;
        };
        let elapsed = started.elapsed();
        tracing::info!(
            tenants = analysis.tenants.len(),
            classes = analysis.classes.len(),
            pairs = analysis.pairs.len(),
            elapsed_ms = elapsed.as_millis(),
            "history was analysed"
        );
        let analysis = Arc::new(analysis);
        historic.analysis_ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
        historic.analysis = Some(Arc::clone(&analysis));
        self.tell(Finished::Analysis(analysis));
    }

    fn tell(&self, finished: Finished) {
        // The receiver is dropped only when the namenode stops.
        let _ = self.outbox.blocking_send(finished);
    }
}

impl Historic {
    /// Notes servers that registered: their owners, and new reimages.
    fn servers(&mut self, at_s: u32, servers: &BTreeMap<NodeId, KnownServer>) {
        let mut records = Vec::new();
        for (node, server) in servers {
            if let Err(error) = self.server(at_s, server, &mut records) {
                // There are too many servers or tenants, for instance.
                tracing::warn!(server = server.name, %error, "history passes over a server");
            }
            let index = node.0 as usize;
            if index >= self.nodes.len() {
                self.nodes.resize(index + 1, None);
            }
            self.nodes[index] = self.history.find_server(&server.name);
        }
        self.store.append_servers(&records, &self.history);
    }

    fn server(
        &mut self,
        at_s: u32,
        server: &KnownServer,
        records: &mut Vec<u8>,
    ) -> Result<(), HistoryError> {
        // A reimage found just now happened while the server still belonged to the tenant that gave it away.
        let known = self.history.find_server(&server.name);
        let known = known.and_then(|id| self.history.servers().get(id.0 as usize));
        let owner = known.and_then(|known| known.owner());
        if known.is_none() || owner != self.history.find_tenant(&server.tenant) {
            let from_s = if known.is_none() {
                server.registered_s
            } else {
                at_s
            };
            self.history.owns(&server.name, &server.tenant, from_s)?;
            let record = ServerRecord::Owns {
                server: server.name.clone(),
                tenant: server.tenant.clone(),
                from_s,
            };
            append(records, &record);
        }
        let mut at_s = Vec::new();
        for &reimage in &server.reimages {
            if self.history.reimaged(&server.name, reimage)? == Recorded::New {
                at_s.push(reimage);
            }
        }
        if !at_s.is_empty() {
            let server = server.name.clone();
            append(records, &ServerRecord::Reimaged { server, at_s });
        }
        Ok(())
    }

    /// Records a slot that is over.
    fn slot(&mut self, slot: Slot, means: &[ServerMean]) {
        let servers = means.iter().filter_map(|mean| {
            let server = self.nodes.get(mean.server as usize).copied().flatten()?;
            Some((server, mean.share))
        });
        let servers: Vec<_> = servers.collect();
        let levels = self.history.record_slot(slot, servers);
        self.store.append_slot(slot, levels, &self.history);
        self.slots_recorded += 1;
        tracing::debug!(
            slot_s = u64::from(slot) * u64::from(SLOT_S),
            "utilisation was recorded"
        );
    }

    fn answer(
        &mut self,
        request: HistoryRequest,
        now_s: u32,
        slots_lost: u64,
    ) -> Result<HistoryReply, FsError> {
        match request {
            HistoryRequest::Import(records) => self.import(records, now_s),
            HistoryRequest::Tenants { after } => Ok(self.tenants(after, now_s)),
            HistoryRequest::Overview | HistoryRequest::Analyse => {
                Ok(HistoryReply::Overview(self.overview(slots_lost)))
            }
        }
    }
}
