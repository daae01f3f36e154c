//! What a member keeps beside its log: its vote, the members, where terms begin, and what it knows about the others.
//!
//! It is one file in the journal's directory, replaced as a whole. It has room for thousands of terms: those of
//! entries that a snapshot covers are dropped. It contains its own file ID, so that a copy, which may lack the newest
//! vote, is recognised.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic: `HFSMEMB\0` |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | checksum (CRC-32) of the content |
//! | 16 | | content, by postcard |

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use harvestfs_protocol::planted::{self, Bug};
use openraft::Membership;
use serde::{Deserialize, Serialize};

use super::entry::{decode_members, encode_members, log_id};
use super::members::is_sole_voter;
use super::{ConsensusError, LogId, Member, MemberId, StoredMembers, Term, Vote};
use crate::journal::disk::{Disk, FileId};
use crate::journal::{JournalError, Lsn};

/// The name of the file.
const MEMBER_FILE: &str = "member";
const TEMPORARY: &str = "member.tmp";
const MAGIC: [u8; 8] = *b"HFSMEMB\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 16;

/// The content of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Kept {
    /// This member.
    pub this: MemberId,
    pub vote: Option<Vote>,
    /// The members, by the entries that name them, in order: those after the oldest snapshot, and the last one before
    /// it. Empty if this namenode waits to be taken into a group.
    pub members: Vec<StoredMembers>,
    /// The first entry of each term, in order, for all entries in the journal and the last one before them.
    pub terms: Vec<(Lsn, Term)>,
    /// How often the file was written.
    pub writes: u64,
    /// The newest that is known about the others: the number of a start, and its count of writes.
    pub known: BTreeMap<MemberId, (u64, u64)>,
    pub told: Told,
}

/// What others reported to a member about itself, which excludes it from the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Told {
    /// Nothing: it is a member.
    #[default]
    Nothing,
    /// They know more about it than it does itself.
    Forgot,
    /// It is no longer in the group.
    Left,
}

impl Kept {
    /// The file of a new member of a group that begins with these members.
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
            members: vec![StoredMembers::new(None, members)],
            ..Self::outside(this)
        })
    }

    /// The file of a namenode that is in no group yet.
    pub(super) fn outside(this: MemberId) -> Self {
        Self {
            this,
            vote: None,
            members: Vec::new(),
            terms: Vec::new(),
            writes: 0,
            known: BTreeMap::new(),
            told: Told::Nothing,
        }
    }

    /// Returns the file of the only remaining member, which gets another number: messages for the old number are not
    /// meant for it.
    pub(super) fn alone(self, this: MemberId, last: Lsn) -> Result<Self, ConsensusError> {
        let members = self.members_at(last).membership();
        let Some(member) = members.get_node(&self.this).cloned() else {
            let what = "this namenode is not among its own members";
            return Err(ConsensusError::Stopped(what.to_owned()));
        };
        let term = self.vote.map_or(0, |vote| vote.leader_id.term);
        let alone = Self::founding(this, BTreeMap::from([(this, member)]))?;
        let members = alone.members.into_iter();
        // As if the last entry named it: an earlier entry that names the lost members no longer counts.
        let entry = (last > 0).then(|| self.entry(last));
        let at = |it: StoredMembers| StoredMembers::new(entry, it.membership().clone());
        Ok(Self {
            members: members.map(at).collect(),
            vote: Some(Vote::new(term, this)),
            terms: self.terms,
            writes: self.writes + 1,
            ..alone
        })
    }

    /// Sets the new address of an only member.
    pub(super) fn move_alone(&mut self, to: Member) -> Result<(), ConsensusError> {
        let moved = Self::founding(self.this, BTreeMap::from([(self.this, to)]))?;
        let entry = self.members.last().and_then(|it| *it.log_id());
        let members = moved.members.into_iter();
        let at = |it: StoredMembers| StoredMembers::new(entry, it.membership().clone());
        self.members = members.map(at).collect();
        Ok(())
    }

    /// The ID of the entry with this number, which is in the log or was the last one before it.
    pub(super) fn entry(&self, lsn: Lsn) -> LogId {
        log_id(term_of(&self.terms, lsn), lsn)
    }

    /// Whether a committed entry is in the log, which has the entries from `first` to `last`, or was covered by the
    /// snapshot before it, for which terms are not known.
    pub(super) fn has_committed(&self, entry: LogId, first: Lsn, last: Lsn) -> bool {
        let lsn = entry.index();
        lsn < first || lsn <= last && self.entry(lsn) == entry
    }

    /// The members as of an entry; the founding members of the group if the entry precedes the first that is known.
    pub(super) fn members_at(&self, lsn: Lsn) -> &StoredMembers {
        let later = self
            .members
            .partition_point(|it| entry_of(it).is_none_or(|entry| entry <= lsn));
        let at = later.saturating_sub(1);
        let members = self.members.get(at);
        members.unwrap_or_else(|| panic!("{} takes part in no group", self.this))
    }

    /// The entry that names these members; 0 if the group began with them.
    pub(super) fn members_entry(&self, lsn: Lsn) -> Lsn {
        entry_of(self.members_at(lsn)).unwrap_or(0)
    }

    /// Whether it has neither voted nor acknowledged anything: whatever others see of a member is written first.
    pub(super) fn did_nothing(&self) -> bool {
        self.writes == 0 && self.vote.is_none()
    }

    /// Whether this is the only member with a vote, as of an entry.
    pub(super) fn is_sole_voter(&self, lsn: Lsn) -> bool {
        is_sole_voter(self.members_at(lsn).membership(), self.this)
    }

    /// Continues after a start. The journal has the entries from `first` on, and those after the snapshot have these
    /// terms, the first of which may have begun earlier: no term must seem to begin where it only continues.
    pub(super) fn go_on_with(&mut self, first: Lsn, snapshot: Lsn, terms: Vec<(Lsn, Term)>) {
        self.terms.retain(|(begun, _)| *begun <= snapshot);
        for (begun, term) in terms {
            if self.terms.last().is_none_or(|(_, last)| *last != term) {
                self.terms.push((begun, term));
            }
        }
        // If the journal begins with another member's snapshot, it is not known where the terms before it began.
        self.forget_terms_before(first.saturating_sub(1));
    }

    /// Adds the members that an entry names, which apply up to the next entry that names some: after a start, entries
    /// that are older than what is known are applied again.
    pub(super) fn add_members(&mut self, members: StoredMembers) {
        let entry = entry_of(&members);
        let at = self.members.partition_point(|it| entry_of(it) < entry);
        if (self.members.get(at)).is_some_and(|it| entry_of(it) == entry) {
            self.members[at] = members;
        } else {
            self.members.insert(at, members);
        }
    }

    fn forget_terms_before(&mut self, lsn: Lsn) {
        let before = self.terms.partition_point(|(first, _)| *first <= lsn);
        self.terms.drain(..before.saturating_sub(1));
    }

    /// Drops what is needed only for entries up to this one.
    pub(super) fn forget_before(&mut self, lsn: Lsn) {
        self.forget_terms_before(lsn);
        let before = self
            .members
            .partition_point(|it| entry_of(it).is_none_or(|entry| entry <= lsn));
        self.members.drain(..before.saturating_sub(1));
    }
}

fn entry_of(members: &StoredMembers) -> Option<Lsn> {
    members.log_id().as_ref().map(|it| it.index())
}

#[derive(Serialize, Deserialize)]
struct Content {
    this: MemberId,
    /// Term, candidate, and whether it was elected.
    vote: Option<(Term, MemberId, bool)>,
    members: Vec<MembersContent>,
    terms: Vec<(Lsn, Term)>,
    writes: u64,
    known: BTreeMap<MemberId, (u64, u64)>,
    told: Told,
    /// The ID of the file that this is written to.
    file: Option<FileId>,
}

#[derive(Serialize, Deserialize)]
struct MembersContent {
    /// The entry with the members, if an entry named them.
    entry: Option<(Term, Lsn)>,
    members: Vec<u8>,
}

/// The result of reading the file.
pub(super) struct ReadKept {
    pub kept: Kept,
    /// Whether it is a copy of the file that was written, and so may be an older one.
    pub is_copy: bool,
}

/// The first entry of the term after the one in which the epoch began whose entries start at `first`. Several leaders
/// may have been elected from there on before one of them began the epoch. That one does so with the second entry of
/// its term, so the terms before it have no second entry.
pub(super) fn term_after_epoch(terms: &[(Lsn, Term)], first: Lsn) -> Option<Lsn> {
    let of_first = terms.partition_point(|(begun, _)| *begun <= first);
    // For the oldest term, only the end may be known.
    let oldest = of_first.saturating_sub(1);
    terms[oldest..].windows(2).enumerate().find_map(|(at, of)| {
        let [(begun, _), (next, _)] = of else {
            return None;
        };
        let has_second = next - begun >= 2 || oldest + at == 0;
        (has_second && *next > first).then_some(*next)
    })
}

/// The term of an entry.
pub(super) fn term_of(terms: &[(Lsn, Term)], lsn: Lsn) -> Term {
    let later = terms.partition_point(|(first, _)| *first <= lsn);
    // Before the first one, there were no terms.
    later.checked_sub(1).map_or(0, |at| terms[at].1)
}

/// Reads the file; `None` if it does not exist.
pub(super) fn read(disk: &dyn Disk) -> Result<Option<ReadKept>, JournalError> {
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
    let here = file.id().map_err(|e| io("look at", e))?;
    match parse(&bytes) {
        Some((kept, written)) => Ok(Some(ReadKept {
            kept,
            is_copy: written.is_some()
                && here.is_some()
                && written != here
                && !planted::is(Bug::TrustsCopies),
        })),
        None => Err(JournalError::Member {
            location: disk.location(),
        }),
    }
}

fn parse(bytes: &[u8]) -> Option<(Kept, Option<FileId>)> {
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
    let members = content.members.iter().map(|it| {
        let entry = it.entry.map(|(term, lsn)| log_id(term, lsn));
        Some(StoredMembers::new(entry, decode_members(&it.members).ok()?))
    });
    let kept = Kept {
        this: content.this,
        vote,
        members: members.collect::<Option<_>>()?,
        terms: content.terms,
        writes: content.writes,
        known: content.known,
        told: content.told,
    };
    Some((kept, content.file))
}

/// Replaces the file; durable when this returns.
pub(super) fn write(disk: &Arc<dyn Disk>, kept: &Kept) -> Result<(), JournalError> {
    let io = |operation, error| JournalError::io(operation, TEMPORARY, error);
    let mut file = disk.create(TEMPORARY, 0).map_err(|e| io("create", e))?;
    let content = Content {
        this: kept.this,
        vote: kept.vote.map(|vote| {
            (
                vote.leader_id.term,
                vote.leader_id.voted_for,
                vote.committed,
            )
        }),
        members: kept.members.iter().map(members_content).collect(),
        terms: kept.terms.clone(),
        writes: kept.writes,
        known: kept.known.clone(),
        told: kept.told,
        file: file.id().map_err(|e| io("look at", e))?,
    };
    let mut bytes = Vec::from(MAGIC);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    let bytes = postcard::to_extend(&content, bytes).expect("plain values are encoded");
    let mut bytes = bytes;
    let checksum = crc32fast::hash(&bytes[HEADER_BYTES..]);
    bytes[12..HEADER_BYTES].copy_from_slice(&checksum.to_le_bytes());
    file.write_at(&bytes, 0).map_err(|e| io("write", e))?;
    let renamed = if planted::is(Bug::SkipsMemberFileSync) {
        disk.rename(TEMPORARY, MEMBER_FILE)
    } else {
        file.sync().map_err(|e| io("sync", e))?;
        disk.install(TEMPORARY, MEMBER_FILE)
    };
    renamed.map_err(|e| io("rename", e))
}

fn members_content(members: &StoredMembers) -> MembersContent {
    let entry = members.log_id().as_ref();
    MembersContent {
        entry: entry.map(|it| (it.committed_leader_id().term, it.index())),
        members: encode_members(members.membership()),
    }
}
