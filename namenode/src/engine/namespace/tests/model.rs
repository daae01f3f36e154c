//! A small and obvious namespace: maps, and for each byte of a file its location. All counts are
//! recomputed each time. It implements the rules of POSIX independently of the engine.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::meta::{SetTime, SetXattrMode};

use super::model_node::Node;
use super::model_quota::is_quota;
use super::model_trash::TRASH_S;
use super::model_upkeep::{LIFETIME_S, RAISE_AFTER_S, RAISE_REPLICATION};
use super::*;

pub const W: u16 = 2;
pub const X: u16 = 1;

#[derive(Clone, Debug, Default)]
pub struct Model {
    pub inodes: BTreeMap<InodeId, Node>,
    pub blocks: BTreeMap<BlockId, ModelBlock>,
    pub sessions: BTreeSet<SessionId>,
    pub orphans: BTreeSet<InodeId>,
    /// Orphans that no session holds: directories in which something counts.
    pub unheld: BTreeSet<InodeId>,
    /// For each inode that is in the trash or has no name, the directory that it was in.
    pub counted_in: BTreeMap<InodeId, InodeId>,
    pub trash_directory: Option<InodeId>,
    pub trash_of_users: BTreeMap<u32, InodeId>,
    /// What is in the trash: where it was, and until when it is kept.
    pub trash: BTreeMap<InodeId, (Vec<u8>, i64)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelBlock {
    pub writer: Option<SessionId>,
    pub committed: u64,
    /// The numbers of the chunks that were committed.
    pub chunks: BTreeSet<u64>,
    pub sealed: Option<u64>,
    pub rules: PlacementRules,
}

/// The context of an operation.
pub struct Context<'a> {
    pub caller: &'a Credentials,
    pub session: SessionId,
    pub now: i64,
    pub held_elsewhere: bool,
    /// The number that a new inode gets.
    pub fresh: InodeId,
    /// The numbers that the directory of the trash has, and the caller's in it, once they are there.
    pub trash: [InodeId; 2],
    /// The numbers of the inodes of a new snapshot, by path below the directory of snapshots; the number
    /// of that directory is at the empty path.
    pub copies: &'a BTreeMap<Vec<Name>, InodeId>,
}

pub type Answer = Result<MetaReply, FsError>;

/// Settings that only directories have.
pub fn is_of_directory(name: &[u8]) -> bool {
    is_quota(name) || [TRASH_S, LIFETIME_S].contains(&name)
}

pub fn invalid() -> FsError {
    FsError::InvalidArgument(String::new())
}

pub fn groups(caller: &Credentials) -> BTreeSet<u32> {
    caller.groups.iter().copied().chain([caller.gid]).collect()
}

impl Model {
    pub fn format() -> Self {
        let mut model = Self::default();
        let root = Node::new(FileKind::Directory, 0o755, 0, 0, 1);
        model.inodes.insert(InodeId::ROOT, root);
        model
    }

    pub fn node(&self, ino: InodeId) -> Result<&Node, FsError> {
        self.inodes.get(&ino).ok_or(FsError::Stale)
    }

    pub fn node_mut(&mut self, ino: InodeId) -> &mut Node {
        self.inodes.get_mut(&ino).unwrap()
    }

    pub fn links(&self, ino: InodeId) -> u32 {
        let all = self.inodes.values().flat_map(|node| node.entries.values());
        let names = all.filter(|&&child| child == ino).count();
        let node = &self.inodes[&ino];
        if node.is_dir() && !self.orphans.contains(&ino) {
            let below = node.entries.values();
            2 + below.filter(|child| self.inodes[child].is_dir()).count() as u32
        } else {
            names as u32
        }
    }

    pub fn attr(&self, ino: InodeId) -> Attr {
        let node = &self.inodes[&ino];
        let size = match node.kind {
            FileKind::Directory => node.entries.len(),
            FileKind::Symlink => node.target.len(),
            _ => node.content.len(),
        };
        Attr {
            ino,
            kind: node.kind,
            mode: node.mode | if node.frozen { MODE_FROZEN } else { 0 },
            nlink: self.links(ino),
            uid: node.uid,
            gid: node.gid,
            rdev: node.rdev,
            size_bytes: size as u64,
            allocated_bytes: node.content.iter().flatten().count() as u64,
            atime: Timestamp(node.atime),
            mtime: Timestamp(node.mtime),
            ctime: Timestamp(node.ctime),
            content_version: 0,
        }
    }

    fn reply(&self, ino: InodeId) -> Answer {
        Ok(MetaReply::Attr(self.attr(ino)))
    }

    pub fn parent_of(&self, ino: InodeId) -> Option<InodeId> {
        let names = |node: &&Node| node.entries.values().any(|&child| child == ino);
        let found = self.inodes.iter().find(|(_, node)| names(node));
        found.map(|(&parent, _)| parent)
    }

    /// What a name leads to, for a caller that may look.
    pub fn walk(
        &self,
        caller: &Credentials,
        dir: InodeId,
        name: &Name,
    ) -> Result<Option<InodeId>, FsError> {
        let node = self.node(dir)?;
        if !node.is_dir() {
            return Err(FsError::NotADirectory);
        }
        node.demand(caller, X)?;
        if self.orphans.contains(&dir) {
            return Err(FsError::NotFound);
        }
        Ok(node.entries.get(name).copied())
    }

    pub fn may_add(&self, caller: &Credentials, dir: InodeId) -> Result<(), FsError> {
        self.node(dir)?.demand(caller, W | X)
    }

    pub fn may_take(
        &self,
        caller: &Credentials,
        dir: InodeId,
        victim: InodeId,
    ) -> Result<(), FsError> {
        let (dir, victim) = (self.node(dir)?, self.node(victim)?);
        dir.demand(caller, W | X)?;
        let sticky = dir.mode & 0o1000 != 0;
        if sticky && ![0, dir.uid, victim.uid].contains(&caller.uid) {
            return Err(FsError::NotPermitted);
        }
        Ok(())
    }

    fn free_name(&self, caller: &Credentials, dir: InodeId, name: &Name) -> Result<(), FsError> {
        if self.walk(caller, dir, name)?.is_some() {
            return Err(FsError::Exists);
        }
        self.may_add(caller, dir)?;
        self.not_trash(dir)
    }

    pub fn not_trash(&self, ino: InodeId) -> Result<(), FsError> {
        (!self.is_part_of_trash(ino))
            .then_some(())
            .ok_or(FsError::NotPermitted)
    }

    pub fn touch_dir(&mut self, dir: InodeId, now: i64) {
        let node = self.node_mut(dir);
        node.mtime = now;
        node.ctime = now;
    }

    /// The nearest value of a setting at or above a directory.
    pub fn setting_above(&self, dir: InodeId, name: &[u8]) -> Option<Vec<u8>> {
        let mut next = Some(dir);
        while let Some(ino) = next {
            if let Some(value) = self.inodes[&ino].xattrs.get(name) {
                return Some(value.clone());
            }
            next = self.parent_of(ino);
        }
        None
    }

    fn add(&mut self, context: &Context, dir: InodeId, name: &Name, mut node: Node) -> Answer {
        let parent = &self.inodes[&dir];
        if parent.mode & 0o2000 != 0 {
            node.gid = parent.gid;
            if node.is_dir() {
                node.mode |= 0o2000;
            } else if node.mode & 0o2010 == 0o2010
                && context.caller.uid != 0
                && !groups(context.caller).contains(&node.gid)
            {
                node.mode &= !0o2000;
            }
        }
        if node.kind == FileKind::Regular {
            for setting in [
                "replication",
                "durability",
                "raise_replication",
                "raise_after_s",
            ] {
                let name = format!("user.harvestfs.{setting}").into_bytes();
                if let Some(value) = self.setting_above(dir, &name) {
                    node.xattrs.insert(name, value);
                }
            }
        }
        self.inodes.insert(context.fresh, node);
        let entries = &mut self.node_mut(dir).entries;
        entries.insert(name.clone(), context.fresh);
        self.touch_dir(dir, context.now);
        self.reply(context.fresh)
    }

    /// Handles the removal of a name that led here from a directory.
    pub fn dropped(&mut self, context: &Context, ino: InodeId, dir: InodeId) -> Attr {
        let named = self.parent_of(ino).is_some();
        let node = self.node_mut(ino);
        node.ctime = context.now;
        if !named && let Some(made_with) = node.made_with {
            (node.mode, node.uid, node.gid) = made_with;
        }
        let mut attr = self.attr(ino);
        if !named {
            attr.nlink = 0;
            if !self.is_part_of_trash(dir) {
                self.counted_in.insert(ino, dir);
            }
            self.orphans.insert(ino);
            if !context.held_elsewhere {
                self.release(ino);
            }
        }
        attr
    }

    /// Handles that no session holds an orphan any more: it is removed unless something counts in it.
    pub fn release(&mut self, ino: InodeId) {
        assert!(self.orphans.contains(&ino));
        self.unheld.insert(ino);
        if self.used(ino) == (0, 0) {
            self.inodes.remove(&ino);
            self.orphans.remove(&ino);
            self.unheld.remove(&ino);
            self.counted_in.remove(&ino);
        }
    }

    /// Removes directories that were kept for inodes that have been removed.
    pub fn release_emptied(&mut self) {
        while let Some(&ino) = self.unheld.iter().find(|&&ino| self.used(ino) == (0, 0)) {
            self.release(ino);
        }
    }

    pub fn apply(&mut self, context: &Context, op: &Mutation) -> Answer {
        if self.is_refused_as_frozen(op) {
            return Err(FsError::ReadOnly);
        }
        let removes = matches!(
            op,
            Mutation::Unlink(_) | Mutation::RemoveDir(_) | Mutation::RemoveSnapshot(_)
        );
        let answer = if removes {
            self.perform(context, op)
        } else {
            self.within_quotas(|model| model.perform(context, op))
        };
        self.look_into_trash();
        self.release_emptied();
        answer
    }

    fn perform(&mut self, context: &Context, op: &Mutation) -> Answer {
        let caller = context.caller;
        match op {
            Mutation::Create(mutation::Create {
                parent,
                name,
                kind,
                mode,
                rdev,
            }) => {
                self.free_name(caller, *parent, name)?;
                let device = matches!(kind, FileKind::CharDevice | FileKind::BlockDevice);
                if device && caller.uid != 0 {
                    return Err(FsError::NotPermitted);
                }
                let mut node = Node::new(*kind, *mode, caller.uid, caller.gid, context.now);
                node.rdev = if device { *rdev } else { 0 };
                self.add(context, *parent, name, node)
            }
            Mutation::MakeDir(mutation::MakeDir { parent, name, mode }) => {
                self.free_name(caller, *parent, name)?;
                let mode = mode & 0o1777;
                let node = Node::new(
                    FileKind::Directory,
                    mode,
                    caller.uid,
                    caller.gid,
                    context.now,
                );
                self.add(context, *parent, name, node)
            }
            Mutation::Symlink(mutation::Symlink {
                parent,
                name,
                target,
            }) => {
                self.free_name(caller, *parent, name)?;
                let kind = FileKind::Symlink;
                let mut node = Node::new(kind, 0o777, caller.uid, caller.gid, context.now);
                node.target = target.clone();
                self.add(context, *parent, name, node)
            }
            Mutation::Link(mutation::Link { ino, parent, name }) => {
                let is_dir = self.node(*ino)?.is_dir();
                self.free_name(caller, *parent, name)?;
                if is_dir {
                    return Err(FsError::NotPermitted);
                }
                if self.orphans.contains(ino) {
                    return Err(FsError::NotFound);
                }
                let entries = &mut self.node_mut(*parent).entries;
                entries.insert(name.clone(), *ino);
                self.touch_dir(*parent, context.now);
                self.node_mut(*ino).ctime = context.now;
                self.reply(*ino)
            }
            Mutation::Unlink(mutation::Unlink { parent, name })
            | Mutation::RemoveDir(mutation::RemoveDir { parent, name }) => {
                let ino = self.walk(caller, *parent, name)?.ok_or(FsError::NotFound)?;
                self.may_take(caller, *parent, ino)?;
                let victim = &self.inodes[&ino];
                match (op, victim.is_dir()) {
                    (Mutation::Unlink(_), true) => return Err(FsError::IsADirectory),
                    (Mutation::RemoveDir(_), false) => return Err(FsError::NotADirectory),
                    (_, true) if !victim.entries.is_empty() => return Err(FsError::NotEmpty),
                    _ => {}
                }
                let last_of_file = !victim.is_dir() && self.links(ino) == 1;
                self.not_trash(ino)?;
                if let (true, Some(seconds)) = (last_of_file, self.kept_s(*parent)) {
                    let kept = self.within_quotas(|model| {
                        model.put_into_trash(context, (*parent, name), seconds)
                    });
                    if kept.is_ok() {
                        return kept;
                    }
                }
                self.node_mut(*parent).entries.remove(name);
                self.touch_dir(*parent, context.now);
                Ok(MetaReply::Removed(Some(
                    self.dropped(context, ino, *parent),
                )))
            }
            Mutation::RemoveToTrash(mutation::RemoveToTrash {
                parent,
                name,
                retention_s,
            }) => {
                let ino = self.walk(caller, *parent, name)?.ok_or(FsError::NotFound)?;
                self.may_take(caller, *parent, ino)?;
                if self.inodes[&ino].is_dir() {
                    self.inodes[&ino].demand(caller, W)?;
                }
                self.not_trash(ino)?;
                if self.is_trash_or_below(*parent) {
                    return Err(invalid());
                }
                let seconds = self.kept_s(*parent).unwrap_or(*retention_s);
                self.put_into_trash(context, (*parent, name), seconds)
            }
            Mutation::CreateSnapshot(mutation::CreateSnapshot { ino, name }) => {
                self.create_snapshot(context, *ino, name)
            }
            Mutation::RemoveSnapshot(mutation::RemoveSnapshot { ino, name }) => {
                self.remove_snapshot(context, *ino, name)
            }
            Mutation::Rename(mutation::Rename {
                parent,
                name,
                new_parent,
                new_name,
                mode,
            }) => self.rename(context, (*parent, name), (*new_parent, new_name), *mode),
            Mutation::SetAttr(mutation::SetAttr { ino, changes }) => {
                self.set_attr(context, *ino, changes)
            }
            Mutation::SetXattr(mutation::SetXattr {
                ino,
                name,
                value,
                mode,
            }) => {
                self.may_set_xattr(caller, *ino, name)?;
                let node = self.node_mut(*ino);
                match (mode, node.xattrs.contains_key(name)) {
                    (SetXattrMode::Create, true) => return Err(FsError::Exists),
                    (SetXattrMode::Replace, false) => return Err(FsError::NoAttribute),
                    _ => {}
                }
                let text = String::from_utf8_lossy(value);
                let good = match name.as_slice() {
                    b"user.harvestfs.replication" | RAISE_REPLICATION => {
                        text.parse().is_ok_and(|n: u8| (1..=10).contains(&n))
                    }
                    b"user.harvestfs.durability" => ["strict", "space"].contains(&text.as_ref()),
                    name if is_quota(name) => text.parse::<u64>().is_ok(),
                    TRASH_S => text.parse::<u32>().is_ok(),
                    RAISE_AFTER_S | LIFETIME_S => text.parse::<u32>().is_ok_and(|n| n > 0),
                    _ => true,
                };
                if !good {
                    return Err(invalid());
                }
                if is_of_directory(name) && !node.is_dir() {
                    return Err(FsError::NotADirectory);
                }
                if is_quota(name) && caller.uid != 0 {
                    return Err(FsError::NotPermitted);
                }
                node.xattrs.insert(name.clone(), value.clone());
                node.ctime = context.now;
                Ok(MetaReply::Done)
            }
            Mutation::RemoveXattr(mutation::RemoveXattr { ino, name }) => {
                self.may_set_xattr(caller, *ino, name)?;
                let node = self.node_mut(*ino);
                if is_quota(name) && node.xattrs.contains_key(name) && caller.uid != 0 {
                    return Err(FsError::NotPermitted);
                }
                node.xattrs.remove(name).ok_or(FsError::NoAttribute)?;
                node.ctime = context.now;
                Ok(MetaReply::Done)
            }
            _ => self.apply_content(context, op),
        }
    }

    fn may_set_xattr(
        &self,
        caller: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Result<(), FsError> {
        let node = self.node(ino)?;
        if !name.starts_with(b"user.") {
            let root = caller.uid == 0;
            return root.then_some(()).ok_or(FsError::NotPermitted);
        }
        let sticky = node.is_dir() && node.mode & 0o1000 != 0;
        let file_or_dir = matches!(node.kind, FileKind::Regular | FileKind::Directory);
        if !file_or_dir || (sticky && !node.owned_by(caller)) {
            return Err(FsError::NotPermitted);
        }
        node.demand(caller, W)
    }

    fn set_attr(&mut self, context: &Context, ino: InodeId, changes: &AttrChanges) -> Answer {
        let caller = context.caller;
        let node = self.node(ino)?;
        if changes.size_bytes.is_some() {
            node.file()?;
            if !changes.opened_for_writing {
                node.demand(caller, W)?;
            }
        }
        let owner = node.owned_by(caller);
        let gives_away = changes.uid.is_some_and(|uid| uid != node.uid);
        if (gives_away && caller.uid != 0) || (changes.uid.is_some() && !owner) {
            return Err(FsError::NotPermitted);
        }
        if let Some(gid) = changes.gid {
            let known = gid == node.gid || groups(caller).contains(&gid);
            if !owner || (caller.uid != 0 && !known) {
                return Err(FsError::NotPermitted);
            }
        }
        if changes.mode.is_some() {
            if node.kind == FileKind::Symlink {
                return Err(FsError::NotSupported(String::new()));
            }
            if !owner {
                return Err(FsError::NotPermitted);
            }
        }
        let writer = owner || changes.opened_for_writing || changes.size_bytes.is_some();
        for (time, may_set) in [(changes.atime, owner), (changes.mtime, writer)] {
            match time {
                Some(SetTime::To(_)) if !may_set => return Err(FsError::NotPermitted),
                Some(SetTime::Now) if !may_set => node.demand(caller, W)?,
                _ => {}
            }
        }

        let node = self.node_mut(ino);
        let mut changed = false;
        if let Some(size) = changes.size_bytes {
            node.content.resize(size as usize, None);
            node.written(caller, context.now);
            changed = true;
        }
        if changes.uid.is_some() || changes.gid.is_some() {
            if !node.is_dir() {
                node.strip(caller);
            }
            node.uid = changes.uid.unwrap_or(node.uid);
            node.gid = changes.gid.unwrap_or(node.gid);
            changed = true;
        }
        if let Some(mode) = changes.mode {
            node.mode = mode;
            if caller.uid != 0 && !groups(caller).contains(&node.gid) {
                node.mode &= !0o2000;
            }
            changed = true;
        }
        let mut set = |time: &mut i64, to: Option<SetTime>| {
            changed |= to.is_some();
            match to {
                Some(SetTime::Now) => *time = context.now,
                Some(SetTime::To(to)) => *time = to.0,
                None => {}
            }
        };
        set(&mut node.atime, changes.atime);
        set(&mut node.mtime, changes.mtime);
        if changed {
            node.ctime = context.now;
        }
        self.snapshots_follow(ino);
        self.reply(ino)
    }
}
