//! Long random histories: the engine against the model, and against itself after crashes.

use std::collections::{BTreeMap, BTreeSet};

use crate::engine::namespace::BlockView;
use harvestfs_protocol::types::FileBlock;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

use super::answers::{plain, without_versions};
use super::model::{Context, Model};
use super::*;

/// Everything a cache could know.
#[derive(Default)]
struct Cache {
    attrs: BTreeMap<InodeId, Attr>,
    entries: BTreeMap<(InodeId, Name), InodeId>,
}

struct World {
    rng: StdRng,
    namespace: Namespace,
    model: Model,
    cache: Cache,
    /// Blocks as the effects reported them.
    announced: BTreeMap<BlockId, (u64, PlacementRules, Option<u64>)>,
    next_sequence: BTreeMap<SessionId, u64>,
    now: i64,
    /// A snapshot, and the commands since.
    saved: Vec<u8>,
    journal: Vec<Vec<u8>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            rng: StdRng::seed_from_u64(seed),
            namespace: Namespace::new(),
            model: Model::format(),
            cache: Cache::default(),
            announced: BTreeMap::new(),
            next_sequence: BTreeMap::new(),
            now: 1,
            saved: snapshot(&Namespace::new()),
            journal: Vec::new(),
        };
        world.apply(&format_command()).unwrap();
        world.apply(&edition_command()).unwrap();
        world
    }

    /// Applies a command, and checks everything that needs no model.
    fn apply(&mut self, command: &Command) -> Result<Outcome, FsError> {
        let before = self.namespace.counts();
        let result = self.namespace.apply(command);
        assert_eq!(self.namespace.check(), [], "after {command:?}");
        match result {
            Ok(Applied { reply, effects }) => {
                self.journal.push(command.encode().unwrap());
                self.check_effects(&effects, command);
                if let Command::Mutate { op, .. } = command {
                    facts::check(&self.namespace, op, &reply, &effects);
                }
                Ok(reply)
            }
            Err(error) => {
                assert_eq!(self.namespace.counts(), before);
                self.check_effects(&Effects::default(), command);
                Err(error)
            }
        }
    }

    /// Checks that everything that changed is among the effects.
    fn check_effects(&mut self, effects: &Effects, command: &Command) {
        let mut now = Cache::default();
        for (ino, inode) in self.namespace.inodes.iter() {
            now.attrs.insert(ino, self.namespace.attr(ino).unwrap());
            if let Ok(directory) = inode.directory() {
                for (name, child) in directory.after(None) {
                    now.entries.insert((ino, Name::new(name).unwrap()), child);
                }
            }
        }
        for (ino, attr) in &self.cache.attrs {
            let announced = effects.inodes.contains(ino);
            assert!(
                announced || now.attrs.get(ino) == Some(attr),
                "{ino}: {command:?}"
            );
            if let Some(new) = now.attrs.get(ino) {
                let resized = new.size_bytes != attr.size_bytes
                    || new.allocated_bytes != attr.allocated_bytes;
                assert!(new.content_version >= attr.content_version);
                assert!(!resized || new.content_version > attr.content_version);
            }
        }
        for place in self.cache.entries.keys().chain(now.entries.keys()) {
            let announced = effects.entries.contains(place);
            let same = now.entries.get(place) == self.cache.entries.get(place);
            let fresh = !self.cache.attrs.contains_key(&place.0);
            assert!(announced || same || fresh, "{place:?}: {command:?}");
        }
        self.cache = now;
        for change in &effects.blocks {
            self.hear(change);
        }
        let blocks: BTreeMap<_, _> = self
            .namespace
            .blocks()
            .map(|view| {
                (
                    view.block,
                    (view.committed_bytes, view.rules, view.sealed_bytes),
                )
            })
            .collect();
        assert_eq!(self.announced, blocks, "{command:?}");
    }

    fn hear(&mut self, change: &BlockChange) {
        match *change {
            BlockChange::Allocated { block, rules, .. } => {
                assert_eq!(self.announced.insert(block, (0, rules, None)), None);
            }
            BlockChange::Grew {
                block,
                committed_bytes,
            } => self.announced.get_mut(&block).unwrap().0 = committed_bytes,
            BlockChange::Sealed {
                block,
                length_bytes,
            } => self.announced.get_mut(&block).unwrap().2 = Some(length_bytes),
            BlockChange::Freed { block } => assert!(self.announced.remove(&block).is_some()),
            BlockChange::RulesChanged { block, rules } => {
                self.announced.get_mut(&block).unwrap().1 = rules;
            }
        }
    }

    fn step(&mut self) {
        self.now += 1;
        match self.rng.random_range(0..400) {
            0..=3 => self.open_session(),
            4..=5 => self.close_session(),
            6..=9 => self.release_orphans(),
            10..=13 => self.crash(),
            14..=23 => self.purge(),
            24..=27 => self.raise(),
            28..=29 => self.end_lifetimes(),
            _ if self.model.sessions.is_empty() => self.open_session(),
            _ => self.mutate(),
        }
        self.model.settle();
        self.compare_blocks();
        if self.rng.random_ratio(1, 20) {
            self.compare_inodes();
        }
    }

    fn some_session(&mut self) -> SessionId {
        let sessions: Vec<_> = self.model.sessions.iter().copied().collect();
        *sessions.choose(&mut self.rng).unwrap()
    }

    fn open_session(&mut self) {
        if self.model.sessions.len() >= 3 {
            return;
        }
        let open = Command::OpenSession {
            client: "client".into(),
            now: Timestamp(self.now),
        };
        let Ok(Outcome::Session(session)) = self.apply(&open) else {
            panic!();
        };
        self.model.sessions.insert(session);
        self.next_sequence.insert(session, 1);
    }

    fn close_session(&mut self) {
        if self.model.sessions.len() < 2 {
            return;
        }
        let session = self.some_session();
        let close = Command::CloseSession {
            session,
            now: Timestamp(self.now),
        };
        self.apply(&close).unwrap();
        self.model.close_session(session);
    }

    fn release_orphans(&mut self) {
        let mut inodes: Vec<_> = self.namespace.orphans().collect();
        inodes.retain(|_| self.rng.random());
        let release = Command::ReleaseOrphans {
            inodes: inodes.clone(),
            now: Timestamp(self.now),
        };
        self.apply(&release).unwrap();
        for ino in inodes {
            self.model.release(ino);
        }
        self.model.release_emptied();
    }

    fn purge(&mut self) {
        let mut inodes: Vec<_> = self.model.trash.keys().copied().collect();
        inodes.retain(|_| self.rng.random());
        let purge = Command::PurgeTrash {
            inodes: inodes.clone(),
            now: Timestamp(self.now),
        };
        self.apply(&purge).unwrap();
        let context = Context {
            caller: &Credentials::root(),
            session: SessionId(0),
            now: self.now,
            held_elsewhere: true,
            fresh: InodeId(0),
            trash: [InodeId(0); 2],
            copies: &BTreeMap::new(),
        };
        if !inodes.is_empty() {
            self.model.purge(&context, &inodes);
        }
    }

    /// A time at which some of what is due after 1, 60 or 90 seconds is due.
    fn later(&mut self) -> i64 {
        let seconds = [0, 1, 70, 100].choose(&mut self.rng).copied();
        self.now + seconds.unwrap_or(0) * 1_000_000_000
    }

    fn raise(&mut self) {
        let now = self.later();
        let limit = self.rng.random_range(1..50);
        let mut due = Vec::new();
        let mut from = Some(InodeId(0));
        while let Some(first) = from {
            let (some, next) = self.namespace.due_raises(Timestamp(now), first, limit);
            due.extend(some);
            from = next;
        }
        assert_eq!(due, self.model.due_raises(now));
        let raise = Command::RaiseReplication {
            inodes: due.clone(),
            now: Timestamp(now),
        };
        self.apply(&raise).unwrap();
        self.model.raise(&due);
    }

    fn end_lifetimes(&mut self) {
        let now = self.later();
        let limit = self.rng.random_range(1..10);
        let mut expired = Vec::new();
        let mut from = Some((InodeId(0), None));
        while let Some(cursor) = from {
            let (some, next) = self
                .namespace
                .expired_entries(Timestamp(now), &cursor, limit);
            expired.extend(some);
            from = next;
        }
        assert_eq!(expired, self.model.expired_entries(now));
        let end = Command::RemoveExpired {
            entries: expired,
            now: Timestamp(now),
        };
        let got = self.apply(&end).map(|_| ());
        let context = Context {
            caller: &Credentials::root(),
            session: SessionId(0),
            now,
            held_elsewhere: true,
            fresh: InodeId(0),
            trash: self.trash_of(0),
            copies: &BTreeMap::new(),
        };
        let Command::RemoveExpired { entries, .. } = end else {
            unreachable!("it is one");
        };
        assert_eq!(got, self.model.remove_expired(&context, &entries));
    }

    /// Starts again from the last snapshot and the commands since.
    fn crash(&mut self) {
        let mut again = Namespace::read_snapshot(&mut &self.saved[..]).unwrap();
        for bytes in &self.journal {
            again.apply(&Command::decode(bytes).unwrap()).unwrap();
        }
        let expected = snapshot(&self.namespace);
        assert!(snapshot(&again) == expected, "replay leads elsewhere");
        self.namespace = again;
        if self.rng.random() {
            self.saved = expected;
            self.journal.clear();
        }
    }

    fn mutate(&mut self) {
        let session = self.some_session();
        let op = steps::operation(&mut self.rng, &self.model, session);
        let caller = steps::caller(&mut self.rng);
        let sequence = self.next_sequence[&session];
        let lag = self.rng.random_range(0..5);
        let held_elsewhere = self.rng.random_ratio(1, 3);
        let command = Command::Mutate {
            session,
            sequence,
            answered_below: sequence.saturating_sub(lag),
            credentials: caller.clone(),
            now: Timestamp(self.now),
            held_elsewhere,
            op: op.clone(),
        };
        let last_name = self.namespace.removal_target(&op);
        let got = self.apply(&command);
        if got.is_ok() {
            self.next_sequence.insert(session, sequence + 1);
            assert_eq!(
                self.namespace.remembered_reply(session, sequence),
                got.as_ref().ok()
            );
            if self.rng.random_ratio(1, 10) {
                // The reply was lost: the client asks again.
                assert_eq!(self.apply(&command), got);
                self.journal.pop();
            }
        }
        let fresh = match &got {
            Ok(Outcome::Meta(MetaReply::Attr(attr))) => attr.ino,
            _ => InodeId(0),
        };
        let copies = match &op {
            Mutation::CreateSnapshot(_) if got.is_ok() => self.copies(fresh),
            _ => BTreeMap::new(),
        };
        let context = Context {
            caller: &caller,
            session,
            now: self.now,
            held_elsewhere,
            fresh,
            trash: self.trash_of(caller.uid),
            copies: &copies,
        };
        if let (
            Mutation::AllocateBlocks(mutation::AllocateBlocks { rules, .. }),
            Ok(Outcome::Blocks(blocks)),
        ) = (&op, &got)
        {
            self.model.allocated(session, *rules, blocks);
            return;
        }
        let expected = self.model.apply(&context, &op);
        match (got, expected) {
            (Ok(Outcome::Meta(got)), Ok(expected)) => {
                if let MetaReply::Removed(Some(attr)) = &got {
                    let kept = self.model.trash.contains_key(&attr.ino);
                    assert_eq!(last_name == Some(attr.ino) && !kept, attr.nlink == 0);
                }
                assert_eq!(
                    without_versions(got),
                    without_versions(expected),
                    "{caller:?} {op:?}"
                );
            }
            (Err(got), Err(expected)) if plain(&got) == plain(&expected) => {}
            (got, expected) => {
                panic!("{caller:?} {op:?}:\n got      {got:?}\n expected {expected:?}")
            }
        }
    }

    /// The directory of the trash, and that of a user in it, as far as they are there.
    fn trash_of(&self, uid: u32) -> [InodeId; 2] {
        let mut of_users = self.namespace.trash.of_users();
        let of_user = of_users
            .find(|(user, _)| *user == uid)
            .map(|(_, directory)| directory);
        [self.namespace.trash.directory, of_user].map(|it| it.unwrap_or(InodeId(0)))
    }

    /// The inodes of a snapshot, and the directory that it is in.
    fn copies(&self, top: InodeId) -> BTreeMap<Vec<Name>, InodeId> {
        let mut copies = BTreeMap::new();
        let parent = self.namespace.inodes.get(top).unwrap().parent;
        copies.insert(Vec::new(), parent);
        let mut waiting = vec![(vec![], parent)];
        while let Some((path, ino)) = waiting.pop() {
            let inode = self.namespace.inodes.get(ino).unwrap();
            let Ok(directory) = inode.directory() else {
                continue;
            };
            for (name, child) in directory.after(None) {
                let mut path = path.clone();
                path.push(Name::new(name).unwrap());
                copies.insert(path.clone(), child);
                waiting.push((path, child));
            }
        }
        copies
    }

    fn compare_blocks(&self) {
        let uses = self.model.uses();
        let got: Vec<_> = self.namespace.blocks().collect();
        let expected: Vec<_> = self
            .model
            .blocks
            .iter()
            .map(|(&block, model)| BlockView {
                block,
                committed_bytes: model.committed,
                live_bytes: uses.get(&block).map_or(0, |(bytes, _)| *bytes),
                rules: model.rules,
                writer: model.writer,
                sealed_bytes: model.sealed,
            })
            .collect();
        assert_eq!(got, expected);
    }

    fn compare_inodes(&self) {
        let orphans: BTreeSet<_> = self.namespace.orphans().collect();
        assert_eq!(orphans, &self.model.orphans - &self.model.unheld);
        let got: Vec<_> = self.namespace.inodes.iter().map(|(ino, _)| ino).collect();
        assert_eq!(got.len(), self.model.inodes.len());
        for ino in got {
            self.compare_inode(ino);
        }
    }

    fn compare_inode(&self, ino: InodeId) {
        let root = Credentials::root();
        let query = |op| self.namespace.query(&root, &op).unwrap();
        let node = &self.model.inodes[&ino];
        let attr = without_versions(query(Query::GetAttr(query::GetAttr { ino })));
        assert_eq!(attr, MetaReply::Attr(self.model.attr(ino)));
        let MetaReply::Names(names) = query(Query::ListXattr(query::ListXattr { ino })) else {
            panic!();
        };
        let names: BTreeSet<_> = names.into_iter().collect();
        assert_eq!(names, node.xattrs.keys().cloned().collect());
        for (name, value) in &node.xattrs {
            let name = name.clone();
            let got = query(Query::GetXattr(query::GetXattr { ino, name }));
            assert_eq!(got, MetaReply::Bytes(value.clone()));
        }
        if let Some((origin, expires)) = self.model.trash.get(&ino) {
            let expires_s = expires.div_euclid(1_000_000_000).to_string();
            for (name, value) in [("origin", origin.clone()), ("expires_s", expires_s.into())] {
                let name = format!("user.harvestfs.trash_{name}").into_bytes();
                let got = query(Query::GetXattr(query::GetXattr { ino, name }));
                assert_eq!(got, MetaReply::Bytes(value));
            }
        }
        match node.kind {
            FileKind::Regular => {
                let mut content = vec![None; node.content.len()];
                let from_offset = 0;
                let MetaReply::Extents { extents, end: true } =
                    query(Query::GetExtents(query::GetExtents { ino, from_offset }))
                else {
                    panic!();
                };
                for extent in extents {
                    for byte in 0..extent.length_bytes {
                        let place = (extent.block, extent.block_offset + byte);
                        content[(extent.file_offset + byte) as usize] = Some(place);
                    }
                }
                assert_eq!(content, node.content);
                self.compare_places(ino, &content);
            }
            FileKind::Directory => {
                let after = None;
                let MetaReply::Entries {
                    entries,
                    end: true,
                    parent,
                } = query(Query::ReadDir(query::ReadDir {
                    ino,
                    after,
                    max_entries: 1000,
                    with_attributes: true,
                }))
                else {
                    panic!();
                };
                let got: BTreeMap<_, _> = entries
                    .into_iter()
                    .map(|entry| (entry.name, entry.ino))
                    .collect();
                assert_eq!(got, self.model.listed(ino));
                let (bytes, inodes) = self.model.used(ino);
                for (name, used) in [("used_bytes", bytes), ("used_files", inodes)] {
                    let name = format!("user.harvestfs.{name}").into_bytes();
                    let got = query(Query::GetXattr(query::GetXattr { ino, name }));
                    assert_eq!(got, MetaReply::Bytes(used.to_string().into_bytes()));
                }
                if let Some(expected) = self.model.parent_of(ino) {
                    assert_eq!(parent, expected);
                }
            }
            FileKind::Symlink => {
                let target = query(Query::ReadLink(query::ReadLink { ino }));
                assert_eq!(target, MetaReply::Bytes(node.target.clone()));
            }
            _ => {}
        }
    }
}

impl World {
    /// A block is in a file where, and only where, the file has a byte in it.
    fn compare_places(&self, ino: InodeId, content: &[Option<(BlockId, u64)>]) {
        let blocks: BTreeSet<BlockId> = content.iter().flatten().map(|(block, _)| *block).collect();
        let root = Credentials::root();
        for block in blocks {
            let places: Vec<FileBlock> = (0..content.len() as u64 + 1)
                .map(|file_offset| FileBlock { block, file_offset })
                .collect();
            let found = self.namespace.readable_blocks(&root, ino, &places).unwrap();
            let there = content.iter().flatten().filter(|(of, _)| *of == block);
            assert_eq!(found, vec![block; there.count()]);
            for at in places {
                let byte = content.get(at.file_offset as usize).copied().flatten();
                let found = self.namespace.readable_blocks(&root, ino, &[at]).unwrap();
                assert_eq!(found.len() == 1, byte.is_some_and(|(of, _)| of == block));
            }
        }
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

/// Longer: `HARVESTFS_MODEL_STEPS=1000000 cargo test --release -p harvestfs-namenode histories`.
/// One history again: `HARVESTFS_MODEL_SEED=<seed>`.
#[test]
fn long_random_histories_are_as_the_model_says() {
    let steps = setting("HARVESTFS_MODEL_STEPS", 5_000);
    let seeds = match setting("HARVESTFS_MODEL_SEED", 0) {
        0 => vec![1, 2, 3, 4],
        seed => vec![seed],
    };
    // In parallel; a panic names its thread, and thereby the seed that repeats it.
    std::thread::scope(|scope| {
        for seed in seeds {
            std::thread::Builder::new()
                .name(format!("HARVESTFS_MODEL_SEED={seed}"))
                .spawn_scoped(scope, move || history(seed, steps))
                .unwrap();
        }
    });
}

fn history(seed: u64, steps: u64) {
    let mut world = World::new(seed);
    for step in 0..steps {
        // Shown when the test fails.
        if step % 1_000 == 0 {
            println!("HARVESTFS_MODEL_SEED={seed}: step {step}");
        }
        world.step();
    }
    world.crash();
    world.compare_inodes();
}
