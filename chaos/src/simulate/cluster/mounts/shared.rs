//! Files that several mounts use: replaced as a whole by renaming, changed in place, and created exclusively.

use std::collections::BTreeMap;
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Program;
use super::handed::Handed;
use super::kernel::Fd;
use super::watched::Watched;

/// The directory of these files.
pub(super) const DIRECTORY: &str = "/of-mounts";
/// Number of files of each kind for each mount.
const FILES: usize = 2;
/// The size of a file gives its version, modulo this number of words.
const WORDS: usize = 1_000;
/// The exclusive limit of how many times `WORDS` are added to the size.
const TIMES_MAX: usize = 6;

/// The versions of a file that a reader may find.
#[derive(Clone, Copy, Debug, Default)]
struct Published {
    /// The newest version whose change returned.
    at_least: u64,
    /// The newest version whose change began.
    at_most: u64,
}

/// What the programs of all mounts know together.
#[derive(Debug, Default)]
pub struct Board {
    published: BTreeMap<String, Published>,
    /// How often a change of a mount had no known outcome. It may take effect later, so the mount continues with other
    /// files.
    doubts: BTreeMap<u8, u64>,
    /// The number of the exclusive file that all mounts try to create, and the mounts that succeeded.
    exclusive: u64,
    winners: Vec<u8>,
    pub(super) handed: Handed,
    pub(super) watched: Watched,
}

impl Board {
    /// Notes that the machine of a mount crashed.
    pub fn crashed(&mut self, number: u8) {
        self.doubt(number);
        self.handed.crashed(number);
    }

    /// Moves on to the next exclusive file, if this is the current one.
    fn go_on_exclusively(&mut self, number: u64) {
        if self.exclusive == number {
            self.exclusive += 1;
            self.winners.clear();
        }
    }

    pub(super) fn doubt(&mut self, number: u8) {
        *self.doubts.entry(number).or_default() += 1;
    }
}

/// Mean time between two operations.
const PAUSE: Duration = Duration::from_millis(15);

/// A session that is silent for less than this continues.
const SESSION: Duration = Duration::from_secs(50);

fn is_acceptable(error: Errno) -> bool {
    // The file was replaced between the lookup of its name and its use, or the call was interrupted.
    matches!(error, Errno::STALE | Errno::INTR)
}

impl Program {
    /// Works on the files that all mounts use.
    pub(super) async fn work_with_others(&self) {
        self.make_directory(DIRECTORY).await;
        // Many reads for each change, in quick succession, to catch what is cached for too long.
        self.repeat_with(PAUSE, async || match self.random(0..20) {
            0..2 => self.doubted(self.replace().await),
            2..4 => self.doubted(self.change_in_place().await),
            4 => self.create_exclusively().await,
            5 => self.hand_around().await,
            _ => self.read_published().await,
        })
        .await;
    }

    /// Notes a failed change, which has no known outcome.
    fn doubted(&self, changed: Result<(), Errno>) -> Result<(), Errno> {
        if changed.is_err() || !self.journal.is_certain() {
            self.board.borrow_mut().doubt(self.number);
        }
        changed
    }

    /// How often a change of this mount had no known outcome.
    pub(super) fn doubts(&self) -> u64 {
        let doubts = &self.board.borrow().doubts;
        doubts.get(&self.number).copied().unwrap_or(0)
    }

    fn new_name(&self, kind: &str) -> String {
        let number = self.number;
        let (doubts, file) = (self.doubts(), self.random(0..FILES));
        format!("{kind}-{number}-{doubts}-{file}")
    }

    fn next_version(&self, name: &str) -> u64 {
        let mut board = self.board.borrow_mut();
        let published = board.published.entry(name.to_owned()).or_default();
        published.at_most += 1;
        published.at_most
    }

    fn published(&self, name: &str, version: u64) {
        if !self.journal.is_certain() {
            return;
        }
        if let Some(published) = self.board.borrow_mut().published.get_mut(name) {
            published.at_least = published.at_least.max(version);
        }
    }

    async fn write_version(&self, path: &str, version: u64, mode: OFlags) -> Result<(), Errno> {
        let words = 1 + version as usize % WORDS + WORDS * self.random(0..TIMES_MAX);
        let content = version.to_le_bytes().repeat(words);
        self.write_synced(path, mode, &content).await
    }

    /// Opens a file, writes this from its beginning, and syncs and closes it.
    pub(super) async fn write_synced(
        &self,
        path: &str,
        mode: OFlags,
        content: &[u8],
    ) -> Result<(), Errno> {
        let fd = self.thread.open(path, mode).await?;
        let filled = self.fill_synced(&fd, content).await;
        self.thread.close(fd).await?;
        filled
    }

    /// Writes this to an open file from its beginning, and syncs it.
    pub(super) async fn fill_synced(&self, fd: &Fd, content: &[u8]) -> Result<(), Errno> {
        let written = self.thread.write(fd, 0, content).await;
        self.thread.fsync(fd).await?;
        match written? == content.len() {
            true => Ok(()),
            false => Err(Errno::IO),
        }
    }

    /// Replaces a file by its next version.
    async fn replace(&self) -> Result<(), Errno> {
        let name = self.new_name("replaced");
        let version = self.next_version(&name);
        self.note(format_args!("replace {name} by version {version}"));
        let path = format!("{DIRECTORY}/{name}");
        let draft = format!("{path}.new");
        let mode = OFlags::CREATE | OFlags::TRUNC | OFlags::WRONLY;
        self.write_version(&draft, version, mode).await?;
        self.thread.rename(&draft, &path).await?;
        self.published(&name, version);
        Ok(())
    }

    /// Truncates a file and writes its next version.
    async fn change_in_place(&self) -> Result<(), Errno> {
        let name = self.new_name("changed");
        let version = self.next_version(&name);
        self.note(format_args!("change {name} to version {version}"));
        let path = format!("{DIRECTORY}/{name}");
        let mode = OFlags::CREATE | OFlags::TRUNC | OFlags::RDWR;
        self.write_version(&path, version, mode).await?;
        self.published(&name, version);
        Ok(())
    }

    /// Reads a file that some mount publishes.
    async fn read_published(&self) -> Result<(), Errno> {
        let (name, before) = {
            let board = self.board.borrow();
            let count = board.published.len();
            if count == 0 {
                return Ok(());
            }
            let nth = board.published.iter().nth(self.random(0..count));
            let Some((name, published)) = nth else {
                return Ok(());
            };
            (name.clone(), *published)
        };
        let path = format!("{DIRECTORY}/{name}");
        if self.random(0..2) == 0 {
            return self.stat_published(&name, &path, before).await;
        }
        self.note(format_args!("read {name}"));
        let opened = self.thread.open(&path, OFlags::RDONLY).await;
        let Some(fd) = self.found(&name, before, opened)? else {
            return Ok(());
        };
        let opened_at = self.journal.now();
        let read = self.read_all(&fd).await;
        self.thread.close(fd).await?;
        let read = match read {
            // The file was truncated while it was read (`docs/SEMANTICS.md`, exception 1).
            Err(Errno::INTR) => return Ok(()),
            // A session that is silent for too long ends, and with it open files without a name.
            Err(Errno::STALE) if self.journal.now() > opened_at + SESSION => return Ok(()),
            Err(Errno::STALE) => {
                self.failure(&format!("{name} is open, and gone"));
                return Ok(());
            }
            read => read?,
        };
        let at_most = self.board.borrow().published[&name].at_most;
        self.judge(&name, before.at_least..=at_most, &read);
        Ok(())
    }

    /// Judges what was found under a name; `None` where it is acceptable that nothing was found.
    fn found<T>(
        &self,
        name: &str,
        before: Published,
        found: Result<T, Errno>,
    ) -> Result<Option<T>, Errno> {
        match found {
            Err(Errno::NOENT) if before.at_least == 0 => Ok(None),
            Err(Errno::NOENT) => {
                self.failure(&format!("{name} is not there"));
                Ok(None)
            }
            Err(error) if is_acceptable(error) => Ok(None),
            found => found.map(Some),
        }
    }

    /// Checks the size only, for which cached attributes are enough.
    async fn stat_published(&self, name: &str, path: &str, before: Published) -> Result<(), Errno> {
        self.note(format_args!("stat {name}"));
        let stat = self.thread.stat(path).await;
        let Some(size) = self.found(name, before, stat)?.map(|it| it.size) else {
            return Ok(());
        };
        let at_most = self.board.borrow().published[name].at_most;
        // A file that is changed in place may have any size while the change is in flight.
        if before.at_least < at_most && name.starts_with("changed") {
            return Ok(());
        }
        let is_of = |version: u64| {
            size % 8 == 0 && size > 0 && (size / 8 - 1) % WORDS as u64 == version % WORDS as u64
        };
        if !(before.at_least..=at_most).any(is_of) {
            let at_least = before.at_least;
            self.failure(&format!(
                "{name} has {size} bytes, where there were versions {at_least} to {at_most}"
            ));
        }
        Ok(())
    }

    /// Checks contents. A file that is replaced is whole and of one version. One that is changed in place may be
    /// truncated or a mixture while a change is in flight, but each word belongs to one of the possible versions.
    fn judge(&self, name: &str, versions: std::ops::RangeInclusive<u64>, read: &[u8]) {
        let (words, rest) = read.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let is_changing = versions.start() < versions.end();
        let is_in_place = name.starts_with("changed");
        let is_whole = rest.is_empty() && words.windows(2).all(|pair| pair[0] == pair[1]);
        let may_be_mixed = is_in_place && is_changing;
        let is_broken = !may_be_mixed && (words.is_empty() || !is_whole);
        let wrong = words.iter().find(|word| !versions.contains(word));
        if wrong.is_some() || is_broken {
            let problem = format!(
                "{name}: {} bytes, whole: {is_whole}, version {wrong:?} or none, where there were {versions:?}",
                read.len()
            );
            // "A namenode that was put back from an older copy shows for each file the content of the copy, or an
            // error, never other bytes" (`docs/SEMANTICS.md`).
            let is_older = words.iter().all(|it| (1..=*versions.end()).contains(it));
            if is_in_place || is_older && is_whole && !words.is_empty() {
                self.failure(&problem);
            } else {
                self.journal.broken(format!("{}: {problem}", self.name()));
            }
        }
    }

    /// Creates a name exclusively, in which only one of all mounts may succeed.
    async fn create_exclusively(&self) -> Result<(), Errno> {
        let number = self.board.borrow().exclusive;
        let path = format!("{DIRECTORY}/exclusive-{number}");
        self.note(format_args!("create exclusive-{number}"));
        let mode = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY;
        let created = self.thread.open(&path, mode).await;
        let is_current = self.board.borrow().exclusive == number;
        match created {
            Ok(fd) => {
                if !self.journal.is_certain() {
                    self.board.borrow_mut().go_on_exclusively(number);
                } else if is_current {
                    let mut board = self.board.borrow_mut();
                    board.winners.push(self.number);
                    if board.winners.len() > 1 {
                        let winners = board.winners.clone();
                        self.failure(&format!("exclusive-{number} was created by {winners:?}"));
                    }
                }
                self.thread.close(fd).await
            }
            Err(Errno::EXIST) => {
                // All mounts move on to the next file: the more of them try it simultaneously, the harder the test.
                self.board.borrow_mut().go_on_exclusively(number);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
