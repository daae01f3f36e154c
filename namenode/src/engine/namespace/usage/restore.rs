//! Recounting usage from names and extents: after reading a snapshot, and to check the usage that is kept.

use std::collections::BTreeMap;

use harvestfs_protocol::ids::InodeId;

use super::super::Namespace;
use super::super::inode::{Body, parts};
use super::Usage;

impl Namespace {
    /// Adds up the usage of each directory, by slot. It does not use the usage that is kept, and relies
    /// on little else.
    pub(in super::super) fn add_up_usage(&self) -> Vec<Usage> {
        let slot = |ino: InodeId| parts(ino).0 as usize;
        let mut sums = vec![Usage::default(); self.inodes.slots() as usize];
        // For each directory, the number of directories counted in it that are not added up yet.
        let mut missing = vec![0_u32; sums.len()];
        let mut above = BTreeMap::new();
        for (ino, inode) in self.inodes.iter() {
            let Some(dir) = self.counted_in(ino) else {
                continue;
            };
            if inode.is_directory() {
                above.insert(ino, dir);
                if let Some(missing) = missing.get_mut(slot(dir)) {
                    *missing += 1;
                }
            } else if let Some(sum) = sums.get_mut(slot(dir)) {
                *sum = sum.with(Self::weight(inode).added());
            }
        }
        let is_complete = |ino: &InodeId, missing: &[u32]| missing[slot(*ino)] == 0;
        let complete = above
            .keys()
            .copied()
            .filter(|ino| is_complete(ino, &missing));
        let mut complete: Vec<InodeId> = complete.collect();
        // Directories that count in each other never become complete, and keep wrong sums.
        while let Some(ino) = complete.pop() {
            let with_itself = sums[slot(ino)].with(Usage::EMPTY_INODE.added());
            let Some(&dir) = above.get(&ino) else {
                continue;
            };
            if let Some(sum) = sums.get_mut(slot(dir)) {
                *sum = sum.with(with_itself.added());
                let Some(rest) = missing[slot(dir)].checked_sub(1) else {
                    panic!("{ino} is one directory more in {dir} than were found there");
                };
                missing[slot(dir)] = rest;
                if is_complete(&dir, &missing) {
                    complete.push(dir);
                }
            }
        }
        sums
    }

    /// Recounts the usage of all directories from names and extents.
    pub(in super::super) fn restore_usage(&mut self) {
        let names = self.names_of_files();
        for names in names.chunk_by(|one, next| one.0 == next.0) {
            let (ino, first) = names[0];
            self.inodes.known_mut(ino).parent = first;
            if names.len() > 1 {
                let parents = names.iter().map(|(_, dir)| *dir).collect();
                self.further_names.insert(ino, parents);
            }
        }
        self.restore_names_of_directories();
        let sums = self.add_up_usage();
        assert_eq!(
            sums.len() as u64,
            self.inodes.slots(),
            "sums of what is below directories, and slots of inodes"
        );
        self.inodes.for_each_mut(|index, inode| {
            if let Body::Directory(directory) = &mut inode.body {
                directory.used = sums[index];
            }
        });
    }

    fn restore_names_of_directories(&mut self) {
        let mut names: Vec<(InodeId, Box<[u8]>)> = Vec::new();
        for (_, inode) in self.inodes.iter() {
            if let Body::Directory(directory) = &inode.body {
                let entries = directory.after(None);
                let below = entries.filter(|(_, child)| self.is_directory_there(*child));
                names.extend(below.map(|(name, child)| (child, name.into())));
            }
        }
        for (ino, name) in names {
            self.inodes.known_directory_mut(ino).name = name;
        }
    }

    /// Every name of an inode that is not a directory, as (inode, directory that names it), ascending.
    pub(in super::super) fn names_of_files(&self) -> Vec<(InodeId, InodeId)> {
        let mut names = Vec::new();
        for (dir, inode) in self.inodes.iter() {
            let Body::Directory(directory) = &inode.body else {
                continue;
            };
            let children = directory.after(None).map(|(_, child)| child);
            let is_file = |ino: &InodeId| {
                let found = self.inodes.get(*ino);
                found.is_ok_and(|inode| !inode.is_directory())
            };
            names.extend(children.filter(is_file).map(|child| (child, dir)));
        }
        names.sort_unstable();
        names
    }
}
