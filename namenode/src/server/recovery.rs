//! Recovery: from the contents of the disk to a namespace.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use harvestfs_protocol::durable;
use harvestfs_protocol::group::Condition;
use harvestfs_protocol::version::{Version, Versions};

use super::NamenodeError;
use super::data_dir;
use crate::consensus::{self, Content, ReadLog, ReadMembers, Standing, Term};
use crate::engine::namespace::{Command, Formatted, Namespace};
use crate::journal::disk::Disk;
use crate::journal::{
    Journal, JournalOptions, Lsn, RecordReader, Recovered, SnapshotReader, TailReport,
};

/// Number of records after which progress is logged.
const PROGRESS_EVERY: u64 = 1_000_000;

/// What was on the disk.
pub(crate) enum Found {
    /// A namespace.
    Restored(Box<Restored>),
    /// A namenode that is in no group, for this reason.
    Outside(Journal, Standing),
}

/// A namespace, and whatever else was on the disk.
pub(crate) struct Restored {
    /// The state after the last record.
    pub namespace: Namespace,
    /// The properties with which the cluster was made.
    pub formatted: Formatted,
    /// The journal, open for appending.
    pub journal: Journal,
    /// What was read from it.
    pub read: ReadLog,
    /// The last record that raised the version of the cluster, which may not be committed, and the version before it.
    pub raised: Option<(Lsn, Version)>,
    /// The record at which its backup ends, if it came from one and waits for an operator.
    pub from_backup: Option<Lsn>,
}

/// The namespace of a namenode that led until now. It matches the journal as long as no other leader replaced the
/// last entry: two logs with an entry of the same number and term have the same entries before it (Raft, section
/// 5.3).
pub(crate) struct Kept {
    /// The state after `last`.
    pub namespace: Namespace,
    /// The last entry that it executed, and its term.
    pub last: (Lsn, Term),
    /// As in [`Restored`].
    pub raised: Option<(Lsn, Version)>,
}

impl Kept {
    fn is_in(&self, journal: &Journal) -> bool {
        let (lsn, term) = self.last;
        let found = journal.reader().read(lsn, lsn + 1, 1);
        let found =
            found.inspect_err(|error| tracing::warn!(%error, lsn, "the last entry was not found"));
        found.is_ok_and(|records| {
            let first = records.first().map(|(_, record)| consensus::decode(record));
            matches!(first, Some(Ok((of, _))) if of == term)
        })
    }
}

/// Reads the newest snapshot and the records after it, from `disk` if given; if a namespace was `kept`, only the
/// records after it. Never guesses: if anything that was acknowledged cannot be read, that is an error.
pub(crate) fn recover(
    data_dir: &Path,
    segment_bytes: u64,
    disk: Option<Arc<dyn Disk>>,
    kept: &mut Option<Kept>,
) -> Result<Found, NamenodeError> {
    let started = Instant::now();
    if disk.is_none() {
        data_dir::finish_making_room(data_dir, segment_bytes)?;
    }
    let cluster = data_dir::cluster_id(data_dir)?;
    let journal_options = JournalOptions {
        segment_bytes,
        ..JournalOptions::new(data_dir::journal_dir(data_dir), cluster.0)
    };
    let (journal, recovered) = match disk {
        Some(disk) => Journal::open_on(disk, &journal_options)?,
        None => Journal::open(&journal_options)?,
    };
    // Only now is it certain that no other namenode uses the directory.
    durable::recover(data_dir).map_err(|source| NamenodeError::DataDir {
        path: data_dir.to_owned(),
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
    let standing = consensus::standing(&journal)?;
    if standing.condition != Condition::Member {
        return Ok(Found::Outside(journal, standing));
    }
    let snapshot_lsn = snapshot.as_ref().map_or(0, |(lsn, _)| *lsn);
    let kept = kept.take().filter(|kept| kept.is_in(&journal));
    let is_kept = kept.is_some();
    let (namespace, executed, raised_before) = match kept {
        Some(kept) => (kept.namespace, kept.last.0, kept.raised),
        None => {
            let (namespace, executed) = read_base(snapshot)?;
            (namespace, executed, None)
        }
    };
    let replayed = replay(namespace, executed, records, || false)?;
    let Some(Replayed {
        namespace,
        terms,
        members,
        raised,
    }) = replayed
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
                path: data_dir.to_owned(),
            });
        }
    };
    tracing::info!(
        snapshot_lsn,
        last_lsn,
        inodes = namespace.counts().inodes,
        is_kept,
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
        raised: raised.or(raised_before),
        from_backup: data_dir::from_backup(data_dir)?,
    })))
}

/// The result of a replay.
pub(crate) struct Replayed {
    /// The state after the last record.
    pub namespace: Namespace,
    /// The first record of each term.
    pub terms: Vec<(Lsn, Term)>,
    /// The last members that a record names.
    pub members: Option<ReadMembers>,
    /// The last record of a term that raised the version of the cluster, and the version before it.
    pub raised: Option<(Lsn, Version)>,
}

/// Reads the namespace of a snapshot. Returns it with the last record that it covers.
pub(crate) fn read_base(
    snapshot: Option<(Lsn, SnapshotReader)>,
) -> Result<(Namespace, Lsn), NamenodeError> {
    let Some((lsn, mut reader)) = snapshot else {
        return Ok((Namespace::new(), 0));
    };
    let namespace = Namespace::read_snapshot(&mut reader).and_then(|mut namespace| {
        namespace.read_behind_snapshot(&mut reader)?;
        Ok(namespace)
    });
    let namespace = namespace.map_err(|source| NamenodeError::of_snapshot(lsn, source))?;
    Ok((namespace, lsn))
}

/// Applies records to a namespace, which has those up to `executed`. Returns `None` if it is `cancelled` in between.
pub(crate) fn replay(
    mut namespace: Namespace,
    executed: Lsn,
    records: RecordReader,
    cancelled: impl Fn() -> bool,
) -> Result<Option<Replayed>, NamenodeError> {
    let mut terms: Vec<(Lsn, Term)> = Vec::new();
    let (mut named, mut raised) = (None, None);
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
            Content::Command(_) if lsn <= executed => {}
            Content::Command(command) => {
                let command = Command::decode(command)
                    .map_err(|source| NamenodeError::Record { lsn, source })?;
                let before = namespace.version();
                namespace
                    .apply(&command)
                    .map_err(|source| NamenodeError::of_replay(lsn, source))?;
                // Nobody replaces what a journal began with, before the first term.
                if namespace.version() != before && term > 0 {
                    raised = Some((lsn, before));
                }
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
        raised,
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

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::ClusterId;
    use harvestfs_protocol::types::{Durability, PlacementRules, Timestamp};

    use super::*;
    use crate::server::{FormatOptions, format};

    const SEGMENT_BYTES: u64 = 4 << 20;

    fn restored(data_dir: &Path, kept: Option<Kept>) -> Restored {
        match recover(data_dir, SEGMENT_BYTES, None, &mut { kept }) {
            Ok(Found::Restored(restored)) => *restored,
            Ok(Found::Outside(..)) => panic!("it is a member"),
            Err(error) => panic!("{error}"),
        }
    }

    const RULES: PlacementRules = PlacementRules {
        replication: 1,
        durability: Durability::Strict,
        class: None,
    };

    /// Shows in the counts that it was applied.
    fn open_session(client: &str) -> Command {
        Command::OpenSession {
            client: client.to_owned(),
            now: Timestamp::default(),
        }
    }

    #[test]
    fn what_was_kept_is_used_as_long_as_the_journal_has_its_last_entry() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("nn");
        let options = FormatOptions {
            cluster: ClusterId(7),
            root_uid: 0,
            root_gid: 0,
            block_bytes: 64 << 20,
            default_rules: RULES,
            segment_bytes: SEGMENT_BYTES,
            group: None,
        };
        format(&data_dir, &options).unwrap();
        let read = restored(&data_dir, None).read;
        let (last_lsn, term) = (read.last_lsn, read.terms.last().unwrap().1);
        // What only the kept one has, tells it from what the journal has.
        let kept = |last| {
            let mut namespace = restored(&data_dir, None).namespace;
            namespace.apply(&open_session("kept")).unwrap();
            Some(Kept {
                namespace,
                last,
                raised: None,
            })
        };
        let sessions = |kept| restored(&data_dir, kept).namespace.counts().sessions;
        assert_eq!(sessions(None), 0);
        assert_eq!(sessions(kept((last_lsn, term))), 1);
        assert_eq!(sessions(kept((last_lsn, term + 1))), 0, "of another term");
        assert_eq!(
            sessions(kept((last_lsn + 1, term))),
            0,
            "not in the journal"
        );

        let before = kept((last_lsn, term));
        let mut journal = restored(&data_dir, None).journal;
        let record = open_session("journal").encode().unwrap();
        journal.append(&[record]).unwrap();
        journal.sync().unwrap();
        drop(journal);
        assert_eq!(sessions(None), 1);
        assert_eq!(sessions(before), 2, "the record after it is replayed");
    }

    #[cfg(feature = "next-version")]
    #[test]
    fn a_version_that_a_leader_raised_is_not_settled_by_a_start() {
        let format = Command::Format {
            cluster: ClusterId(7),
            now: Timestamp::default(),
            root_uid: 0,
            root_gid: 0,
            block_bytes: 64 << 20,
            default_rules: RULES,
        };
        let raise = Command::RaiseVersion {
            version: Version::NEXT,
            now: Timestamp::default(),
        };
        let raise = raise.encode().unwrap();
        let of_term_1 = [vec![64, 1, 1], raise.clone()].concat();
        for (raise, raised) in [(raise, None), (of_term_1, Some((2, Version::V0_2)))] {
            let directory = tempfile::tempdir().unwrap();
            let options = data_dir::empty(directory.path(), ClusterId(7), SEGMENT_BYTES);
            let (mut journal, _) = Journal::open(&options).unwrap();
            journal.append(&[format.encode().unwrap(), raise]).unwrap();
            journal.sync().unwrap();
            drop(journal);
            let (_journal, recovered) = Journal::open(&options).unwrap();
            let replayed = replay(Namespace::new(), 0, recovered.records, || false);
            assert_eq!(replayed.unwrap().unwrap().raised, raised);
        }
    }
}
