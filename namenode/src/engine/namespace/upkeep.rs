//! Timed work on files, without a request: replication is raised, and entries whose lifetime is over
//! are removed.
//!
//! Both times count from the last change of an inode (`ctime`, by the namenode's clock). The server
//! scans periodically, a bounded number of inodes at a time, and applies a command for those that are
//! due.

use std::num::NonZeroU32;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Credentials, FileKind, Timestamp};

use super::command::Effects;
use super::directory::name_of_entry;
use super::inode::Body;
use super::rename::Place;
use super::settings::Settings;
use super::{Call, Namespace};

const NANOSECONDS_PER_SECOND: i64 = 1_000_000_000;

/// The position at which a scan continues: after a name in a directory, or at its first name.
pub type EntryCursor = (InodeId, Option<Name>);

fn is_over(since: Timestamp, seconds: u32, now: Timestamp) -> bool {
    let time = i64::from(seconds) * NANOSECONDS_PER_SECOND;
    since.0.saturating_add(time) <= now.0
}

impl Namespace {
    /// Scans at most `limit` of the files that will get more replicas, from `from` on. Returns those that
    /// are due, and where to continue; none at the end.
    #[must_use]
    pub fn due_raises(
        &self,
        now: Timestamp,
        from: InodeId,
        limit: usize,
    ) -> (Vec<InodeId>, Option<InodeId>) {
        let mut rest = self.to_raise.range(from..).copied();
        let looked_at = rest.by_ref().take(limit);
        let due = looked_at.filter(|ino| self.is_raise_due(*ino, now));
        (due.collect(), rest.next())
    }

    /// Whether one of the files that will get more replicas is due.
    fn is_raise_due(&self, ino: InodeId, now: Timestamp) -> bool {
        let inode = self.inodes.known(ino);
        let Some((_, after_s)) = inode.settings.raise(self.default_rules()) else {
            panic!(
                "file {ino} with {:?} is to get no more replicas",
                inode.settings
            );
        };
        is_over(inode.ctime, after_s, now)
    }

    /// Updates the list of files to raise, after a file was added or its settings changed.
    pub(super) fn note_raise(&mut self, ino: InodeId, kind: FileKind, settings: Settings) {
        if kind == FileKind::Regular && settings.raise(self.default_rules()).is_some() {
            self.to_raise.insert(ino);
        } else {
            self.to_raise.remove(&ino);
        }
    }

    pub(super) fn raise_replication(
        &mut self,
        inodes: &[InodeId],
        now: Timestamp,
        effects: &mut Effects,
    ) {
        for &ino in inodes {
            if self.to_raise.contains(&ino) && self.is_raise_due(ino, now) {
                let settings = self.inodes.known(ino).settings;
                self.change_settings(ino, settings.raised());
                effects.inodes.push(ino);
            }
        }
    }

    /// Sets the lifetime of a directory's entries; none: they stay forever.
    pub(super) fn set_lifetime(
        &mut self,
        ino: InodeId,
        seconds: Option<NonZeroU32>,
    ) -> Result<(), FsError> {
        let Body::Directory(directory) = &mut self.inodes.get_mut(ino)?.body else {
            return Err(FsError::NotADirectory);
        };
        let before = std::mem::replace(&mut directory.lifetime_s, seconds);
        let was_listed = match seconds {
            Some(_) => !self.with_lifetime.insert(ino),
            None => self.with_lifetime.remove(&ino),
        };
        assert_eq!(
            was_listed,
            before.is_some(),
            "directory {ino} with the lifetime {before:?} is in the list of those that have one"
        );
        Ok(())
    }

    /// Scans at most `limit` names in directories that set a lifetime, from `from` on. Returns those whose
    /// lifetime is over, and where to continue; none at the end.
    #[must_use]
    pub fn expired_entries(
        &self,
        now: Timestamp,
        from: &EntryCursor,
        limit: usize,
    ) -> (Vec<(InodeId, Name)>, Option<EntryCursor>) {
        let mut expired = Vec::new();
        let mut looked_at = 0;
        for &dir in self.with_lifetime.range(from.0..) {
            let mut after = from.1.clone().filter(|_| dir == from.0);
            let directory = self.inodes.known_directory(dir);
            let first = after.clone();
            for (name, _) in directory.after(first.as_ref()) {
                if looked_at == limit {
                    return (expired, Some((dir, after)));
                }
                looked_at += 1;
                let name = name_of_entry(name);
                after = Some(name.clone());
                if self.expired(dir, &name, now).is_some() {
                    expired.push((dir, name));
                }
            }
        }
        (expired, None)
    }

    /// The inode of a name, if its lifetime is over. Names that start with a dot are left alone: they are
    /// for the directory's owner.
    fn expired(&self, dir: InodeId, name: &Name, now: Timestamp) -> Option<InodeId> {
        let directory = self.inodes.get(dir).ok()?.directory().ok()?;
        let seconds = directory.lifetime_s?.get();
        let ino = directory.get(name)?;
        let is_kept = name.as_bytes().starts_with(b".") || self.is_trash_or_below(dir);
        let since = self.inodes.get(ino).ok()?.ctime;
        (!is_kept && is_over(since, seconds, now)).then_some(ino)
    }

    pub(super) fn remove_expired(
        &mut self,
        entries: &[(InodeId, Name)],
        now: Timestamp,
        effects: &mut Effects,
    ) -> Result<(), FsError> {
        let root = Credentials::root();
        let call = Call::of_namenode(&root, now);
        for (parent, name) in entries {
            if let Some(ino) = self.expired(*parent, name, now) {
                let place = Place {
                    parent: *parent,
                    name,
                };
                // Fails for the first entry, before anything is changed, or for none.
                let directory = self.make_trash(&call, effects)?;
                self.move_to_trash(&call, ino, place, (directory, 0), effects);
            }
        }
        Ok(())
    }
}
