//! Reading a snapshot.

use std::io::Read;

use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::limits::REPLICATION_MAX;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::Extent;

use super::{
    BodyRecord, FRAME_BYTES_MAX, InodeRecord, MAGIC, Record, SnapshotError, VERSION,
    VERSIONS_BEFORE, damaged,
};
use crate::engine::namespace::extents::{Extents, Piece, UseChanges};
use crate::engine::namespace::inode::{Body, FileData, Inode, Slot};
use crate::engine::namespace::sessions::Session;
use crate::engine::namespace::trash::Trashed;
use crate::engine::namespace::usage::{NOWHERE, Quota};
use crate::engine::namespace::version::check_not_newer;
use crate::engine::namespace::{EDITION, EpochView, Namespace, settings};

/// A bound that no counter reaches in the life of a cluster, and from which each can still grow.
const COUNTER_MAX: u64 = u64::MAX / 2;

impl Namespace {
    /// Reads the output of [`Namespace::write_snapshot`], up to its end and no further. Never panics,
    /// and never allocates as much as a damaged snapshot merely claims to hold.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn read_snapshot(from: &mut impl Read) -> Result<Self, SnapshotError> {
        let mut magic = [0; MAGIC.len()];
        from.read_exact(&mut magic)?;
        if magic != MAGIC {
            return Err(SnapshotError::Version("it does not start as one".into()));
        }
        let version = read_u32(from)?;
        if version != VERSION && !VERSIONS_BEFORE.contains(&version) {
            return Err(SnapshotError::Version(format!(
                "it has version {version}, this software reads {VERSION} and {VERSIONS_BEFORE:?}"
            )));
        }
        let mut reader = Reader::default();
        let mut payload = Vec::new();
        while !reader.ended {
            read_frame(from, &mut payload)?;
            let mut rest = payload.as_slice();
            while !rest.is_empty() {
                let (record, after) = postcard::take_from_bytes(rest)
                    .map_err(|error| damaged(format!("a record cannot be decoded: {error}")))?;
                rest = after;
                reader.take(record)?;
            }
        }
        reader.finish()
    }
}

impl InodeRecord {
    fn slot(self) -> Slot {
        // For inodes other than directories, it is derived from the names later.
        let parent = match self.body {
            BodyRecord::Directory { parent } => parent,
            _ => InodeId::ROOT,
        };
        let body = match self.body {
            BodyRecord::Regular { size_bytes } => Body::Regular(FileData {
                size_bytes,
                extents: Extents::default(),
            }),
            BodyRecord::Directory { .. } => Body::Directory(Box::default()),
            BodyRecord::Symlink(target) => Body::Symlink(target.into()),
            BodyRecord::Fifo => Body::Fifo,
            BodyRecord::Socket => Body::Socket,
            BodyRecord::CharDevice(rdev) => Body::CharDevice(rdev),
            BodyRecord::BlockDevice(rdev) => Body::BlockDevice(rdev),
        };
        Slot {
            generation: self.generation,
            inode: Some(Inode {
                mode: self.mode,
                settings: self.settings,
                nlink: self.nlink,
                parent,
                uid: self.uid,
                gid: self.gid,
                atime: self.atime,
                mtime: self.mtime,
                ctime: self.ctime,
                content_version: self.content_version,
                xattrs: None,
                body,
            }),
        }
    }
}

fn read_u32(from: &mut impl Read) -> Result<u32, SnapshotError> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

pub(super) fn read_frame(from: &mut impl Read, payload: &mut Vec<u8>) -> Result<(), SnapshotError> {
    let length = read_u32(from)? as usize;
    let checksum = read_u32(from)?;
    if length == 0 || length > FRAME_BYTES_MAX {
        return Err(damaged(format!("a frame of {length} bytes")));
    }
    payload.resize(length, 0);
    from.read_exact(payload)?;
    if crc32fast::hash(payload) != checksum {
        return Err(damaged("a checksum does not match"));
    }
    Ok(())
}

/// Builds a namespace from records.
#[derive(Default)]
struct Reader {
    namespace: Namespace,
    records: u64,
    session: Option<SessionId>,
    inode: Option<InodeId>,
    free: Vec<u32>,
    epochs: Vec<EpochView>,
    live_bytes: u64,
    ended: bool,
}

impl Reader {
    fn take(&mut self, record: Record) -> Result<(), SnapshotError> {
        if self.ended {
            return Err(damaged("something follows its end"));
        }
        if (self.records == 0) != matches!(record, Record::Header { .. }) {
            return Err(damaged("the header is not the first record, and only that"));
        }
        self.records += 1;
        let namespace = &mut self.namespace;
        let fits = match record {
            Record::Header {
                formatted,
                last_session,
                last_block,
            } => {
                namespace.formatted = formatted;
                namespace.sessions.last = last_session;
                namespace.blocks.set_last(last_block);
                let rules = formatted.map(|it| it.default_rules);
                last_session.max(last_block) <= COUNTER_MAX
                    && rules.is_none_or(|rules| settings::check_rules(&rules).is_ok())
            }
            Record::Server(server) => namespace.servers.push(server).is_some(),
            Record::Session {
                session,
                client,
                opened,
                answered_below,
            } => {
                self.session = Some(session);
                let opened = Session::new(client, opened, answered_below);
                let known = namespace.sessions.sessions.insert(session, opened);
                known.is_none() && session.0 <= namespace.sessions.last
            }
            Record::Reply { sequence, outcome } => self
                .session
                .and_then(|session| namespace.sessions.sessions.get_mut(&session))
                .is_some_and(|session| session.restore_reply(sequence, outcome)),
            Record::Block { view, committed } => {
                let live_bytes = self.live_bytes.checked_add(view.live_bytes);
                self.live_bytes = live_bytes
                    .ok_or_else(|| damaged("files use more bytes of blocks than there can be"))?;
                namespace.blocks.restore(&view, committed)
            }
            Record::Vacant { generation } => {
                self.inode = None;
                namespace.inodes.push_slot(Slot {
                    generation,
                    inode: None,
                });
                true
            }
            Record::Inode(record) => {
                let rules = record.settings.rules(namespace.default_rules());
                let sound =
                    record.content_version <= COUNTER_MAX && settings::check_rules(&rules).is_ok();
                self.inode = namespace.inodes.push_slot(record.slot());
                sound && self.inode.is_some()
            }
            Record::Extents(extents) => self.take_extents(&extents),
            Record::Entries(entries) => self.take_entries(&entries),
            Record::Xattr { name, value } => self.take_xattr(&name, &value),
            Record::DirectorySettings {
                quota_bytes,
                quota_inodes,
                trash_s,
            } => {
                let quota = Quota {
                    bytes: quota_bytes,
                    inodes: quota_inodes,
                };
                self.take_directory_settings(quota, trash_s)
            }
            Record::Raise {
                replication,
                after_s,
            } => self.current().is_some_and(|inode| {
                inode.settings.set_raise_parts((replication, after_s));
                replication.is_none_or(|it| it.get() <= REPLICATION_MAX)
            }),
            Record::Lifetime { seconds } => match self.current().map(|inode| &mut inode.body) {
                Some(Body::Directory(directory)) => directory.lifetime_s.replace(seconds).is_none(),
                _ => false,
            },
            Record::TrashDirectory(ino) => namespace.trash.set_directory(ino),
            Record::Trashed {
                ino,
                origin,
                expires,
            } => match namespace.trash.directory {
                Some(directory) if namespace.trash.get(ino).is_none() => {
                    // As in edition 0, unless the next record overrides it.
                    let trashed = Trashed {
                        origin: origin.into(),
                        expires,
                        directory,
                        counted_in: None,
                    };
                    namespace.trash.insert(ino, trashed);
                    true
                }
                _ => false,
            },
            Record::TrashOfUser { uid, directory } => {
                namespace.trash.set_directory_of(uid, directory)
            }
            Record::TrashedFrom {
                ino,
                directory,
                counted_in,
            } => match namespace.trash.get(ino).cloned() {
                Some(mut trashed) => {
                    trashed.directory = directory;
                    trashed.counted_in = counted_in;
                    namespace.trash.insert(ino, trashed);
                    namespace.trash.is_part(directory)
                }
                None => false,
            },
            Record::Nameless(inodes) => inodes.into_iter().all(|(ino, counted_in)| {
                let inode = namespace.inodes.get_mut(ino);
                inode.is_ok_and(|inode| {
                    let fits = inode.nlink == 0 && !inode.is_directory();
                    inode.parent = counted_in;
                    fits
                })
            }),
            Record::Unheld(inodes) => {
                namespace.unheld.extend(inodes);
                true
            }
            Record::Version(version) => {
                check_not_newer(version)?;
                namespace.version = version;
                self.records == 2
            }
            #[cfg(feature = "next-version")]
            Record::Probes(probes) => {
                namespace.probes = probes;
                true
            }
            Record::Edition(edition) => {
                namespace.edition = edition;
                edition <= EDITION
            }
            Record::Free(slots) => {
                self.free.extend(slots);
                self.free.len() as u64 <= namespace.inodes.slots()
            }
            Record::Orphans(inodes) => {
                namespace.orphans.extend(inodes);
                true
            }
            Record::Operations(operations) => {
                namespace.operations = operations;
                true
            }
            Record::BalanceSpread(choice) => namespace
                .operations
                .balance_spread
                .replace(choice)
                .is_none(),
            Record::Epoch(epoch) => {
                self.epochs.push(epoch);
                true
            }
            Record::Maintenance { node, until } => match namespace.servers.get_mut(node) {
                Some(server) => server.maintenance_until.replace(until).is_none(),
                None => false,
            },
            Record::End { records } => {
                self.ended = true;
                Some(self.records) == records.checked_add(1)
            }
        };
        if fits {
            Ok(())
        } else {
            Err(damaged(format!(
                "record {} does not fit those before it",
                self.records
            )))
        }
    }

    fn current(&mut self) -> Option<&mut Inode> {
        self.namespace.inodes.get_mut(self.inode?).ok()
    }

    fn take_extents(&mut self, extents: &[Extent]) -> bool {
        let Some(Body::Regular(file)) = self.current().map(|inode| &mut inode.body) else {
            return false;
        };
        // The use of blocks is added up at the end.
        let mut changes = UseChanges::default();
        for extent in extents {
            let Some(piece) = Piece::new(extent) else {
                return false;
            };
            // Extents must be ascending: none may overwrite an earlier one.
            if file.extents.from(piece.file_offset).next().is_some() {
                return false;
            }
            file.extents.write(piece, &mut changes);
        }
        true
    }

    fn take_entries(&mut self, entries: &[(Name, InodeId)]) -> bool {
        let Some(Body::Directory(directory)) = self.current().map(|inode| &mut inode.body) else {
            return false;
        };
        entries
            .iter()
            .all(|(name, ino)| *ino != NOWHERE && directory.insert(name, *ino).is_none())
    }

    fn take_directory_settings(&mut self, quota: Quota, trash_s: Option<u32>) -> bool {
        let Some(Body::Directory(directory)) = self.current().map(|inode| &mut inode.body) else {
            return false;
        };
        directory.quota = quota;
        directory.trash_s = trash_s;
        true
    }

    fn take_xattr(&mut self, name: &[u8], value: &[u8]) -> bool {
        let Some(inode) = self.current() else {
            return false;
        };
        inode.xattrs.get_or_insert_default().insert(name, value);
        true
    }

    fn finish(self) -> Result<Namespace, SnapshotError> {
        assert!(
            self.ended,
            "a snapshot is put together after {} records, before its end",
            self.records
        );
        let mut namespace = self.namespace;
        if !namespace.inodes.set_free(self.free) {
            return Err(damaged("its free slots are not free"));
        }
        if !namespace.restore_epochs(self.epochs) {
            return Err(damaged("its epochs are not in order"));
        }
        if !namespace.add_up() {
            return Err(damaged("a file uses a block that is not there"));
        }
        if namespace.blocks.live_bytes() != self.live_bytes {
            return Err(damaged("files do not use of blocks what these say"));
        }
        match namespace.check().into_iter().next() {
            None => {
                let (changes, emptied) = (&namespace.changes, &namespace.emptied);
                assert!(
                    changes.is_empty() && emptied.is_empty() && namespace.blocks.is_settled(),
                    "what was read leaves {changes:?} to be counted, and {emptied:?} to be released"
                );
                Ok(namespace)
            }
            Some(finding) => Err(damaged(format!(
                "{} (inode {:?}, block {:?})",
                finding.message, finding.ino, finding.block
            ))),
        }
    }
}

impl Namespace {
    /// Adds up the sums that snapshots leave out. Returns false when a file uses an unknown block.
    fn add_up(&mut self) -> bool {
        let default_rules = self.default_rules();
        let blocks = &mut self.blocks;
        for (ino, inode) in self.inodes.iter() {
            match &inode.body {
                Body::Regular(file) => {
                    self.files += 1;
                    self.spilled_pieces += file.extents.spilled_pieces() as u64;
                    let rules = inode.settings.rules(default_rules);
                    if inode.settings.raise(default_rules).is_some() {
                        self.to_raise.insert(ino);
                    }
                    if !file
                        .extents
                        .iter()
                        .all(|piece| blocks.restore_use(rules, &piece))
                    {
                        return false;
                    }
                }
                Body::Directory(directory) => {
                    self.directories += 1;
                    self.names += directory.len() as u64;
                    self.directories_with_settings += u64::from(!inode.settings.is_empty());
                    self.directories_with_quota += u64::from(!directory.quota.is_unlimited());
                    self.directories_with_trash += u64::from(directory.trash_s.is_some());
                    if directory.lifetime_s.is_some() {
                        self.with_lifetime.insert(ino);
                    }
                }
                _ => {}
            }
        }
        self.restore_usage();
        true
    }
}
