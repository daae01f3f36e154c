//! A few names that clients and mounts, for several users, create, link, remove, rename, list and look up, and whose
//! attributes and extended attributes they change. At the end there must be an order of all these operations that
//! explains their answers ([`order`]).
//!
//! "When `create`, `mkdir`, `rename`, `unlink`, `chmod` ... has returned on one mount, every mount shows the result"
//! (`docs/SEMANTICS.md`): changes take effect in the order in which they were done. A read is ordered after every
//! change that had returned before it began. Reads of different clients are not ordered: while a change has not
//! returned, one may show it, and a later one of another client may not yet.

mod act;
mod files;
mod order;

use std::fmt::{self, Display, Formatter};
use std::ops::Range;
use std::time::Duration;

use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::{Attr, Credentials};

use crate::simulate::cluster::journal::Journal;

pub const NAMES_DIRECTORY: &str = "names";
/// All users may add names; only owners and root may remove theirs.
pub const NAMES_MODE: u16 = 0o1777;
/// Number of pairs of names; files are renamed and linked within a pair.
const PAIRS: usize = 2;
/// The extended attribute that is changed.
pub const XATTR: &str = "user.simulated";
/// The mode of files that a mount creates, which belong to root.
pub const MOUNT_MODE: u16 = 0o644;
/// The users of operations. Root may change what others may not, and is drawn more often.
const USERS: [u32; 4] = [ROOT, ROOT, 1_001, 1_002];
pub const ROOT: u32 = 0;
/// The group of all users but root.
const GROUP: u32 = 1_000;
const MODES: [u16; 7] = [0o644, 0o666, 0o600, 0o640, 0o660, 0o444, 0o000];
/// The number of recently seen files from which operations that take a file, not a name, choose.
const RECENT_MAX: usize = 3;

/// What an operation asks for. The names of a pair are 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Creates a file with a mode, unless the name exists.
    Create(usize, u16),
    Unlink(usize),
    /// Renames a name to the other one, replacing what is there.
    Rename(usize),
    Look(usize),
    List,
    /// Gives a file one more name.
    Link(InodeId, usize),
    SetMode(InodeId, u16),
    SetSize(InodeId, u64),
    /// Sets the extended attribute, or removes it.
    SetXattr(InodeId, Option<u8>),
    Show(InodeId),
    ShowXattr(InodeId),
}

impl Action {
    /// Whether it changes something unless it is refused.
    fn changes(self) -> bool {
        match self {
            Self::Create(..)
            | Self::Unlink(_)
            | Self::Rename(_)
            | Self::Link(..)
            | Self::SetMode(..)
            | Self::SetSize(..)
            | Self::SetXattr(..) => true,
            Self::Look(_) | Self::List | Self::Show(_) | Self::ShowXattr(_) => false,
        }
    }
}

/// The answer to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Done,
    /// This file was created or seen.
    File(InodeId),
    /// This file was seen, together with its attributes.
    Found(InodeId, Shown),
    Shown(Shown),
    Xattr(u8),
    /// Which names of the pair exist.
    Listed([bool; 2]),
    /// Whether this name of the pair exists.
    ListedName(usize, bool),
    Refused(Refusal),
}

/// Attributes that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    pub uid: u32,
    pub mode: u16,
    pub size_bytes: u64,
    pub nlink: u32,
}

impl From<&Attr> for Shown {
    fn from(attr: &Attr) -> Self {
        Self {
            uid: attr.uid,
            mode: attr.permission_bits(),
            size_bytes: attr.size_bytes,
            nlink: attr.nlink,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Exists,
    NotFound,
    /// The file has no name any more.
    Gone,
    /// The user lacks the permission.
    Denied,
    NoAttribute,
}

impl Refusal {
    /// Translates an error; `None` if it is not known whether the operation was done.
    fn of(error: &ClientError) -> Option<Self> {
        let ClientError::Fs(error) = error else {
            return None;
        };
        match error {
            FsError::Exists => Some(Self::Exists),
            FsError::NotFound => Some(Self::NotFound),
            FsError::Stale => Some(Self::Gone),
            FsError::PermissionDenied | FsError::NotPermitted => Some(Self::Denied),
            FsError::NoAttribute => Some(Self::NoAttribute),
            _ => None,
        }
    }
}

/// The origin of an operation: a client or a mount, each of which does one operation after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Actor {
    Client(u8),
    Mount(u8),
}

/// An operation.
#[derive(Clone, Copy, Debug)]
struct Operation {
    actor: Actor,
    uid: u32,
    action: Action,
    began: Duration,
    /// When the answer arrived, and the answer. If `None`, the operation may take effect at any time, or never.
    answered: Option<(Duration, Answer)>,
}

impl Display for Operation {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self {
            actor,
            uid,
            action,
            began,
            answered,
        } = self;
        let began_s = began.as_secs_f64();
        write!(f, "{actor:?} as user {uid}, from {began_s:.3} ")?;
        match answered {
            Some((at, answer)) => {
                let until_s = at.as_secs_f64();
                write!(f, "to {until_s:.3}: {action:?}: {answer:?}")
            }
            None => write!(f, "on: {action:?}: not known"),
        }
    }
}

/// All operations on a pair of names.
#[derive(Clone, Debug, Default)]
struct Pair {
    operations: Vec<Operation>,
    /// Recently seen files.
    recent: Vec<InodeId>,
}

/// All operations on the names.
#[derive(Debug)]
pub struct History {
    pairs: Vec<Pair>,
}

/// An operation in flight.
#[derive(Clone, Copy, Debug)]
pub struct Begun {
    pub pair: usize,
    number: usize,
}

impl Default for History {
    fn default() -> Self {
        Self {
            pairs: vec![Pair::default(); PAIRS],
        }
    }
}

impl History {
    /// Draws the pair, the user and the action of the next operation.
    pub fn draw(&self, random: impl Fn(Range<usize>) -> usize) -> (usize, u32, Action) {
        let pair = random(0..PAIRS);
        let uid = USERS[random(0..USERS.len())];
        let name = random(0..2);
        let mode = MODES[random(0..MODES.len())];
        let recent = &self.pairs[pair].recent;
        let file = (!recent.is_empty()).then(|| recent[random(0..recent.len())]);
        let action = match (random(0..20), file) {
            (0..3, _) => Action::Create(name, mode),
            (3..5, _) => Action::Unlink(name),
            (5..7, _) => Action::Rename(name),
            (7..9, _) => Action::List,
            (9, Some(file)) => Action::Link(file, name),
            (10, Some(file)) => Action::SetMode(file, mode),
            (11, Some(file)) => Action::SetSize(file, random(0..9) as u64),
            (12, Some(file)) => {
                let value = random(0..4) as u8;
                Action::SetXattr(file, (value > 0).then_some(value))
            }
            (13, Some(file)) => Action::Show(file),
            (14..16, Some(file)) => Action::ShowXattr(file),
            _ => Action::Look(name),
        };
        (pair, uid, action)
    }

    /// Notes that an operation begins.
    pub fn begin(
        &mut self,
        (actor, uid): (Actor, u32),
        pair: usize,
        action: Action,
        now: Duration,
    ) -> Begun {
        let operations = &mut self.pairs[pair].operations;
        operations.push(Operation {
            actor,
            uid,
            action,
            began: now,
            answered: None,
        });
        Begun {
            pair,
            number: operations.len() - 1,
        }
    }

    /// Notes the answer to an operation.
    pub fn answered(&mut self, begun: Begun, now: Duration, answer: Answer) {
        let Pair { operations, recent } = &mut self.pairs[begun.pair];
        let operation = &mut operations[begun.number];
        let (answer, file) = match answer {
            Answer::Found(file, shown) => {
                // The name and the attributes were each current at some time during the lookup, but not necessarily at
                // the same time.
                let show = Operation {
                    action: Action::Show(file),
                    answered: Some((now, Answer::Shown(shown))),
                    ..*operation
                };
                operations.push(show);
                (Answer::File(file), Some(file))
            }
            Answer::File(file) => (answer, Some(file)),
            // If names change while the directory is read, the listing may miss one and show another outdated one.
            Answer::Listed([first, second]) if matches!(operation.actor, Actor::Mount(_)) => {
                let look = Operation {
                    answered: Some((now, Answer::ListedName(1, second))),
                    ..*operation
                };
                operations.push(look);
                (Answer::ListedName(0, first), None)
            }
            answer => (answer, None),
        };
        operations[begun.number].answered = Some((now, answer));
        if let Some(file) = file
            && !recent.contains(&file)
        {
            if recent.len() == RECENT_MAX {
                recent.remove(0);
            }
            recent.push(file);
        }
    }

    /// Notes that an operation did nothing, whatever the names led to.
    pub fn dropped(&mut self, begun: Begun) {
        let operation = &mut self.pairs[begun.pair].operations[begun.number];
        operation.action = Action::List;
    }

    /// Checks that there is an order that explains all answers.
    pub fn check(&self, journal: &Journal) {
        for (pair, done) in self.pairs.iter().enumerate() {
            let mut operations = done.operations.clone();
            operations.sort_by_key(|it| it.began);
            match order::find(&operations) {
                Ok(order::Found::Order) => {}
                Ok(order::Found::TooMuchWork) => journal.note(
                    "NAMES",
                    format_args!("pair {pair} was not checked to the end: too many orders"),
                ),
                Err(stuck) => {
                    for operation in &operations {
                        journal.note("NAMES", format_args!("pair {pair}: {operation}"));
                    }
                    journal.failure(format!(
                        "no order explains what was answered about the names {pair}-0 and {pair}-1: {stuck}"
                    ));
                }
            }
        }
    }
}

fn group(uid: u32) -> u32 {
    match uid {
        ROOT => 0,
        _ => GROUP,
    }
}

fn credentials(uid: u32) -> Credentials {
    Credentials {
        uid,
        gid: group(uid),
        groups: Vec::new(),
    }
}

/// The path of a name of a pair.
pub fn path(pair: usize, name: usize) -> String {
    format!("/{NAMES_DIRECTORY}/{pair}-{name}")
}

/// Which names of a pair are in a listing.
pub fn listed<'a>(pair: usize, found: impl Iterator<Item = &'a [u8]> + Clone) -> [bool; 2] {
    [0, 1].map(|name| {
        let name = format!("{pair}-{name}");
        found.clone().any(|it| it == name.as_bytes())
    })
}
