//! Making a namenode's directory from a backup.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use harvestfs_protocol::backup::BackupContent;
use harvestfs_protocol::ids::ClusterId;

use super::recovery::read_base;
use super::{NamenodeError, data_dir};
use crate::backup::{BackupError, BackupReader};
use crate::consensus::{self, Member};
use crate::engine::namespace::Namespace;
use crate::journal::{Journal, JournalError};

/// Bytes that are copied at a time.
const COPY_BYTES: usize = 256 << 10;

/// Why nothing was restored.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The backup cannot be used.
    #[error("the backup cannot be used")]
    Backup(#[from] BackupError),
    /// The backup is of another cluster.
    #[error("the backup is of cluster {found}, not of cluster {expected}")]
    WrongCluster {
        /// The cluster that it has to be of.
        expected: ClusterId,
        /// The cluster that it is of.
        found: ClusterId,
    },
    /// The directory is not vacant.
    #[error(
        "{} is in the way: name a directory that is empty, that does not exist yet, or that \
         `harvestfs init namenode` made",
        path.display()
    )]
    NotEmpty {
        /// What is in the way.
        path: PathBuf,
    },
    /// The namespace in the backup differs from the backup's own description of it.
    #[error("the namespace in the backup is not what it says of itself: {what}")]
    Contradiction {
        /// What differs.
        what: String,
    },
    /// The directory cannot be made.
    #[error(transparent)]
    Namenode(#[from] NamenodeError),
}

impl From<JournalError> for RestoreError {
    fn from(error: JournalError) -> Self {
        Self::Namenode(error.into())
    }
}

/// Makes the data directory of a namenode from a backup. The namenode is the only one of a group of its own, has the
/// contents of the backup, and is in recovery until an operator accepts what the backup lacks. An attempt that was
/// interrupted can be repeated.
///
/// Pass `cluster` if it is known which cluster it has to be; the directory may name one, too.
///
/// # Errors
/// The directory is not vacant, the backup is damaged or of another cluster, or the disk refuses. In that case,
/// nothing is left that a namenode would start with.
pub fn restore(
    from: impl Read,
    data_dir: &Path,
    cluster: Option<ClusterId>,
    segment_bytes: u64,
) -> Result<BackupContent, RestoreError> {
    let mut reader = BackupReader::open(from)?;
    let content = reader.content().clone();
    let claimed = data_dir::claimed_cluster(data_dir)?;
    for expected in [cluster, claimed].into_iter().flatten() {
        if expected != content.cluster {
            let found = content.cluster;
            return Err(RestoreError::WrongCluster { expected, found });
        }
    }
    if let Some(path) = data_dir::in_the_way(data_dir)? {
        return Err(RestoreError::NotEmpty { path });
    }
    data_dir::prepare_restored(data_dir, content.cluster, content.record, |journal_dir| {
        make_journal(journal_dir, &mut reader, &content, segment_bytes)
    })?;
    Ok(content)
}

fn make_journal(
    dir: &Path,
    reader: &mut BackupReader<impl Read>,
    content: &BackupContent,
    segment_bytes: u64,
) -> Result<(), RestoreError> {
    let (mut journal, _) = Journal::open(&data_dir::empty(dir, content.cluster, segment_bytes))?;
    let mut receiver = journal.receive_snapshot(content.record)?;
    let mut buffer = vec![0; COPY_BYTES];
    loop {
        let read = reader.read(&mut buffer).map_err(BackupError::of_read)?;
        if read == 0 {
            break;
        }
        let written = receiver.write_all(&buffer[..read]);
        written.map_err(|error| JournalError::io("write", "the snapshot", error))?;
    }
    let received = receiver.finish().map_err(|error| match error {
        JournalError::Io { .. } => RestoreError::from(error),
        other => BackupError::Snapshot(other).into(),
    })?;
    let lsn = received.lsn();
    // A namenode that starts with it reads it, too, and must not be the first to find that it is unreadable.
    let (namespace, _) = read_base(Some((lsn, received.content()?)))?;
    check(&namespace, content)?;
    let member = Member {
        name: content.name.clone(),
        // It learns its actual address when it starts.
        addr: content.addr,
    };
    consensus::found_with_snapshot(&mut journal, received, content.term, member)
        .map_err(NamenodeError::from)?;
    Ok(())
}

fn check(namespace: &Namespace, content: &BackupContent) -> Result<(), RestoreError> {
    let differs = |what: String| Err(RestoreError::Contradiction { what });
    let cluster = namespace.formatted().map(|it| it.cluster);
    if cluster != Some(content.cluster) {
        return differs(format!(
            "it is of cluster {cluster:?}, not {}",
            content.cluster
        ));
    }
    let epoch = namespace.epoch().unwrap_or_default();
    if epoch != content.epoch {
        return differs(format!("it ends in epoch {epoch}, not {}", content.epoch));
    }
    let counts = namespace.counts();
    let found = (counts.files, counts.directories, counts.blocks);
    let said = (content.files, content.directories, content.blocks);
    if found != said {
        return differs(format!(
            "it has {found:?} files, directories and blocks, not {said:?}"
        ));
    }
    Ok(())
}
