//! The inodes that the kernel knows. The kernel's identifier of an inode, its *node id*, is the inode number, so that
//! one file is always one inode with one page cache, even when the namenode restarts, the lease ends or other mounts
//! change the file (adr/0016).

use std::sync::Arc;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::types::{Attr, FileKind};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use crate::pages::Pages;

/// The inodes that the kernel knows.
#[derive(Debug)]
pub struct Nodes {
    nodes: Mutex<FxHashMap<InodeId, Node>>,
}

#[derive(Debug)]
struct Node {
    kind: Kind,
    /// Number of lookups that the kernel has not yet forgotten.
    lookups: u64,
}

#[derive(Debug)]
enum Kind {
    Regular(Arc<Pages>),
    /// The kernel asks for the attributes of a directory even after it was removed, as long as a program has it open,
    /// when the namenode no longer knows it. `None` for the root.
    Directory(Option<Box<Attr>>),
    Other,
}

impl Nodes {
    /// Only the root is known.
    pub fn new() -> Self {
        let root = Node {
            kind: Kind::Directory(None),
            lookups: 1,
        };
        Self {
            nodes: Mutex::new(FxHashMap::from_iter([(InodeId::ROOT, root)])),
        }
    }

    /// Counts one lookup of an inode.
    pub fn remember(&self, attr: &Attr) {
        let mut nodes = self.nodes.lock();
        let node = nodes.entry(attr.ino).or_insert_with(|| Node {
            kind: match attr.kind {
                FileKind::Regular => Kind::Regular(Arc::new(Pages::new(attr.size_bytes))),
                FileKind::Directory => Kind::Directory(None),
                _ => Kind::Other,
            },
            lookups: 0,
        });
        node.lookups += 1;
        node.learn(attr);
    }

    /// Records attributes that are sent to the kernel for an inode that it knows.
    pub fn learn(&self, attr: &Attr) {
        if let Some(node) = self.nodes.lock().get_mut(&attr.ino) {
            node.learn(attr);
        }
    }

    /// The attributes of a directory that the namenode no longer knows.
    pub fn removed_directory(&self, ino: InodeId) -> Option<Attr> {
        match &self.nodes.lock().get(&ino)?.kind {
            Kind::Directory(Some(attr)) => Some(Attr {
                nlink: 0,
                size_bytes: 0,
                ..**attr
            }),
            _ => None,
        }
    }

    /// Records that the kernel forgot `lookups` lookups of an inode.
    pub fn forget(&self, ino: InodeId, lookups: u64) {
        if ino == InodeId::ROOT {
            return;
        }
        let mut nodes = self.nodes.lock();
        let Some(node) = nodes.get_mut(&ino) else {
            return;
        };
        // The count is the kernel's; a wrong one must not end the mount.
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 {
            nodes.remove(&ino);
        }
    }

    /// Whether the kernel knows the inode.
    pub fn knows(&self, ino: InodeId) -> bool {
        self.nodes.lock().contains_key(&ino)
    }

    /// The kernel's pages of a regular file that it knows.
    pub fn pages(&self, ino: InodeId) -> Option<Arc<Pages>> {
        match &self.nodes.lock().get(&ino)?.kind {
            Kind::Regular(pages) => Some(pages.clone()),
            _ => None,
        }
    }

    /// Every inode that the kernel knows.
    pub fn all(&self) -> Vec<InodeId> {
        self.nodes.lock().keys().copied().collect()
    }
}

impl Node {
    fn learn(&mut self, attr: &Attr) {
        match &mut self.kind {
            Kind::Regular(pages) => pages.tell(attr.size_bytes),
            Kind::Directory(known) => *known = Some(Box::new(attr.clone())),
            Kind::Other => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::directory::bare_directory;

    #[test]
    fn the_root_is_never_forgotten() {
        let nodes = Nodes::new();
        nodes.forget(InodeId::ROOT, 100);
        assert!(nodes.knows(InodeId::ROOT));
    }

    #[test]
    fn an_inode_is_known_until_all_lookups_are_forgotten() {
        let nodes = Nodes::new();
        let file = Attr {
            kind: FileKind::Regular,
            size_bytes: 10,
            ..bare_directory(InodeId(7))
        };
        nodes.remember(&file);
        nodes.remember(&file);
        nodes.forget(file.ino, 1);
        let pages = nodes.pages(file.ino).map(|pages| pages.growth_max());
        assert_eq!(pages, Some(10));
        nodes.forget(file.ino, 1);
        assert!(!nodes.knows(file.ino));
    }

    #[test]
    fn a_removed_directory_has_no_name_left() {
        let nodes = Nodes::new();
        let directory = bare_directory(InodeId(8));
        assert_eq!(nodes.removed_directory(directory.ino), None);
        nodes.remember(&directory);
        let removed = nodes.removed_directory(directory.ino);
        assert_eq!(removed.map(|attr| attr.nlink), Some(0));
    }
}
