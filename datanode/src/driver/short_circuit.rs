//! Lending files of sealed replicas to readers on this host; see [`harvestfs_protocol::short_circuit`].

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::codec::FrameDecoder;
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::short_circuit::{FileRequest, LOAN, LOANS_MAX, answer, this_host};
use harvestfs_protocol::token::Right;
use tokio::io::AsyncReadExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout};

use crate::driver::node::Node;
use crate::store::{Lent, OpenFile};

/// Maximum number of readers at a time; bounds the number of files lent to them.
const READERS_MAX: usize = 32;
/// How long a reader may ask for nothing after its last loan has ended. Otherwise a few that are idle for good would
/// keep all others on the network. One that asks again later connects again.
const IDLE_DEADLINE: Duration = Duration::from_secs(10 * 60);
/// How long to pause when a reader cannot be accepted because the system lacks a resource.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);
/// Maximum number of bytes received at a time; all requests are far shorter.
const RECEIVED_BYTES_MAX: usize = 4096;

/// The socket on which files are lent, and the host whose clients may learn its path.
#[derive(Debug)]
pub struct ShortCircuit {
    path: PathBuf,
    host: String,
}

impl ShortCircuit {
    /// The socket's path, for clients on the same host.
    pub fn path_for(&self, host: &str) -> Option<PathBuf> {
        (host == self.host).then(|| self.path.clone())
    }
}

impl Drop for ShortCircuit {
    fn drop(&mut self) {
        // If the file stays, connecting to it fails, and the next start replaces it.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Opens the socket. If that fails, readers on this host use the network like all other readers.
pub fn open(path: &Path) -> Option<(ShortCircuit, UnixListener)> {
    match listen(path) {
        Ok(opened) => Some(opened),
        Err(error) => {
            let path = path.display();
            tracing::warn!(%path, %error, "no files are lent to readers on this host");
            None
        }
    }
}

fn listen(path: &Path) -> io::Result<(ShortCircuit, UnixListener)> {
    let host = this_host()?;
    let path = std::path::absolute(path)?;
    match std::fs::remove_file(&path) {
        // Left behind by a process that was killed.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let listener = UnixListener::bind(&path)?;
    Ok((ShortCircuit { path, host }, listener))
}

/// Serves readers until the datanode stops.
pub async fn serve(listener: UnixListener, node: Arc<Node>) {
    let readers = Arc::new(Semaphore::new(READERS_MAX));
    loop {
        let accepted = tokio::select! {
            biased;
            () = node.stopping() => return,
            accepted = listener.accept() => accepted,
        };
        let socket = match accepted {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "a reader on this host is not accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = readers.clone().try_acquire_owned() else {
            // The reader falls back to the network.
            continue;
        };
        let node = node.clone();
        tokio::spawn(async move {
            // The loans of a connection end with the connection.
            tokio::select! {
                biased;
                _ = node.busy.denied() => {}
                () = node.stopping() => {}
                ended = lend(&node, socket) => {
                    if let Err(error) = ended {
                        tracing::debug!(%error, "a reader on this host is gone");
                    }
                }
            }
            drop(permit);
        });
    }
}

/// Answers the requests of one reader until it disconnects, or has asked for nothing for long.
async fn lend(node: &Node, mut socket: UnixStream) -> io::Result<()> {
    let mut decoder = FrameDecoder::new();
    let mut loans: VecDeque<(Instant, Arc<OpenFile>)> = VecDeque::new();
    let mut received = [0; RECEIVED_BYTES_MAX];
    loop {
        let bytes = tokio::select! {
            biased;
            () = oldest_ends(&loans) => {
                loans.pop_front();
                continue;
            }
            read = timeout(IDLE_DEADLINE, socket.read(&mut received)) => match read {
                Ok(read) => read?,
                Err(_) => return Ok(()),
            },
        };
        if bytes == 0 {
            return Ok(());
        }
        decoder.push(Bytes::copy_from_slice(&received[..bytes]));
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        while let Some(request) = decoder.next_frame::<FileRequest>().map_err(invalid)? {
            let lent = if loans.len() < LOANS_MAX {
                request.request.scope(find(node, &request)).await
            } else {
                Err(DataError::OutOfOrder("too many files are lent".into()))
            };
            match lent {
                Ok(Lent { file, loan }) => {
                    answer(&socket, &Ok(()), Some(file.as_fd()))?;
                    loans.push_back((Instant::now() + LOAN, loan));
                }
                Err(error) => answer(&socket, &Err(error), None)?,
            }
        }
    }
}

async fn find(node: &Node, request: &FileRequest) -> Result<Lent, DataError> {
    tracing::debug!(block = %request.block, "a file is asked for");
    node.check_token(&request.token, request.block, Right::Read)?;
    let lent = node.store.lend(request.block).await?;
    // The server may have become busy while the file was opened.
    match node.busy.denial() {
        Some(denial) => Err(denial),
        None => Ok(lent),
    }
}

async fn oldest_ends(loans: &VecDeque<(Instant, Arc<OpenFile>)>) {
    match loans.front() {
        Some((end, _)) => tokio::time::sleep_until(*end).await,
        None => std::future::pending().await,
    }
}
