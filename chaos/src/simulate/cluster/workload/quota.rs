//! A directory of each client that has quotas: its contents never exceed them, and nothing is refused that fits.

use std::collections::BTreeMap;
use std::time::Duration;

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::types::Credentials;

use super::check::attributes;
use super::{DIRECTORY_MODE, Worker};
use crate::simulate::cluster::journal::Journal;

/// The quotas of the directory.
const QUOTA: Usage = Usage {
    bytes: 100_000,
    files: 4,
};
/// Number of names in it.
const NAMES: usize = 6;
/// The most bytes of a file.
const BYTES_MAX: usize = 60_000;
/// How long removed files may count: until no session has them open, and a session ends after 60 s of silence.
const COUNTED: Duration = Duration::from_secs(90);
/// How often the final check looks whether all removed files have ceased to count.
const LOOK: Duration = Duration::from_secs(5);

/// The quantities that quotas limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Usage {
    bytes: u64,
    files: u64,
}

impl Usage {
    fn of(bytes: u64) -> Self {
        Self { bytes, files: 1 }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            files: self.files + other.files,
        }
    }

    fn max(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.max(other.bytes),
            files: self.files.max(other.files),
        }
    }

    fn is_within(self, other: Self) -> bool {
        self.bytes <= other.bytes && self.files <= other.files
    }
}

/// What is known about the directory.
#[derive(Clone, Debug, Default)]
pub struct Limited {
    /// The least and the most that each name may count.
    names: BTreeMap<String, (Usage, Usage)>,
    /// When files were removed, and how much they may still count.
    removed: Vec<(Duration, Usage)>,
}

impl Limited {
    fn at_least(&self) -> Usage {
        let names = self.names.values().map(|(least, _)| *least);
        names.fold(Usage::default(), Usage::plus)
    }

    fn at_most(&mut self, now: Duration) -> Usage {
        self.removed.retain(|(at, _)| *at + COUNTED > now);
        let removed = self.removed.iter().map(|(_, usage)| *usage);
        let names = self.names.values().map(|(_, most)| *most);
        names.chain(removed).fold(Usage::default(), Usage::plus)
    }

    /// Notes that what was written and not synced may be lost.
    pub(super) fn lose_what_was_not_synced(&mut self) {
        for (least, _) in self.names.values_mut() {
            *least = Usage::default();
        }
    }

    /// Begins an operation on a name, which may count up to `most` afterwards if the operation is done. Returns the
    /// most that the name may have counted before.
    fn begin(&mut self, name: &str, most: Usage) -> Usage {
        let (least, known) = self.names.entry(name.to_owned()).or_default();
        let before = *known;
        (*least, *known) = (Usage::default(), before.max(most));
        before
    }
}

fn directory(number: u8) -> String {
    format!("limited-{number}")
}

impl Worker {
    /// Makes the directory and sets its quotas.
    pub(super) async fn limit(&self) -> Result<(), ClientError> {
        let (me, path) = (Credentials::root(), directory(self.number));
        self.make_directory(&path, DIRECTORY_MODE).await?;
        let ino = self.client.resolve(&me, path.as_bytes()).await?.ino;
        for (name, quota) in [
            ("user.harvestfs.quota_bytes", QUOTA.bytes),
            ("user.harvestfs.quota_files", QUOTA.files),
        ] {
            let (name, value) = (name.as_bytes(), quota.to_string());
            let mode = SetXattrMode::Any;
            self.client
                .setxattr(&me, ino, name, value.as_bytes(), mode)
                .await?;
        }
        Ok(())
    }

    /// Writes or removes a file there, or checks the usage.
    pub(super) async fn use_quota(&self) -> Result<(), ClientError> {
        let name = format!("f{}", self.random(0..NAMES));
        match self.random(0..6) {
            0 => self.compare_usage().await,
            1 => self.remove_limited(&name).await,
            _ => self.write_limited(&name).await,
        }
    }

    async fn write_limited(&self, name: &str) -> Result<(), ClientError> {
        let bytes = self.bytes(BYTES_MAX);
        let need = Usage::of(bytes.len() as u64);
        self.begin(
            &[],
            format_args!("write limited {name}: {} bytes", bytes.len()),
        );
        self.memory.borrow_mut().limited.begin(name, need);
        let (me, path) = (
            Credentials::root(),
            format!("/{}/{name}", directory(self.number)),
        );
        let written = self.client.write_file(&me, path.as_bytes(), &bytes).await;
        match written {
            Ok(()) => {
                let limited = &mut self.memory.borrow_mut().limited;
                if self.journal.is_certain() {
                    limited.names.insert(name.to_owned(), (need, need));
                }
                let used = limited.at_least();
                if !used.is_within(QUOTA) {
                    self.journal
                        .failure(format!("{path} was written: {used:?}, of {QUOTA:?}"));
                }
                Ok(())
            }
            Err(ClientError::Fs(FsError::QuotaExceeded)) => {
                let now = self.journal.now();
                let used = self.memory.borrow_mut().limited.at_most(now);
                if used.is_within(QUOTA) {
                    self.journal.failure(format!(
                        "{path} was refused, {need:?} more: at most {used:?}, of {QUOTA:?}"
                    ));
                }
                // The client would otherwise retry what it could not write.
                self.remove_limited(name).await
            }
            Err(error) => Err(error),
        }
    }

    async fn remove_limited(&self, name: &str) -> Result<(), ClientError> {
        self.begin(&[], format_args!("remove limited {name}"));
        let before = {
            let limited = &mut self.memory.borrow_mut().limited;
            limited.begin(name, Usage::default())
        };
        let (me, directory) = (Credentials::root(), directory(self.number));
        let path = format!("/{directory}/{name}");
        let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
        match self.client.unlink(&me, parent.ino, &file).await {
            Ok(_) | Err(ClientError::Fs(FsError::NotFound)) => {
                if self.journal.is_certain() {
                    let limited = &mut self.memory.borrow_mut().limited;
                    limited.names.remove(name);
                    limited.removed.push((self.journal.now(), before));
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    async fn compare_usage(&self) -> Result<(), ClientError> {
        self.begin(&[], format_args!("look at what is used"));
        let path = directory(self.number);
        let used = usage(&self.client, &path).await?;
        let limited = &mut self.memory.borrow_mut().limited;
        let (least, most) = (limited.at_least(), limited.at_most(self.journal.now()));
        if !used.is_within(QUOTA) || !least.is_within(used) || !used.is_within(most) {
            self.journal.failure(format!(
                "/{path} uses {used:?} of {QUOTA:?}, where there are {least:?} to {most:?}"
            ));
        }
        Ok(())
    }
}

/// The usage that a directory reports.
async fn usage(client: &Client, path: &str) -> Result<Usage, ClientError> {
    let me = Credentials::root();
    let ino = client.resolve(&me, path.as_bytes()).await?.ino;
    let number = async |name: &str| {
        let value = client.getxattr(&me, ino, name.as_bytes()).await?;
        let text = String::from_utf8_lossy(&value);
        Ok::<_, ClientError>(text.parse().expect("the namenode answers with numbers"))
    };
    Ok(Usage {
        bytes: number("user.harvestfs.used_bytes").await?,
        files: number("user.harvestfs.used_files").await?,
    })
}

/// Compares the reported usage of a client's directory with its contents at the end.
///
/// # Errors
/// When it cannot be read.
pub(super) async fn check_usage(
    client: &Client,
    number: u8,
    journal: &Journal,
) -> Result<(), ClientError> {
    let path = directory(number);
    let until = journal.now() + COUNTED;
    loop {
        let counted = match attributes(client, &path).await {
            // The client never made it.
            Err(ClientError::Fs(FsError::NotFound)) => return Ok(()),
            found => found?
                .values()
                .map(|attr| Usage::of(attr.allocated_bytes))
                .fold(Usage::default(), Usage::plus),
        };
        let used = usage(client, &path).await?;
        if used == counted {
            return Ok(());
        }
        if journal.now() > until {
            journal.failure(format!(
                "/{path}, in the end: {used:?} is used, and {counted:?} is there"
            ));
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}
