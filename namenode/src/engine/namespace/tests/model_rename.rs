//! The model's rename.

use super::model::{Answer, Context, Model, W, invalid};
use super::*;

impl Model {
    fn is_below(&self, ino: InodeId, above: InodeId) -> bool {
        let mut next = Some(ino);
        while let Some(ino) = next {
            if ino == above {
                return true;
            }
            next = self.parent_of(ino);
        }
        false
    }

    pub fn rename(
        &mut self,
        context: &Context,
        old: (InodeId, &Name),
        new: (InodeId, &Name),
        mode: RenameMode,
    ) -> Answer {
        let caller = context.caller;
        // Failures to search either directory are reported first.
        let (source, target) = (
            self.walk(caller, old.0, old.1),
            self.walk(caller, new.0, new.1),
        );
        let denied = |found: &Result<Option<InodeId>, FsError>| match found {
            Ok(_) | Err(FsError::NotFound) => None,
            Err(error) => Some(error.clone()),
        };
        if let Some(error) = denied(&source).or(denied(&target)) {
            return Err(error);
        }
        let (source, target) = (source?.ok_or(FsError::NotFound)?, target?);
        match (mode, target) {
            (RenameMode::NoReplace, Some(_)) => return Err(FsError::Exists),
            (RenameMode::Exchange, None) => return Err(FsError::NotFound),
            _ => {}
        }
        let exchange = mode == RenameMode::Exchange;
        let swallowed = exchange && target.is_some_and(|target| self.is_below(old.0, target));
        if self.is_below(new.0, source) || swallowed {
            return Err(invalid());
        }
        // Nor may two count in each other.
        let within = |dir, above| old.0 != new.0 && self.counts_within(dir, above);
        if within(new.0, source) || (exchange && target.is_some_and(|it| within(old.0, it))) {
            return Err(invalid());
        }
        let renamed = |model: &Self, other| MetaReply::Renamed {
            moved: model.attr(source),
            other,
        };
        if target == Some(source) {
            return Ok(renamed(self, None));
        }
        self.may_take(caller, old.0, source)?;
        let moved_dir = |ino: InodeId| self.inodes[&ino].is_dir() && old.0 != new.0;
        match target {
            None => self.may_add(caller, new.0)?,
            Some(target) => {
                self.may_take(caller, new.0, target)?;
                let dirs = (self.inodes[&source].is_dir(), self.inodes[&target].is_dir());
                match dirs {
                    _ if exchange => {}
                    (true, false) => return Err(FsError::NotADirectory),
                    (false, true) => return Err(FsError::IsADirectory),
                    _ => {}
                }
            }
        }
        if moved_dir(source) {
            self.inodes[&source].demand(caller, W)?;
        }
        if let Some(target) = target {
            if exchange && moved_dir(target) {
                self.inodes[&target].demand(caller, W)?;
            }
            if !exchange && !self.inodes[&target].entries.is_empty() {
                return Err(FsError::NotEmpty);
            }
        }

        let concerned = [source, new.0].into_iter().chain(target);
        for ino in concerned.chain(exchange.then_some(old.0)) {
            self.not_trash(ino)?;
        }

        self.node_mut(old.0).entries.remove(old.1);
        self.node_mut(new.0).entries.insert(new.1.clone(), source);
        self.node_mut(source).ctime = context.now;
        self.touch_dir(old.0, context.now);
        self.touch_dir(new.0, context.now);
        let Some(target) = target else {
            return Ok(renamed(self, None));
        };
        if exchange {
            self.node_mut(old.0).entries.insert(old.1.clone(), target);
            self.node_mut(target).ctime = context.now;
            return Ok(renamed(self, Some(self.attr(target))));
        }
        let dropped = self.dropped(context, target, new.0);
        Ok(renamed(self, Some(dropped)))
    }
}
