//! Settings of files and directories: the extended attributes `user.harvestfs.*`. Some say how blocks
//! are placed, and are inherited; quotas are of the directory on which they are set.

use std::{num::NonZeroU8, str::FromStr};

use harvestfs_protocol::{
    error::FsError,
    limits::REPLICATION_MAX,
    types::{Durability, PlacementRules, StorageClass},
};
use serde::{Deserialize, Serialize};

/// Every setting starts with it.
pub(super) const PREFIX: &[u8] = b"user.harvestfs.";

/// Which setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    Replication,
    Durability,
    Class,
    QuotaBytes,
    QuotaFiles,
    /// How long the trash keeps what is removed from a directory.
    TrashSeconds,
    /// Where something in the trash was: read-only.
    TrashOrigin,
    /// Until when it can be restored: read-only.
    TrashExpires,
    /// Bytes below a directory: read-only.
    UsedBytes,
    /// Inodes below a directory: read-only.
    UsedFiles,
    /// Where the replicas are: read-only, answered by the server.
    Locations,
}

impl Setting {
    pub const STORED: [Self; 6] = [
        Self::Replication,
        Self::Durability,
        Self::Class,
        Self::QuotaBytes,
        Self::QuotaFiles,
        Self::TrashSeconds,
    ];

    pub fn name(self) -> &'static [u8] {
        match self {
            Self::Replication => b"user.harvestfs.replication",
            Self::Durability => b"user.harvestfs.durability",
            Self::Class => b"user.harvestfs.class",
            Self::QuotaBytes => b"user.harvestfs.quota_bytes",
            Self::QuotaFiles => b"user.harvestfs.quota_files",
            Self::TrashSeconds => b"user.harvestfs.trash_s",
            Self::TrashOrigin => b"user.harvestfs.trash_origin",
            Self::TrashExpires => b"user.harvestfs.trash_expires_s",
            Self::UsedBytes => b"user.harvestfs.used_bytes",
            Self::UsedFiles => b"user.harvestfs.used_files",
            Self::Locations => b"user.harvestfs.locations",
        }
    }

    pub fn by_name(name: &[u8]) -> Option<Self> {
        Self::STORED
            .into_iter()
            .chain([Self::TrashOrigin, Self::TrashExpires])
            .chain([Self::UsedBytes, Self::UsedFiles, Self::Locations])
            .find(|setting| setting.name() == name)
    }
}

/// The settings of one inode that say how blocks are placed; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Settings {
    replication: Option<NonZeroU8>,
    durability: Option<Durability>,
    class: Option<StorageClass>,
}

impl Settings {
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Whether every setting is set, so that nothing is left to inherit.
    pub fn is_complete(self) -> bool {
        self.replication.is_some() && self.durability.is_some() && self.class.is_some()
    }

    /// These, and those of `other` where these say nothing.
    pub fn or(self, other: Self) -> Self {
        Self {
            replication: self.replication.or(other.replication),
            durability: self.durability.or(other.durability),
            class: self.class.or(other.class),
        }
    }

    /// Those from which these rules follow.
    pub fn from_rules(rules: &PlacementRules) -> Self {
        Self {
            replication: NonZeroU8::new(rules.replication),
            durability: Some(rules.durability),
            class: rules.class,
        }
    }

    /// The rules that follow for blocks.
    pub fn rules(self, default: PlacementRules) -> PlacementRules {
        PlacementRules {
            replication: self.replication.map_or(default.replication, NonZeroU8::get),
            durability: self.durability.unwrap_or(default.durability),
            class: self.class.or(default.class),
        }
    }

    pub fn is_set(self, setting: Setting) -> bool {
        match setting {
            Setting::Replication => self.replication.is_some(),
            Setting::Durability => self.durability.is_some(),
            Setting::Class => self.class.is_some(),
            _ => false,
        }
    }

    pub fn clear(&mut self, setting: Setting) {
        match setting {
            Setting::Replication => self.replication = None,
            Setting::Durability => self.durability = None,
            Setting::Class => self.class = None,
            _ => {}
        }
    }

    /// Sets one from its text.
    pub fn set(&mut self, setting: Setting, value: &[u8]) -> Result<(), FsError> {
        match setting {
            Setting::Replication => self.replication = Some(parse_replication(value)?),
            Setting::Durability => self.durability = Some(parse_durability(value)?),
            Setting::Class => self.class = Some(parse_class(value)?),
            _ => return Err(FsError::NotPermitted),
        }
        Ok(())
    }
}

/// The text of a setting; none for a class that nobody asked for.
pub(super) fn text(setting: Setting, rules: &PlacementRules) -> Option<String> {
    match setting {
        Setting::Replication => Some(rules.replication.to_string()),
        Setting::Durability => Some(
            match rules.durability {
                Durability::Strict => "strict",
                Durability::Space => "space",
            }
            .to_owned(),
        ),
        Setting::Class => rules.class.map(|class| {
            match class {
                StorageClass::Disk => "disk",
                StorageClass::Ssd => "ssd",
                StorageClass::Memory => "memory",
            }
            .to_owned()
        }),
        _ => None,
    }
}

/// Refuses rules that no block can have.
pub(super) fn check_rules(rules: &PlacementRules) -> Result<(), FsError> {
    if (1..=REPLICATION_MAX).contains(&rules.replication) {
        Ok(())
    } else {
        Err(replication_error())
    }
}

fn replication_error() -> FsError {
    FsError::InvalidArgument(format!(
        "replication is a number from 1 to {REPLICATION_MAX}"
    ))
}

fn parse_replication(value: &[u8]) -> Result<NonZeroU8, FsError> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .filter(|number: &NonZeroU8| number.get() <= REPLICATION_MAX)
        .ok_or_else(replication_error)
}

/// A quota or a time in seconds: the text of a number.
pub(super) fn parse_number<T: FromStr>(value: &[u8]) -> Result<T, FsError> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| {
            FsError::InvalidArgument("it is a number; remove the attribute for none".into())
        })
}

fn parse_durability(value: &[u8]) -> Result<Durability, FsError> {
    match value {
        b"strict" => Ok(Durability::Strict),
        b"space" => Ok(Durability::Space),
        _ => Err(FsError::InvalidArgument(
            "durability is strict or space".into(),
        )),
    }
}

fn parse_class(value: &[u8]) -> Result<StorageClass, FsError> {
    match value {
        b"disk" => Ok(StorageClass::Disk),
        b"ssd" => Ok(StorageClass::Ssd),
        b"memory" => Ok(StorageClass::Memory),
        _ => Err(FsError::InvalidArgument(
            "class is disk, ssd or memory".into(),
        )),
    }
}
