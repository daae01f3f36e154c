//! Rename.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::DIRECTORY_DEPTH_MAX;
use harvestfs_protocol::meta::{MetaReply, RenameMode};
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::Attr;

use super::command::Effects;
use super::inode::Inode;
use super::permissions::{self, EXECUTE, WRITE};
use super::usage::Move;
use super::{Call, Namespace};

/// One side of a rename.
#[derive(Clone, Copy)]
pub(super) struct Place<'a> {
    pub parent: InodeId,
    pub name: &'a Name,
}

impl Namespace {
    pub(super) fn rename(
        &mut self,
        call: &Call,
        old: Place,
        new: Place,
        mode: RenameMode,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        // Both directories are checked before either name is looked up, as in Linux.
        let (old_inode, old_directory) = self.searchable(call.credentials, old.parent)?;
        let (new_inode, new_directory) = self.searchable(call.credentials, new.parent)?;
        if old_inode.nlink == 0 || new_inode.nlink == 0 {
            // One of the directories was removed and is only held open.
            return Err(FsError::NotFound);
        }
        let source = old_directory.get(old.name).ok_or(FsError::NotFound)?;
        let target = match (new_directory.get(new.name), mode) {
            (Some(_), RenameMode::NoReplace) => return Err(FsError::Exists),
            (None, RenameMode::Exchange) => return Err(FsError::NotFound),
            (target, _) => target,
        };
        self.check_loop(source, old, new)?;
        if let (Some(target), RenameMode::Exchange) = (target, mode) {
            self.check_loop(target, new, old)?;
        }
        if target == Some(source) {
            // Two names of one file: both stay. The client whose mutation made them so may still wait for its
            // reply, and must learn of it by the time this rename returns.
            effects.inodes.push(source);
            return Ok(MetaReply::Renamed {
                moved: self.inodes.get(source)?.attr(source),
                other: None,
            });
        }
        self.check_rename(call, (source, old), (target, new), mode)?;
        // Names get into the trash by removals only, and the trash itself stays where it is.
        for ino in [source, new.parent].into_iter().chain(target) {
            self.check_not_trash(ino)?;
        }
        if mode == RenameMode::Exchange {
            self.check_not_trash(old.parent)?;
        }
        let exchange = mode == RenameMode::Exchange;
        let mut moves = self.plan_rename(call, (source, old), (target, new), exchange)?;
        // Nothing is refused from here on.
        let names = self.names;
        // Charged as planned, while both inodes are still in their old places. Charged together, since one
        // may subtract what the other adds.
        let charges = moves
            .iter_mut()
            .flat_map(|planned| std::mem::take(&mut planned.charges));
        self.charge(&charges.collect::<Vec<_>>());
        for planned in moves {
            self.carry_out(planned);
        }
        let (other, lost) = match target {
            Some(target) if exchange => {
                self.exchange(call, (source, old), (target, new), effects);
                (Some(self.inodes.known(target).attr(target)), 0)
            }
            _ => {
                let other = self.replace(call, (source, old), (target, new), effects);
                (other, u64::from(target.is_some()))
            }
        };
        let left = self.names;
        assert_eq!(
            left.get() + lost,
            names.get(),
            "names after and before {source} went from {} to {}, where {target:?} was",
            old.parent,
            new.parent
        );
        let moved = self.inodes.known(source);
        assert!(
            !moved.is_directory() || moved.parent == new.parent,
            "the directory {source} went to {}, but `..` in it leads to {}",
            new.parent,
            moved.parent
        );
        Ok(MetaReply::Renamed {
            moved: moved.attr(source),
            other,
        })
    }

    /// Checks that a directory is not moved into itself, nor too deep.
    fn check_loop(&self, moved: InodeId, from: Place, to: Place) -> Result<(), FsError> {
        if from.parent == to.parent || !self.inodes.get(moved)?.is_directory() {
            return Ok(());
        }
        let mut depth = 0;
        for (ino, _) in self.ancestors(to.parent) {
            if ino == moved {
                return Err(FsError::InvalidArgument(
                    "a directory cannot be moved into itself".into(),
                ));
            }
            depth += 1;
        }
        if self.counts_within(to.parent, moved) {
            return Err(FsError::InvalidArgument(
                "the directory cannot be moved into something that was removed from it".into(),
            ));
        }
        if depth > DIRECTORY_DEPTH_MAX {
            return Err(FsError::TooDeep);
        }
        Ok(())
    }

    fn check_rename(
        &self,
        call: &Call,
        (source, old): (InodeId, Place),
        (target, new): (Option<InodeId>, Place),
        mode: RenameMode,
    ) -> Result<(), FsError> {
        let credentials = call.credentials;
        let source = self.inodes.get(source)?;
        let new_directory = self.inodes.get(new.parent)?;
        permissions::check_removal(credentials, self.inodes.get(old.parent)?, source)?;
        let moves = old.parent != new.parent;
        let Some(target) = target else {
            permissions::check(credentials, new_directory, WRITE | EXECUTE)?;
            return check_dotdot(call, source, moves);
        };
        let target = self.inodes.get(target)?;
        permissions::check_removal(credentials, new_directory, target)?;
        if mode == RenameMode::Exchange {
            check_dotdot(call, source, moves)?;
            return check_dotdot(call, target, moves);
        }
        match (source.is_directory(), target.directory()) {
            (true, Err(error)) => return Err(error),
            (false, Ok(_)) => return Err(FsError::IsADirectory),
            (true, Ok(directory)) => {
                check_dotdot(call, source, moves)?;
                if !directory.is_empty() {
                    return Err(FsError::NotEmpty);
                }
            }
            (false, Err(_)) => {}
        }
        Ok(())
    }

    /// Plans the changes of usage by the rename; [`FsError::QuotaExceeded`] when a quota refuses it.
    fn plan_rename(
        &self,
        call: &Call,
        (source, old): (InodeId, Place),
        (target, new): (Option<InodeId>, Place),
        exchange: bool,
    ) -> Result<Vec<Move>, FsError> {
        let mut moves = vec![self.plan_move(source, Some(old.parent), Some(new.parent), true)];
        if let Some(target) = target {
            let back = exchange.then_some(old.parent);
            // One may be a file that is charged below the other, through another name that it has there.
            let left = self.change_within(target, &moves[0].charges);
            let stays = self.is_counted_after(self.inodes.known(target), left);
            let stays = stays || call.held_elsewhere;
            let mut other = self.plan_move(target, Some(new.parent), back, stays);
            moves[0].change_weight(self.change_within(source, &other.charges));
            other.change_weight(left);
            moves.push(other);
        }
        let charges: Vec<_> = moves
            .iter()
            .flat_map(|planned| &planned.charges)
            .copied()
            .collect();
        self.check_quotas(&charges)?;
        Ok(moves)
    }

    fn replace(
        &mut self,
        call: &Call,
        (source, old): (InodeId, Place),
        (target, new): (Option<InodeId>, Place),
        effects: &mut Effects,
    ) -> Option<Attr> {
        let is_directory = self.inodes.known(source).is_directory();
        // A directory only replaces a directory: the link count of the new parent does not change.
        let replaces_directory = is_directory && target.is_some();
        self.remove_name(old.parent, old.name, is_directory, call.now, effects);
        self.add_name(
            new.parent,
            new.name,
            source,
            is_directory && !replaces_directory,
            call.now,
            effects,
        );
        self.moved(call, source, effects);
        target.map(|target| self.lose_name(call, target, effects))
    }

    fn exchange(
        &mut self,
        call: &Call,
        (source, old): (InodeId, Place),
        (target, new): (InodeId, Place),
        effects: &mut Effects,
    ) {
        let source_is_directory = self.inodes.known(source).is_directory();
        let target_is_directory = self.inodes.known(target).is_directory();
        self.remove_name(old.parent, old.name, source_is_directory, call.now, effects);
        self.remove_name(new.parent, new.name, target_is_directory, call.now, effects);
        self.add_name(
            old.parent,
            old.name,
            target,
            target_is_directory,
            call.now,
            effects,
        );
        self.add_name(
            new.parent,
            new.name,
            source,
            source_is_directory,
            call.now,
            effects,
        );
        self.moved(call, source, effects);
        self.moved(call, target, effects);
    }

    fn moved(&mut self, call: &Call, ino: InodeId, effects: &mut Effects) {
        self.inodes.known_mut(ino).ctime = call.now;
        effects.inodes.push(ino);
    }
}

/// Checks that the caller may write a directory that moves to another parent, since its `..` changes.
fn check_dotdot(call: &Call, moved: &Inode, moves: bool) -> Result<(), FsError> {
    if moves && moved.is_directory() {
        permissions::check(call.credentials, moved, WRITE)?;
    }
    Ok(())
}
