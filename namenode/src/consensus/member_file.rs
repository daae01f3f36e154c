//! What a member keeps beside its log: its vote, the members, and where terms begin.
//!
//! One file in the journal's directory, replaced as a whole. Big enough for thousands of terms: those of entries that a
//! snapshot covers are forgotten.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic: `HFSMEMB\0` |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | checksum (CRC-32) of the content |
//! | 16 | | content, by postcard |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use openraft::Membership;
use serde::{Deserialize, Serialize};

use super::entry::{decode_members, encode_members, log_id};
use super::{ConsensusError, Member, MemberId, StoredMembers, Term, Vote};
use crate::journal::disk::Disk;
use crate::journal::{JournalError, Lsn};

/// The name of the file.
const MEMBER_FILE: &str = "member";
const TEMPORARY: &str = "member.tmp";
const MAGIC: [u8; 8] = *b"HFSMEMB\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 16;

/// What is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// This member.
    pub this: MemberId,
    pub vote: Option<Vote>,
    pub members: StoredMembers,
    /// The first entry of each term, in order; of all entries that are in the journal, and of the last one before.
    pub terms: Vec<(Lsn, Term)>,
}

impl Kept {
    /// Of a new member of a group that begins with these.
    pub(super) fn founding(
        this: MemberId,
        members: BTreeMap<MemberId, Member>,
    ) -> Result<Self, ConsensusError> {
        if !members.contains_key(&this) {
            return Err(ConsensusError::Stopped(format!(
                "{this} is not among the members"
            )));
        }
        let voters: BTreeSet<MemberId> = members.keys().copied().collect();
        let members = Membership::new(vec![voters], members)
            .map_err(|error| ConsensusError::Stopped(error.to_string()))?;
        Ok(Self {
            this,
            vote: None,
            members: StoredMembers::new(None, members),
            terms: Vec::new(),
        })
    }
}

#[derive(Serialize, Deserialize)]
struct Content {
    this: MemberId,
    /// Term, candidate, and whether it was elected.
    vote: Option<(Term, MemberId, bool)>,
    /// The entry with the members, if one said so.
    members_entry: Option<(Term, Lsn)>,
    members: Vec<u8>,
    terms: Vec<(Lsn, Term)>,
}

/// The term of an entry.
pub(super) fn term_of(terms: &[(Lsn, Term)], lsn: Lsn) -> Term {
    let later = terms.partition_point(|(first, _)| *first <= lsn);
    // Before the first there were no terms.
    later.checked_sub(1).map_or(0, |at| terms[at].1)
}

/// What the file says; none when there is no such file.
pub(super) fn read(disk: &dyn Disk) -> Result<Option<Kept>, JournalError> {
    let io = |operation, error| JournalError::io(operation, MEMBER_FILE, error);
    let names = disk
        .list()
        .map_err(|e| JournalError::io("list", &disk.location(), e))?;
    if !names.iter().any(|name| name == MEMBER_FILE) {
        return Ok(None);
    }
    let file = disk.open(MEMBER_FILE).map_err(|e| io("open", e))?;
    let length = file.len_bytes().map_err(|e| io("read", e))?;
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(usize::MAX)];
    let read = file.read_at(&mut bytes, 0).map_err(|e| io("read", e))?;
    bytes.truncate(read);
    match parse(&bytes) {
        Some(kept) => Ok(Some(kept)),
        None => Err(JournalError::Member {
            location: disk.location(),
        }),
    }
}

fn parse(bytes: &[u8]) -> Option<Kept> {
    let (header, content) = bytes.split_at_checked(HEADER_BYTES)?;
    let checksum = crc32fast::hash(content).to_le_bytes();
    if header[..8] != MAGIC || header[8..12] != VERSION.to_le_bytes() || header[12..] != checksum {
        return None;
    }
    let content: Content = postcard::from_bytes(content).ok()?;
    let vote = content.vote.map(|(term, candidate, is_elected)| {
        let elected = if is_elected {
            Vote::new_committed
        } else {
            Vote::new
        };
        elected(term, candidate)
    });
    let members = decode_members(&content.members).ok()?;
    let entry = content.members_entry.map(|(term, lsn)| log_id(term, lsn));
    Some(Kept {
        this: content.this,
        vote,
        members: StoredMembers::new(entry, members),
        terms: content.terms,
    })
}

/// Replaces the file; durable when this returns.
pub(super) fn write(disk: &Arc<dyn Disk>, kept: &Kept) -> Result<(), JournalError> {
    let content = Content {
        this: kept.this,
        vote: kept.vote.map(|vote| {
            (
                vote.leader_id.term,
                vote.leader_id.voted_for,
                vote.committed,
            )
        }),
        members_entry: (kept.members.log_id().as_ref())
            .map(|entry| (entry.committed_leader_id().term, entry.index())),
        members: encode_members(kept.members.membership()),
        terms: kept.terms.clone(),
    };
    let mut bytes = Vec::from(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    let bytes = postcard::to_extend(&content, bytes).expect("plain values are encoded");
    let mut bytes = bytes;
    let checksum = crc32fast::hash(&bytes[HEADER_BYTES..]);
    bytes[12..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    let io = |operation, error| JournalError::io(operation, TEMPORARY, error);
    let length = bytes.len() as u64;
    let mut file = disk
        .create(TEMPORARY, length)
        .map_err(|e| io("create", e))?;
    file.write_at(&bytes, 0).map_err(|e| io("write", e))?;
    file.sync().map_err(|e| io("sync", e))?;
    disk.install(TEMPORARY, MEMBER_FILE)
        .map_err(|e| io("rename", e))
}
