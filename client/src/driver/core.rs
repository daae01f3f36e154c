//! What all handles of a client share.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use rustc_hash::{FxHashMap, FxHashSet};
use tokio::time::Instant;

use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::BLOCKS_PER_REQUEST_MAX;
use harvestfs_protocol::meta::housekeeping;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{Credentials, PlacementRules};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::driver::locations::Locations;
use crate::driver::read::reader::{Fetched, ReadTimes};
use crate::driver::read::short_circuit::ShortCircuit;
use crate::driver::session::calls::confirm;
use crate::driver::session::listing::Listings;
use crate::driver::session::{LinkState, Session};
use crate::driver::write::allocator::Allocator;
use crate::driver::write::committer::Committer;
use crate::driver::write::file_state::FileState;
use crate::driver::write::pipeline::{BlockStream, Topology};
use crate::driver::write::writer::DataWriter;
use crate::engine::read::recent::Recent;
use crate::error::ClientError;

/// How often to look for files with old data.
const FLUSH_INTERVAL: Duration = Duration::from_millis(500);

/// How long a file that was closed before its commit waits for others to share a packet with.
const CLOSE_LINGER: Duration = Duration::from_millis(5);
/// How long a recalled file's content may take to be committed, within the namenode's patience.
const RECALL_DEADLINE: Duration = Duration::from_secs(8);

/// How long the end of a client waits until its last blocks are sealed: longer than it takes to save
/// one whose pipeline broke.
const CLOSE_DEADLINE: Duration = Duration::from_secs(8);

/// See the module.
pub(crate) struct Core {
    pub(crate) session: Arc<Session>,
    pub(crate) locations: Arc<Locations>,
    pub(crate) allocator: Allocator,
    pub(crate) committer: Committer,
    pub(crate) listings: Listings,
    pub(crate) dirty: DirtyBudget,
    pub(crate) read_times: ReadTimes,
    pub(crate) fetched: Fetched,
    pub(crate) short_circuit: ShortCircuit,
    /// Bytes read ahead, of all files.
    pub(crate) read_ahead_bytes: AtomicU64,
    pub(crate) recent: Recent,
    block_bytes: AtomicU64,
    default_rules: Mutex<PlacementRules>,
    packs: Mutex<FxHashMap<PlacementRules, Arc<DataWriter>>>,
    /// Blocks that this client writes to; what is in them may not be on stable storage.
    unsealed: Mutex<Vec<Weak<BlockStream>>>,
    /// Writers, of files too, that have not sealed and reported their last block.
    pub(crate) writers: watch::Sender<usize>,
    files: Mutex<FxHashMap<InodeId, Arc<FileState>>>,
    /// Files that were closed before what was written to them was committed.
    pub(crate) closed_early: AtomicUsize,
    /// The ones among them whose data is not even in flight.
    closing: Mutex<Vec<(RequestId, Arc<FileState>)>>,
}

/// Written data in memory, of all files.
pub(crate) struct DirtyBudget {
    used: AtomicU64,
    max: u64,
    freed: Notify,
}

impl DirtyBudget {
    pub(crate) fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether there is room for more. One write always fits, however large it is.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        let used = self.used();
        used == 0 || used + bytes as u64 <= self.max
    }

    /// So much is in memory that it is written without waiting for a flush.
    pub(crate) fn is_tight(&self) -> bool {
        self.used() > self.max / 2
    }

    /// A file holds `after` bytes now instead of `before`.
    pub(crate) fn changed(&self, before: u64, after: u64) {
        if after >= before {
            self.used.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.used.fetch_sub(before - after, Ordering::Relaxed);
            self.freed.notify_waiters();
        }
    }
}

impl Core {
    pub(crate) async fn start(session: Arc<Session>) -> Result<Arc<Self>, ClientError> {
        let link = session.link(session.options.unreachable_timeout).await?;
        let core = Arc::new(Self {
            locations: Arc::new(Locations::new(&session)),
            allocator: Allocator::default(),
            committer: Committer::default(),
            listings: Listings::default(),
            dirty: DirtyBudget {
                used: AtomicU64::new(0),
                max: session.options.dirty_bytes_max,
                freed: Notify::new(),
            },
            read_times: ReadTimes::default(),
            fetched: Fetched::default(),
            short_circuit: ShortCircuit::new(),
            read_ahead_bytes: AtomicU64::new(0),
            recent: Recent::default(),
            block_bytes: AtomicU64::new(link.opened.block_bytes),
            default_rules: Mutex::new(link.opened.default_rules),
            packs: Mutex::default(),
            unsealed: Mutex::default(),
            writers: watch::Sender::new(0),
            files: Mutex::default(),
            closed_early: AtomicUsize::new(0),
            closing: Mutex::default(),
            session,
        });
        // Set once: the session is new.
        let _ = core.session.core.set(Arc::downgrade(&core));
        tokio::spawn(flush_old_data(core.clone()));
        tokio::spawn(follow_session(core.clone()));
        Ok(core)
    }

    pub(crate) fn block_bytes(&self) -> u64 {
        self.block_bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn default_rules(&self) -> PlacementRules {
        *self.default_rules.lock()
    }

    /// The writer of small pieces of files with these rules.
    pub(crate) fn pack(self: &Arc<Self>, rules: PlacementRules) -> Arc<DataWriter> {
        let mut packs = self.packs.lock();
        let start = || DataWriter::start(self, Topology::Star, rules);
        packs.entry(rules).or_insert_with(start).clone()
    }

    /// A block was begun.
    pub(crate) fn begun(&self, stream: &Arc<BlockStream>) {
        let mut unsealed = self.unsealed.lock();
        unsealed.retain(|other| other.upgrade().is_some_and(|other| !other.is_sealed()));
        unsealed.push(Arc::downgrade(stream));
    }

    /// The blocks of a file that this client has written to and not sealed yet, through any handle.
    pub(crate) async fn unsealed_blocks(
        &self,
        ino: InodeId,
    ) -> Result<Vec<Arc<BlockStream>>, ClientError> {
        let mut unsealed: Vec<_> = self
            .unsealed
            .lock()
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|stream| !stream.is_sealed())
            .collect();
        if !unsealed.is_empty() {
            let (_, extents) = self.content(&Credentials::root(), ino).await?;
            let blocks: FxHashSet<_> = extents.from(0).map(|extent| extent.block).collect();
            unsealed.retain(|stream| blocks.contains(&stream.new.block));
        }
        Ok(unsealed)
    }

    /// The state of an inode that is open or has data in memory.
    pub(crate) fn file(&self, ino: InodeId) -> Option<Arc<FileState>> {
        self.files.lock().get(&ino).cloned()
    }

    /// The state of an inode, with one handle more.
    pub(crate) fn open_file(self: &Arc<Self>, ino: InodeId) -> Arc<FileState> {
        let mut files = self.files.lock();
        let file = files
            .entry(ino)
            .or_insert_with(|| FileState::new(self.clone(), ino))
            .clone();
        file.handle_opened();
        file
    }

    /// Forgets the state of an inode if nothing needs it.
    pub(crate) fn reap(&self, file: &Arc<FileState>) {
        let mut files = self.files.lock();
        if file.is_unused()
            && files
                .get(&file.ino)
                .is_some_and(|own| Arc::ptr_eq(own, file))
        {
            files.remove(&file.ino);
            file.close_writer();
        }
    }

    /// Starts flushing everything.
    pub(crate) fn flush_all(&self) {
        for file in self.all_files() {
            file.start_flush();
        }
    }

    /// Waits until there is room for more written data.
    pub(crate) async fn wait_for_room(&self, bytes: usize) -> Result<(), ClientError> {
        let started = Instant::now();
        // Writers that fail give up after the longer of these, and then nothing is freed.
        let options = &self.session.options;
        let patience = options.busy_timeout.max(options.unreachable_timeout);
        let patience = patience.saturating_mul(2);
        let mut unreachable = pin!(self.session.unreachable());
        loop {
            let freed = self.dirty.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if self.dirty.has_room(bytes) {
                return Ok(());
            }
            self.flush_all();
            let left = patience.saturating_sub(started.elapsed());
            tokio::select! {
                biased;
                () = freed => {}
                error = &mut unreachable => return Err(error),
                () = tokio::time::sleep(left) => {
                    return Err(ClientError::TooMuchDirtyData {
                        waiting_bytes: self.dirty.used(),
                        waited: started.elapsed(),
                    });
                }
            }
        }
    }

    /// Flushes a file soon, together with others that are closed meanwhile: they share packets and
    /// commits.
    pub(crate) fn flush_soon(self: &Arc<Self>, file: Arc<FileState>) {
        let is_first = {
            let mut closing = self.closing.lock();
            closing.push((RequestId::current(), file));
            closing.len() == 1
        };
        if is_first {
            let core = self.clone();
            self.session.runtime.spawn(async move {
                tokio::time::sleep(CLOSE_LINGER).await;
                let files = std::mem::take(&mut *core.closing.lock());
                for (request, file) in files {
                    request.during(|| file.start_flush());
                }
            });
        }
    }

    /// Commits what was closed already, of all files.
    pub(crate) async fn commit_closed(&self) -> Result<(), ClientError> {
        for file in self.all_files() {
            if file.is_closed_early() {
                file.flush(false).await?;
            }
        }
        Ok(())
    }

    /// Commits what is in memory of files that another session asks about; notifies the namenode.
    pub(crate) async fn commit_recalled(self: Arc<Self>, inodes: Vec<InodeId>) {
        let files: Vec<_> = inodes.iter().filter_map(|ino| self.file(*ino)).collect();
        for file in &files {
            file.start_flush();
        }
        let committed = async {
            for file in files {
                if let Err(error) = file.flush(false).await {
                    tracing::warn!(ino = %file.ino, %error, "what another session asks for is not committed yet");
                }
            }
        };
        if tokio::time::timeout(RECALL_DEADLINE, committed)
            .await
            .is_err()
        {
            tracing::warn!("what another session asks for is not committed in time");
        }
        for chunk in inodes.chunks(BLOCKS_PER_REQUEST_MAX) {
            let op = housekeeping::ReturnDelegations {
                inodes: chunk.to_vec(),
            };
            if let Err(error) = self.session.keep_house(op).await {
                // They end with the connection, or the namenode's patience.
                tracing::debug!(%error, "cannot return delegations");
            }
        }
    }

    /// No replica of a block has what was acknowledged.
    pub(crate) fn block_lost(&self, block: BlockId) {
        self.locations.forget(block);
        for file in self.all_files() {
            file.blocks_lost(|lost| lost == block);
        }
    }

    /// Flushes everything and waits for it; the first error counts. Nothing may be written any more.
    pub(crate) async fn flush_and_wait(&self) -> Result<(), ClientError> {
        let mut result = Ok(());
        for file in self.all_files() {
            let flushed = file.flush(false).await;
            result = result.and(flushed);
        }
        self.close_writers();
        // A block that is not sealed when its pipeline goes has to be recovered by the namenode.
        let mut writers = self.writers.subscribe();
        let sealed = writers.wait_for(|&running| running == 0);
        if tokio::time::timeout(CLOSE_DEADLINE, sealed).await.is_err() {
            tracing::debug!("some blocks are not sealed; the namenode does that");
        }
        result
    }

    /// Ends everything that holds on to this.
    pub(crate) fn let_go(&self) {
        self.close_writers();
        self.files.lock().clear();
    }

    fn close_writers(&self) {
        for (_, pack) in self.packs.lock().drain() {
            pack.close();
        }
        for file in self.all_files() {
            file.close_writer();
        }
    }

    fn all_files(&self) -> Vec<Arc<FileState>> {
        self.files.lock().values().cloned().collect()
    }
}

/// Flushes what was in memory for long, confirms commits, evicts and releases what is not needed.
async fn flush_old_data(core: Arc<Core>) {
    let age_max = core.session.options.dirty_age_max;
    while !core.session.is_closed() {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        for file in core.all_files() {
            if file.is_dirty_for(age_max) {
                file.start_flush();
            }
            core.reap(&file);
        }
        core.short_circuit.return_files();
        if core.session.has_unconfirmed() {
            confirm(core.session.clone()).await;
        }
    }
}

/// When a new session has replaced an expired one, everything that was not committed goes into
/// blocks of the new one.
async fn follow_session(core: Arc<Core>) {
    let mut changes = core.session.watch_link();
    let mut generation = core.session.generation();
    loop {
        let link = match &*changes.borrow_and_update() {
            LinkState::Closed => return core.let_go(),
            LinkState::Up(link) => Some(link.clone()),
            LinkState::Down { .. } => None,
        };
        if let Some(link) = link
            && link.generation != generation
        {
            generation = link.generation;
            core.block_bytes
                .store(link.opened.block_bytes, Ordering::Relaxed);
            *core.default_rules.lock() = link.opened.default_rules;
            for pack in core.packs.lock().values() {
                pack.wake();
            }
            for file in core.all_files() {
                file.blocks_lost(|_| true);
            }
        }
        if changes.changed().await.is_err() {
            return;
        }
    }
}
