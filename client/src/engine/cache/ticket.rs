//! What replies add to the cache.

use std::sync::Arc;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::DirEntry;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Extent, FileKind, PlacementRules};

use super::{Subject, Ticket};
use crate::engine::cache::extents::ExtentMap;

/// What replies to read-only requests add.
impl Ticket {
    /// Whether an inode changed since the ticket was taken, or may have.
    pub(crate) fn is_overtaken(&self, ino: InodeId) -> bool {
        let inner = self.inner.lock();
        inner.is_overtaken(self.at, &Subject::Inode(ino))
    }

    /// Learns attributes; returns whether nothing has overtaken them.
    pub(crate) fn learn_attr(&self, attr: &Attr) -> bool {
        let mut inner = self.inner.lock();
        let subject = Subject::Inode(attr.ino);
        if inner.is_fresh(self.at, &subject) {
            inner.inode_mut(attr.ino).attr = Some(attr.clone());
        }
        !inner.is_overtaken(self.at, &subject)
    }

    pub(crate) fn learn_entry(&self, parent: InodeId, name: &Name, found: Option<&Attr>) {
        let mut inner = self.inner.lock();
        if let Some(attr) = found
            && inner.is_fresh(self.at, &Subject::Inode(attr.ino))
        {
            inner.inode_mut(attr.ino).attr = Some(attr.clone());
        }
        if inner.is_fresh(self.at, &Subject::Entry(parent, name.clone())) {
            inner.set_entry(parent, name, found.map(|attr| attr.ino));
        }
    }

    pub(crate) fn learn_content(&self, attr: &Attr, extents: &Arc<ExtentMap>) {
        let mut inner = self.inner.lock();
        if inner.is_fresh(self.at, &Subject::Inode(attr.ino)) {
            inner.inode_mut(attr.ino).attr = Some(attr.clone());
            inner.set_extents(attr.ino, Some((attr.content_version, extents.clone())));
        }
    }

    pub(crate) fn learn_link_target(&self, ino: InodeId, target: &[u8]) {
        let mut inner = self.inner.lock();
        if inner.is_fresh(self.at, &Subject::Inode(ino)) {
            inner.inode_mut(ino).link_target = Some(target.to_vec());
        }
    }

    pub(crate) fn learn_rules(&self, ino: InodeId, rules: PlacementRules) {
        let mut inner = self.inner.lock();
        if inner.is_fresh(self.at, &Subject::Inode(ino)) {
            inner.inode_mut(ino).rules = Some(rules);
        }
    }

    pub(crate) fn learn_xattr(&self, ino: InodeId, name: &[u8], value: Option<&[u8]>) {
        let mut inner = self.inner.lock();
        if inner.is_fresh(self.at, &Subject::Inode(ino)) {
            let value = value.map(<[u8]>::to_vec);
            inner.inode_mut(ino).xattrs.insert(name.to_vec(), value);
        }
    }

    /// Learns entries of a directory; with `complete`, these are all its entries, learned since this ticket.
    pub(crate) fn learn_listing(
        &self,
        ino: InodeId,
        parent: InodeId,
        entries: &[DirEntry],
        complete: bool,
    ) {
        let mut inner = self.inner.lock();
        for entry in entries {
            if let Some(attr) = &entry.attr
                && inner.is_fresh(self.at, &Subject::Inode(entry.ino))
            {
                inner.inode_mut(entry.ino).attr = Some(attr.clone());
            }
        }
        if complete && inner.is_fresh(self.at, &Subject::Listing(ino)) {
            let is_there = inner.is_fresh(self.at, &Subject::Inode(ino));
            let names = entries.iter().map(|it| (it.name.clone(), Some(it.ino)));
            inner.set_listing(ino, names.collect(), is_there.then_some(parent));
        }
    }
}

/// What this client's own mutations change.
impl Ticket {
    /// A mutation changed an inode's attributes to these.
    pub(crate) fn changed_attr(&self, attr: &Attr) {
        let mut inner = self.inner.lock();
        let fresh = inner.is_fresh(self.at, &Subject::Inode(attr.ino));
        inner.happened(Subject::Inode(attr.ino));
        let inode = inner.inode_mut(attr.ino);
        inode.may_lose_capabilities();
        // If something else changed the inode meanwhile, the order of the two changes is unknown.
        inode.attr = fresh.then(|| attr.clone());
        if !fresh {
            inner.set_extents(attr.ino, None);
        }
    }

    /// A mutation changed an inode in a way that its reply does not describe.
    pub(crate) fn changed_inode(&self, ino: InodeId) {
        let mut inner = self.inner.lock();
        inner.happened(Subject::Inode(ino));
        inner.forget_inode(ino);
    }

    /// A mutation changed only times: the content is unchanged.
    pub(crate) fn changed_times(&self, ino: InodeId) {
        let mut inner = self.inner.lock();
        inner.happened(Subject::Inode(ino));
        if let Some(inode) = inner.inodes.get_mut(&ino) {
            inode.attr = None;
        }
    }

    /// A mutation changed extended attributes.
    pub(crate) fn changed_xattrs(&self, ino: InodeId) {
        self.changed_times(ino);
        let mut inner = self.inner.lock();
        if let Some(inode) = inner.inodes.get_mut(&ino) {
            inode.xattrs.clear();
            inode.no_other_xattrs = false;
            inode.rules = None;
        }
    }

    /// An inode was moved to another directory.
    pub(crate) fn moved(&self, attr: &Attr, to: InodeId) {
        let is_there = self
            .inner
            .lock()
            .is_fresh(self.at, &Subject::Inode(attr.ino));
        self.changed_attr(attr);
        let mut inner = self.inner.lock();
        if let Some(directory) = inner.dirs.get_mut(&attr.ino) {
            directory.parent = is_there.then_some(to);
        }
    }

    /// A mutation changed the size or the content in a way that its reply does not describe by extents.
    pub(crate) fn changed_content(&self, attr: &Attr, change: impl FnOnce(&mut ExtentMap)) {
        let mut inner = self.inner.lock();
        let fresh = inner.is_fresh(self.at, &Subject::Inode(attr.ino));
        inner.happened(Subject::Inode(attr.ino));
        let inode = inner.inode_mut(attr.ino);
        inode.may_lose_capabilities();
        let known = inode.attr.as_ref().map(|attr| attr.content_version);
        inode.attr = fresh.then(|| attr.clone());
        let extents = inode.extents.take();
        // The change applies to these extents only if nothing else changed the content before.
        let extents = extents
            .filter(|(version, _)| fresh && known.is_none_or(|known| known == *version))
            .map(|(_, mut extents)| {
                change(Arc::make_mut(&mut extents));
                (attr.content_version, extents)
            });
        inner.set_extents(attr.ino, extents);
    }

    /// A commit put extents into a file.
    pub(crate) fn committed(&self, attr: &Attr, extents: &[Extent]) {
        self.changed_content(attr, |map| map.apply(extents));
    }

    /// A mutation made a name lead to an inode, or to nothing.
    pub(crate) fn changed_entry(&self, parent: InodeId, name: &Name, to: Option<InodeId>) {
        let mut inner = self.inner.lock();
        let fresh = inner.is_fresh(self.at, &Subject::Entry(parent, name.clone()));
        inner.entry_happened(parent, name);
        if fresh {
            inner.set_entry(parent, name, to);
        } else {
            inner.forget_entry(parent, name);
        }
    }

    /// A name and its directory changed in an unknown way: the mutation failed, or its outcome is
    /// unknown.
    pub(crate) fn unknown_entry(&self, parent: InodeId, name: &Name) {
        let mut inner = self.inner.lock();
        inner.entry_happened(parent, name);
        inner.forget_entry(parent, name);
        inner.happened(Subject::Inode(parent));
        inner.forget_inode(parent);
    }

    /// A mutation created an inode: nothing but its attributes ever has to be requested.
    pub(crate) fn created(&self, attr: &Attr, link_target: Option<&[u8]>, parent: InodeId) {
        let mut inner = self.inner.lock();
        if !inner.is_fresh(self.at, &Subject::Inode(attr.ino)) {
            return;
        }
        let inode = inner.inode_mut(attr.ino);
        inode.attr = Some(attr.clone());
        inode.link_target = link_target.map(<[u8]>::to_vec);
        inode.no_other_xattrs = true;
        if attr.kind == FileKind::Regular {
            inner.set_extents(attr.ino, Some((attr.content_version, Arc::default())));
        }
        if attr.kind == FileKind::Directory {
            let directory = inner.directory_mut(attr.ino);
            directory.complete = true;
            directory.parent = Some(parent);
        }
    }

    /// An inode was removed.
    pub(crate) fn removed(&self, ino: InodeId) {
        let mut inner = self.inner.lock();
        inner.happened(Subject::Inode(ino));
        inner.forget_inode(ino);
        inner.remove_directory(ino);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut inner = self.inner.lock();
        assert!(
            inner.tickets > 0,
            "a request ends, and none is in flight: it was sent after event {}",
            self.at
        );
        // Otherwise a reply would count as newer than what overtook it.
        assert!(
            self.at <= inner.now && inner.floor <= inner.now,
            "a request was sent after event {}, all are from before {}, and {} was the last one",
            self.at,
            inner.floor,
            inner.now
        );
        inner.tickets -= 1;
        if inner.tickets == 0 {
            // No request is left that an event could matter to.
            inner.events.clear();
        }
    }
}
