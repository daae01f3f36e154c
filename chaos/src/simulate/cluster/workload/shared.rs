//! The directory that all clients share: each replaces files of its own by renaming, and reads those of the others. A
//! reader must find a version that was current at some time during its read.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::ops::RangeInclusive;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use harvestfs_client::{Client, ClientError, File, OpenFlags};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;

use super::Worker;
use crate::simulate::cluster::journal::Journal;

pub const SHARED_DIRECTORY: &str = "shared";
/// Number of files of each client.
const SHARED: usize = 2;
/// The size of a file gives its version, modulo this number of words.
const WORDS: u64 = 1_000;
/// The exclusive limit of how many times `WORDS` are added to the size.
const TIMES_MAX: usize = 8;

/// How long a client keeps a file open at most before it reads it.
const HELD_MAX_MS: usize = 600;
/// The most bytes of one read.
const READ_BYTES: usize = 16 << 10;
/// A session that is silent for less than this continues.
const SESSION: Duration = Duration::from_secs(50);

/// The mean time between two looks at sizes, and how long a client waits after one that failed.
const LOOK_PAUSE: Duration = Duration::from_millis(20);
const ERROR_PAUSE: Duration = Duration::from_millis(300);
/// The mean time while a look waits for the namenode: what other looks still show then is what leases protect.
const CUT_OFF_PAUSE: Duration = Duration::from_millis(5);

/// Versions of a file in the shared directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Published {
    /// The newest version whose rename returned.
    at_least: u64,
    /// The newest version whose rename began.
    at_most: u64,
}

/// What all clients know together.
#[derive(Debug, Default)]
pub struct Board {
    shared: BTreeMap<String, Published>,
}

/// A look that waits for the namenode.
type Look<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

impl Worker {
    /// Replaces a file in the shared directory by its next version.
    pub async fn publish(&self) -> Result<(), ClientError> {
        let name = format!("{}-{}", self.number, self.random(0..SHARED));
        let path = format!("/{SHARED_DIRECTORY}/{name}");
        let version = {
            let mut board = self.board.borrow_mut();
            let published = board.shared.entry(name.clone()).or_default();
            published.at_most += 1;
            published.at_most
        };
        self.begin(&[], format_args!("publish {name}, version {version}"));
        let words = 1 + version % WORDS + WORDS * self.random(0..TIMES_MAX) as u64;
        let content = version.to_le_bytes().repeat(words as usize);
        let draft = format!("{path}.new");
        let me = Credentials::root();
        self.client
            .write_file(&me, draft.as_bytes(), &content)
            .await?;
        self.rename_path(&draft, &path).await?;
        let mut board = self.board.borrow_mut();
        let published = board.shared.get_mut(&name);
        if let Some(published) = published.filter(|_| self.journal.is_certain()) {
            published.at_least = published.at_least.max(version);
        }
        Ok(())
    }

    /// Reads a file that some client replaces.
    pub async fn read_shared(&self) -> Result<(), ClientError> {
        let Some(name) = self.shared_name() else {
            return Ok(());
        };
        if self.random(0..4) == 0 {
            return self.hold_shared(&name).await;
        }
        self.begin(&[], format_args!("read shared {name}"));
        check(&self.client, &self.board, &name, &self.journal).await
    }

    /// Opens a file and reads it after a while: it must be as it was when it was opened, even if it was replaced since
    /// and has no name.
    async fn hold_shared(&self, name: &str) -> Result<(), ClientError> {
        let held = Duration::from_millis(self.random(0..HELD_MAX_MS) as u64);
        self.begin(&[], format_args!("hold shared {name} for {held:?}"));
        let at_least = self.board.borrow().shared[name].at_least;
        let path = format!("/{SHARED_DIRECTORY}/{name}");
        let me = Credentials::root();
        let opened = self
            .client
            .open_path(&me, path.as_bytes(), OpenFlags::READ, None);
        let file = match opened.await {
            Err(ClientError::Fs(FsError::NotFound)) if at_least == 0 => return Ok(()),
            // The file was replaced between the lookup of its name and its use.
            Err(ClientError::Fs(FsError::Stale)) => return Ok(()),
            opened => opened?,
        };
        let at_most = self.board.borrow().shared[name].at_most;
        let opened_at = self.journal.now();
        tokio::time::sleep(held).await;
        let read = read_all(&file).await;
        file.close().await?;
        match read {
            Err(ClientError::Fs(FsError::Stale | FsError::NotFound)) => {
                // A session that is silent for too long ends, and with it open files without a name.
                if self.journal.now() < opened_at + SESSION {
                    self.journal
                        .failure(format!("{path} is open, and gone, after {held:?}"));
                }
                Ok(())
            }
            read => {
                judge(&path, &read?, at_least..=at_most, &self.journal);
                Ok(())
            }
        }
    }
}

impl Worker {
    /// Looks at sizes continuously, beside the client's other operations, to catch what is cached for too long, even
    /// while the client is cut off.
    pub async fn watch_shared(&self) -> Infallible {
        // Looks that wait for the namenode, with the names of their files.
        let mut waiting: Vec<(String, Look<'_>)> = Vec::new();
        loop {
            let mut pause = pin!(self.pause(match waiting.is_empty() {
                true => LOOK_PAUSE,
                false => CUT_OFF_PAUSE,
            }));
            poll_fn(|context| {
                waiting.retain_mut(|(_, look)| look.as_mut().poll(context).is_pending());
                pause.as_mut().poll(context)
            })
            .await;
            let Some(name) = self.shared_name().filter(|_| !self.is_silent()) else {
                continue;
            };
            if waiting.iter().any(|(other, _)| *other == name) {
                continue;
            }
            let mut look: Look<'_> = Box::pin(self.watch_once(name.clone()));
            // What is cached is returned immediately.
            let is_over = poll_fn(|context| Poll::Ready(look.as_mut().poll(context).is_ready()));
            if !is_over.await {
                waiting.push((name, look));
            }
        }
    }

    async fn watch_once(&self, name: String) {
        // This runs beside other operations, which begin and end in the meantime, so it needs a journal of its own.
        let journal = self.journal.clone();
        journal.begin();
        if let Err(error) = self.look_at_shared(&name, &journal).await {
            self.journal.error(&self.name(), &error);
            tokio::time::sleep(ERROR_PAUSE).await;
        }
    }

    /// The names of all files that clients replace.
    pub(super) fn shared_names(&self) -> Vec<String> {
        self.board.borrow().shared.keys().cloned().collect()
    }

    /// The name of a file that some client replaces.
    fn shared_name(&self) -> Option<String> {
        let board = self.board.borrow();
        let count = board.shared.len();
        let nth = (count > 0).then(|| self.random(0..count))?;
        board.shared.keys().nth(nth).cloned()
    }

    /// Checks the size of a file only, for which cached attributes are enough.
    async fn look_at_shared(&self, name: &str, journal: &Journal) -> Result<(), ClientError> {
        let at_least = self.board.borrow().shared[name].at_least;
        let path = format!("/{SHARED_DIRECTORY}/{name}");
        let me = Credentials::root();
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        let size_bytes = match self.client.lookup(&me, parent.ino, &file).await {
            Err(ClientError::Fs(FsError::NotFound)) if at_least == 0 => return Ok(()),
            attr => attr?.size_bytes,
        };
        let at_most = self.board.borrow().shared[name].at_most;
        let words = size_bytes / 8;
        let mut versions = at_least..=at_most;
        if words == 0 || !versions.any(|it| (words - 1) % WORDS == it % WORDS) {
            journal.failure(format!(
                "{path} has {size_bytes} bytes, where there were versions {at_least} to {at_most}"
            ));
        }
        Ok(())
    }
}

async fn check(
    client: &Client,
    board: &RefCell<Board>,
    name: &str,
    journal: &Journal,
) -> Result<(), ClientError> {
    let at_least = board.borrow().shared[name].at_least;
    let path = format!("/{SHARED_DIRECTORY}/{name}");
    let me = Credentials::root();
    let read = match client.read_file(&me, path.as_bytes()).await {
        Err(ClientError::Fs(FsError::NotFound)) if at_least == 0 => return Ok(()),
        // The file was replaced between the lookup of its name and its use.
        Err(ClientError::Fs(FsError::Stale)) => return Ok(()),
        read => read?,
    };
    let at_most = board.borrow().shared[name].at_most;
    judge(&path, &read, at_least..=at_most, journal);
    Ok(())
}

/// Reads a whole file.
async fn read_all(file: &File) -> Result<Vec<u8>, ClientError> {
    let mut all = Vec::new();
    loop {
        let read = file.read(all.len() as u64, READ_BYTES).await?;
        if read.is_empty() {
            return Ok(all);
        }
        all.extend_from_slice(&read);
    }
}

/// Checks that what was read is one of these versions, and whole.
fn judge(path: &str, read: &[u8], versions: RangeInclusive<u64>, journal: &Journal) {
    let (words, rest) = read.as_chunks::<8>();
    let version = words.first().map(|word| u64::from_le_bytes(*word));
    let is_whole = rest.is_empty() && words.iter().all(|word| Some(word) == words.first());
    let is_current = version.is_some_and(|it| versions.contains(&it));
    if !is_whole || !is_current {
        let whole = if is_whole { "" } else { "not whole, " };
        let problem = format!("{path}: {whole}version {version:?}, where there were {versions:?}",);
        // "A namenode that was put back from an older copy shows for each file the content of the copy, or an error,
        // never other bytes" (`docs/SEMANTICS.md`).
        if is_whole && version.is_some_and(|it| (1..=*versions.end()).contains(&it)) {
            journal.failure(problem);
        } else {
            journal.broken(problem);
        }
    }
}

/// Reads and checks all files, when nothing changes any more.
pub async fn check_shared(client: &Client, board: &RefCell<Board>, journal: &Journal) {
    let names: Vec<String> = board.borrow().shared.keys().cloned().collect();
    for name in names {
        if let Err(error) = check(client, board, &name, journal).await {
            journal.failure(format!("/{SHARED_DIRECTORY}/{name}, in the end: {error}"));
        }
    }
}
