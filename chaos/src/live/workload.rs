//! A client that writes, reads, renames and removes files, and remembers what was promised to it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harvestfs_client::{Client, ClientError, ClientOptions};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::identity::Identity;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::types::Credentials;
use rand::RngExt;
use rand::rngs::SmallRng;
use serde::{Deserialize, Serialize};

use super::admin::NAMENODE_NAME;
use super::metrics::{Metrics, Operation};
use super::model::{Content, Model};
use super::mounted::Doubt;
use super::scenario::ClientSpec;
use crate::random;

/// How a client reaches the cluster.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Access {
    /// The directory of the certificate.
    pub identity: PathBuf,
    /// The namenodes.
    pub namenodes: Vec<SocketAddr>,
    /// The options of clients, such as timeouts.
    pub spec: ClientSpec,
}

impl Access {
    /// Opens a session.
    pub async fn connect(&self) -> Result<Client, String> {
        let identity = Identity::load(&self.identity).map_err(|error| error.to_string())?;
        let mut options = ClientOptions::new(self.namenodes.clone(), NAMENODE_NAME, identity);
        options.busy_timeout = Duration::from_millis(self.spec.busy_timeout_ms);
        options.unreachable_timeout = Duration::from_millis(self.spec.unreachable_timeout_ms);
        // Up to a thousand clients share this process, and bytes should come from datanodes, not from caches.
        options.dirty_bytes_max = 16 << 20;
        options.read_ahead_total_bytes = 8 << 20;
        let connected = Client::connect(options).await;
        connected.map_err(|error| error.to_string())
    }
}

/// Counts of what all clients of a run have done so far, which are read while they work.
pub(crate) struct Counters {
    /// The metrics, which are updated with the counts.
    pub metrics: Arc<Metrics>,
    /// Reads that returned the right bytes.
    pub reads: AtomicU64,
    /// Reads that failed.
    pub failed_reads: AtomicU64,
    /// Writes, renames and removals that were acknowledged.
    pub changes: AtomicU64,
    /// Writes, renames and removals that were not acknowledged.
    pub failed_changes: AtomicU64,
}

impl Counters {
    /// Creates counts of zero.
    pub fn new(metrics: Arc<Metrics>) -> Self {
        Self {
            metrics,
            reads: AtomicU64::new(0),
            failed_reads: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            failed_changes: AtomicU64::new(0),
        }
    }

    /// Counts an operation that succeeded.
    pub fn done(&self, operation: Operation, took: Duration) {
        let count = match operation {
            Operation::Read => &self.reads,
            Operation::Write | Operation::Rename | Operation::Unlink => &self.changes,
        };
        count.fetch_add(1, Ordering::Relaxed);
        self.metrics.done(operation, took);
    }

    /// Counts an operation that failed.
    pub fn failed(&self, operation: Operation) {
        let count = match operation {
            Operation::Read => &self.failed_reads,
            Operation::Write | Operation::Rename | Operation::Unlink => &self.failed_changes,
        };
        count.fetch_add(1, Ordering::Relaxed);
        self.metrics.failed(operation);
    }

    /// The number of operations that succeeded.
    pub fn succeeded(&self) -> u64 {
        self.reads.load(Ordering::Relaxed) + self.changes.load(Ordering::Relaxed)
    }
}

/// The result of one client's work.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// What was promised to it.
    pub model: Model,
    /// How often each error occurred, by its text.
    pub errors: BTreeMap<String, u64>,
    /// Reads that returned other bytes than were written, and files that were missing.
    pub wrong: Vec<String>,
    /// Bytes that were read during the run and compared with the promised ones.
    pub compared_bytes: u64,
    /// Writes, renames and removals that are promised.
    pub changes: u64,
    /// How long reads took, in microseconds.
    pub read_us: Vec<u32>,
}

/// The accesses of all clients, for the report.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Accesses {
    /// Reads that returned the right bytes.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// Reads that failed because every replica was on a busy server.
    pub failed_reads_busy: u64,
    /// Writes, renames and removals that were acknowledged.
    pub changes: u64,
    /// Writes, renames and removals that were not acknowledged.
    pub failed_changes: u64,
    /// Changes that failed because no server took the data, owing to busy primaries.
    pub failed_changes_busy: u64,
    /// The median duration of a read, in milliseconds.
    pub read_p50_ms: f64,
    /// The 99th percentile of the duration of a read, in milliseconds.
    pub read_p99_ms: f64,
    /// How often each error occurred.
    pub errors: BTreeMap<String, u64>,
}

/// How long closing a session may take, in a cluster that is healing.
const CLOSE_DEADLINE: Duration = Duration::from_secs(30);

/// The name of a client's directory.
pub(crate) fn directory(number: u16) -> String {
    format!("client-{number}")
}

/// One client.
pub(crate) struct Worker {
    access: Access,
    number: u16,
    rng: SmallRng,
    client: Option<Client>,
    counters: Arc<Counters>,
    doubt: Arc<Doubt>,
    outcome: Outcome,
    /// The value of [`Doubt::since`] when the operation began.
    since: u64,
    next_name: u64,
}

impl Worker {
    /// Creates a client with a number from 1; the seed decides what it does.
    pub fn new(
        access: Access,
        number: u16,
        seed: u64,
        counters: &Arc<Counters>,
        doubt: &Arc<Doubt>,
    ) -> Self {
        Self {
            access,
            number,
            rng: random::stream(seed, &format!("client {number}")),
            client: None,
            counters: Arc::clone(counters),
            doubt: Arc::clone(doubt),
            outcome: Outcome::default(),
            since: 0,
            next_name: 0,
        }
    }

    /// Works until `stop` is set.
    pub async fn run(mut self, stop: Arc<AtomicBool>) -> Outcome {
        let pause = Duration::from_millis(self.access.spec.pause_ms);
        while !stop.load(Ordering::Relaxed) {
            let Some(since) = self.doubt.since() else {
                tokio::time::sleep(pause).await;
                continue;
            };
            self.since = since;
            if self.client.is_none() {
                match self.start_session().await {
                    Ok(client) => self.client = Some(client),
                    Err(error) => {
                        self.note("connect", &error);
                        tokio::time::sleep(Duration::from_millis(200)).await;
                        continue;
                    }
                }
            }
            if let Some(client) = self.client.clone() {
                self.step(&client).await;
            }
            tokio::time::sleep(pause).await;
        }
        if let Some(client) = self.client.take() {
            // Otherwise its open files would count as open until the session expires.
            let closed = tokio::time::timeout(CLOSE_DEADLINE, client.close()).await;
            if !matches!(closed, Ok(Ok(()))) {
                self.note("close", "the session is left to expire");
            }
        }
        self.outcome
    }

    async fn start_session(&self) -> Result<Client, String> {
        let client = self.access.connect().await?;
        let me = Credentials::root();
        let path = directory(self.number);
        let made = async {
            let (parent, name) = client.resolve_parent(&me, path.as_bytes()).await?;
            match client.mkdir(&me, parent.ino, &name, 0o755).await {
                Err(ClientError::Fs(FsError::Exists)) | Ok(_) => Ok(()),
                Err(error) => Err(error),
            }
        };
        made.await.map_err(|error: ClientError| error.to_string())?;
        Ok(client)
    }

    async fn step(&mut self, client: &Client) {
        let files = self.outcome.model.files();
        let dice = self.rng.random_range(0..100);
        let chosen = if files.is_empty() {
            None
        } else {
            Some(files[self.rng.random_range(0..files.len())].clone())
        };
        let full = files.len() >= self.access.spec.files_max;
        match chosen {
            Some((name, content)) if dice < self.access.spec.read_percent => {
                self.read(client, &name, content).await;
            }
            // A tenth of the changes are renames, and another tenth are removals.
            Some((name, _)) if dice % 10 == 0 && !full => self.rename(client, &name).await,
            Some((name, _)) if dice % 10 == 1 || full => self.unlink(client, &name).await,
            Some((name, _)) if dice % 10 == 2 => self.write(client, name).await,
            _ => {
                let name = self.new_name();
                self.write(client, name).await;
            }
        }
    }

    fn new_name(&mut self) -> String {
        self.next_name += 1;
        format!("file-{}", self.next_name)
    }

    fn path(&self, name: &str) -> Vec<u8> {
        format!("/{}/{name}", directory(self.number)).into_bytes()
    }

    async fn write(&mut self, client: &Client, name: String) {
        let max = self.access.spec.file_kib_max as usize * 1_024;
        let len = random::length(&mut self.rng, max);
        let content = Content {
            seed: self.rng.random(),
            len,
        };
        let path = self.path(&name);
        let bytes = content.bytes();
        let began = Instant::now();
        let written = client.write_file(&Credentials::root(), &path, &bytes).await;
        let promised = written.is_ok() && self.counts();
        self.outcome.model.wrote(&name, content, promised);
        self.changed(Operation::Write, began, written);
    }

    async fn rename(&mut self, client: &Client, name: &str) {
        let to = self.new_name();
        let (from_path, to_path) = (self.path(name), self.path(&to));
        let me = Credentials::root();
        let renamed = async {
            let (parent, from) = client.resolve_parent(&me, &from_path).await?;
            let (_, to) = client.resolve_parent(&me, &to_path).await?;
            let mode = RenameMode::Replace;
            client
                .rename(&me, parent.ino, &from, parent.ino, &to, mode)
                .await
        };
        let began = Instant::now();
        let renamed = renamed.await.map(|_| ());
        self.renamed(name, &to, began, renamed);
    }

    fn renamed(&mut self, from: &str, to: &str, began: Instant, result: Result<(), ClientError>) {
        if !self.misses(from, &result) {
            let promised = result.is_ok() && self.counts();
            self.outcome.model.renamed(from, to, promised);
        }
        self.changed(Operation::Rename, began, result);
    }

    async fn unlink(&mut self, client: &Client, name: &str) {
        let path = self.path(name);
        let me = Credentials::root();
        let unlinked = async {
            let (parent, name) = client.resolve_parent(&me, &path).await?;
            client.unlink(&me, parent.ino, &name).await
        };
        let began = Instant::now();
        let unlinked = unlinked.await.map(|_| ());
        self.unlinked(name, began, unlinked);
    }

    fn unlinked(&mut self, name: &str, began: Instant, result: Result<(), ClientError>) {
        if !self.misses(name, &result) {
            let promised = result.is_ok() && self.counts();
            self.outcome.model.unlinked(name, promised);
        }
        self.changed(Operation::Unlink, began, result);
    }

    async fn read(&mut self, client: &Client, name: &str, content: Content) {
        let path = self.path(name);
        let began = Instant::now();
        let read = client.read_file(&Credentials::root(), &path).await;
        self.was_read(name, content, began, read);
    }

    fn was_read(
        &mut self,
        name: &str,
        content: Content,
        began: Instant,
        result: Result<Vec<u8>, ClientError>,
    ) {
        self.misses(name, &result);
        match result {
            Ok(bytes) => {
                let took = began.elapsed();
                let took_us = u32::try_from(took.as_micros()).unwrap_or(u32::MAX);
                self.outcome.read_us.push(took_us);
                self.counters.done(Operation::Read, took);
                if !self.counts() {
                    return;
                }
                self.outcome.compared_bytes += bytes.len() as u64;
                if let Some(difference) = self.outcome.model.difference(content, &bytes) {
                    self.wrong(name, &difference);
                }
            }
            Err(error) => self.failed(Operation::Read, &error),
        }
    }

    /// Whether a file in the model was missing. That is wrong during any fault: no other client changes this directory,
    /// and the client repeats a change only if it was certainly not made. The promise stays as it was, for the
    /// comparison at the end.
    fn misses<T>(&mut self, name: &str, result: &Result<T, ClientError>) -> bool {
        let misses = matches!(result, Err(ClientError::Fs(FsError::NotFound))) && self.counts();
        if misses {
            self.wrong(name, "it is not there");
        }
        misses
    }

    fn wrong(&mut self, name: &str, what: &str) {
        let path = self.path(name);
        let path = String::from_utf8_lossy(&path);
        let text = format!("{path} during the run: {what}");
        self.outcome.wrong.push(text);
    }

    /// Whether the result of the operation is a promise.
    fn counts(&self) -> bool {
        self.doubt.since() == Some(self.since)
    }

    fn changed(&mut self, operation: Operation, began: Instant, result: Result<(), ClientError>) {
        match result {
            Ok(()) => {
                self.outcome.changes += u64::from(self.counts());
                self.counters.done(operation, began.elapsed());
            }
            Err(error) => self.failed(operation, &error),
        }
    }

    fn failed(&mut self, operation: Operation, error: &ClientError) {
        self.counters.failed(operation);
        let ended = matches!(
            error,
            ClientError::Closed
                | ClientError::Connect(_)
                | ClientError::Fs(FsError::SessionExpired)
        );
        if ended {
            self.client = None;
        }
        let text = match error {
            ClientError::AllReplicasBusy { .. } => "all replicas are busy".to_owned(),
            ClientError::AllServersBusy { .. } => "all servers are busy".to_owned(),
            ClientError::NoReplica { reason, .. } => format!("no replica can be read: {reason}"),
            error => error.to_string(),
        };
        self.note(operation.name(), &text);
    }

    fn note(&mut self, what: &str, text: &str) {
        // Ids would make every text unique.
        let text: String = format!("{what}: {text}")
            .chars()
            .map(|c| if c.is_ascii_digit() { '#' } else { c })
            .take(160)
            .collect();
        *self.outcome.errors.entry(text).or_default() += 1;
    }
}

/// Sums up the accesses of all clients.
pub(crate) fn accesses(counters: &Counters, outcomes: &[Outcome]) -> Accesses {
    let mut all = Accesses {
        reads: counters.reads.load(Ordering::Relaxed),
        failed_reads: counters.failed_reads.load(Ordering::Relaxed),
        changes: counters.changes.load(Ordering::Relaxed),
        failed_changes: counters.failed_changes.load(Ordering::Relaxed),
        ..Accesses::default()
    };
    for outcome in outcomes {
        for (text, count) in &outcome.errors {
            let busy = text.to_lowercase().contains("busy");
            if busy && text.starts_with("read:") {
                all.failed_reads_busy += count;
            } else if busy {
                all.failed_changes_busy += count;
            }
            *all.errors.entry(text.clone()).or_default() += count;
        }
    }
    let mut read_us: Vec<u32> = outcomes.iter().flat_map(|it| it.read_us.clone()).collect();
    read_us.sort_unstable();
    let quantile = |share: f64| {
        let index = (read_us.len() as f64 * share) as usize;
        let index = index.min(read_us.len().saturating_sub(1));
        read_us.get(index).map_or(0.0, |&us| f64::from(us) / 1e3)
    };
    (all.read_p50_ms, all.read_p99_ms) = (quantile(0.5), quantile(0.99));
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::model::Promise;

    const FILE: &str = "file-1";
    const HELD: Content = Content { seed: 1, len: 10 };

    /// A client without a session, to which a file was promised.
    fn worker(doubt: &Arc<Doubt>) -> Worker {
        let access = Access {
            identity: PathBuf::new(),
            namenodes: Vec::new(),
            spec: ClientSpec::default(),
        };
        let counters = Arc::new(Counters::new(Arc::new(Metrics::default())));
        let mut worker = Worker::new(access, 1, 1, &counters, doubt);
        worker.outcome.model.wrote(FILE, HELD, true);
        worker
    }

    fn is_not_there<T>() -> Result<T, ClientError> {
        Err(ClientError::Fs(FsError::NotFound))
    }

    #[test]
    fn a_held_file_that_is_not_there_is_wrong_and_stays_promised() {
        let doubt = Arc::default();
        let mut worker = worker(&doubt);
        let began = Instant::now();
        worker.was_read(FILE, HELD, began, is_not_there());
        worker.renamed(FILE, "file-2", began, is_not_there());
        worker.unlinked(FILE, began, is_not_there());
        let text = "/client-1/file-1 during the run: it is not there";
        assert_eq!(worker.outcome.wrong, [text; 3]);
        let (names, either) = worker.outcome.model.promises();
        assert_eq!(names[FILE], Promise::Holds(HELD));
        assert!(either.is_empty());
    }

    #[test]
    fn only_what_is_promised_is_a_change() {
        let doubt: Arc<Doubt> = Arc::default();
        let mut worker = worker(&doubt);
        let began = Instant::now();
        let expired = Err(ClientError::Fs(FsError::SessionExpired));
        worker.renamed(FILE, "file-2", began, expired);
        assert_eq!(worker.outcome.changes, 0);
        worker.unlinked(FILE, began, Ok(()));
        assert_eq!(worker.outcome.changes, 1);
        // The answer of an older copy of the namenode.
        doubt.turn();
        worker.changed(Operation::Write, began, Ok(()));
        assert_eq!(worker.outcome.changes, 1);
    }

    #[test]
    fn what_an_older_copy_or_no_namenode_says_is_not_wrong() {
        let doubt: Arc<Doubt> = Arc::default();
        let mut worker = worker(&doubt);
        let began = Instant::now();
        let unlinked = Err(ClientError::Fs(FsError::SessionExpired));
        worker.unlinked(FILE, began, unlinked);
        assert!(worker.outcome.wrong.is_empty());
        let promise = worker.outcome.model.promises().0[FILE];
        assert_eq!(promise, Promise::HoldsOrGone(HELD));
        doubt.turn();
        worker.was_read(FILE, HELD, began, is_not_there());
        assert!(worker.outcome.wrong.is_empty());
    }
}
