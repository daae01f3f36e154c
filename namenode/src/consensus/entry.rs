//! Entries of the replicated log, as records of the journal.
//!
//! An entry has the number of its record. The record consists of one byte (64, for this format), the term, the kind
//! of the entry, and its content:
//!
//! | kind | content |
//! |---|---|
//! | 0 | none: a leader's term begins |
//! | 1 | an encoded command of the engine |
//! | 2 | the members from here on |
//!
//! Numbers are varints of postcard. A record that begins with the version of a command instead, as all did before
//! groups were introduced, is a command of term 0.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use bytes::Bytes;
use openraft::entry::RaftEntry;
use openraft::{EntryPayload, Membership};
use serde::{Deserialize, Serialize};

use super::{Entry, LogId, Member, MemberId, Term};
use crate::engine::namespace::COMMAND_VERSION;
use crate::journal::Lsn;

/// The first byte of a record that is an entry with a term.
const ENTRY_VERSION: u8 = 64;
const _: () = assert!(
    COMMAND_VERSION < ENTRY_VERSION,
    "records are told apart by it"
);

/// A command of the engine, encoded.
#[derive(Clone, PartialEq, Eq)]
pub struct Record {
    /// The output of [`crate::engine::namespace::Command::encode`].
    pub command: Bytes,
    /// Whether anything waits for it to become durable.
    pub awaited: bool,
}

impl fmt::Debug for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a command of {} bytes", self.command.len())
    }
}

/// Why a record is not an entry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryError {
    /// There are no bytes.
    #[error("the record is empty")]
    Empty,
    /// Another version wrote it.
    #[error("the record has version {0}; this software reads up to {ENTRY_VERSION}")]
    Version(u8),
    /// The bytes are damaged.
    #[error("the record is damaged: {0}")]
    Damaged(#[from] postcard::Error),
    /// The kind of the entry is unknown.
    #[error("the record is of the unknown kind {0}")]
    Kind(u8),
    /// Its number or its term cannot follow those of the entry before it.
    #[error("entries are not in the order of their numbers and terms")]
    OutOfOrder,
    /// The members cannot form a group.
    #[error("the record names impossible members: {0}")]
    Members(String),
}

#[derive(Serialize, Deserialize)]
struct Members {
    configs: Vec<BTreeSet<MemberId>>,
    nodes: BTreeMap<MemberId, Member>,
}

/// The content of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content<'a> {
    /// A leader's term begins.
    Blank,
    /// A command of the engine, encoded.
    Command(&'a [u8]),
    /// The members from here on.
    Members(Membership<MemberId, Member>),
}

/// Returns the term and the content of a record.
///
/// # Errors
/// See [`EntryError`].
pub fn decode(record: &[u8]) -> Result<(Term, Content<'_>), EntryError> {
    let (&version, rest) = record.split_first().ok_or(EntryError::Empty)?;
    if version <= COMMAND_VERSION {
        return Ok((0, Content::Command(record)));
    }
    if version != ENTRY_VERSION {
        return Err(EntryError::Version(version));
    }
    let ((term, kind), rest): ((Term, u8), _) = postcard::take_from_bytes(rest)?;
    let content = match kind {
        0 => Content::Blank,
        1 => Content::Command(rest),
        2 => Content::Members(decode_members(rest)?),
        other => return Err(EntryError::Kind(other)),
    };
    Ok((term, content))
}

/// Encodes members for files and messages.
pub(super) fn encode_members(members: &Membership<MemberId, Member>) -> Vec<u8> {
    let members = Members {
        configs: members.get_joint_config().clone(),
        nodes: members
            .nodes()
            .map(|(id, node)| (*id, node.clone()))
            .collect(),
    };
    encoded(&members, Vec::new())
}

pub(super) fn decode_members(bytes: &[u8]) -> Result<Membership<MemberId, Member>, EntryError> {
    let members: Members = postcard::from_bytes(bytes)?;
    Membership::new(members.configs, members.nodes)
        .map_err(|error| EntryError::Members(error.to_string()))
}

/// Encodes an entry as a record.
pub(super) fn encode(entry: &Entry) -> Vec<u8> {
    let term: Term = entry.log_id.committed_leader_id().term;
    let head = |kind: u8| encoded(&(term, kind), vec![ENTRY_VERSION]);
    match &entry.payload {
        EntryPayload::Blank => head(0),
        EntryPayload::Normal(record) => {
            let mut bytes = head(1);
            bytes.extend_from_slice(&record.command);
            bytes
        }
        EntryPayload::Membership(members) => {
            let mut bytes = head(2);
            bytes.extend_from_slice(&encode_members(members));
            bytes
        }
    }
}

/// Decodes the entry in a record.
pub(super) fn entry_of(lsn: Lsn, record: Vec<u8>) -> Result<Entry, EntryError> {
    let record = Bytes::from(record);
    let (term, content) = decode(&record)?;
    let payload = match content {
        Content::Blank => EntryPayload::Blank,
        Content::Command(command) => EntryPayload::Normal(Record {
            command: record.slice_ref(command),
            // If it is not in the journal yet, a leader waits for it.
            awaited: true,
        }),
        Content::Members(members) => EntryPayload::Membership(members),
    };
    Ok(Entry::new(log_id(term, lsn), payload))
}

/// The position of an entry in the log.
pub(super) fn log_id(term: Term, lsn: Lsn) -> LogId {
    LogId::new_term_index(term, lsn)
}

fn encoded(value: &impl Serialize, before: Vec<u8>) -> Vec<u8> {
    // Serialization fails only for values of unknown length or larger than memory.
    postcard::to_extend(value, before).expect("plain values are encoded")
}
