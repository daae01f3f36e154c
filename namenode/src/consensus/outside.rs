//! A namenode that takes part in no group. A new one, or one whose memory cannot be trusted, waits until a leader
//! makes it take a snapshot. A founding member of a new group whose directory was copied to its server waits until
//! the others have confirmed that they know nothing of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::group::{Condition, GroupStatus};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::machine;
use harvestfs_protocol::peer::{Memory, PeerReply, PeerRequest};
use harvestfs_protocol::transport::Endpoint;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::entry::decode;
use super::links::Links;
use super::member_file::{self, Kept, ReadKept, Told, term_of};
use super::members::{is_sole_voter, members_of};
use super::peers::{Caller, Peer, Releases};
use super::snapshots::{Fetched, Fetching, fetch};
use super::{ConsensusError, FIRST, Member, MemberId, Term, Vote};
use crate::journal::{Journal, JournalError, JournalReader, Lsn, ReceivedSnapshot};

/// How long another member of a new group may take to answer.
const FOUNDING_DEADLINE: Duration = Duration::from_secs(2);
/// How often the members that did not answer are asked again.
const FOUNDING_POLL: Duration = Duration::from_millis(200);

/// The status of a namenode, as recorded on its own disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Its condition in its group.
    pub condition: Condition,
    /// Its number in the group; if it cannot be trusted, a new number with which it comes back.
    pub id: MemberId,
}

/// Reads the status of this namenode from its disk.
///
/// # Errors
/// The disk cannot be read.
pub fn standing(journal: &Journal) -> Result<Standing, JournalError> {
    let Some(read) = member_file::read(&*journal.disk())? else {
        if has_voted(journal)? {
            return Err(JournalError::MemberMissing {
                location: journal.disk().location(),
            });
        }
        return Ok(Standing {
            condition: Condition::Member,
            id: FIRST,
        });
    };
    let condition = condition(&read, journal.last_lsn());
    let id = match condition.is_stale() {
        true => MemberId::random(),
        false => read.kept.this,
    };
    Ok(Standing { condition, id })
}

fn condition(ReadKept { kept, is_copy }: &ReadKept, last: Lsn) -> Condition {
    let Some(members) = kept.members.last() else {
        return Condition::New;
    };
    // It ended after writing this file and before installing the snapshot by which it becomes a member.
    if last == 0 && kept.vote.is_none() && !kept.did_nothing() {
        return Condition::New;
    }
    match kept.told {
        Told::Forgot => return Condition::Forgetful,
        Told::Left => return Condition::Left,
        Told::Nothing => {}
    }
    // A sole member has no other that it could contradict, except datanodes, which notice.
    let is_alone = is_sole_voter(members.membership(), kept.this);
    if !is_copy || is_alone {
        Condition::Member
    } else if kept.did_nothing() {
        Condition::Founding
    } else {
        Condition::Copy
    }
}

/// Whether a journal without a vote belongs to a namenode that had one: before groups were introduced, and before its
/// first vote, all entries are of term 0.
fn has_voted(journal: &Journal) -> Result<bool, JournalError> {
    let last = journal.last_lsn();
    if last == 0 {
        return Ok(false);
    }
    let mut reader = journal.reader();
    if last < reader.first_lsn() {
        // Only a snapshot of another namenode leaves no record.
        return Ok(true);
    }
    let records = reader.read(last, last + 1, 1)?;
    // What cannot be decoded is refused when it is replayed.
    let decoded = records.first().map(|(_, record)| decode(record));
    Ok(matches!(decoded, Some(Ok((term, _))) if term > 0))
}

/// What a namenode that takes part in nothing knows about the group that it was in.
fn last_known(journal: &Journal, condition: Condition) -> Result<GroupStatus, ConsensusError> {
    let last = journal.last_lsn();
    let read = member_file::read(&*journal.disk())?;
    let kept = read.map(|it| it.kept);
    let mut reader = journal.reader();
    // Without records after it, the snapshot ends the log, and the file records where terms begin.
    let records = match last >= reader.first_lsn() {
        true => reader.read(last, last + 1, 1)?,
        false => Vec::new(),
    };
    let last_term = match (records.first(), &kept) {
        (Some((_, record)), _) => decode(record).map_or(0, |(term, _)| term),
        (None, Some(kept)) => term_of(&kept.terms, last),
        (None, None) => 0,
    };
    let members = kept.as_ref().and_then(|it| it.members.last());
    let term = kept.as_ref().and_then(|it| it.vote);
    Ok(GroupStatus {
        this: kept.as_ref().map_or(FIRST, |it| it.this).0,
        condition,
        leader: None,
        term: term.map_or(0, |vote| vote.leader_id.term),
        last,
        last_term,
        members: members.map_or_else(Vec::new, |it| members_of(it.membership())),
        is_changing: false,
    })
}

/// Turns an empty journal into that of a namenode that is to be taken into a group.
///
/// # Errors
/// The disk refuses.
pub fn found_outside(journal: &Journal, this: MemberId) -> Result<(), JournalError> {
    member_file::write(&journal.disk(), &Kept::outside(this))
}

/// The other members of the group, as of an entry; empty if the namenode is in no group.
///
/// # Errors
/// The disk cannot be read.
pub fn other_members(
    journal: &Journal,
    last: Lsn,
) -> Result<BTreeMap<MemberId, Member>, JournalError> {
    let read = member_file::read(&*journal.disk())?;
    let Some(kept) = read.map(|it| it.kept).filter(|it| !it.members.is_empty()) else {
        return Ok(BTreeMap::new());
    };
    let members = kept.members_at(last).membership().nodes();
    let others = members.filter(|(id, _)| **id != kept.this);
    Ok(others.map(|(id, member)| (*id, member.clone())).collect())
}

/// Makes this founding member of a new group take part from now on, since the others know nothing of it. No copy of
/// its directory does.
///
/// # Errors
/// The disk refuses.
pub fn found_here(journal: &Journal) -> Result<(), JournalError> {
    let read = member_file::read(&*journal.disk())?;
    let Some(ReadKept { mut kept, .. }) = read else {
        unreachable!("a namenode without that file is a member");
    };
    kept.writes += 1;
    member_file::write(&journal.disk(), &kept)
}

/// Makes a member the only one of its group, with the entries up to `last`, which is its last one.
///
/// # Errors
/// It is not a member of a group, or the disk refuses.
pub fn found_alone(journal: &Journal, last: Lsn) -> Result<(), ConsensusError> {
    let read = member_file::read(&*journal.disk())?;
    let kept = read.map(|it| it.kept);
    let Some(kept) = kept.filter(|it| !it.members.is_empty()) else {
        let what = "this namenode is in no group: it needs no recovery of one";
        return Err(ConsensusError::Stopped(what.to_owned()));
    };
    let alone = kept.alone(MemberId::random(), last)?;
    Ok(member_file::write(&journal.disk(), &alone)?)
}

/// Turns an empty journal into that of the only member of a new group, which begins with a snapshot whose last entry
/// is of this term.
///
/// # Errors
/// The disk refuses.
pub fn found_with_snapshot(
    journal: &mut Journal,
    received: ReceivedSnapshot,
    term: Term,
    member: Member,
) -> Result<(), ConsensusError> {
    // A number different from any member of the previous group: messages for that group are not meant for it.
    let this = MemberId::random();
    let alone = Kept::founding(this, BTreeMap::from([(this, member)]))?;
    let kept = Kept {
        vote: Some(Vote::new(term, this)),
        terms: vec![(received.lsn(), term)],
        writes: 1,
        ..alone
    };
    member_file::write(&journal.disk(), &kept)?;
    journal.install_snapshot(received)?;
    Ok(())
}

/// A request to a namenode in no group.
pub enum Asked {
    /// To join: the contents of its journal have to make room.
    MakeRoom,
    /// To become a member with the snapshot that it has taken.
    Join(Joining),
}

/// A snapshot by which a namenode becomes a member.
pub struct Joining {
    fetched: Fetched,
}

impl Joining {
    /// Makes the snapshot the content of the journal.
    ///
    /// # Errors
    /// The disk refuses.
    pub fn install(self, journal: &mut Journal) -> Result<(), ConsensusError> {
        let mut kept = match member_file::read(&*journal.disk())? {
            Some(read) => read.kept,
            None => unreachable!("a namenode without that file is a member"),
        };
        Ok(self.fetched.install(journal, &mut kept)?)
    }
}

/// A namenode in no group, which answers others.
#[derive(Clone)]
pub struct Outside {
    inner: Arc<Inner>,
}

struct Inner {
    caller: Arc<Caller>,
    reader: JournalReader,
    /// What it reports about itself.
    status: GroupStatus,
    fetching: Fetching,
    asked: Mutex<Option<Asked>>,
    arrived: Notify,
}

impl Outside {
    /// Starts waiting to be taken into a group.
    ///
    /// # Errors
    /// The journal cannot be read.
    pub fn new(
        standing: Standing,
        journal: &Journal,
        endpoint: Endpoint,
    ) -> Result<Self, ConsensusError> {
        let caller = Caller {
            this: standing.id,
            run: machine::random(),
            writes_at_start: 0,
            store: None,
            silent: Mutex::default(),
            releases: Releases::default(),
            links: Links::new(endpoint),
        };
        Ok(Self {
            inner: Arc::new(Inner {
                caller: Arc::new(caller),
                reader: journal.reader(),
                status: last_known(journal, standing.condition)?,
                fetching: Fetching::default(),
                asked: Mutex::new(None),
                arrived: Notify::new(),
            }),
        })
    }

    /// What it knows about the group that it was in, or is to be in.
    #[must_use]
    pub fn status(&self) -> GroupStatus {
        self.inner.status.clone()
    }

    /// Its number in the group that it will be taken into.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.inner.caller.this
    }

    /// Waits until each of the other members of a new group has confirmed that it knows nothing of this one. Then,
    /// even if its directory is an older copy, it has promised nothing to anybody. Never completes unless it belongs
    /// to a new group.
    pub async fn founded(&self, others: BTreeMap<MemberId, Member>) {
        if self.inner.status.condition != Condition::Founding {
            return std::future::pending().await;
        }
        let peer = |(id, member): (MemberId, Member)| {
            let caller = Arc::clone(&self.inner.caller);
            Peer::new(caller, Some(id), member.name, member.addr)
        };
        let mut open: Vec<Peer> = others.into_iter().map(peer).collect();
        let here = ClusterId(self.inner.reader.cluster_id());
        loop {
            let mut left = Vec::new();
            for mut peer in open {
                match peer.call(PeerRequest::Identify, FOUNDING_DEADLINE).await {
                    // A member that knows of this one refuses.
                    Ok((_, PeerReply::Identity { cluster, .. })) if cluster == here => {}
                    Ok(_) | Err(_) => left.push(peer),
                }
            }
            if left.is_empty() {
                return;
            }
            open = left;
            tokio::time::sleep(FOUNDING_POLL).await;
        }
    }

    /// Waits for the next request.
    pub async fn asked(&self) -> Asked {
        loop {
            if let Some(asked) = self.inner.asked.lock().take() {
                return asked;
            }
            self.inner.arrived.notified().await;
        }
    }

    pub(super) fn memory(&self) -> Memory {
        self.inner.caller.memory()
    }

    /// Stops fetching snapshots, and waits until none is being fetched.
    pub async fn end_fetching(&self) {
        self.inner.fetching.end().await;
    }

    pub(super) fn answer(&self, request: PeerRequest) -> PeerReply {
        let condition = self.inner.status.condition;
        let is_founding = condition == Condition::Founding;
        match request {
            PeerRequest::Identify => PeerReply::Identity {
                cluster: ClusterId(self.inner.reader.cluster_id()),
                condition,
            },
            // It already has what the snapshot would give it, or may have lost what it promised.
            PeerRequest::TakeSnapshot { .. } if is_founding => PeerReply::Outside,
            PeerRequest::TakeSnapshot { name, addr, .. } => {
                let inner = Arc::clone(&self.inner);
                if condition.is_stale() {
                    inner.ask(Asked::MakeRoom);
                    return PeerReply::Taking(None);
                }
                let peer = Peer::new(Arc::clone(&inner.caller), None, name, addr);
                let fetching = inner.fetching.clone();
                fetching.begin(async move {
                    match fetch(peer, inner.reader.clone(), &inner.fetching).await {
                        Ok(fetched) => inner.ask(Asked::Join(Joining { fetched })),
                        Err(error) => {
                            tracing::warn!(%error, "a snapshot of the leader was not taken");
                        }
                    }
                });
                PeerReply::Taking(None)
            }
            PeerRequest::Vote { .. }
            | PeerRequest::Append { .. }
            | PeerRequest::Transfer { .. }
            | PeerRequest::ReadSnapshot { .. } => PeerReply::Outside,
        }
    }
}

impl Inner {
    fn ask(&self, asked: Asked) {
        *self.asked.lock() = Some(asked);
        self.arrived.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use openraft::entry::RaftEntry;
    use openraft::{EntryPayload, Membership};

    use super::*;
    use crate::consensus::entry::{encode, log_id};
    use crate::consensus::{Entry, StoredMembers};
    use crate::journal::JournalOptions;

    fn journal_in(dir: &std::path::Path) -> Journal {
        let options = JournalOptions {
            create_if_empty: true,
            ..JournalOptions::new(dir, 7)
        };
        Journal::open(&options).unwrap().0
    }

    #[test]
    fn one_that_lost_its_vote_is_refused_and_one_that_never_had_one_is_the_only_member() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal_in(dir.path());
        let record = |term| encode(&Entry::new(log_id(term, 1), EntryPayload::Blank));
        journal.append(&[record(0)]).unwrap();
        assert_eq!(standing(&journal).unwrap().condition, Condition::Member);
        journal.append(&[record(1)]).unwrap();
        let refused = standing(&journal);
        assert!(matches!(refused, Err(JournalError::MemberMissing { .. })));
        member_file::write(&journal.disk(), &Kept::outside(MemberId(4))).unwrap();
        assert_eq!(standing(&journal).unwrap().condition, Condition::New);
    }

    #[test]
    fn one_that_ended_before_the_snapshot_by_which_it_joins_was_in_place_is_no_member() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = journal_in(dir.path());
        let member = Member {
            name: "nn".to_owned(),
            addr: SocketAddr::from(([10, 0, 0, 1], 1)),
        };
        let members = Membership::new(
            vec![[MemberId(1)].into()],
            BTreeMap::from([(MemberId(1), member)]),
        );
        // The snapshot may be from before an entry that names members.
        for named in [None, Some(log_id(1, 6))] {
            let mut kept = Kept::outside(MemberId(4));
            kept.terms = vec![(9, 2)];
            kept.add_members(StoredMembers::new(named, members.clone().unwrap()));
            kept.writes = 1;
            member_file::write(&journal.disk(), &kept).unwrap();
            let new = Standing {
                condition: Condition::New,
                id: MemberId(4),
            };
            assert_eq!(standing(&journal).unwrap(), new, "{named:?}");
        }
        journal.append(&[[0_u8; 4]]).unwrap();
        assert_eq!(standing(&journal).unwrap().condition, Condition::Member);
    }
}
