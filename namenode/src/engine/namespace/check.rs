//! Invariants of the namespace: redundant state is compared.

use std::collections::{BTreeMap, BTreeSet};

use harvestfs_protocol::admin::FsckFinding;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::name::SNAPSHOTS_NAME;
use harvestfs_protocol::types::PlacementRules;
use rustc_hash::FxHashMap;

use super::inode::{Body, FileData, Inode, parts};
use super::{Namespace, trash};

/// The most findings in one report; more would hardly tell anything new.
const FINDINGS_MAX: usize = 1_000;

#[derive(Default)]
struct Findings(Vec<FsckFinding>);

impl Findings {
    fn add(&mut self, ino: Option<InodeId>, block: Option<BlockId>, message: impl Into<String>) {
        if self.0.len() < FINDINGS_MAX {
            self.0.push(FsckFinding {
                ino,
                path: None,
                block,
                message: message.into(),
            });
        }
    }

    fn inode(&mut self, ino: InodeId, message: impl Into<String>) {
        self.add(Some(ino), None, message);
    }
}

/// The number of names that lead to each inode, and of subdirectories in each directory; by slot.
struct Names {
    to: Vec<u32>,
    subdirectories: Vec<u32>,
}

fn slot(ino: InodeId) -> usize {
    parts(ino).0 as usize
}

impl Namespace {
    /// Compares redundant state: link counts, live bytes, extents, names. Returns at most 1,000 findings,
    /// and none when everything is consistent.
    #[must_use]
    pub fn check(&self) -> Vec<FsckFinding> {
        let mut findings = Findings::default();
        if self.formatted.is_none() {
            if self.inodes.len() > 0 {
                findings.add(None, None, "there are inodes, but no cluster");
            }
            return findings.0;
        }
        let names = self.check_names(&mut findings);
        self.check_links(&names, &mut findings);
        self.check_reachable(&mut findings);
        self.check_usage(&mut findings);
        self.check_trash(&mut findings);
        self.check_upkeep(&mut findings);
        self.check_blocks(&mut findings);
        self.check_sessions(&mut findings);
        self.check_sums(&mut findings);

        let count = findings.0.len();
        assert!(count <= FINDINGS_MAX, "{count} findings in one report");
        let concerned = findings.0.iter().filter_map(|finding| finding.ino);
        let paths = self.paths(&concerned.collect());
        for finding in &mut findings.0 {
            finding.path = finding.ino.and_then(|ino| paths.get(&ino).cloned());
        }
        findings.0
    }

    fn check_names(&self, findings: &mut Findings) -> Names {
        let slots = self.inodes.slots() as usize;
        let mut names = Names {
            to: vec![0; slots],
            subdirectories: vec![0; slots],
        };
        for (ino, inode) in self.inodes.iter() {
            let Body::Directory(directory) = &inode.body else {
                continue;
            };
            for (name, child) in directory.after(None) {
                let Ok(found) = self.inodes.get(child) else {
                    findings.inode(
                        ino,
                        format!("an entry leads to inode {child}, which is gone"),
                    );
                    continue;
                };
                names.to[slot(child)] += 1;
                let may_differ = name == SNAPSHOTS_NAME || self.trash.is_part(ino);
                if found.is_frozen() != inode.is_frozen() && !(found.is_frozen() && may_differ) {
                    findings.inode(child, "a part of a snapshot outside of one, or the reverse");
                }
                if found.is_directory() {
                    names.subdirectories[slot(ino)] += 1;
                    let known_as = found.directory().map(|below| below.name.as_ref());
                    if known_as != Ok(name) {
                        findings.inode(child, "it is called otherwise than it thinks");
                    }
                    if found.parent != ino {
                        findings.inode(child, format!("its parent is not {ino}, which names it"));
                    }
                }
            }
        }
        names
    }

    fn check_links(&self, names: &Names, findings: &mut Findings) {
        for (ino, inode) in self.inodes.iter() {
            let to = names.to[slot(ino)];
            let is_orphan = self.orphans.contains(&ino);
            let expected = match &inode.body {
                Body::Directory(_) if is_orphan => 0,
                Body::Directory(_) => 2 + names.subdirectories[slot(ino)],
                _ => to,
            };
            if inode.nlink != expected {
                findings.inode(ino, format!("it has {} links, not {expected}", inode.nlink));
            }
            let one_name = u32::from(ino != InodeId::ROOT && !is_orphan);
            if inode.is_directory() && to != one_name {
                findings.inode(ino, format!("{to} names lead to this directory"));
            }
            if is_orphan != (inode.nlink == 0) {
                findings.inode(
                    ino,
                    "it is an orphan with a name, or has none and is no orphan",
                );
            }
            if let Body::Regular(file) = &inode.body {
                check_extents(ino, file, findings);
            }
        }
        for &ino in &self.orphans {
            if self.inodes.get(ino).is_err() {
                findings.inode(ino, "an orphan that is gone");
            }
            if let Some(dir) = self.counted_in(ino)
                && !self.is_directory_there(dir)
            {
                findings.inode(
                    ino,
                    "an orphan that counts in something that is no directory",
                );
            }
        }
        for &ino in &self.unheld {
            let is_counted_in = self.inodes.get(ino).is_ok_and(|it| self.is_counted_in(it));
            if !self.orphans.contains(&ino) || !is_counted_in {
                findings.inode(ino, "a removed directory that is kept for nothing");
            }
        }
    }

    fn check_reachable(&self, findings: &mut Findings) {
        let mut reached = vec![false; self.inodes.slots() as usize];
        let mut waiting = vec![InodeId::ROOT];
        while let Some(ino) = waiting.pop() {
            let Ok(Inode {
                body: Body::Directory(directory),
                ..
            }) = self.inodes.get(ino)
            else {
                continue;
            };
            if !std::mem::replace(&mut reached[slot(ino)], true) {
                waiting.extend(directory.after(None).map(|(_, child)| child));
            }
        }
        let root = self.inodes.get(InodeId::ROOT);
        if !root.is_ok_and(|root| root.is_directory() && root.parent == InodeId::ROOT) {
            findings.inode(InodeId::ROOT, "the root is not its own parent");
        }
        for (ino, inode) in self.inodes.iter() {
            if inode.is_directory() && !reached[slot(ino)] && !self.orphans.contains(&ino) {
                findings.inode(ino, "the root does not lead to this directory");
            }
        }
    }

    fn check_usage(&self, findings: &mut Findings) {
        let names = self.names_of_files();
        let mut several = 0;
        for names in names.chunk_by(|one, next| one.0 == next.0) {
            let ino = names[0].0;
            let kept = match self.further_names.get(&ino) {
                Some(parents) => parents.clone(),
                None => self
                    .inodes
                    .get(ino)
                    .map(|inode| vec![inode.parent])
                    .unwrap_or_default(),
            };
            several += usize::from(names.len() > 1);
            if !kept.iter().eq(names.iter().map(|(_, dir)| dir)) {
                findings.inode(
                    ino,
                    "the directories that name it are not those that are kept",
                );
            }
        }
        if several != self.further_names.len() {
            findings.add(
                None,
                None,
                "the index of files with several names has leftovers",
            );
        }
        let sums = self.add_up_usage();
        for (ino, inode) in self.inodes.iter() {
            if let Body::Directory(directory) = &inode.body
                && directory.used != sums[slot(ino)]
            {
                let (kept, found) = (directory.used, sums[slot(ino)]);
                findings.inode(ino, format!("below it are {found:?}, counted are {kept:?}"));
            }
        }
    }

    fn check_trash(&self, findings: &mut Findings) {
        let mut children = BTreeSet::new();
        for part in self.trash.parts() {
            let Ok(directory) = self.inodes.get(part).and_then(Inode::directory) else {
                return findings.inode(part, "a part of the trash is no directory");
            };
            for (name, child) in directory.after(None) {
                if self.trash.is_part(child) {
                    continue;
                }
                if !name.starts_with(&trash::name_before(child)) {
                    findings.inode(
                        child,
                        "its name in the trash does not start with its number",
                    );
                }
                children.insert(child);
                let known = self.trash.get(child);
                if known.is_some_and(|it| it.directory != part) {
                    findings.inode(
                        child,
                        "it is in another part of the trash than is kept of it",
                    );
                }
            }
        }
        if !self.trash.iter().map(|(ino, _)| ino).eq(children) {
            findings.add(None, None, "what is in the trash is not what is kept of it");
        }
        for (uid, part) in self.trash.of_users() {
            let found = self.inodes.get(part);
            if !found.is_ok_and(|it| Some(it.parent) == self.trash.directory) {
                findings.inode(part, format!("it is not what user {uid} has in the trash"));
            }
        }
    }

    fn check_upkeep(&self, findings: &mut Findings) {
        let default_rules = self.default_rules();
        for (ino, inode) in self.inodes.iter() {
            let (to_raise, has_lifetime) = match &inode.body {
                Body::Regular(_) => (inode.settings.raise(default_rules).is_some(), false),
                Body::Directory(directory) => (false, directory.lifetime_s.is_some()),
                _ => (false, false),
            };
            if self.to_raise.contains(&ino) != to_raise {
                findings.inode(ino, "the list of files that get more replicas is wrong");
            }
            if self.with_lifetime.contains(&ino) != has_lifetime {
                findings.inode(ino, "the list of directories with a lifetime is wrong");
            }
        }
        let mut listed = self.to_raise.iter().chain(&self.with_lifetime);
        if let Some(&gone) = listed.find(|ino| self.inodes.get(**ino).is_err()) {
            findings.inode(gone, "something is to be done to it, but it is gone");
        }
    }

    fn check_blocks(&self, findings: &mut Findings) {
        let mut uses: FxHashMap<BlockId, BTreeMap<RulesKey, u64>> = FxHashMap::default();
        for (ino, inode) in self.inodes.iter() {
            let Body::Regular(file) = &inode.body else {
                continue;
            };
            let rules = key(&inode.settings.rules(self.default_rules()));
            for piece in file.extents.iter() {
                let bytes = u64::from(piece.length_bytes);
                *uses
                    .entry(piece.block)
                    .or_default()
                    .entry(rules)
                    .or_default() += bytes;
                let end = piece.extent().block_end();
                let committed = self
                    .blocks
                    .get(piece.block)
                    .map(|block| block.committed_bytes);
                if committed.is_none_or(|committed| committed < end) {
                    let message = format!("it uses {end} bytes of a block with {committed:?}");
                    findings.add(Some(ino), Some(piece.block), message);
                }
            }
        }
        let mut writers = 0;
        for view in self.blocks.iter() {
            let counted = self.blocks.uses(view.block);
            let counted: BTreeMap<_, _> = counted
                .iter()
                .map(|(rules, bytes)| (key(rules), *bytes))
                .collect();
            let found = uses.remove(&view.block).unwrap_or_default();
            if counted != found {
                let message = format!("files use {found:?} of it, counted are {counted:?}");
                findings.add(None, Some(view.block), message);
            }
            if let Some(fault) = self.blocks.fault(view.block) {
                findings.add(None, Some(view.block), fault);
            }
            if let Some(writer) = view.writer {
                writers += 1;
                if self.sessions.get(writer).is_err() {
                    findings.add(None, Some(view.block), "its writer's session is not open");
                }
            }
        }
        if writers != self.blocks.written_blocks() {
            findings.add(None, None, "the index of blocks by writer has leftovers");
        }
    }

    fn check_sessions(&self, findings: &mut Findings) {
        for (id, session) in &self.sessions.sessions {
            let numbers: Vec<_> = session.replies.iter().map(|(number, _)| *number).collect();
            let ascending = numbers.windows(2).all(|pair| pair[0] < pair[1]);
            let open = numbers
                .first()
                .is_none_or(|&first| first >= session.answered_below);
            if !ascending || !open {
                let message = format!("the replies of session {id} are out of order");
                findings.add(None, None, message);
            }
        }
    }

    fn check_sums(&self, findings: &mut Findings) {
        let mut sums = [0u64; 8];
        for (_, inode) in self.inodes.iter() {
            sums[0] += 1;
            match &inode.body {
                Body::Regular(file) => {
                    sums[1] += 1;
                    sums[2] += file.extents.spilled_pieces() as u64;
                }
                Body::Directory(directory) => {
                    sums[3] += 1;
                    sums[4] += directory.len() as u64;
                    sums[5] += u64::from(!inode.settings.is_empty());
                    sums[6] += u64::from(!directory.quota.is_unlimited());
                    sums[7] += u64::from(directory.trash_s.is_some());
                }
                _ => {}
            }
        }
        let kept = [
            self.inodes.len(),
            self.files.get(),
            self.spilled_pieces.get(),
            self.directories.get(),
            self.names.get(),
            self.directories_with_settings.get(),
            self.directories_with_quota.get(),
            self.directories_with_trash.get(),
        ];
        if sums != kept {
            findings.add(None, None, format!("the sums are {kept:?}, not {sums:?}"));
        }
        let live_bytes: u64 = self.blocks.iter().map(|block| block.live_bytes).sum();
        if live_bytes != self.blocks.live_bytes() {
            findings.add(None, None, "the sum of live bytes is wrong");
        }
    }

    /// One path of each of these inodes that has one. Takes a single walk over all entries, however many
    /// inodes are requested.
    #[must_use]
    pub fn paths(&self, inodes: &BTreeSet<InodeId>) -> BTreeMap<InodeId, String> {
        if inodes.is_empty() {
            return BTreeMap::new();
        }
        let mut found: FxHashMap<InodeId, (InodeId, &[u8])> = FxHashMap::default();
        for (ino, inode) in self.inodes.iter() {
            let Body::Directory(directory) = &inode.body else {
                continue;
            };
            for (name, child) in directory.after(None) {
                if self.is_directory_there(child) || inodes.contains(&child) {
                    found.insert(child, (ino, name));
                }
            }
        }
        inodes
            .iter()
            .filter_map(|&ino| Some((ino, path(ino, &found)?)))
            .collect()
    }

    /// The files that use these blocks beyond the given offset in each block.
    #[must_use]
    pub fn files_using(&self, blocks: &BTreeMap<BlockId, u32>) -> BTreeSet<(BlockId, InodeId)> {
        let mut users = BTreeSet::new();
        for (ino, inode) in self.inodes.iter() {
            if let Body::Regular(file) = &inode.body {
                let used = file.extents.iter().filter(|piece| {
                    let from = blocks.get(&piece.block);
                    from.is_some_and(|&from| from < piece.block_end())
                });
                users.extend(used.map(|piece| (piece.block, ino)));
            }
        }
        users
    }
}

/// Placement rules as a sort key.
type RulesKey = (u8, u8, Option<u8>);

fn key(rules: &PlacementRules) -> RulesKey {
    (
        rules.replication,
        rules.durability as u8,
        rules.class.map(|class| class as u8),
    )
}

fn check_extents(ino: InodeId, file: &FileData, findings: &mut Findings) {
    let mut end = 0;
    let mut allocated_bytes = 0;
    let mut last = None;
    for piece in file.extents.iter() {
        if piece.file_offset < end {
            findings.inode(ino, format!("extents overlap at {}", piece.file_offset));
        }
        if last.is_some_and(|last: super::extents::Piece| last.continues_in(&piece)) {
            findings.inode(
                ino,
                format!("extents were not joined at {}", piece.file_offset),
            );
        }
        end = piece.file_end();
        allocated_bytes += u64::from(piece.length_bytes);
        last = Some(piece);
    }
    if end > file.size_bytes {
        findings.inode(ino, "an extent reaches beyond the end of the file");
    }
    if allocated_bytes != file.extents.allocated_bytes() {
        findings.inode(ino, "the sum of its extents is wrong");
    }
}

/// Follows names upwards; none when they form a cycle or do not lead to the root.
fn path(ino: InodeId, names: &FxHashMap<InodeId, (InodeId, &[u8])>) -> Option<String> {
    let mut components = Vec::new();
    let mut next = ino;
    while next != InodeId::ROOT {
        let (parent, name) = names.get(&next)?;
        components.push(String::from_utf8_lossy(name));
        if components.len() > names.len() {
            return None;
        }
        next = *parent;
    }
    components.reverse();
    Some(format!("/{}", components.join("/")))
}
