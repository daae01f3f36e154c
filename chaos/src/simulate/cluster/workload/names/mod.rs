//! A few names that all clients create, remove, rename and look up. In the end there must be an order of all these
//! operations that explains their answers ([`order`]).
//!
//! "When `create`, `mkdir`, `rename`, `unlink` ... has returned on one mount, every mount shows the result"
//! (`docs/SEMANTICS.md`): what changes names comes in the order in which it was done. A look comes behind every change that had
//! returned before it began. Looks of different clients are in no order: while a change has not returned, one may
//! show it, and a later one of another client not yet.

mod order;

use std::time::Duration;

use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::RenameMode;
use harvestfs_protocol::types::{Credentials, FileKind};

use super::Worker;
use crate::simulate::cluster::journal::Journal;

pub const NAMES_DIRECTORY: &str = "names";
/// Pairs of names; files are renamed within one.
const PAIRS: usize = 2;

/// What is asked for; names are those of a pair, 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Creates a file, unless there is one.
    Create(usize),
    Unlink(usize),
    /// From a name to the other one, over what is there.
    Rename(usize),
    Look(usize),
}

impl Action {
    /// The name that it is about; of a rename, the one before.
    fn name(self) -> usize {
        match self {
            Self::Create(name) | Self::Unlink(name) | Self::Rename(name) | Self::Look(name) => name,
        }
    }
}

/// What is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// It was done. Of what was created or seen: its number.
    Done(Option<InodeId>),
    Exists,
    NotFound,
}

/// An operation.
#[derive(Clone, Copy, Debug)]
struct Operation {
    client: u8,
    action: Action,
    began: Duration,
    /// When and what was answered; none: it may happen at any time, or never.
    answered: Option<(Duration, Answer)>,
}

/// All that clients did with the names.
#[derive(Debug)]
pub struct History {
    pairs: Vec<Vec<Operation>>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            pairs: vec![Vec::new(); PAIRS],
        }
    }
}

impl History {
    /// Whether there is an order that explains all answers.
    pub fn check(&self, journal: &Journal) {
        for (pair, operations) in self.pairs.iter().enumerate() {
            match order::find(operations) {
                Ok(order::Found::Order) => {}
                Ok(order::Found::TooMuchWork) => journal.note(
                    "NAMES",
                    format_args!("pair {pair} was not checked to the end: too many orders"),
                ),
                Err(stuck) => journal.failure(format!(
                    "no order explains what was answered about the names {pair}-0 and {pair}-1: {stuck}"
                )),
            }
        }
    }
}

impl Worker {
    /// Does something with one of the names.
    pub async fn use_names(&self) -> Result<(), ClientError> {
        let (pair, name) = (self.random(0..PAIRS), self.random(0..2));
        let action = match self.random(0..6) {
            0 => Action::Create(name),
            1 => Action::Unlink(name),
            2 => Action::Rename(name),
            _ => Action::Look(name),
        };
        self.begin(&[], format_args!("names, pair {pair}: {action:?}"));
        let number = {
            let operations = &mut self.names.borrow_mut().pairs[pair];
            operations.push(Operation {
                client: self.number,
                action,
                began: self.journal.now(),
                answered: None,
            });
            operations.len() - 1
        };
        let answer = match self.act_on_names(pair, action).await {
            Ok(ino) => Answer::Done(ino),
            Err(ClientError::Fs(FsError::Exists)) => Answer::Exists,
            Err(ClientError::Fs(FsError::NotFound)) => Answer::NotFound,
            Err(error) => return Err(error),
        };
        if self.journal.is_certain() {
            let operation = &mut self.names.borrow_mut().pairs[pair][number];
            operation.answered = Some((self.journal.now(), answer));
        }
        Ok(())
    }

    async fn act_on_names(
        &self,
        pair: usize,
        action: Action,
    ) -> Result<Option<InodeId>, ClientError> {
        let me = Credentials::root();
        let path = |name: usize| format!("/{NAMES_DIRECTORY}/{pair}-{name}");
        let name = action.name();
        let resolved = self
            .client
            .resolve_parent(&me, path(name).as_bytes())
            .await?;
        let (directory, file) = (resolved.0.ino, resolved.1);
        match action {
            Action::Create(_) => {
                let kind = FileKind::Regular;
                let made = self.client.mknod(&me, directory, &file, kind, 0o644, 0);
                Ok(Some(made.await?.ino))
            }
            Action::Unlink(_) => {
                self.client.unlink(&me, directory, &file).await?;
                Ok(None)
            }
            Action::Rename(_) => {
                let other = path(1 - name);
                let (_, other) = self.client.resolve_parent(&me, other.as_bytes()).await?;
                let mode = RenameMode::Replace;
                self.client
                    .rename(&me, directory, &file, directory, &other, mode)
                    .await?;
                Ok(None)
            }
            Action::Look(_) => {
                let found = self.client.lookup(&me, directory, &file).await?;
                Ok(Some(found.ino))
            }
        }
    }
}
