//! Extended attributes, with the rules of Linux for their namespaces.

use std::collections::BTreeMap;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::{
    XATTR_NAME_BYTES_MAX, XATTR_TOTAL_BYTES_MAX, XATTR_VALUE_BYTES_MAX,
};
use harvestfs_protocol::meta::{MetaReply, SetXattrMode};
use harvestfs_protocol::types::{Credentials, FileKind};

use super::command::Effects;
use super::inode::{Body, Inode, STICKY};
use super::permissions::{self, READ, WRITE};
use super::settings::{self, Setting};
use super::{Call, Namespace};

/// File capabilities: they are dropped when the file changes, as the set-user-id bit is.
const CAPABILITY: &[u8] = b"security.capability";

/// The extended attributes of one inode; settings are not among them.
#[derive(Clone, Debug, Default)]
pub(super) struct Xattrs {
    values: BTreeMap<Box<[u8]>, Box<[u8]>>,
    total_bytes: usize,
}

impl Xattrs {
    pub fn get(&self, name: &[u8]) -> Option<&[u8]> {
        self.values.get(name).map(AsRef::as_ref)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&[u8], &[u8])> {
        self.values
            .iter()
            .map(|(name, value)| (name.as_ref(), value.as_ref()))
    }

    /// Refuses an attribute that would exceed the limits.
    fn check_room(&self, name: &[u8], value: &[u8]) -> Result<(), FsError> {
        let replaced = self.get(name).map_or(0, |old| cost(name, old));
        if value.len() > XATTR_VALUE_BYTES_MAX
            || self.total_bytes - replaced + cost(name, value) > XATTR_TOTAL_BYTES_MAX
        {
            return Err(FsError::AttributeTooLarge);
        }
        Ok(())
    }

    pub fn insert(&mut self, name: &[u8], value: &[u8]) {
        self.remove(name);
        self.total_bytes += cost(name, value);
        self.values.insert(name.into(), value.into());
    }

    fn remove(&mut self, name: &[u8]) {
        if let Some(old) = self.values.remove(name) {
            let left = self.total_bytes.checked_sub(cost(name, &old));
            let Some(left) = left else {
                panic!(
                    "attributes of {} bytes lose {}, of {}",
                    self.total_bytes,
                    name.escape_ascii(),
                    cost(name, &old)
                );
            };
            self.total_bytes = left;
        }
        // Each attribute has a name, so its size is not 0.
        assert_eq!(
            self.total_bytes == 0,
            self.values.is_empty(),
            "{} attributes have {} bytes",
            self.values.len(),
            self.total_bytes
        );
    }
}

/// The size of an attribute; its name is counted as by `listxattr`, with its NUL.
fn cost(name: &[u8], value: &[u8]) -> usize {
    name.len() + 1 + value.len()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    User,
    Trusted,
    Security,
}

/// Checks a name; `system.` names belong to features that HarvestFS does not have.
fn kind_of(name: &[u8]) -> Result<Kind, FsError> {
    let (kind, rest) = if let Some(rest) = name.strip_prefix(b"user.") {
        (Kind::User, rest)
    } else if let Some(rest) = name.strip_prefix(b"trusted.") {
        (Kind::Trusted, rest)
    } else if let Some(rest) = name.strip_prefix(b"security.") {
        (Kind::Security, rest)
    } else {
        return Err(FsError::NotSupported(
            "extended attributes are in user., trusted. or security.".into(),
        ));
    };
    if rest.is_empty() || name.len() > XATTR_NAME_BYTES_MAX || name.contains(&0) {
        return Err(FsError::InvalidArgument(
            "not a name of an extended attribute".into(),
        ));
    }
    Ok(kind)
}

fn has_user_attributes(inode: &Inode) -> bool {
    matches!(inode.kind(), FileKind::Regular | FileKind::Directory)
}

fn check_read(credentials: &Credentials, inode: &Inode, kind: Kind) -> Result<(), FsError> {
    match kind {
        Kind::Trusted if !permissions::is_root(credentials) => Err(FsError::NoAttribute),
        Kind::User if !has_user_attributes(inode) => Err(FsError::NoAttribute),
        Kind::Security => Ok(()),
        Kind::User | Kind::Trusted => permissions::check(credentials, inode, READ),
    }
}

fn check_write(credentials: &Credentials, inode: &Inode, kind: Kind) -> Result<(), FsError> {
    match kind {
        Kind::Trusted | Kind::Security if !permissions::is_root(credentials) => {
            Err(FsError::NotPermitted)
        }
        Kind::User if !has_user_attributes(inode) => Err(FsError::NotPermitted),
        Kind::User
            if inode.is_directory()
                && inode.mode & STICKY != 0
                && !permissions::owns(credentials, inode) =>
        {
            Err(FsError::NotPermitted)
        }
        _ => permissions::check(credentials, inode, WRITE),
    }
}

/// Checks whether an attribute may be created or replaced.
fn check_mode(mode: SetXattrMode, exists: bool) -> Result<(), FsError> {
    match mode {
        SetXattrMode::Create if exists => Err(FsError::Exists),
        SetXattrMode::Replace if !exists => Err(FsError::NoAttribute),
        _ => Ok(()),
    }
}

impl Inode {
    /// Removes the file capabilities, if there are any.
    pub(super) fn drop_capabilities(&mut self) {
        if let Some(xattrs) = &mut self.xattrs {
            xattrs.remove(CAPABILITY);
            if xattrs.values.is_empty() {
                self.xattrs = None;
            }
        }
    }

    fn xattr(&self, name: &[u8]) -> Option<&[u8]> {
        self.xattrs.as_ref()?.get(name)
    }
}

impl Namespace {
    pub(super) fn get_xattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        name: &[u8],
    ) -> Result<MetaReply, FsError> {
        let kind = kind_of(name)?;
        let inode = self.inodes.get(ino)?;
        if let Some(value) = self.of_trash(ino, name) {
            // Also for symlinks and other inodes that have no user attributes: otherwise they could not
            // be restored.
            if !permissions::owns(credentials, inode) {
                permissions::check(credentials, inode, READ)?;
            }
            return Ok(MetaReply::Bytes(value));
        }
        check_read(credentials, inode, kind)?;
        let value = if name.starts_with(settings::PREFIX) {
            self.setting(inode, name)
        } else {
            inode.xattr(name).map(<[u8]>::to_vec)
        };
        value.map(MetaReply::Bytes).ok_or(FsError::NoAttribute)
    }

    /// An attribute that the trash provides for an inode in it.
    fn of_trash(&self, ino: InodeId, name: &[u8]) -> Option<Vec<u8>> {
        let trashed = self.trash.get(ino)?;
        match Setting::by_name(name)? {
            Setting::TrashOrigin => Some(trashed.origin.to_vec()),
            Setting::TrashExpires => {
                let seconds = trashed.expires.0.div_euclid(1_000_000_000);
                Some(seconds.to_string().into_bytes())
            }
            _ => None,
        }
    }

    /// The value of a setting: the one in effect for a file, the one that is set for a directory.
    fn setting(&self, inode: &Inode, name: &[u8]) -> Option<Vec<u8>> {
        let setting = Setting::by_name(name)?;
        if let Body::Directory(directory) = &inode.body {
            let number = match setting {
                Setting::QuotaBytes => directory.quota.bytes,
                Setting::QuotaFiles => directory.quota.inodes,
                Setting::UsedBytes => Some(directory.used.bytes),
                Setting::UsedFiles => Some(directory.used.inodes),
                Setting::TrashSeconds => directory.trash_s.map(u64::from),
                Setting::LifetimeSeconds => directory.lifetime_s.map(|it| it.get().into()),
                _ => None,
            };
            if let Some(number) = number {
                return Some(number.to_string().into_bytes());
            }
            if !inode.settings.is_set(setting) {
                return None;
            }
        }
        if let Some(number) = inode.settings.number(setting) {
            return Some(number.to_string().into_bytes());
        }
        let rules = inode.settings.rules(self.default_rules());
        settings::text(setting, &rules).map(String::into_bytes)
    }

    pub(super) fn list_xattr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<MetaReply, FsError> {
        let inode = self.inodes.get(ino)?;
        let stored = inode.xattrs.iter().flat_map(|xattrs| xattrs.iter());
        let mut names: Vec<_> = stored
            .map(|(name, _)| name)
            .filter(|name| !name.starts_with(b"trusted.") || permissions::is_root(credentials))
            .map(<[u8]>::to_vec)
            .collect();
        names.extend(
            Setting::STORED
                .into_iter()
                .filter(|&setting| is_set(inode, setting))
                .map(|setting| setting.name().to_vec()),
        );
        Ok(MetaReply::Names(names))
    }

    pub(super) fn set_xattr(
        &mut self,
        call: &Call,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        mode: SetXattrMode,
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let kind = kind_of(name)?;
        let inode = self.inodes.get_mut(ino)?;
        check_write(call.credentials, inode, kind)?;
        if name.starts_with(settings::PREFIX) {
            let setting = known_setting(name)?;
            check_mode(mode, is_set(inode, setting))?;
            if is_quota(setting) {
                let quota = settings::parse_number(value)?;
                self.set_quota(call, ino, setting, Some(quota))?;
            } else if setting == Setting::TrashSeconds {
                let seconds = settings::parse_number(value)?;
                self.set_retention(ino, Some(seconds))?;
            } else if setting == Setting::LifetimeSeconds {
                let seconds = settings::parse_number(value)?;
                self.set_lifetime(ino, Some(seconds))?;
            } else {
                let mut changed = inode.settings;
                changed.set(setting, value)?;
                self.change_settings(ino, changed);
            }
        } else {
            check_mode(mode, inode.xattr(name).is_some())?;
            let empty = Xattrs::default();
            inode
                .xattrs
                .as_deref()
                .unwrap_or(&empty)
                .check_room(name, value)?;
            inode.xattrs.get_or_insert_default().insert(name, value);
        }
        Ok(self.xattr_changed(call, ino, effects))
    }

    pub(super) fn remove_xattr(
        &mut self,
        call: &Call,
        ino: InodeId,
        name: &[u8],
        effects: &mut Effects,
    ) -> Result<MetaReply, FsError> {
        let kind = kind_of(name)?;
        let inode = self.inodes.get_mut(ino)?;
        check_write(call.credentials, inode, kind)?;
        if name.starts_with(settings::PREFIX) {
            let setting = known_setting(name)?;
            if !Setting::STORED.contains(&setting) {
                return Err(FsError::NotPermitted);
            }
            if !is_set(inode, setting) {
                return Err(FsError::NoAttribute);
            }
            if is_quota(setting) {
                self.set_quota(call, ino, setting, None)?;
            } else if setting == Setting::TrashSeconds {
                self.set_retention(ino, None)?;
            } else if setting == Setting::LifetimeSeconds {
                self.set_lifetime(ino, None)?;
            } else {
                let mut changed = inode.settings;
                changed.clear(setting);
                self.change_settings(ino, changed);
            }
        } else {
            let xattrs = inode.xattrs.as_deref_mut().ok_or(FsError::NoAttribute)?;
            if xattrs.get(name).is_none() {
                return Err(FsError::NoAttribute);
            }
            xattrs.remove(name);
            if xattrs.values.is_empty() {
                inode.xattrs = None;
            }
        }
        Ok(self.xattr_changed(call, ino, effects))
    }

    /// Sets or removes a quota. Existing files stay, even if they exceed it.
    fn set_quota(
        &mut self,
        call: &Call,
        ino: InodeId,
        setting: Setting,
        value: Option<u64>,
    ) -> Result<(), FsError> {
        let Body::Directory(directory) = &mut self.inodes.get_mut(ino)?.body else {
            return Err(FsError::NotADirectory);
        };
        if !permissions::is_root(call.credentials) {
            return Err(FsError::NotPermitted);
        }
        let had_one = !directory.quota.is_unlimited();
        match setting {
            Setting::QuotaBytes => directory.quota.bytes = value,
            _ => directory.quota.inodes = value,
        }
        self.directories_with_quota += u64::from(!directory.quota.is_unlimited());
        self.directories_with_quota -= u64::from(had_one);
        let (with_quota, all) = (self.directories_with_quota.get(), self.directories.get());
        assert!(
            with_quota <= all,
            "{with_quota} of {all} directories have a quota"
        );
        Ok(())
    }

    /// Sets how long the trash keeps files removed from a directory; with none, the ancestors decide.
    fn set_retention(&mut self, ino: InodeId, seconds: Option<u32>) -> Result<(), FsError> {
        let Body::Directory(directory) = &mut self.inodes.get_mut(ino)?.body else {
            return Err(FsError::NotADirectory);
        };
        let before = std::mem::replace(&mut directory.trash_s, seconds);
        self.directories_with_trash += u64::from(seconds.is_some());
        self.directories_with_trash -= u64::from(before.is_some());
        Ok(())
    }

    fn xattr_changed(&mut self, call: &Call, ino: InodeId, effects: &mut Effects) -> MetaReply {
        self.inodes.known_mut(ino).ctime = call.now;
        effects.inodes.push(ino);
        MetaReply::Done
    }
}

fn is_quota(setting: Setting) -> bool {
    matches!(setting, Setting::QuotaBytes | Setting::QuotaFiles)
}

fn is_set(inode: &Inode, setting: Setting) -> bool {
    match (&inode.body, setting) {
        (Body::Directory(directory), Setting::QuotaBytes) => directory.quota.bytes.is_some(),
        (Body::Directory(directory), Setting::QuotaFiles) => directory.quota.inodes.is_some(),
        (Body::Directory(directory), Setting::TrashSeconds) => directory.trash_s.is_some(),
        (Body::Directory(directory), Setting::LifetimeSeconds) => directory.lifetime_s.is_some(),
        _ => inode.settings.is_set(setting),
    }
}

fn known_setting(name: &[u8]) -> Result<Setting, FsError> {
    Setting::by_name(name).ok_or_else(|| {
        FsError::InvalidArgument(
            "the settings are user.harvestfs.replication, .durability, .class, .raise_replication, \
             .raise_after_s, .lifetime_s, .quota_bytes, .quota_files and .trash_s"
                .into(),
        )
    })
}
