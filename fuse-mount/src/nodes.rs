//! What the kernel calls an inode, and what we call one.
//!
//! Under writeback caching the kernel alone decides the size of a regular file it has cached: what
//! another mount appends stays invisible for as long as the kernel keeps its inode. So the kernel's
//! *node id* is not always the inode number: when another session changed a file, the next lookup
//! gives it a fresh node id, and with it a fresh kernel inode, size and page cache. Programs that
//! have the old one open keep what they opened: close-to-open consistency.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Mutex, MutexGuard, PoisonError},
};

use harvestfs_protocol::ids::InodeId;

/// Fresh node ids count up from here; no inode number reaches it.
const FRESH_NODE_ID_MIN: u64 = 1 << 63;

/// The node ids that the kernel knows.
#[derive(Debug)]
pub struct Nodes {
    tables: Mutex<Tables>,
}

#[derive(Debug)]
struct Tables {
    nodes: HashMap<u64, Node>,
    /// The node id that the next lookup of an inode answers with.
    current: HashMap<InodeId, u64>,
    /// How many node ids of an inode the kernel knows beside the current one.
    replaced: HashMap<InodeId, u32>,
    next_fresh: u64,
}

#[derive(Debug)]
struct Node {
    ino: InodeId,
    /// Only of regular files does the kernel know the size better than we do.
    regular: bool,
    /// Lookups that the kernel has not yet forgotten.
    lookups: u64,
}

impl Tables {
    /// The node id that lookups of an inode answer with.
    fn current(&mut self, ino: InodeId) -> u64 {
        if let Some(&node_id) = self.current.get(&ino) {
            return node_id;
        }
        // Free again once the kernel forgot all about it; taken while a stale one lives.
        let node_id = if self.nodes.contains_key(&ino.0) {
            self.fresh()
        } else {
            ino.0
        };
        self.current.insert(ino, node_id);
        node_id
    }

    fn fresh(&mut self) -> u64 {
        self.next_fresh += 1;
        self.next_fresh - 1
    }
}

impl Nodes {
    /// The root only.
    pub fn new() -> Self {
        let root = InodeId::ROOT;
        Self {
            tables: Mutex::new(Tables {
                nodes: HashMap::from([(
                    root.0,
                    Node {
                        ino: root,
                        regular: false,
                        lookups: 1,
                    },
                )]),
                current: HashMap::from([(root, root.0)]),
                replaced: HashMap::new(),
                next_fresh: FRESH_NODE_ID_MIN,
            }),
        }
    }

    /// The inode behind a node id.
    pub fn inode(&self, node_id: u64) -> Option<InodeId> {
        self.tables().nodes.get(&node_id).map(|node| node.ino)
    }

    /// Counts one lookup of an inode and returns the node id to answer with. Of a regular file whose
    /// attributes are `outdated`, that is one of its own, which no other lookup answers with. It is
    /// asked when no invalidation can come in between.
    pub fn remember(&self, ino: InodeId, regular: bool, outdated: impl FnOnce() -> bool) -> u64 {
        let mut tables = self.tables();
        let node_id = if outdated() && regular {
            *tables.replaced.entry(ino).or_default() += 1;
            tables.fresh()
        } else {
            tables.current(ino)
        };
        let node = tables.nodes.entry(node_id).or_insert(Node {
            ino,
            regular,
            lookups: 0,
        });
        node.lookups += 1;
        node_id
    }

    /// The kernel forgot `lookups` lookups of a node id.
    pub fn forget(&self, node_id: u64, lookups: u64) {
        if node_id == InodeId::ROOT.0 {
            return;
        }
        let mut tables = self.tables();
        let Some(node) = tables.nodes.get_mut(&node_id) else {
            return;
        };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 {
            let ino = node.ino;
            tables.nodes.remove(&node_id);
            if tables.current.get(&ino) == Some(&node_id) {
                tables.current.remove(&ino);
            } else if let Entry::Occupied(mut others) = tables.replaced.entry(ino) {
                *others.get_mut() -= 1;
                if *others.get() == 0 {
                    others.remove();
                }
            }
        }
    }

    /// Another session changed an inode: if it is a regular file, the next lookup answers with a
    /// fresh node id. Returns the node id that the kernel has had for it, if it knows the inode.
    pub fn changed_elsewhere(&self, ino: InodeId) -> Option<u64> {
        let mut tables = self.tables();
        let node_id = *tables.current.get(&ino)?;
        if tables.nodes.get(&node_id).is_some_and(|node| node.regular) {
            tables.current.remove(&ino);
            *tables.replaced.entry(ino).or_default() += 1;
        }
        Some(node_id)
    }

    /// The inode behind a node id, if lookups answer with another one now.
    pub fn replaced(&self, node_id: u64) -> Option<InodeId> {
        let tables = self.tables();
        let ino = tables.nodes.get(&node_id)?.ino;
        (tables.current.get(&ino) != Some(&node_id)).then_some(ino)
    }

    /// Whether the next lookup of the inode answers with this node id, and the kernel knows no other.
    pub fn is_only(&self, node_id: u64) -> bool {
        let tables = self.tables();
        let node = tables.nodes.get(&node_id);
        node.is_some_and(|node| {
            tables.current.get(&node.ino) == Some(&node_id)
                && !tables.replaced.contains_key(&node.ino)
        })
    }

    /// Every inode that the kernel knows.
    pub fn all(&self) -> Vec<InodeId> {
        self.tables().current.keys().copied().collect()
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        // Nothing between lock and unlock can panic half-way through a change.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: InodeId = InodeId(7);
    const DIRECTORY: InodeId = InodeId(8);

    #[test]
    fn a_node_id_is_the_inode_number_until_another_session_changes_the_file() {
        let nodes = Nodes::new();
        assert_eq!(nodes.remember(FILE, true, || false), 7);
        assert_eq!(nodes.remember(FILE, true, || false), 7);

        assert!(nodes.is_only(7));
        assert_eq!(nodes.changed_elsewhere(FILE), Some(7));
        assert!(!nodes.is_only(7));
        let fresh = nodes.remember(FILE, true, || false);
        assert!(fresh >= FRESH_NODE_ID_MIN);
        assert!(!nodes.is_only(fresh) && !nodes.is_only(7));
        assert_eq!(nodes.inode(7), Some(FILE), "what has it open keeps it");
        assert_eq!(nodes.inode(fresh), Some(FILE));

        nodes.forget(7, 2);
        assert_eq!(nodes.inode(7), None);
        assert!(nodes.is_only(fresh));
        assert_eq!(nodes.remember(FILE, true, || false), fresh);
        nodes.forget(fresh, 2);
        assert_eq!(
            nodes.remember(FILE, true, || false),
            7,
            "all forgotten: it is free again"
        );
    }

    #[test]
    fn a_directory_keeps_its_node_id() {
        let nodes = Nodes::new();
        assert_eq!(nodes.remember(DIRECTORY, false, || false), 8);
        assert_eq!(nodes.changed_elsewhere(DIRECTORY), Some(8));
        assert_eq!(nodes.remember(DIRECTORY, false, || false), 8);
    }

    #[test]
    fn the_root_is_never_forgotten() {
        let nodes = Nodes::new();
        nodes.forget(1, 100);
        assert_eq!(nodes.changed_elsewhere(InodeId::ROOT), Some(1));
        assert_eq!(nodes.inode(1), Some(InodeId::ROOT));
    }

    #[test]
    fn what_the_kernel_does_not_know_needs_no_notice() {
        assert_eq!(Nodes::new().changed_elsewhere(FILE), None);
    }
}
