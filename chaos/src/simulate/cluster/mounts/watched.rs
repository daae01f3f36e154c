//! Files of one page that each mount changes in place, and that programs on all mounts keep open: what was synced has
//! to be visible within 2 s through a descriptor that is already open.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::kernel::{Fd, PAGE_BYTES};
use super::shared::DIRECTORY;

/// How soon a change is visible through descriptors that are already open (`docs/SEMANTICS.md`).
const SEEN_WITHIN: Duration = Duration::from_secs(2);
/// The mean time between two changes, and between two reads.
const CHANGE_PAUSE: Duration = Duration::from_millis(300);
const LOOK_PAUSE: Duration = Duration::from_millis(40);
/// A program whose reads are further apart than this was held up, and its mount may have been, too.
const GAP_MAX: Duration = Duration::from_millis(500);

/// What is known about the files, by name.
#[derive(Debug, Default)]
pub(super) struct Watched {
    files: BTreeMap<String, Versions>,
}

#[derive(Debug, Default)]
struct Versions {
    /// The newest version whose write began.
    begun: u64,
    /// When the `fsync` of each version returned.
    synced: BTreeMap<u64, Duration>,
}

/// A file that a program keeps open.
struct Open {
    fd: Fd,
    /// Since when the program has not been held up and its mount has had a lease.
    undisturbed_since: Duration,
    looked_at: Duration,
}

impl Program {
    /// Changes a file of this mount in place, again and again.
    pub(super) async fn change_watched(&self) {
        self.make_directory(DIRECTORY).await;
        self.repeat_with(CHANGE_PAUSE, async || {
            let changed = self.write_watched().await;
            if changed.is_err() || !self.journal.is_certain() {
                // It may take effect later, and overwrite what is written next.
                self.board.borrow_mut().doubt(self.number);
            }
            changed
        })
        .await;
    }

    async fn write_watched(&self) -> Result<(), Errno> {
        let name = format!("watched-{}-{}", self.number, self.doubts());
        let version = {
            let mut board = self.board.borrow_mut();
            let versions = board.watched.files.entry(name.clone()).or_default();
            versions.begun += 1;
            versions.begun
        };
        self.note(format_args!("write version {version} over {name}"));
        let mode = OFlags::CREATE | OFlags::WRONLY;
        let fd = self
            .thread
            .open(&format!("{DIRECTORY}/{name}"), mode)
            .await?;
        let content = version.to_le_bytes().repeat(PAGE_BYTES as usize / 8);
        let written = self.thread.write(&fd, 0, &content).await;
        let synced = self.thread.fsync(&fd).await;
        self.thread.close(fd).await?;
        synced?;
        if written? != content.len() {
            return Err(Errno::IO);
        }
        if !self.journal.is_certain() {
            return Ok(());
        }
        let now = self.journal.now();
        if let Some(versions) = self.board.borrow_mut().watched.files.get_mut(&name) {
            versions.synced.insert(version, now);
        }
        Ok(())
    }

    /// Reads what other mounts change, through descriptors that stay open.
    pub(super) async fn watch(&self) {
        let open: RefCell<BTreeMap<String, Open>> = RefCell::default();
        self.repeat_with(LOOK_PAUSE, async || {
            let Some(name) = self.watched_elsewhere() else {
                return Ok(());
            };
            let known = open.borrow_mut().remove(&name);
            let mut file = match known {
                Some(file) => file,
                None => {
                    let path = format!("{DIRECTORY}/{name}");
                    match self.thread.open(&path, OFlags::RDONLY).await {
                        Err(Errno::NOENT) => return Ok(()),
                        opened => Open {
                            fd: opened?,
                            undisturbed_since: self.journal.now(),
                            looked_at: self.journal.now(),
                        },
                    }
                }
            };
            match self.look_at_watched(&name, &mut file).await {
                Ok(()) => {
                    open.borrow_mut().insert(name, file);
                    Ok(())
                }
                Err(error) => {
                    self.thread.close(file.fd).await?;
                    Err(error)
                }
            }
        })
        .await;
        for (_, file) in open.take() {
            if let Err(error) = self.thread.close(file.fd).await {
                self.journal.error(&self.name(), &error);
            }
        }
    }

    /// Draws a file that another mount changes.
    fn watched_elsewhere(&self) -> Option<String> {
        let board = self.board.borrow();
        let own = format!("watched-{}-", self.number);
        let names = board.watched.files.keys();
        let others: Vec<&String> = names.filter(|name| !name.starts_with(&own)).collect();
        let count = others.len();
        (count > 0).then(|| others[self.random(0..count)].clone())
    }

    async fn look_at_watched(&self, name: &str, file: &mut Open) -> Result<(), Errno> {
        let began = self.journal.now();
        let read = self.thread.read(&file.fd, 0, PAGE_BYTES as usize).await?;
        let now = self.journal.now();
        let is_disturbed = began - file.looked_at > GAP_MAX || !self.journal.is_certain();
        if is_disturbed || self.client.lease_remaining().is_zero() {
            file.undisturbed_since = now;
        }
        file.looked_at = now;
        let (words, _) = read.as_chunks::<8>();
        let version = words.first().map_or(0, |word| u64::from_le_bytes(*word));
        let is_whole = words
            .iter()
            .all(|word| u64::from_le_bytes(*word) == version);
        let board = self.board.borrow();
        let versions = &board.watched.files[name];
        if !is_whole || version > versions.begun {
            let begun = versions.begun;
            self.failure(&format!(
                "{name} is of version {version}, whole: {is_whole}, where there were {begun}"
            ));
        }
        let newer = versions.synced.range(version + 1..).next();
        if let Some((newer, synced_at)) = newer {
            let since = file.undisturbed_since.max(*synced_at);
            if began > since + SEEN_WITHIN {
                self.failure(&format!(
                    "{name}, which is open, shows version {version}, and version {newer} was synced at {synced_at:?}"
                ));
            }
        }
        Ok(())
    }
}
