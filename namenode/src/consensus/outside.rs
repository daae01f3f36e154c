//! A namenode that is in no group: a new one, or one whose memory is not to be trusted. It waits until a
//! leader has it take a snapshot.

use std::collections::BTreeMap;
use std::sync::Arc;

use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::machine;
use harvestfs_protocol::peer::{Memory, PeerReply, PeerRequest};
use harvestfs_protocol::transport::Endpoint;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::links::Links;
use super::member_file::{self, Kept};
use super::members::is_sole_voter;
use super::peers::{Caller, Peer, Releases};
use super::snapshots::{Fetched, Fetching, fetch};
use super::{ConsensusError, Member, MemberId, Term, Vote};
use crate::journal::{Journal, JournalError, JournalReader, Lsn, ReceivedSnapshot};

/// What a namenode is, as far as its own disk says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A member of a group, or the only one.
    Member,
    /// It was made to be taken into a group, and was not yet.
    New(MemberId),
    /// Its directory is a copy: of what it said since the copy was made, it knows nothing.
    Copy,
    /// Others knew more of it than it did itself.
    Forgetful,
}

/// What the disk says of this namenode.
///
/// # Errors
/// It cannot be read.
pub fn standing(journal: &Journal) -> Result<Standing, JournalError> {
    let Some(read) = member_file::read(&*journal.disk())? else {
        return Ok(Standing::Member);
    };
    let kept = read.kept;
    let Some(members) = kept.members.last() else {
        return Ok(Standing::New(kept.this));
    };
    if kept.is_forgetful {
        return Ok(Standing::Forgetful);
    }
    // The only one has nobody that it could contradict, but datanodes, which know better.
    let is_alone = is_sole_voter(members.membership(), kept.this);
    // Namenodes are made together, and moved to their servers before they say anything. If it is one of them that is put
    // back later, the others know more of it.
    let has_spoken = kept.vote.is_some() || kept.writes > 0;
    Ok(if read.is_copy && has_spoken && !is_alone {
        Standing::Copy
    } else {
        Standing::Member
    })
}

/// Makes an empty journal that of a namenode which is to be taken into a group.
///
/// # Errors
/// The disk refuses.
pub fn found_outside(journal: &Journal, this: MemberId) -> Result<(), JournalError> {
    member_file::write(&journal.disk(), &Kept::outside(this))
}

/// Where the other members of the group listen, as of an entry; nobody, if it is in no group.
///
/// # Errors
/// It cannot be read.
pub fn other_members(journal: &Journal, last: Lsn) -> Result<Vec<Member>, JournalError> {
    let read = member_file::read(&*journal.disk())?;
    let Some(kept) = read.map(|it| it.kept).filter(|it| !it.members.is_empty()) else {
        return Ok(Vec::new());
    };
    let members = kept.members_at(last).membership().nodes();
    let others = members.filter(|(id, _)| **id != kept.this);
    Ok(others.map(|(_, member)| member.clone()).collect())
}

/// Makes a member the only one of its group, with the entries up to this one, which are its last ones.
///
/// # Errors
/// It is no member of a group, or the disk refuses.
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

/// Makes an empty journal that of the only member of a new group, which begins with a snapshot whose last entry is
/// of this term.
///
/// # Errors
/// The disk refuses.
pub fn found_with_snapshot(
    journal: &mut Journal,
    received: ReceivedSnapshot,
    term: Term,
    member: Member,
) -> Result<(), ConsensusError> {
    // Another number than any member of the group before: what those say is not for it.
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

/// What a namenode in no group is asked for.
pub enum Asked {
    /// To join: what its journal has is to make room.
    MakeRoom,
    /// It has a snapshot, and becomes a member by it.
    Join(Joining),
}

/// A snapshot by which a namenode becomes a member.
pub struct Joining {
    fetched: Fetched,
}

impl Joining {
    /// Makes it the content of the journal.
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

/// This namenode, in no group.
#[derive(Clone)]
pub struct Outside {
    inner: Arc<Inner>,
}

struct Inner {
    caller: Arc<Caller>,
    reader: JournalReader,
    /// Its journal has something that is not to be trusted.
    is_stale: bool,
    fetching: Fetching,
    asked: Mutex<Option<Asked>>,
    arrived: Notify,
}

impl Outside {
    /// Waits, with a journal that is empty or not to be trusted.
    #[must_use]
    pub fn new(this: MemberId, journal: &Journal, is_stale: bool, endpoint: Endpoint) -> Self {
        let caller = Caller {
            this,
            run: machine::random(),
            writes_at_start: 0,
            store: None,
            silent: Mutex::default(),
            releases: Releases::default(),
            links: Links::new(endpoint),
        };
        Self {
            inner: Arc::new(Inner {
                caller: Arc::new(caller),
                reader: journal.reader(),
                is_stale,
                fetching: Fetching::default(),
                asked: Mutex::new(None),
                arrived: Notify::new(),
            }),
        }
    }

    /// Its number in the group that it is taken into.
    #[must_use]
    pub fn id(&self) -> MemberId {
        self.inner.caller.this
    }

    /// Waits until it is asked for something.
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

    pub(super) fn answer(&self, request: PeerRequest) -> PeerReply {
        match request {
            PeerRequest::Identify => PeerReply::Identity {
                cluster: ClusterId(self.inner.reader.cluster_id()),
                is_outside: true,
            },
            PeerRequest::TakeSnapshot { name, addr, .. } => {
                let inner = Arc::clone(&self.inner);
                if inner.is_stale {
                    inner.ask(Asked::MakeRoom);
                    return PeerReply::Taking(None);
                }
                let peer = Peer::new(Arc::clone(&inner.caller), None, name, addr);
                let fetching = inner.fetching.clone();
                fetching.begin(async move {
                    match fetch(peer, inner.reader.clone()).await {
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
