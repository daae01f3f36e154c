//! The namenode's data directory, and how a new cluster gets one.
//!
//! | name | is |
//! |---|---|
//! | `journal/` | segments and snapshots; its existence means that the directory is formatted |
//! | `cluster-id` | the cluster's id, 32 hexadecimal digits |
//! | `history/` | utilisation and reimages of the primary tenants (see `history/store.rs`) |
//! | `token-keys` | the keys that sign block tokens |
//! | `restored-from-backup` | the journal began with a backup, and no operator has yet accepted what that lacks |
//! | `formatting/` | a journal that is being made; left behind by a `format` that was interrupted |
//! | `journal-replaced-*/` | an untrusted journal from before the namenode joined its group again |

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harvestfs_protocol::durable;
use harvestfs_protocol::group::Condition;
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, CHUNK_BYTES, REPLICATION_MAX};
use harvestfs_protocol::types::{PlacementRules, Timestamp};
use harvestfs_protocol::version::Version;

use super::NamenodeError;
use super::options::check_segment_bytes;
use crate::consensus::{self, Content, Member, MemberId};
use crate::engine::namespace::{Command, Namespace};
use crate::journal::disk::Disk;
use crate::journal::{Journal, JournalOptions, Lsn, Recovered};

const CLUSTER_ID_FILE: &str = "cluster-id";
const JOURNAL_DIR: &str = "journal";
const HISTORY_DIR: &str = "history";
const FORMATTING_DIR: &str = "formatting";
const TOKEN_KEYS_FILE: &str = "token-keys";
/// Prefix of the name of a journal that made room for another one.
const REPLACED_PREFIX: &str = "journal-replaced-";
const FROM_BACKUP_FILE: &str = "restored-from-backup";
/// How its first line begins; the backup's last record follows.
const FROM_BACKUP_RECORD: &str = "record ";

/// The properties of a new cluster.
#[derive(Clone, Debug)]
pub struct FormatOptions {
    /// Its id; chosen at random, once.
    pub cluster: ClusterId,
    /// Owner of the root directory.
    pub root_uid: u32,
    /// Group of the root directory.
    pub root_gid: u32,
    /// Size at which clients start a new block, in bytes: [`BLOCK_BYTES_MIN`] to
    /// [`BLOCK_BYTES_MAX`], in whole chunks.
    pub block_bytes: u64,
    /// Rules for files below directories that set none.
    pub default_rules: PlacementRules,
    /// Size of one segment of the journal in bytes, at least 4 MiB.
    pub segment_bytes: u64,
    /// The namenodes of its group; `None` for this one alone.
    pub group: Option<GroupOptions>,
}

/// The namenodes with which a cluster begins. All their directories are made with the same options except for
/// `this`, so that their journals begin with the same record.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// The member whose directory is made.
    pub this: MemberId,
    /// All members, with their numbers.
    pub members: BTreeMap<MemberId, Member>,
    /// When the cluster is made.
    pub now: Timestamp,
}

/// Makes the data directory of a new cluster. An attempt that was interrupted can be repeated.
///
/// # Errors
/// [`NamenodeError::AlreadyFormatted`], a value out of range, or a failure of the disk.
pub fn format(data_dir: &Path, options: &FormatOptions) -> Result<(), NamenodeError> {
    check(options)?;
    prepare(data_dir, options.cluster, |formatting| {
        write_first_records(formatting, options)
    })
}

/// Makes a data directory; `make` makes the journal in it.
fn prepare(
    data_dir: &Path,
    cluster: ClusterId,
    make: impl FnOnce(&Path) -> Result<(), NamenodeError>,
) -> Result<(), NamenodeError> {
    if journal_dir(data_dir).exists() {
        return Err(NamenodeError::AlreadyFormatted {
            path: data_dir.to_owned(),
        });
    }
    make_aside(data_dir, cluster, make)?;
    // A mark belongs to a journal that was to be restored here, if that was interrupted, and not to this one.
    accept_backup(data_dir).map_err(|source| in_dir(data_dir, source))?;
    put_in_place(data_dir)
}

/// Makes everything, but does not give the journal its final name yet.
fn make_aside<E: From<NamenodeError>>(
    data_dir: &Path,
    cluster: ClusterId,
    make: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let dir_error = |source| in_dir(data_dir, source);
    durable::create_directories(data_dir, 0o700).map_err(dir_error)?;
    let formatting = data_dir.join(FORMATTING_DIR);
    remove_all(&formatting).map_err(dir_error)?;
    make(&formatting)?;
    let id = format!("{cluster}\n");
    durable::replace_file(&data_dir.join(CLUSTER_ID_FILE), id.as_bytes(), 0o644)
        .map_err(dir_error)?;
    Ok(())
}

fn put_in_place(data_dir: &Path) -> Result<(), NamenodeError> {
    durable::rename(&data_dir.join(FORMATTING_DIR), &journal_dir(data_dir))
        .map_err(|source| in_dir(data_dir, source))
}

fn in_dir(data_dir: &Path, source: io::Error) -> NamenodeError {
    NamenodeError::DataDir {
        path: data_dir.to_owned(),
        source,
    }
}

/// Removes a directory with everything in it, if it exists.
fn remove_all(dir: &Path) -> io::Result<()> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Makes the data directory of a namenode that was restored from a backup, which ends at `record`, in a vacant
/// directory. `make` makes its journal.
pub(super) fn prepare_restored<E: From<NamenodeError>>(
    data_dir: &Path,
    cluster: ClusterId,
    record: Lsn,
    make: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    if let Err(error) = make_aside(data_dir, cluster, make) {
        // Otherwise the next attempt removes it.
        let _ = remove_all(&data_dir.join(FORMATTING_DIR));
        return Err(error);
    }
    let dir_error = |source| in_dir(data_dir, source);
    // A journal may be there, of a namenode that was in no group: it is empty. It must not get the mark if this is
    // interrupted.
    remove_all(&journal_dir(data_dir)).map_err(dir_error)?;
    let why =
        format!("{FROM_BACKUP_RECORD}{record}\nuntil `harvestfs admin recover --accept-loss`\n");
    durable::replace_file(&data_dir.join(FROM_BACKUP_FILE), why.as_bytes(), 0o644)
        .map_err(dir_error)?;
    Ok(put_in_place(data_dir)?)
}

/// What prevents a namenode from being restored into a directory. `None` if nothing does: the directory does
/// not exist, is empty, holds what an earlier attempt left, or belongs to a namenode which has no records and
/// is in no group.
pub(super) fn in_the_way(data_dir: &Path) -> Result<Option<PathBuf>, NamenodeError> {
    let dir_error = |source| in_dir(data_dir, source);
    let entries = match fs::read_dir(data_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries.map_err(dir_error)?,
    };
    const LEFT: [&str; 4] = [
        FORMATTING_DIR,
        CLUSTER_ID_FILE,
        FROM_BACKUP_FILE,
        // Made by the file system, where a disk is mounted.
        "lost+found",
    ];
    for entry in entries {
        let name = entry.map_err(dir_error)?.file_name();
        let is_left = LEFT.iter().any(|it| name == *it)
            || durable::is_temporary(&name)
            || (name == JOURNAL_DIR && has_nothing(data_dir)?);
        if !is_left {
            return Ok(Some(data_dir.join(name)));
        }
    }
    Ok(None)
}

/// Whether the journal is empty and belongs to a namenode that waits to be taken into a group.
fn has_nothing(data_dir: &Path) -> Result<bool, NamenodeError> {
    let options = JournalOptions::new(journal_dir(data_dir), cluster_id(data_dir)?.0);
    let (journal, recovered) = Journal::open(&options)?;
    let is_new = consensus::standing(&journal)?.condition == Condition::New;
    Ok(is_new && recovered.last_lsn == 0 && recovered.snapshot.is_none())
}

/// The cluster that a directory is for, even if it was not formatted yet; `None` if it does not name one.
pub(super) fn claimed_cluster(data_dir: &Path) -> Result<Option<ClusterId>, NamenodeError> {
    let path = data_dir.join(CLUSTER_ID_FILE);
    match path.try_exists() {
        Ok(true) => read_cluster_id(path).map(Some),
        Ok(false) => Ok(None),
        Err(source) => Err(NamenodeError::DataDir { path, source }),
    }
}

/// The last record of the backup with which the journal began, as long as no operator has accepted what the
/// backup lacks; the largest number if the file does not name the record.
pub(crate) fn from_backup(data_dir: &Path) -> Result<Option<Lsn>, NamenodeError> {
    let path = data_dir.join(FROM_BACKUP_FILE);
    match fs::read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NamenodeError::DataDir { path, source }),
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let record = text
                .lines()
                .next()
                .and_then(|it| it.strip_prefix(FROM_BACKUP_RECORD));
            Ok(Some(
                record.and_then(|it| it.parse().ok()).unwrap_or(Lsn::MAX),
            ))
        }
    }
}

/// Notes that an operator has accepted what a backup lacks, or that the journal did not begin with one.
pub(crate) fn accept_backup(data_dir: &Path) -> io::Result<()> {
    match fs::remove_file(data_dir.join(FROM_BACKUP_FILE)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => durable::sync_directory(data_dir),
    }
}

/// Makes the data directory of a namenode that is to be taken into the group of a cluster. An attempt
/// that was interrupted can be repeated.
///
/// # Errors
/// As [`format()`].
pub fn format_outside(
    data_dir: &Path,
    cluster: ClusterId,
    segment_bytes: u64,
) -> Result<(), NamenodeError> {
    check_segment_bytes(segment_bytes)?;
    prepare(data_dir, cluster, |formatting| {
        make_empty(formatting, cluster, segment_bytes, MemberId::random())
    })
}

/// Names and addresses of the other members of the group of a namenode that is not running: the members that
/// were committed last, and the newest that its journal names, which other namenodes may have committed.
///
/// # Errors
/// The namenode is running, or the directory cannot be read.
pub fn other_members(data_dir: &Path) -> Result<BTreeSet<(String, SocketAddr)>, NamenodeError> {
    let (journal, recovered) = open_stopped(data_dir)?;
    let mut named = None;
    for record in recovered.records {
        let (lsn, bytes) = record?;
        let decoded = consensus::decode(&bytes);
        let (_, content) = decoded.map_err(|source| NamenodeError::Entry { lsn, source })?;
        if let Content::Members(members) = content {
            named = Some(members);
        }
    }
    let this = consensus::standing(&journal)?.id;
    let committed = consensus::other_members(&journal, recovered.last_lsn)?;
    let named = named.iter().flat_map(|it| it.nodes());
    let named = named.filter(|(id, _)| **id != this).map(|(_, it)| it);
    let all = committed.values().chain(named);
    Ok(all.map(|it| (it.name.clone(), it.addr)).collect())
}

/// Makes the namenode of a directory, which must not be running, the only one of its group, with the records it
/// has.
///
/// # Errors
/// The namenode is running, or the directory cannot be read.
pub fn recover_alone(data_dir: &Path) -> Result<(), NamenodeError> {
    let (journal, recovered) = open_stopped(data_dir)?;
    Ok(consensus::found_alone(&journal, recovered.last_lsn)?)
}

/// Opens the journal of a namenode that is not running, and returns it with its contents.
fn open_stopped(data_dir: &Path) -> Result<(Journal, Recovered), NamenodeError> {
    let cluster = cluster_id(data_dir)?;
    let options = JournalOptions::new(journal_dir(data_dir), cluster.0);
    Ok(Journal::open(&options)?)
}

/// Puts an untrusted journal aside, and makes an empty one for a member with this number.
pub(crate) fn make_room(
    data_dir: &Path,
    disk: Option<&Arc<dyn Disk>>,
    segment_bytes: u64,
    member: MemberId,
) -> Result<(), NamenodeError> {
    let cluster = cluster_id(data_dir)?;
    if let Some(disk) = disk {
        let io = |source| NamenodeError::DataDir {
            path: data_dir.to_owned(),
            source,
        };
        for name in disk.list().map_err(io)? {
            disk.remove(&name).map_err(io)?;
        }
        disk.sync_dir().map_err(io)?;
        let options = empty(Path::new(""), cluster, segment_bytes);
        let (journal, _) = Journal::open_on(Arc::clone(disk), &options)?;
        return Ok(consensus::found_outside(&journal, member)?);
    }
    let dir_error = |source| NamenodeError::DataDir {
        path: data_dir.to_owned(),
        source,
    };
    let aside = data_dir.join(format!("{REPLACED_PREFIX}{}", member.0));
    // First what needs room: if the disk is full, nothing changes.
    make_aside(data_dir, cluster, |formatting| {
        make_empty(formatting, cluster, segment_bytes, member)
    })?;
    // The mark belongs to the journal that is put aside.
    accept_backup(data_dir).map_err(dir_error)?;
    durable::rename(&journal_dir(data_dir), &aside).map_err(dir_error)?;
    tracing::warn!(aside = %aside.display(), "the journal of before is kept beside the new one");
    put_in_place(data_dir)
}

/// Completes [`make_room`] where it was interrupted after the old journal had been put aside and before the
/// empty one was in its place.
pub(super) fn finish_making_room(data_dir: &Path, segment_bytes: u64) -> Result<(), NamenodeError> {
    let dir_error = |source| in_dir(data_dir, source);
    // A dangling link is not such a case.
    let there = fs::symlink_metadata(journal_dir(data_dir));
    if !matches!(there, Err(error) if error.kind() == io::ErrorKind::NotFound) {
        return Ok(());
    }
    let Some(cluster) = claimed_cluster(data_dir)? else {
        return Ok(());
    };
    for entry in fs::read_dir(data_dir).map_err(dir_error)? {
        let name = entry.map_err(dir_error)?.file_name();
        if name.to_string_lossy().starts_with(REPLACED_PREFIX) {
            tracing::warn!(
                aside = %data_dir.join(name).display(),
                "there is no journal, since this namenode ended while that one made room for it: an empty one is made"
            );
            // From scratch, since an earlier release began to make the empty journal only at this point.
            return format_outside(data_dir, cluster, segment_bytes);
        }
    }
    Ok(())
}

pub(super) fn empty(dir: &Path, cluster: ClusterId, segment_bytes: u64) -> JournalOptions {
    JournalOptions {
        segment_bytes,
        create_if_empty: true,
        ..JournalOptions::new(dir, cluster.0)
    }
}

fn make_empty(
    dir: &Path,
    cluster: ClusterId,
    segment_bytes: u64,
    member: MemberId,
) -> Result<(), NamenodeError> {
    let (journal, _) = Journal::open(&empty(dir, cluster, segment_bytes))?;
    Ok(consensus::found_outside(&journal, member)?)
}

fn check(options: &FormatOptions) -> Result<(), NamenodeError> {
    let bad = |option, value: String, accepted: String| {
        Err(NamenodeError::Option {
            option,
            value,
            accepted,
        })
    };
    let block_bytes = options.block_bytes;
    if !(BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&block_bytes)
        || !block_bytes.is_multiple_of(CHUNK_BYTES as u64)
    {
        let accepted =
            format!("a multiple of {CHUNK_BYTES} from {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}");
        return bad("block_bytes", block_bytes.to_string(), accepted);
    }
    let replication = options.default_rules.replication;
    if !(1..=REPLICATION_MAX).contains(&replication) {
        let accepted = format!("from 1 to {REPLICATION_MAX}");
        return bad("replication", replication.to_string(), accepted);
    }
    check_segment_bytes(options.segment_bytes)
}

fn write_first_records(dir: &Path, options: &FormatOptions) -> Result<(), NamenodeError> {
    let now = match &options.group {
        Some(group) => group.now,
        None => Timestamp::now(),
    };
    let command = Command::Format {
        cluster: options.cluster,
        now,
        root_uid: options.root_uid,
        root_gid: options.root_gid,
        block_bytes: options.block_bytes,
        default_rules: options.default_rules,
    };
    let mut commands = vec![command];
    // A cluster that does not name its version has the first one.
    if Version::NEWEST > Version::default() {
        commands.push(Command::RaiseVersion {
            version: Version::NEWEST,
            now,
        });
    }
    // The journal must not contain what the engine refuses.
    let mut namespace = Namespace::new();
    for command in &commands {
        namespace.apply(command).map_err(NamenodeError::Engine)?;
    }
    let records: Result<Vec<Vec<u8>>, _> = commands.iter().map(Command::encode).collect();
    let records = records.map_err(NamenodeError::Engine)?;
    let journal_options = empty(dir, options.cluster, options.segment_bytes);
    let (mut journal, _) = Journal::open(&journal_options)?;
    journal.append(&records)?;
    journal.sync()?;
    if let Some(group) = &options.group {
        consensus::found(&journal, group.this, group.members.clone())?;
    }
    Ok(())
}

/// Returns the cluster that a data directory was formatted for.
///
/// # Errors
/// The directory is not formatted, or does not name its cluster.
pub fn cluster_id(data_dir: &Path) -> Result<ClusterId, NamenodeError> {
    if !journal_dir(data_dir).exists() {
        return Err(NamenodeError::NotFormatted {
            path: data_dir.to_owned(),
        });
    }
    read_cluster_id(data_dir.join(CLUSTER_ID_FILE))
}

fn read_cluster_id(path: PathBuf) -> Result<ClusterId, NamenodeError> {
    let text = fs::read_to_string(&path).map_err(|source| NamenodeError::DataDir {
        path: path.clone(),
        source,
    })?;
    let digits = text.trim_end();
    match u128::from_str_radix(digits, 16) {
        Ok(id) if digits.len() == 32 => Ok(ClusterId(id)),
        _ => Err(NamenodeError::BadClusterId { path }),
    }
}

/// Returns the path of the journal.
pub fn journal_dir(data_dir: &Path) -> PathBuf {
    data_dir.join(JOURNAL_DIR)
}

/// Returns the path of the history of the primary tenants.
pub(crate) fn history_dir(data_dir: &Path) -> PathBuf {
    data_dir.join(HISTORY_DIR)
}

/// Returns the path of the keys of block tokens.
pub(crate) fn token_keys_file(data_dir: &Path) -> PathBuf {
    data_dir.join(TOKEN_KEYS_FILE)
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::ClusterId;

    use super::*;
    use crate::server::recovery::{self, Found};

    const SEGMENT_BYTES: u64 = 4 << 20;

    /// What it is to its group after a start.
    fn condition(data_dir: &Path) -> Condition {
        match recovery::recover(data_dir, SEGMENT_BYTES, None, &mut None) {
            Ok(Found::Outside(_, standing)) => standing.condition,
            Ok(Found::Restored(_)) => Condition::Member,
            Err(error) => panic!("{error}"),
        }
    }

    fn outside(data_dir: &Path) {
        format_outside(data_dir, ClusterId(7), SEGMENT_BYTES).unwrap();
    }

    #[test]
    fn a_namenode_that_ended_while_it_made_room_starts_again() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("nn");
        let (aside, formatting) = (
            data_dir.join("journal-replaced-5"),
            data_dir.join(FORMATTING_DIR),
        );
        outside(&data_dir);
        fs::rename(journal_dir(&data_dir), &aside).unwrap();
        assert_eq!(condition(&data_dir), Condition::New, "nothing else");

        fs::rename(journal_dir(&data_dir), &formatting).unwrap();
        assert_eq!(condition(&data_dir), Condition::New, "and the empty one");

        fs::remove_dir_all(journal_dir(&data_dir)).unwrap();
        fs::create_dir(&formatting).unwrap();
        fs::write(formatting.join("member.tmp"), "half").unwrap();
        assert_eq!(condition(&data_dir), Condition::New, "and half of it");
        assert!(aside.exists(), "what it had stays");
    }

    #[test]
    fn a_journal_that_is_missing_is_replaced_only_where_one_made_room() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("nn");
        outside(&data_dir);
        fs::remove_dir_all(journal_dir(&data_dir)).unwrap();
        let refused = recovery::recover(&data_dir, SEGMENT_BYTES, None, &mut None);
        assert!(matches!(refused, Err(NamenodeError::NotFormatted { .. })));
    }

    #[test]
    fn a_disk_without_room_for_another_journal_keeps_the_one_it_has() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("nn");
        outside(&data_dir);
        // In the way of the new one, as a full disk is.
        fs::write(data_dir.join(FORMATTING_DIR), "").unwrap();
        assert!(make_room(&data_dir, None, SEGMENT_BYTES, MemberId(5)).is_err());
        assert_eq!(condition(&data_dir), Condition::New);
    }

    #[test]
    fn a_restoration_that_was_interrupted_leaves_no_mark_for_another_journal() {
        let directory = tempfile::tempdir().unwrap();
        let data_dir = directory.path().join("nn");
        let restore = || {
            let nothing = |_: &Path| Ok::<(), NamenodeError>(());
            prepare_restored(&data_dir, ClusterId(7), 5, nothing)
        };
        fs::create_dir(&data_dir).unwrap();
        fs::write(journal_dir(&data_dir), "").unwrap();
        assert!(restore().is_err(), "it cannot remove what is there");
        assert_eq!(from_backup(&data_dir).unwrap(), None);

        fs::remove_file(journal_dir(&data_dir)).unwrap();
        assert!(restore().is_err(), "there is nothing to put in place");
        assert_eq!(from_backup(&data_dir).unwrap(), Some(5));
        outside(&data_dir);
        assert_eq!(from_backup(&data_dir).unwrap(), None);
    }
}
