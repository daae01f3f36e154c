//! Reads of sealed replicas on this host directly from the files of its datanodes; see
//! [`harvestfs_protocol::short_circuit`].
//!
//! If anything fails here, the caller asks the datanode over the network, which reports the cause:
//! a busy server, a missing replica, a chunk that does not match. Only if a disk hangs does the
//! caller ask another datanode: this one would wait for the same disk.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, ShortCircuitReply, chunk_checksum};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::replica_layout::{
    ENTRY_BYTES, GROUP_CHUNKS, PAGE_BYTES, chunk_position, chunks_in_file, decode_header,
    group_end, group_of, table_page_position,
};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::short_circuit::{FileRequest, ask, is_connected, this_host};
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::transport::{Connection, TransportError};
use harvestfs_protocol::types::NodeInfo;
use lru::LruCache;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::reader::SILENCE_MAX;
use crate::driver::clock;
use crate::driver::locations::Locations;
use crate::engine::read::loans::{Lenders, Loans, Way};

/// Maximum number of concurrent reads. Each occupies a thread while the disk works; more make no disk faster.
const READS_MAX: usize = 64;
/// How long a datanode may take to name its socket.
const SOCKET_DEADLINE: Duration = Duration::from_secs(2);
/// How long a datanode may take to hand over a file, which it has to open.
const FILE_DEADLINE: Duration = Duration::from_secs(1);
/// Maximum number of checksum tables that are kept: 16 MiB, for 16 GiB of data. Sealed blocks never
/// change, and all their replicas are identical.
const TABLES_MAX: NonZeroUsize = NonZeroUsize::new(4096).unwrap();

type Table = [u32; GROUP_CHUNKS as usize];
type Tables = Mutex<LruCache<(BlockId, u32), Arc<Table>>>;

/// The datanodes on this host, and what is cached of their files.
pub(crate) struct ShortCircuit {
    /// The identity of this host. Without one (`None`), no datanode counts as being on it.
    host: Option<String>,
    lenders: Mutex<Lenders<Arc<Lender>>>,
    tables: Arc<Tables>,
    reads: Arc<Semaphore>,
}

/// A datanode that lends its files.
struct Lender {
    socket: UnixStream,
    /// Held during a request: only one may be in flight.
    asking: Mutex<()>,
    /// Whether an answer was late or malformed: the next one would be taken for the answer to
    /// another request. Kept here, because the caller that asked may have been cancelled.
    out_of_step: AtomicBool,
    loans: Mutex<Loans<Arc<LentFile>>>,
}

struct LentFile {
    file: File,
    block: BlockId,
    /// The number of chunks, once the header was read. That waits for the disk, and is therefore
    /// left to the readers of this file: others request files on other disks meanwhile.
    chunks: OnceLock<u32>,
}

impl ShortCircuit {
    pub(crate) fn new() -> Self {
        Self {
            host: this_host().ok(),
            lenders: Mutex::default(),
            tables: Arc::new(Mutex::new(LruCache::new(TABLES_MAX))),
            reads: Arc::new(Semaphore::new(READS_MAX)),
        }
    }

    /// Reads and verifies a range, in bytes, of whole chunks of a block; `None` if the network has to be asked.
    ///
    /// # Errors
    /// The disk hangs.
    pub(crate) async fn read(
        &self,
        locations: &Locations,
        node: &NodeInfo,
        block: BlockId,
        token: BlockToken,
        bytes: &Range<u64>,
    ) -> Result<Option<Bytes>, DataError> {
        let Some(lender) = self.lender(locations, node).await else {
            return Ok(None);
        };
        let Ok(permit) = self.reads.clone().try_acquire_owned() else {
            return Ok(None);
        };
        let chunk = |at: u64| u32::try_from(at / PAGE_BYTES as u64);
        let (Ok(first), Ok(end)) = (chunk(bytes.start), chunk(bytes.end)) else {
            return Ok(None);
        };
        let (tables, reader) = (self.tables.clone(), lender.clone());
        let file = FileRequest {
            block,
            token,
            request: RequestId::current(),
        };
        let read = within(SILENCE_MAX, move || {
            let _permit = permit;
            reader.read(&tables, file, first..end)
        });
        match read.await {
            Some(Ok(data)) => Ok(data),
            Some(Err(error)) => self.ended(node, &lender, &error).map(|()| None),
            None => Ok(None),
        }
    }

    /// Notes that a datanode no longer lends files, for a while.
    ///
    /// # Errors
    /// The datanode's disk hangs.
    fn ended(
        &self,
        node: &NodeInfo,
        lender: &Arc<Lender>,
        error: &io::Error,
    ) -> Result<(), DataError> {
        tracing::debug!(node = node.name, %error, "a datanode on this host lends no more");
        let is_it = |open: &Arc<Lender>| Arc::ptr_eq(open, lender);
        self.lenders.lock().ended(node.node, clock::now(), is_it);
        match error.kind() {
            io::ErrorKind::TimedOut => Err(DataError::Disk("a read takes too long".into())),
            _ => Ok(()),
        }
    }

    /// Drops the files that are no longer lent.
    pub(crate) fn return_files(&self) {
        let lenders = self.lenders.lock().open();
        for lender in lenders {
            lender.loans.lock().expire(clock::now());
        }
    }

    async fn lender(&self, locations: &Locations, node: &NodeInfo) -> Option<Arc<Lender>> {
        let host = self.host.as_ref()?;
        let way = self.lenders.lock().way(node.node, clock::now());
        match way {
            Way::Lender(lender) => return Some(lender),
            Way::Network => return None,
            Way::Ask => {}
        }
        let connection = locations.connect(node).await.ok()?;
        match find_socket(&connection, host).await {
            Ok(Some(path)) => {
                let lender = Arc::new(Lender::connect(path).await?);
                self.lenders.lock().opened(node.node, lender.clone());
                Some(lender)
            }
            Ok(None) => {
                self.lenders.lock().has_no_socket(node.node, clock::now());
                None
            }
            Err(error) => {
                tracing::debug!(node = node.name, %error, "a datanode does not name its socket");
                None
            }
        }
    }
}

/// Runs a read on its own thread; fails if that takes too long, because a disk may hang. `None`:
/// the runtime is shutting down.
async fn within<T: Send + 'static>(
    patience: Duration,
    read: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Option<io::Result<T>> {
    match timeout(patience, spawn_blocking(read)).await {
        Ok(ended) => ended.ok(),
        // The thread continues until the disk answers, and keeps its resources until then.
        Err(_) => Some(Err(io::ErrorKind::TimedOut.into())),
    }
}

async fn find_socket(
    connection: &Connection,
    host: &str,
) -> Result<ShortCircuitReply, TransportError> {
    let (mut sender, mut receiver) = connection.open_stream(StreamKind::Data).await?;
    let request = Opening::from(DataRequest::ShortCircuit {
        host: host.to_owned(),
    });
    sender.send(&request).await?;
    sender.finish()?;
    let reply = receiver.recv::<ShortCircuitReply>(SOCKET_DEADLINE).await?;
    Ok(reply.and_then(|(path, _)| path))
}

impl Lender {
    async fn connect(path: PathBuf) -> Option<Self> {
        let connecting = spawn_blocking(move || {
            let socket = UnixStream::connect(path)?;
            socket.set_read_timeout(Some(FILE_DEADLINE))?;
            socket.set_write_timeout(Some(FILE_DEADLINE))?;
            io::Result::Ok(socket)
        });
        match connecting.await.ok()? {
            Ok(socket) => Some(Self {
                socket,
                asking: Mutex::default(),
                out_of_step: AtomicBool::new(false),
                loans: Mutex::default(),
            }),
            // The socket belongs to another user, or is in another container.
            Err(error) => {
                tracing::debug!(%error, "a datanode on this host cannot be reached by its socket");
                None
            }
        }
    }

    /// Reads and verifies chunks, as long as the connection lasts; `None` if the block is not lent,
    /// or the data is not valid.
    ///
    /// # Errors
    /// The connection has ended.
    fn read(
        &self,
        tables: &Tables,
        request: FileRequest,
        chunks: Range<u32>,
    ) -> io::Result<Option<Bytes>> {
        self.check()?;
        let block = request.block;
        let Some(lent) = self.file(&request)? else {
            return Ok(None);
        };
        let Some(lent_chunks) = self.in_step(lent.chunks())? else {
            // Keeps the file from being requested again immediately.
            self.loans.lock().answered(block, None, clock::now());
            return Ok(None);
        };
        if chunks.end > lent_chunks {
            return Ok(None);
        }
        match lent.read(tables, chunks) {
            Ok(data) => Ok(data),
            Err(error) => {
                tracing::debug!(%block, %error, "a replica on this host cannot be read");
                Ok(None)
            }
        }
    }

    fn check(&self) -> io::Result<()> {
        if self.out_of_step.load(Ordering::Acquire) || !is_connected(&self.socket) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(())
    }

    fn file(&self, request: &FileRequest) -> io::Result<Option<Arc<LentFile>>> {
        let answered = || self.loans.lock().get(request.block, clock::now());
        if let Some(file) = answered() {
            return Ok(file);
        }
        let _asking = self.asking.lock();
        // Another caller may have asked meanwhile, perhaps without getting an answer.
        self.check()?;
        if let Some(file) = answered() {
            return Ok(file);
        }
        let asked_at = clock::now();
        let lent = self.in_step(ask(&self.socket, request))?;
        let file = lent.ok().map(|file| {
            Arc::new(LentFile {
                file: file.into(),
                block: request.block,
                chunks: OnceLock::new(),
            })
        });
        let mut loans = self.loans.lock();
        loans.answered(request.block, file.clone(), asked_at);
        Ok(file)
    }

    /// Passes the result on. After an error, nothing that the datanode sends can be trusted any more.
    fn in_step<T>(&self, result: io::Result<T>) -> io::Result<T> {
        if result.is_err() {
            self.out_of_step.store(true, Ordering::Release);
        }
        result
    }
}

impl LentFile {
    /// Returns the number of chunks; `None` if the file is not that of a sealed replica, or cannot be read.
    ///
    /// # Errors
    /// The file belongs to another block, which checksums would not reveal.
    fn chunks(&self) -> io::Result<Option<u32>> {
        if let Some(chunks) = self.chunks.get() {
            return Ok(Some(*chunks));
        }
        let mut page = page_aligned(PAGE_BYTES);
        let length = self.file.metadata().map_or(0, |metadata| metadata.len());
        let header = self.file.read_exact_at(&mut page, 0);
        let (Some(chunks), Ok(())) = (chunks_in_file(length), header) else {
            return Ok(None);
        };
        match page.first_chunk().and_then(decode_header) {
            Some((found, _)) if found == self.block => {
                Ok(Some(*self.chunks.get_or_init(|| chunks)))
            }
            Some((found, _)) => {
                let block = self.block;
                tracing::error!(%block, %found, "the file of another block was lent");
                Err(io::ErrorKind::InvalidData.into())
            }
            None => Ok(None),
        }
    }

    /// Reads chunks that exist; `None` if one does not match its checksum.
    fn read(&self, tables: &Tables, chunks: Range<u32>) -> io::Result<Option<Bytes>> {
        let mut whole = page_aligned(chunks.len() * PAGE_BYTES);
        let mut rest = &mut whole[..];
        let mut first = chunks.start;
        while first < chunks.end {
            let end = group_end(first).min(chunks.end);
            let part;
            (part, rest) = rest.split_at_mut((end - first) as usize * PAGE_BYTES);
            self.file.read_exact_at(part, chunk_position(first))?;
            let table = self.table(tables, group_of(first))?;
            let start = (first % GROUP_CHUNKS) as usize;
            let expected = &table[start..start + (end - first) as usize];
            let mut pairs = part.chunks(PAGE_BYTES).zip(expected);
            if !pairs.all(|(chunk, expected)| chunk_checksum(chunk) == *expected) {
                tables.lock().pop(&(self.block, group_of(first)));
                return Ok(None);
            }
            first = end;
        }
        Ok(Some(whole.freeze()))
    }

    fn table(&self, tables: &Tables, group: u32) -> io::Result<Arc<Table>> {
        let key = (self.block, group);
        if let Some(table) = tables.lock().get(&key) {
            return Ok(table.clone());
        }
        let mut page = page_aligned(PAGE_BYTES);
        self.file
            .read_exact_at(&mut page, table_page_position(group))?;
        let mut table = [0; GROUP_CHUNKS as usize];
        let (entries, _) = page.as_chunks::<ENTRY_BYTES>();
        for (checksum, entry) in table.iter_mut().zip(entries) {
            *checksum = u32::from_le_bytes(*entry);
        }
        let table = Arc::new(table);
        tables.lock().put(key, table.clone());
        Ok(table)
    }
}

/// Returns zeros that begin at a page boundary, as direct I/O requires.
fn page_aligned(bytes: usize) -> BytesMut {
    let mut buffer = BytesMut::zeroed(bytes + PAGE_BYTES);
    let skip = buffer.as_ptr().align_offset(PAGE_BYTES);
    let mut aligned = buffer.split_off(skip);
    aligned.truncate(bytes);
    aligned
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::Path;
    use std::sync::mpsc;

    use harvestfs_protocol::codec::FrameDecoder;
    use harvestfs_protocol::ids::{NodeId, StorageId};
    use harvestfs_protocol::replica_layout::{encode_header, entry_position, file_bytes};
    use harvestfs_protocol::short_circuit::answer;
    use harvestfs_protocol::token::{Right, TokenKey, TokenSigner};

    use super::*;

    /// Creates a sealed replica of one chunk of these bytes.
    fn replica(directory: &Path, block: BlockId, byte: u8) -> File {
        let path = directory.join(block.to_string());
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(path)
            .unwrap();
        let mut header = [0; PAGE_BYTES];
        encode_header(&mut header, block, StorageId(1));
        let chunk = [byte; PAGE_BYTES];
        let checksum = chunk_checksum(&chunk).to_le_bytes();
        file.set_len(file_bytes(1)).unwrap();
        file.write_all_at(&header, 0).unwrap();
        file.write_all_at(&checksum, entry_position(0)).unwrap();
        file.write_all_at(&chunk, chunk_position(0)).unwrap();
        file
    }

    fn request(block: BlockId) -> FileRequest {
        let key = TokenKey {
            key_id: 1,
            secret: [3; 32],
        };
        FileRequest {
            block,
            token: TokenSigner::new(&key).sign(block, Right::Read, u64::MAX),
            request: RequestId::NONE,
        }
    }

    /// Takes the next request, and answers it with a file after `go`; returns false if the reader
    /// has disconnected.
    fn lend(
        mut socket: &UnixStream,
        decoder: &mut FrameDecoder,
        file: &File,
        go: impl FnOnce(),
    ) -> bool {
        while decoder.next_frame::<FileRequest>().unwrap().is_none() {
            let mut received = [0; 64];
            let Ok(bytes @ 1..) = socket.read(&mut received) else {
                return false;
            };
            decoder.push(Bytes::copy_from_slice(&received[..bytes]));
        }
        go();
        let _ = answer(socket, &Ok(()), Some(file.as_fd()));
        true
    }

    async fn connect(directory: &Path) -> (Lender, UnixStream) {
        let path = directory.join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        let lender = Lender::connect(path).await.unwrap();
        (lender, listener.accept().unwrap().0)
    }

    fn tables() -> Tables {
        Mutex::new(LruCache::new(TABLES_MAX))
    }

    #[tokio::test]
    async fn a_read_that_a_disk_holds_up_ends_in_time_and_keeps_its_permit() {
        let reads = Arc::new(Semaphore::new(1));
        let permit = reads.clone().try_acquire_owned().unwrap();
        let (go_on, goes_on) = mpsc::channel::<()>();
        let read = within(Duration::from_millis(10), move || {
            let _permit = permit;
            goes_on.recv().map_err(io::Error::other)
        });
        let ended = read.await.unwrap();
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(reads.available_permits(), 0, "its thread waits");
        go_on.send(()).unwrap();
        let freed = timeout(Duration::from_secs(60), reads.acquire()).await;
        assert!(freed.is_ok(), "its thread has ended");
    }

    /// Over the network, the datanode would wait for the same disk.
    #[tokio::test]
    async fn a_disk_that_hangs_is_not_asked_over_the_network() {
        let directory = tempfile::tempdir().unwrap();
        let (lender, _socket) = connect(directory.path()).await;
        let lender = Arc::new(lender);
        let node = NodeInfo {
            node: NodeId(1),
            name: "datanode-1".into(),
            data_addr: "127.0.0.1:1".parse().unwrap(),
            rack: "rack".into(),
        };
        let here = ShortCircuit::new();
        let way = || here.lenders.lock().way(node.node, clock::now());
        assert!(matches!(way(), Way::Ask));
        for (kind, hangs) in [
            (io::ErrorKind::TimedOut, true),
            (io::ErrorKind::ConnectionAborted, false),
        ] {
            here.lenders.lock().opened(node.node, lender.clone());
            let ended = here.ended(&node, &lender, &kind.into());
            assert_eq!(ended.is_err(), hangs, "{kind}");
            assert!(!matches!(way(), Way::Lender(_)), "{kind}");
        }
    }

    /// Its disk may hang, during which no caller could request files of other disks.
    #[tokio::test]
    async fn a_file_is_not_looked_at_before_it_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let (lender, socket) = connect(directory.path()).await;
        let file = File::create(directory.path().join("empty")).unwrap();
        let datanode = std::thread::spawn(move || {
            let mut decoder = FrameDecoder::new();
            lend(&socket, &mut decoder, &file, || {});
            lend(&socket, &mut decoder, &file, || {})
        });
        let block = BlockId(1);
        assert!(lender.file(&request(block)).unwrap().is_some());
        for _ in 0..2 {
            let read = lender.read(&tables(), request(block), 0..1);
            assert_eq!(read.unwrap(), None, "it has no header");
        }
        drop(lender);
        assert!(!datanode.join().unwrap(), "it was asked once more");
    }

    /// A datanode that stalled answers late. The caller of that request has gone, and the answer
    /// must not be taken for the answer to the next request.
    #[tokio::test]
    async fn a_late_answer_is_not_taken_for_the_next_one() {
        let directory = tempfile::tempdir().unwrap();
        let (lender, socket) = connect(directory.path()).await;
        let (first, second) = (BlockId(1), BlockId(2));
        let files = [
            replica(directory.path(), first, 1),
            replica(directory.path(), second, 2),
        ];
        let (go_on, goes_on) = mpsc::channel();
        let datanode = std::thread::spawn(move || {
            let mut decoder = FrameDecoder::new();
            lend(&socket, &mut decoder, &files[0], || goes_on.recv().unwrap());
            lend(&socket, &mut decoder, &files[1], || {})
        });
        assert!(lender.read(&tables(), request(first), 0..1).is_err());
        go_on.send(()).unwrap();
        // A caller that waited for its turn does not know that the other one has failed.
        let late = lender.read(&tables(), request(second), 0..1);
        assert!(late.is_err(), "{late:?}");
        drop(lender);
        assert!(!datanode.join().unwrap(), "it was asked once more");
    }

    /// Checksums do not distinguish replicas.
    #[tokio::test]
    async fn the_file_of_another_block_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let (lender, socket) = connect(directory.path()).await;
        let file = replica(directory.path(), BlockId(1), 1);
        let datanode = std::thread::spawn(move || {
            let mut decoder = FrameDecoder::new();
            for _ in 0..2 {
                lend(&socket, &mut decoder, &file, || {});
            }
        });
        let right = lender.read(&tables(), request(BlockId(1)), 0..1).unwrap();
        assert_eq!(right.unwrap(), [1; PAGE_BYTES][..]);
        let wrong = lender.read(&tables(), request(BlockId(2)), 0..1);
        assert!(matches!(wrong, Err(_) | Ok(None)), "{wrong:?}");
        datanode.join().unwrap();
    }
}
