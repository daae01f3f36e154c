//! Changing attributes: `chmod`, `chown`, `truncate`, `utimensat`.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::FILE_BYTES_MAX;
use harvestfs_protocol::meta::{AttrChanges, MetaReply, SetTime};
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::types::FileKind;

use super::command::Effects;
use super::inode::{ALL_MODE_BITS, Inode, SET_GROUP_ID};
use super::permissions::{self, WRITE};
use super::{Call, Namespace};

/// Checks all changes before any is made.
fn check(call: &Call, inode: &Inode, changes: &AttrChanges) -> Result<(), FsError> {
    let credentials = call.credentials;
    if let Some(size_bytes) = changes.size_bytes {
        inode.file()?;
        if !changes.opened_for_writing {
            permissions::check(credentials, inode, WRITE)?;
        }
        if size_bytes > FILE_BYTES_MAX {
            return Err(FsError::FileTooLarge);
        }
    }
    let is_root = permissions::is_root(credentials);
    let owns = permissions::owns(credentials, inode);
    if changes.uid.is_some_and(|uid| uid != inode.uid) && !is_root {
        return Err(FsError::NotPermitted);
    }
    if changes.uid.is_some() && !owns {
        return Err(FsError::NotPermitted);
    }
    if let Some(gid) = changes.gid {
        let may_give = is_root || gid == inode.gid || permissions::in_group(credentials, gid);
        if !owns || !may_give {
            return Err(FsError::NotPermitted);
        }
    }
    if changes.mode.is_some() {
        if inode.kind() == FileKind::Symlink {
            return Err(FsError::NotSupported("a symlink has no mode".into()));
        }
        if !owns {
            return Err(FsError::NotPermitted);
        }
    }
    // A kernel that caches writes sends their time together with the new size, or with the file that
    // they were written through: a caller that may write the file may set this time.
    let writes = changes.opened_for_writing || changes.size_bytes.is_some();
    let times = [(changes.atime, owns), (changes.mtime, owns || writes)];
    for (time, may_set) in times {
        match time {
            Some(SetTime::To(_)) if !may_set => return Err(FsError::NotPermitted),
            Some(SetTime::Now) if !may_set => permissions::check(credentials, inode, WRITE)?,
            _ => {}
        }
    }
    Ok(())
}

impl Namespace {
    pub(super) fn set_attr(
        &mut self,
        call: &Call,
        ino: InodeId,
        changes: &AttrChanges,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let inode = self.inodes.get_mut(ino)?;
        check(call, inode, changes)?;
        if let Some(size_bytes) = changes.size_bytes {
            self.truncate(call, ino, size_bytes);
        }
        let inode = self.inodes.known_mut(ino);
        assert!(
            !inode.is_frozen(),
            "the attributes of {ino}, a part of a snapshot, change"
        );
        let gives_away = changes.uid.is_some_and(|uid| uid != inode.uid);
        assert!(
            !gives_away || permissions::is_root(call.credentials),
            "user {} gives {ino} of user {} to {:?}",
            call.credentials.uid,
            inode.uid,
            changes.uid
        );
        if changes.uid.is_some() || changes.gid.is_some() {
            if !inode.is_directory() {
                permissions::drop_privileges(call.credentials, inode);
            }
            inode.uid = changes.uid.unwrap_or(inode.uid);
            inode.gid = changes.gid.unwrap_or(inode.gid);
        }
        if let Some(mode) = changes.mode {
            inode.mode = mode & ALL_MODE_BITS;
            let member = permissions::in_group(call.credentials, inode.gid);
            if !member && !permissions::is_root(call.credentials) {
                inode.mode &= !SET_GROUP_ID;
            }
        }
        let time = |set| match set {
            SetTime::Now => call.now,
            SetTime::To(time) => time,
        };
        inode.atime = changes.atime.map_or(inode.atime, time);
        inode.mtime = changes.mtime.map_or(inode.mtime, time);
        let nothing = AttrChanges {
            opened_for_writing: changes.opened_for_writing,
            ..AttrChanges::default()
        };
        if *changes != nothing {
            inode.ctime = call.now;
            effects.inodes.push(ino);
        }
        let attr = inode.attr(ino);
        // The mode and owner of `.snapshot` follow those of the directory.
        let has_others = changes.mode.is_some() || changes.uid.is_some() || changes.gid.is_some();
        if has_others && let Ok(Some(snapshots)) = self.snapshots_of(ino) {
            effects.inodes.push(snapshots);
        }
        Ok(MetaReply::Attr(attr))
    }

    fn truncate(&mut self, call: &Call, ino: InodeId, size_bytes: u64) {
        let mut resized = false;
        let inode = self.edit(ino, |file, changes| {
            if !planted::is(Bug::KeepsWhatIsCut) {
                file.extents.clear(size_bytes, u64::MAX, changes);
            }
            resized = file.size_bytes != size_bytes;
            file.size_bytes = size_bytes;
        });
        inode.mtime = call.now;
        inode.content_version += u64::from(resized);
        permissions::content_written(call.credentials, inode);
    }
}
