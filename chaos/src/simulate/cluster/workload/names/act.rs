//! The operations of clients on the names.

use std::convert::Infallible;
use std::time::Duration;

use harvestfs_client::ClientError;
use harvestfs_protocol::meta::{AttrChanges, RenameMode, SetXattrMode};
use harvestfs_protocol::types::FileKind;

use super::{Action, Actor, Answer, Begun, NAMES_DIRECTORY, Refusal, XATTR, credentials, listed};
use crate::simulate::cluster::journal::Journal;
use crate::simulate::cluster::workload::Worker;

/// The mean time between two operations of a client, and how long it waits after one whose outcome is not known.
const PAUSE: Duration = Duration::from_millis(70);
const ERROR_PAUSE: Duration = Duration::from_millis(300);
/// More entries than the directory has.
const ENTRIES: usize = 100;

impl Worker {
    /// Repeats operations on the names, beside the client's other operations.
    pub async fn use_names(&self) -> Infallible {
        // This runs beside other operations, which begin and end in the meantime, so it needs a journal of its own.
        let journal = self.journal.clone();
        loop {
            self.pause(PAUSE).await;
            // No answers count in doubt, and operations with unknown outcomes would have to be tried in every order.
            if journal.is_in_doubt() || self.is_silent() {
                continue;
            }
            let (pair, uid, action) = self.names.borrow().draw(|range| self.random(range));
            journal.operation();
            journal.note(
                &self.name(),
                format_args!("names, pair {pair}, user {uid}: {action:?}"),
            );
            let begun = self.names.borrow_mut().begin(
                (Actor::Client(self.number), uid),
                pair,
                action,
                journal.now(),
            );
            if let Err(error) = self.act_on_names(begun, uid, action, &journal).await {
                journal.error(&self.name(), &error);
                tokio::time::sleep(ERROR_PAUSE).await;
            }
        }
    }

    async fn act_on_names(
        &self,
        begun: Begun,
        uid: u32,
        action: Action,
        journal: &Journal,
    ) -> Result<(), ClientError> {
        let answer = match self.act(begun.pair, uid, action).await {
            Ok(answer) => answer,
            Err(error) => match Refusal::of(&error) {
                Some(refusal) => Answer::Refused(refusal),
                None => return Err(error),
            },
        };
        if journal.is_certain() {
            let now = journal.now();
            self.names.borrow_mut().answered(begun, now, answer);
        }
        Ok(())
    }

    async fn act(&self, pair: usize, uid: u32, action: Action) -> Result<Answer, ClientError> {
        let me = credentials(uid);
        let client = &self.client;
        let path = |name: usize| super::path(pair, name);
        let resolve = async |name: usize| {
            let resolved = client.resolve_parent(&me, path(name).as_bytes()).await?;
            Ok::<_, ClientError>((resolved.0.ino, resolved.1))
        };
        let changed = match action {
            Action::Create(name, mode) => {
                let (directory, name) = resolve(name).await?;
                let kind = FileKind::Regular;
                let made = client.mknod(&me, directory, &name, kind, mode, 0).await?;
                return Ok(Answer::File(made.ino));
            }
            Action::Unlink(name) => {
                let (directory, name) = resolve(name).await?;
                client.unlink(&me, directory, &name).await.map(|_| ())
            }
            Action::Rename(name) => {
                let (directory, from) = resolve(name).await?;
                let (_, to) = resolve(1 - name).await?;
                let mode = RenameMode::Replace;
                let renamed = client.rename(&me, directory, &from, directory, &to, mode);
                renamed.await.map(|_| ())
            }
            Action::Look(name) => {
                let (directory, name) = resolve(name).await?;
                let found = client.lookup(&me, directory, &name).await?;
                return Ok(Answer::Found(found.ino, (&found).into()));
            }
            Action::List => {
                let directory = client.resolve(&me, NAMES_DIRECTORY.as_bytes()).await?;
                let page = client.readdir(&me, directory.ino, None, ENTRIES, false);
                let entries = page.await?.entries;
                let found = entries.iter().map(|entry| entry.name.as_bytes());
                return Ok(Answer::Listed(listed(pair, found)));
            }
            Action::Link(file, name) => {
                let (directory, name) = resolve(name).await?;
                client.link(&me, file, directory, &name).await.map(|_| ())
            }
            Action::SetMode(file, mode) => {
                let changes = AttrChanges {
                    mode: Some(mode),
                    ..AttrChanges::default()
                };
                client.setattr(&me, file, changes).await.map(|_| ())
            }
            Action::SetSize(file, size_bytes) => {
                let changes = AttrChanges {
                    size_bytes: Some(size_bytes),
                    ..AttrChanges::default()
                };
                client.setattr(&me, file, changes).await.map(|_| ())
            }
            Action::SetXattr(file, Some(value)) => {
                let (name, mode) = (XATTR.as_bytes(), SetXattrMode::Any);
                client.setxattr(&me, file, name, &[value], mode).await
            }
            Action::SetXattr(file, None) => client.removexattr(&me, file, XATTR.as_bytes()).await,
            Action::Show(file) => {
                let shown = client.getattr(&me, file).await?;
                return Ok(Answer::Shown((&shown).into()));
            }
            Action::ShowXattr(file) => {
                let value = client.getxattr(&me, file, XATTR.as_bytes()).await?;
                return Ok(Answer::Xattr(value.first().copied().unwrap_or_default()));
            }
        };
        changed.map(|()| Answer::Done)
    }
}
