//! The model's trash.

use super::{
    model::{Answer, Context, Model, Node},
    *,
};

pub const TRASH_S: &[u8] = b"user.harvestfs.trash_s";

impl Model {
    /// Seconds for which what is removed from a directory is kept.
    pub fn kept_s(&self, dir: InodeId) -> Option<u32> {
        if self.is_trash_or_below(dir) {
            return None;
        }
        let value = String::from_utf8(self.setting_above(dir, TRASH_S)?).unwrap();
        Some(value.parse().unwrap()).filter(|&seconds| seconds > 0)
    }

    pub fn is_trash_or_below(&self, dir: InodeId) -> bool {
        let mut next = Some(dir);
        while let Some(ino) = next {
            if self.trash_directory == Some(ino) {
                return true;
            }
            next = self.parent_of(ino);
        }
        false
    }

    /// The path of a directory.
    fn path(&self, dir: InodeId) -> Vec<u8> {
        let Some(above) = self.parent_of(dir) else {
            return Vec::new();
        };
        let entries = &self.inodes[&above].entries;
        let (name, _) = entries.iter().find(|(_, child)| **child == dir).unwrap();
        [&self.path(above), &b"/"[..], name.as_bytes()].concat()
    }

    pub fn put_into_trash(
        &mut self,
        context: &Context,
        (dir, name): (InodeId, &Name),
        seconds: u32,
    ) -> Answer {
        let ino = self.inodes[&dir].entries[name];
        let origin = [&self.path(dir), &b"/"[..], name.as_bytes()].concat();
        let trash = context.trash;
        self.make_trash(context);
        self.node_mut(dir).entries.remove(name);
        self.touch_dir(dir, context.now);
        let called = format!("{:016x}-{name}", ino.0);
        let entries = &mut self.node_mut(trash).entries;
        entries.insert(super::name(&called), ino);
        self.touch_dir(trash, context.now);
        self.node_mut(ino).ctime = context.now;
        let expires = context.now + i64::from(seconds) * 1_000_000_000;
        self.trash.insert(ino, (origin, expires));
        Ok(MetaReply::Removed(Some(self.attr(ino))))
    }

    pub fn make_trash(&mut self, context: &Context) {
        let trash = context.trash;
        if self.trash_directory.is_none() {
            let (uid, gid) = (
                self.inodes[&InodeId::ROOT].uid,
                self.inodes[&InodeId::ROOT].gid,
            );
            let node = Node::new(FileKind::Directory, 0o1777, uid, gid, context.now);
            self.inodes.insert(trash, node);
            let entries = &mut self.node_mut(InodeId::ROOT).entries;
            entries.insert(super::name(".trash"), trash);
            self.touch_dir(InodeId::ROOT, context.now);
            self.trash_directory = Some(trash);
        }
    }

    /// Forgets what left the trash.
    pub fn look_into_trash(&mut self) {
        if let Some(trash) = self.trash_directory {
            let there: Vec<_> = self.inodes[&trash].entries.values().copied().collect();
            self.trash.retain(|ino, _| there.contains(ino));
        }
    }

    pub fn purge(&mut self, context: &Context, inodes: &[InodeId]) {
        let trash = self.trash_directory.unwrap();
        for ino in inodes {
            let entries = self.inodes[&trash].entries.clone();
            let (name, _) = entries.iter().find(|(_, child)| *child == ino).unwrap();
            self.remove_tree(context, trash, name);
        }
        self.look_into_trash();
    }

    fn remove_tree(&mut self, context: &Context, dir: InodeId, name: &Name) {
        let ino = self.inodes[&dir].entries[name];
        for below in self.inodes[&ino].entries.clone().into_keys() {
            self.remove_tree(context, ino, &below);
        }
        self.node_mut(dir).entries.remove(name);
        self.touch_dir(dir, context.now);
        self.dropped(context, ino);
    }
}
