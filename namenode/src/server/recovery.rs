//! From what is on the disk to a namespace.

use std::sync::Arc;
use std::time::Instant;

use harvestfs_protocol::durable;
use harvestfs_protocol::version::Versions;

use super::data_dir;
use super::{NamenodeError, NamenodeOptions};
use crate::consensus::{self, Content, ReadLog, ReadMembers, Standing, Term};
use crate::engine::namespace::{Command, Formatted, Namespace};
use crate::journal::disk::Disk;
use crate::journal::{
    Journal, JournalOptions, Lsn, RecordReader, Recovered, SnapshotReader, TailReport,
};

/// Records after which progress is reported in the log.
const PROGRESS_EVERY: u64 = 1_000_000;

/// What was on the disk.
pub(crate) enum Found {
    /// A namespace.
    Restored(Box<Restored>),
    /// A namenode that is in no group, for this reason.
    Outside(Journal, Standing),
}

/// A namespace, and what else was on the disk.
pub(crate) struct Restored {
    /// The state after the last record.
    pub namespace: Namespace,
    /// What the cluster was made with.
    pub formatted: Formatted,
    /// The journal, open for more.
    pub journal: Journal,
    /// What was read of it.
    pub read: ReadLog,
    /// It came from a backup, and waits for an operator.
    pub is_from_backup: bool,
}

/// Reads the newest snapshot and the records after it, from `disk` if there is one. Refuses to guess: what was acknowledged and
/// cannot be read is an error.
pub(crate) fn recover(
    options: &NamenodeOptions,
    disk: Option<Arc<dyn Disk>>,
) -> Result<Found, NamenodeError> {
    let started = Instant::now();
    let cluster = data_dir::cluster_id(&options.data_dir)?;
    let journal_options = JournalOptions {
        segment_bytes: options.segment_bytes,
        ..JournalOptions::new(data_dir::journal_dir(&options.data_dir), cluster.0)
    };
    let (journal, recovered) = match disk {
        Some(disk) => Journal::open_on(disk, &journal_options)?,
        None => Journal::open(&journal_options)?,
    };
    // Only now is it certain that no other namenode uses the directory.
    durable::recover(&options.data_dir).map_err(|source| NamenodeError::DataDir {
        path: options.data_dir.clone(),
        source,
    })?;
    let Recovered {
        snapshot,
        records,
        last_lsn,
        tail,
        skipped_snapshots,
    } = recovered;
    for error in skipped_snapshots {
        tracing::warn!(%error, "a damaged snapshot was passed over; check the disk");
    }
    report_tail(&tail);
    match consensus::standing(&journal)? {
        Standing::Member => {}
        outside @ (Standing::New(_)
        | Standing::Founding(_)
        | Standing::Copy
        | Standing::Forgetful) => {
            return Ok(Found::Outside(journal, outside));
        }
    }
    let snapshot_lsn = snapshot.as_ref().map_or(0, |(lsn, _)| *lsn);
    let Some(Replayed {
        namespace,
        terms,
        members,
    }) = replay(snapshot, records, || false)?
    else {
        unreachable!("a replay that cannot be cancelled was");
    };
    Versions::OURS.check_cluster(namespace.version())?;
    let formatted = match namespace.formatted() {
        Some(formatted) if formatted.cluster == cluster => formatted,
        Some(formatted) => {
            return Err(NamenodeError::WrongCluster {
                expected: cluster,
                found: formatted.cluster,
            });
        }
        None => {
            return Err(NamenodeError::NotFormatted {
                path: options.data_dir.clone(),
            });
        }
    };
    tracing::info!(
        snapshot_lsn,
        last_lsn,
        inodes = namespace.counts().inodes,
        elapsed_ms = started.elapsed().as_millis(),
        "the namespace was restored"
    );
    Ok(Found::Restored(Box::new(Restored {
        namespace,
        formatted,
        journal,
        read: ReadLog {
            snapshot_lsn,
            last_lsn,
            terms,
            members,
        },
        is_from_backup: data_dir::is_from_backup(&options.data_dir)?,
    })))
}

/// What was replayed.
pub(crate) struct Replayed {
    /// The state after the last record.
    pub namespace: Namespace,
    /// The first record of each term.
    pub terms: Vec<(Lsn, Term)>,
    /// The last members that a record names.
    pub members: Option<ReadMembers>,
}

/// Applies records to a snapshot. `None` when `cancelled` says so in between.
pub(crate) fn replay(
    snapshot: Option<(Lsn, SnapshotReader)>,
    records: RecordReader,
    cancelled: impl Fn() -> bool,
) -> Result<Option<Replayed>, NamenodeError> {
    let mut namespace = match snapshot {
        None => Namespace::new(),
        Some((lsn, mut reader)) => Namespace::read_snapshot(&mut reader)
            .map_err(|source| NamenodeError::of_snapshot(lsn, source))?,
    };
    let mut terms: Vec<(Lsn, Term)> = Vec::new();
    let mut named = None;
    for record in records {
        let (lsn, bytes) = record?;
        let (term, content) =
            consensus::decode(&bytes).map_err(|source| NamenodeError::Entry { lsn, source })?;
        if terms.last().is_none_or(|(_, last)| *last != term) {
            terms.push((lsn, term));
        }
        match content {
            Content::Blank => {}
            Content::Members(members) => named = Some(ReadMembers { lsn, members }),
            Content::Command(command) => {
                let command = Command::decode(command)
                    .map_err(|source| NamenodeError::Record { lsn, source })?;
                namespace
                    .apply(&command)
                    .map_err(|source| NamenodeError::of_replay(lsn, source))?;
            }
        }
        if lsn.is_multiple_of(PROGRESS_EVERY) {
            tracing::info!(lsn, "replaying the journal");
        }
        if cancelled() {
            return Ok(None);
        }
    }
    Ok(Some(Replayed {
        namespace,
        terms,
        members: named,
    }))
}

fn report_tail(tail: &TailReport) {
    match tail {
        TailReport::Clean => {}
        TailReport::Torn {
            segment,
            offset,
            dropped_bytes,
            missing_bytes: 0,
        } => tracing::warn!(
            segment,
            offset,
            dropped_bytes,
            "the journal ended in records that a crash had interrupted; they were never \
             acknowledged and were dropped"
        ),
        TailReport::Torn {
            segment,
            offset,
            dropped_bytes,
            missing_bytes,
        } => tracing::error!(
            segment,
            offset,
            dropped_bytes,
            missing_bytes,
            "the newest segment of the journal is shorter than it was made: something other than a \
             crash truncated it, and acknowledged operations may be lost"
        ),
    }
}
