//! The comparison of every acknowledged byte and name with the model, by a client with empty caches.

use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;
use serde::Serialize;

use super::model::{Content, Model, Promise};
use super::workload::directory;

/// The findings of the comparison.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Comparison {
    /// Files whose every byte was compared at the end.
    pub files: u64,
    /// Bytes compared at the end.
    pub bytes: u64,
    /// Bytes that clients and programs on mounts read during the run and compared.
    pub bytes_during: u64,
    /// Names that were looked up.
    pub names: u64,
    /// Files whose last change was not acknowledged, so that nothing is promised.
    pub not_promised: u64,
    /// Acknowledged files that cannot be read, or are missing.
    pub lost: Vec<String>,
    /// Files with other bytes than acknowledged, and violations by parts of the cluster.
    pub wrong: Vec<String>,
    /// Names that exist although their removal was acknowledged, or both names of an unanswered rename.
    pub unexpected: Vec<String>,
}

impl Comparison {
    /// Whether everything is as it was promised.
    #[must_use]
    pub fn intact(&self) -> bool {
        self.lost.is_empty() && self.wrong.is_empty() && self.unexpected.is_empty()
    }

    /// Adds the findings of another comparison.
    pub(crate) fn add(&mut self, other: Self) {
        self.files += other.files;
        self.bytes += other.bytes;
        self.bytes_during += other.bytes_during;
        self.names += other.names;
        self.not_promised += other.not_promised;
        self.lost.extend(other.lost);
        self.wrong.extend(other.wrong);
        self.unexpected.extend(other.unexpected);
    }
}

/// The most findings of each kind that are named.
const NAMED_MAX: usize = 1_000;
const ENTRIES_PER_PAGE: usize = 1_000;

/// Adds a finding to a list, unless that is full.
pub(crate) fn note(list: &mut Vec<String>, text: String) {
    if list.len() < NAMED_MAX {
        list.push(text);
    }
}

/// Compares the directory of one client.
pub(crate) async fn compare(client: &Client, number: u16, model: &Model, to: &mut Comparison) {
    let me = Credentials::root();
    let path = |name: &str| format!("/{}/{name}", directory(number));
    let (names, either) = model.promises();
    for (file, promise) in names {
        to.names += 1;
        match *promise {
            Promise::Anything => to.not_promised += 1,
            Promise::Holds(content) => {
                check(client, &path(file), content, model, to).await;
            }
            Promise::HoldsOrGone(content) => {
                let there = client.resolve(&me, path(file).as_bytes()).await;
                if !matches!(there, Err(ClientError::Fs(FsError::NotFound))) {
                    check(client, &path(file), content, model, to).await;
                }
            }
        }
    }
    for (from, renamed, content) in either {
        to.names += 1;
        // The order matters: the rename may still take effect, but is never undone. So the file is found under the new
        // name and then also under the old one only if something is wrong.
        let new = client.resolve(&me, path(renamed).as_bytes()).await;
        let old = client.resolve(&me, path(from).as_bytes()).await;
        let (at, both) = after_rename([from, renamed], [&old, &new]);
        check(client, &path(at), *content, model, to).await;
        if both {
            let text = format!("{}: {} is there, too", path(from), path(renamed));
            note(&mut to.unexpected, text);
        }
    }
    let directory = directory(number);
    let may_exist = |text: &str| model.may_exist(text);
    if let Err(error) = list(client, &directory, &may_exist, to).await {
        let text = format!("/{directory}: {error}");
        if !names.is_empty() {
            note(&mut to.lost, text);
        }
    }
}

/// The name that must have the contents after a rename that was not answered, and whether both names exist.
fn after_rename<'a, T>(
    [from, renamed]: [&'a str; 2],
    [old, new]: [&Result<T, ClientError>; 2],
) -> (&'a str, bool) {
    if matches!(old, Err(ClientError::Fs(FsError::NotFound))) {
        return (renamed, false);
    }
    (from, old.is_ok() && new.is_ok())
}

async fn check(client: &Client, path: &str, content: Content, model: &Model, to: &mut Comparison) {
    match client
        .read_file(&Credentials::root(), path.as_bytes())
        .await
    {
        Ok(bytes) => match model.difference(content, &bytes) {
            Some(difference) => note(&mut to.wrong, format!("{path}: {difference}")),
            None => {
                to.files += 1;
                to.bytes += content.len as u64;
            }
        },
        Err(error) => note(&mut to.lost, format!("{path}: {error}")),
    }
}

/// Looks for names in a directory that must not exist.
pub(crate) async fn list(
    client: &Client,
    directory: &str,
    may_exist: &(dyn Fn(&str) -> bool + Sync),
    to: &mut Comparison,
) -> Result<(), ClientError> {
    let me = Credentials::root();
    let top = client.resolve(&me, directory.as_bytes()).await?;
    let mut after = None;
    loop {
        let page = client
            .readdir(&me, top.ino, after.as_ref(), ENTRIES_PER_PAGE, false)
            .await?;
        for entry in &page.entries {
            let text = String::from_utf8_lossy(entry.name.as_bytes()).into_owned();
            if !may_exist(&text) {
                note(&mut to.unexpected, format!("/{directory}/{text}"));
            }
        }
        after = page.entries.last().map(|entry| entry.name.clone());
        if page.end || page.entries.is_empty() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unanswered_rename_leaves_one_name_and_not_both() {
        let there = Ok(());
        let gone = Err(ClientError::Fs(FsError::NotFound));
        let unknown = Err(ClientError::Fs(FsError::SessionExpired));
        for (old, new, wanted) in [
            (&there, &gone, ("a", false)),
            (&gone, &there, ("b", false)),
            (&there, &there, ("a", true)),
            // The read of the file, which has to exist, reports this.
            (&gone, &gone, ("b", false)),
            (&unknown, &there, ("a", false)),
            (&there, &unknown, ("a", false)),
        ] {
            let found = after_rename(["a", "b"], [old, new]);
            assert_eq!(found, wanted, "{old:?} {new:?}");
        }
    }
}
