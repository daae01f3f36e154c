//! The model's snapshots of directories: copies of everything, byte by byte.

use std::collections::BTreeMap;

use super::model::{Answer, Context, Model, invalid, is_of_directory};
use super::model_node::Node;
use super::*;

fn snapshots_name() -> Name {
    name(".snapshot")
}

impl Model {
    fn is_frozen(&self, ino: InodeId) -> bool {
        self.inodes.get(&ino).is_some_and(|node| node.frozen)
    }

    fn leads_to_frozen(&self, dir: InodeId, name: &Name) -> bool {
        let node = self.inodes.get(&dir);
        node.and_then(|node| node.entries.get(name))
            .is_some_and(|&child| self.is_frozen(child))
    }

    /// Whether an operation would change a snapshot.
    pub fn is_refused_as_frozen(&self, op: &Mutation) -> bool {
        let (inodes, names) = match op {
            Mutation::Create(mutation::Create { parent, .. })
            | Mutation::MakeDir(mutation::MakeDir { parent, .. })
            | Mutation::Symlink(mutation::Symlink { parent, .. }) => (vec![*parent], vec![]),
            Mutation::Link(mutation::Link { ino, parent, .. }) => (vec![*ino, *parent], vec![]),
            Mutation::Unlink(mutation::Unlink { parent, name })
            | Mutation::RemoveDir(mutation::RemoveDir { parent, name })
            | Mutation::RemoveToTrash(mutation::RemoveToTrash { parent, name, .. }) => {
                (vec![*parent], vec![(*parent, name)])
            }
            Mutation::Rename(mutation::Rename {
                parent,
                name,
                new_parent,
                new_name,
                ..
            }) => (
                vec![*parent, *new_parent],
                vec![(*parent, name), (*new_parent, new_name)],
            ),
            Mutation::SetAttr(mutation::SetAttr { ino, .. })
            | Mutation::SetXattr(mutation::SetXattr { ino, .. })
            | Mutation::RemoveXattr(mutation::RemoveXattr { ino, .. })
            | Mutation::Fallocate(mutation::Fallocate { ino, .. })
            | Mutation::CreateSnapshot(mutation::CreateSnapshot { ino, .. })
            | Mutation::RemoveSnapshot(mutation::RemoveSnapshot { ino, .. }) => {
                (vec![*ino], vec![])
            }
            Mutation::CloneRange(mutation::CloneRange { destination, .. }) => {
                (vec![*destination], vec![])
            }
            _ => (vec![], vec![]),
        };
        inodes.into_iter().any(|ino| self.is_frozen(ino))
            || names
                .into_iter()
                .any(|(dir, name)| self.leads_to_frozen(dir, name))
    }

    /// The entries that a listing of a directory shows.
    pub fn listed(&self, dir: InodeId) -> BTreeMap<Name, InodeId> {
        let node = &self.inodes[&dir];
        let mut listed = node.entries.clone();
        if !node.frozen && self.leads_to_frozen(dir, &snapshots_name()) {
            listed.remove(&snapshots_name());
        }
        listed
    }

    /// Every snapshot that can be removed.
    pub fn snapshots(&self) -> Vec<(InodeId, Name)> {
        let mut all = Vec::new();
        for (&dir, node) in &self.inodes {
            if let Some(snapshots) = node.entries.get(&snapshots_name()) {
                let names = self.inodes[snapshots].entries.keys();
                all.extend(names.map(|name| (dir, name.clone())));
            }
        }
        all
    }

    fn own_directory(&self, context: &Context, dir: InodeId) -> Result<(), FsError> {
        let node = self.node(dir)?;
        if !node.is_dir() {
            return Err(FsError::NotADirectory);
        }
        if self.orphans.contains(&dir) {
            return Err(FsError::NotFound);
        }
        let owned = node.owned_by(context.caller);
        owned.then_some(()).ok_or(FsError::NotPermitted)
    }

    pub fn create_snapshot(&mut self, context: &Context, dir: InodeId, name: &Name) -> Answer {
        self.own_directory(context, dir)?;
        if self.is_trash_or_below(dir) {
            return Err(invalid());
        }
        let known = self.inodes[&dir].entries.get(&snapshots_name()).copied();
        if known.is_some_and(|known| self.inodes[&known].entries.contains_key(name)) {
            return Err(FsError::Exists);
        }
        let mut made = BTreeMap::new();
        let top = self.copy(context, dir, vec![name.clone()], &mut made);
        let snapshots = known.unwrap_or_else(|| {
            let ino = self.number_of(context, &[]);
            let above = &self.inodes[&dir];
            let (mode, uid, gid) = (above.mode & 0o555, above.uid, above.gid);
            let mut node = Node::new(FileKind::Directory, mode, uid, gid, context.now);
            node.frozen = true;
            node.made_with = Some((mode, uid, gid));
            self.inodes.insert(ino, node);
            let entries = &mut self.node_mut(dir).entries;
            entries.insert(snapshots_name(), ino);
            self.touch_dir(dir, context.now);
            ino
        });
        let entries = &mut self.node_mut(snapshots).entries;
        entries.insert(name.clone(), top);
        self.touch_dir(snapshots, context.now);
        self.node_mut(top).ctime = context.now;
        Ok(MetaReply::Attr(self.attr(top)))
    }

    /// Gives the directory of a directory's snapshots the mode and owner of that directory.
    pub fn snapshots_follow(&mut self, dir: InodeId) {
        let above = &self.inodes[&dir];
        let Some(&snapshots) = above.entries.get(&snapshots_name()) else {
            return;
        };
        let (mode, uid, gid) = (above.mode & 0o555, above.uid, above.gid);
        let node = self.node_mut(snapshots);
        (node.mode, node.uid, node.gid) = (mode, uid, gid);
    }

    /// The engine's number of a copy; an arbitrary one when the engine refused.
    fn number_of(&self, context: &Context, path: &[Name]) -> InodeId {
        let known = context.copies.get(path).copied();
        known.unwrap_or_else(|| InodeId(u64::MAX - self.inodes.len() as u64))
    }

    fn copy(
        &mut self,
        context: &Context,
        source: InodeId,
        path: Vec<Name>,
        made: &mut BTreeMap<InodeId, InodeId>,
    ) -> InodeId {
        let ino = self.number_of(context, &path);
        let before = made.insert(source, ino);
        if !context.copies.is_empty() {
            assert!(before.is_none_or(|before| before == ino), "{path:?}");
        }
        let mut node = self.inodes[&source].clone();
        node.frozen = true;
        if node.is_dir() {
            node.xattrs.retain(|name, _| !is_of_directory(name));
        }
        let mut below = self.listed(source);
        below.retain(|_, child| Some(*child) != self.trash_directory);
        node.entries = BTreeMap::new();
        self.inodes.insert(ino, node);
        for (name, child) in below {
            let mut path = path.clone();
            path.push(name.clone());
            let copy = self.copy(context, child, path, made);
            self.node_mut(ino).entries.insert(name, copy);
        }
        ino
    }

    pub fn remove_snapshot(&mut self, context: &Context, dir: InodeId, name: &Name) -> Answer {
        self.own_directory(context, dir)?;
        let entries = &self.inodes[&dir].entries;
        let snapshots = *entries.get(&snapshots_name()).ok_or(FsError::NotFound)?;
        if !self.inodes[&snapshots].entries.contains_key(name) {
            return Err(FsError::NotFound);
        }
        self.within_quotas(|model| {
            model.make_trash(context);
            Ok(())
        })?;
        self.put_into_trash(context, (snapshots, name), 0)?;
        if self.inodes[&snapshots].entries.is_empty() {
            self.node_mut(dir).entries.remove(&snapshots_name());
            self.touch_dir(dir, context.now);
            self.dropped(context, snapshots, dir);
        }
        Ok(MetaReply::Done)
    }
}
