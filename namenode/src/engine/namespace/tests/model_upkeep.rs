//! The model's timed work on files.

use super::model::{Context, Model};
use super::model_node::Node;
use super::*;

pub const RAISE_REPLICATION: &[u8] = b"user.harvestfs.raise_replication";
pub const RAISE_AFTER_S: &[u8] = b"user.harvestfs.raise_after_s";
pub const LIFETIME_S: &[u8] = b"user.harvestfs.lifetime_s";

impl Node {
    fn number(&self, name: &[u8]) -> Option<i64> {
        let value = self.xattrs.get(name)?;
        Some(String::from_utf8(value.clone()).unwrap().parse().unwrap())
    }

    fn is_past(&self, seconds: i64, now: i64) -> bool {
        now - self.ctime >= seconds * 1_000_000_000
    }
}

impl Model {
    pub fn due_raises(&self, now: i64) -> Vec<InodeId> {
        let is_due = |node: &Node| {
            let wanted = node.number(RAISE_REPLICATION);
            node.kind == FileKind::Regular
                && wanted.is_some_and(|wanted| wanted > node.rules().replication.into())
                && node.is_past(node.number(RAISE_AFTER_S).unwrap_or(60), now)
        };
        let due = self.inodes.iter().filter(|(_, node)| is_due(node));
        due.map(|(&ino, _)| ino).collect()
    }

    pub fn raise(&mut self, inodes: &[InodeId]) {
        for &ino in inodes {
            let node = self.node_mut(ino);
            node.xattrs.remove(RAISE_AFTER_S);
            let value = node.xattrs.remove(RAISE_REPLICATION).unwrap();
            let name = b"user.harvestfs.replication".to_vec();
            node.xattrs.insert(name, value);
        }
    }

    fn is_expired(&self, dir: InodeId, name: &Name, now: i64) -> bool {
        let Some(node) = self.inodes.get(&dir) else {
            return false;
        };
        let (Some(seconds), Some(child)) = (node.number(LIFETIME_S), node.entries.get(name)) else {
            return false;
        };
        self.inodes[child].is_past(seconds, now)
            && !name.as_bytes().starts_with(b".")
            && !self.is_trash_or_below(dir)
    }

    pub fn expired_entries(&self, now: i64) -> Vec<(InodeId, Name)> {
        let all = self.inodes.iter();
        all.flat_map(|(&dir, node)| node.entries.keys().map(move |name| (dir, name.clone())))
            .filter(|(dir, name)| self.is_expired(*dir, name, now))
            .collect()
    }

    pub fn remove_expired(
        &mut self,
        context: &Context,
        entries: &[(InodeId, Name)],
    ) -> Result<(), FsError> {
        for (dir, name) in entries {
            if self.is_expired(*dir, name, context.now) {
                self.within_quotas(|model| {
                    model.make_trash(context);
                    Ok(())
                })?;
                self.put_into_trash(context, (*dir, name), 0).unwrap();
            }
        }
        self.look_into_trash();
        Ok(())
    }
}
