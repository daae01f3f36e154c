//! An inode of the model.

use std::collections::BTreeMap;

use super::model::*;
use super::*;

#[derive(Clone, Debug)]
pub struct Node {
    pub kind: FileKind,
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub atime: i64,
    pub mtime: i64,
    pub ctime: i64,
    pub entries: BTreeMap<Name, InodeId>,
    /// For each byte, the block and the offset in it; a hole has neither.
    pub content: Vec<Option<(BlockId, u64)>>,
    pub target: Vec<u8>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// It is a part of a snapshot.
    pub frozen: bool,
    /// For `.snapshot` of a directory: the mode and owner that the directory had when `.snapshot` was made. They apply
    /// again when `.snapshot` has no name any more.
    pub made_with: Option<(u16, u32, u32)>,
}

impl Node {
    pub fn new(kind: FileKind, mode: u16, uid: u32, gid: u32, now: i64) -> Self {
        Self {
            kind,
            mode,
            uid,
            gid,
            rdev: 0,
            atime: now,
            mtime: now,
            ctime: now,
            entries: BTreeMap::new(),
            content: Vec::new(),
            target: Vec::new(),
            xattrs: BTreeMap::new(),
            frozen: false,
            made_with: None,
        }
    }

    pub fn is_dir(&self) -> bool {
        self.kind == FileKind::Directory
    }

    pub fn may(&self, caller: &Credentials, wanted: u16) -> bool {
        if caller.uid == 0 {
            return self.is_dir() || wanted & X == 0 || self.mode & 0o111 != 0;
        }
        let class = if caller.uid == self.uid {
            self.mode / 64
        } else if groups(caller).contains(&self.gid) {
            self.mode / 8
        } else {
            self.mode
        };
        class & wanted == wanted
    }

    pub fn demand(&self, caller: &Credentials, wanted: u16) -> Result<(), FsError> {
        let allowed = self.may(caller, wanted);
        allowed.then_some(()).ok_or(FsError::PermissionDenied)
    }

    pub fn owned_by(&self, caller: &Credentials) -> bool {
        caller.uid == 0 || caller.uid == self.uid
    }

    pub fn file(&self) -> Result<(), FsError> {
        match self.kind {
            FileKind::Regular => Ok(()),
            FileKind::Directory => Err(FsError::IsADirectory),
            _ => Err(invalid()),
        }
    }

    /// Set-user-id and its kin, as a change of owner or content takes them away.
    pub fn strip(&mut self, caller: &Credentials) {
        let outsider = caller.uid != 0 && !groups(caller).contains(&self.gid);
        self.mode &= !0o4000;
        if self.mode & 0o010 != 0 || outsider {
            self.mode &= !0o2000;
        }
        self.xattrs.remove(&b"security.capability"[..]);
    }

    pub fn written(&mut self, caller: &Credentials, now: i64) {
        self.mtime = now;
        self.ctime = now;
        if caller.uid == 0 {
            self.xattrs.remove(&b"security.capability"[..]);
        } else {
            self.strip(caller);
        }
    }

    pub fn rules(&self) -> PlacementRules {
        let text = |name: &str| {
            let name = format!("user.harvestfs.{name}");
            let value = self.xattrs.get(name.as_bytes());
            value.map(|value| String::from_utf8(value.clone()).unwrap())
        };
        PlacementRules {
            replication: text("replication").map_or(RULES.replication, |n| n.parse().unwrap()),
            durability: match text("durability").as_deref() {
                Some("space") => Durability::Space,
                _ => Durability::Strict,
            },
            class: None,
        }
    }
}
