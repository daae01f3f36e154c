//! The model's trash.

use super::model::{Answer, Context, Model};
use super::model_node::Node;
use super::*;

pub const TRASH_S: &[u8] = b"user.harvestfs.trash_s";

impl Model {
    /// Seconds for which files removed from a directory are kept.
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
        self.make_trash(context);
        // With the user that removed it first, if it is in the trash by another name.
        let trash = context.trash[1];
        let before = self.trash.get(&ino).map(|_| self.part_with(ino));
        self.node_mut(dir).entries.remove(name);
        self.touch_dir(dir, context.now);
        if before.is_none_or(|before| before == trash) {
            let called = format!("{:016x}-{name}", ino.0);
            let entries = &mut self.node_mut(trash).entries;
            entries.insert(super::name(&called), ino);
            self.touch_dir(trash, context.now);
        }
        if before.is_none() {
            self.counted_in.insert(ino, dir);
        }
        self.node_mut(ino).ctime = context.now;
        let expires = context.now + i64::from(seconds) * 1_000_000_000;
        self.trash.insert(ino, (origin, expires));
        Ok(MetaReply::Removed(Some(self.attr(ino))))
    }

    pub fn is_part_of_trash(&self, dir: InodeId) -> bool {
        self.trash_directory == Some(dir) || self.trash_of_users.values().any(|&part| part == dir)
    }

    /// The directory of the user in whose trash something is.
    fn part_with(&self, ino: InodeId) -> InodeId {
        let mut parts = self.trash_of_users.values();
        let has = |part: &&InodeId| {
            self.inodes[*part]
                .entries
                .values()
                .any(|&child| child == ino)
        };
        *parts.find(has).unwrap()
    }

    pub fn make_trash(&mut self, context: &Context) {
        let [trash, of_user] = context.trash;
        if self.trash_directory.is_none() {
            let root = &self.inodes[&InodeId::ROOT];
            let (uid, gid) = (root.uid, root.gid);
            self.make_part(context, (InodeId::ROOT, ".trash", trash), (0o755, uid, gid));
            self.trash_directory = Some(trash);
        }
        let uid = context.caller.uid;
        if !self.trash_of_users.contains_key(&uid) {
            let gid = self.inodes[&self.trash_directory.unwrap()].gid;
            self.make_part(
                context,
                (trash, &uid.to_string(), of_user),
                (0o700, uid, gid),
            );
            self.trash_of_users.insert(uid, of_user);
        }
    }

    fn make_part(
        &mut self,
        context: &Context,
        (dir, name, ino): (InodeId, &str, InodeId),
        (mode, uid, gid): (u16, u32, u32),
    ) {
        let node = Node::new(FileKind::Directory, mode, uid, gid, context.now);
        self.inodes.insert(ino, node);
        let entries = &mut self.node_mut(dir).entries;
        entries.insert(super::name(name), ino);
        self.touch_dir(dir, context.now);
    }

    /// Forgets inodes that left the trash.
    pub fn look_into_trash(&mut self) {
        let parts = self.trash_of_users.values();
        let there = parts.flat_map(|part| self.inodes[part].entries.values().copied());
        let there: Vec<_> = there.collect();
        self.trash.retain(|ino, _| there.contains(ino));
        let orphans = &self.orphans;
        self.counted_in
            .retain(|ino, _| there.contains(ino) || orphans.contains(ino));
    }

    pub fn purge(&mut self, context: &Context, inodes: &[InodeId]) {
        for ino in inodes {
            let trash = self.part_with(*ino);
            let entries = self.inodes[&trash].entries.clone();
            let (name, _) = entries.iter().find(|(_, child)| *child == ino).unwrap();
            self.remove_tree(context, trash, name);
            self.look_into_trash();
        }
        self.release_emptied();
    }

    fn remove_tree(&mut self, context: &Context, dir: InodeId, name: &Name) {
        let ino = self.inodes[&dir].entries[name];
        for below in self.inodes[&ino].entries.clone().into_keys() {
            self.remove_tree(context, ino, &below);
        }
        self.node_mut(dir).entries.remove(name);
        self.touch_dir(dir, context.now);
        self.dropped(context, ino, dir);
    }
}
