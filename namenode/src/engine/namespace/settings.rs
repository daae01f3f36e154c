//! Settings of files and directories: the extended attributes `user.harvestfs.*`. Those for the placement
//! of blocks are inherited; quotas and lifetimes belong to the directory on which they are set.

use std::num::{NonZeroU8, NonZeroU32};
use std::str::FromStr;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::limits::REPLICATION_MAX;
use harvestfs_protocol::types::{Durability, PlacementRules, StorageClass};
use serde::{Deserialize, Serialize};

/// The prefix of the name of every setting.
pub(super) const PREFIX: &[u8] = b"user.harvestfs.";

/// A setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setting {
    Replication,
    Durability,
    Class,
    /// The final number of replicas of a file.
    RaiseReplication,
    /// The time from the file's last change until it gets them.
    RaiseAfterSeconds,
    QuotaBytes,
    QuotaFiles,
    /// How long each entry of a directory stays after its last change.
    LifetimeSeconds,
    /// How long the trash keeps files removed from a directory.
    TrashSeconds,
    /// The former path of an inode in the trash: read-only.
    TrashOrigin,
    /// The time until which it can be restored: read-only.
    TrashExpires,
    /// Bytes below a directory: read-only.
    UsedBytes,
    /// Inodes below a directory: read-only.
    UsedFiles,
    /// Where the replicas are: read-only, answered by the server.
    Locations,
}

impl Setting {
    pub const STORED: [Self; 9] = [
        Self::Replication,
        Self::Durability,
        Self::Class,
        Self::RaiseReplication,
        Self::RaiseAfterSeconds,
        Self::LifetimeSeconds,
        Self::QuotaBytes,
        Self::QuotaFiles,
        Self::TrashSeconds,
    ];

    pub fn name(self) -> &'static [u8] {
        match self {
            Self::Replication => b"user.harvestfs.replication",
            Self::Durability => b"user.harvestfs.durability",
            Self::Class => b"user.harvestfs.class",
            Self::RaiseReplication => b"user.harvestfs.raise_replication",
            Self::RaiseAfterSeconds => b"user.harvestfs.raise_after_s",
            Self::LifetimeSeconds => b"user.harvestfs.lifetime_s",
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

    /// Whether files inherit it from the directories above.
    fn is_inherited(self) -> bool {
        use Setting::{Class, Durability, RaiseAfterSeconds, RaiseReplication, Replication};
        matches!(
            self,
            Replication | Durability | Class | RaiseReplication | RaiseAfterSeconds
        )
    }

    pub fn by_name(name: &[u8]) -> Option<Self> {
        Self::STORED
            .into_iter()
            .chain([Self::TrashOrigin, Self::TrashExpires])
            .chain([Self::UsedBytes, Self::UsedFiles, Self::Locations])
            .find(|setting| setting.name() == name)
    }
}

/// Seconds after its last change until a file gets its final number of replicas, unless a setting
/// overrides it: more than the time between two commits of a file that is being written.
const RAISE_AFTER_S: u32 = 60;

/// The settings of one inode for the placement of blocks; none by default. (The first three fields were
/// serialized before the others existed, so they are encoded without them.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Settings {
    replication: Option<NonZeroU8>,
    durability: Option<Durability>,
    class: Option<StorageClass>,
    #[serde(skip)]
    raise_replication: Option<NonZeroU8>,
    #[serde(skip)]
    raise_after_s: Option<NonZeroU32>,
}

impl Settings {
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Whether every setting is set, so that nothing is left to inherit.
    pub fn is_complete(self) -> bool {
        Setting::STORED
            .into_iter()
            .filter(|setting| setting.is_inherited())
            .all(|setting| self.is_set(setting))
    }

    /// These settings, and those of `other` where these have none.
    pub fn or(self, other: Self) -> Self {
        Self {
            replication: self.replication.or(other.replication),
            durability: self.durability.or(other.durability),
            class: self.class.or(other.class),
            raise_replication: self.raise_replication.or(other.raise_replication),
            raise_after_s: self.raise_after_s.or(other.raise_after_s),
        }
    }

    /// The final number of replicas of a file with these settings, and the seconds after its last change
    /// until it gets them; none when it has as many already.
    pub fn raise(self, default: PlacementRules) -> Option<(NonZeroU8, u32)> {
        let replication = self.raise_replication?;
        let after_s = self.raise_after_s.map_or(RAISE_AFTER_S, NonZeroU32::get);
        (replication.get() > self.rules(default).replication).then_some((replication, after_s))
    }

    /// These settings after the replication was raised.
    pub fn raised(self) -> Self {
        assert!(
            self.raise_replication.is_some(),
            "nothing of {self:?} was to be raised"
        );
        Self {
            replication: self.raise_replication.or(self.replication),
            raise_replication: None,
            raise_after_s: None,
            ..self
        }
    }

    /// The settings for raising, for the serialized state.
    pub fn raise_parts(self) -> (Option<NonZeroU8>, Option<NonZeroU32>) {
        (self.raise_replication, self.raise_after_s)
    }

    /// The reverse of [`Self::raise_parts`].
    pub fn set_raise_parts(&mut self, parts: (Option<NonZeroU8>, Option<NonZeroU32>)) {
        (self.raise_replication, self.raise_after_s) = parts;
    }

    /// The value of a setting for raising, if it is set; none for the placement rules.
    pub fn number(self, setting: Setting) -> Option<u64> {
        match setting {
            Setting::RaiseReplication => self.raise_replication.map(|it| it.get().into()),
            Setting::RaiseAfterSeconds => self.raise_after_s.map(|it| it.get().into()),
            _ => None,
        }
    }

    /// The settings that result in these rules, which [`check_rules`] has accepted.
    pub fn from_rules(rules: &PlacementRules) -> Self {
        assert_ne!(rules.replication, 0, "{rules:?} ask for no replica");
        Self {
            replication: NonZeroU8::new(rules.replication),
            durability: Some(rules.durability),
            class: rules.class,
            ..Self::default()
        }
    }

    /// The placement rules for blocks that result from these settings.
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
            setting => self.number(setting).is_some(),
        }
    }

    pub fn clear(&mut self, setting: Setting) {
        match setting {
            Setting::Replication => self.replication = None,
            Setting::Durability => self.durability = None,
            Setting::Class => self.class = None,
            Setting::RaiseReplication => self.raise_replication = None,
            Setting::RaiseAfterSeconds => self.raise_after_s = None,
            _ => {}
        }
    }

    /// Sets a setting from its text.
    pub fn set(&mut self, setting: Setting, value: &[u8]) -> Result<(), FsError> {
        match setting {
            Setting::Replication => self.replication = Some(parse_replication(value)?),
            Setting::Durability => self.durability = Some(parse_durability(value)?),
            Setting::Class => self.class = Some(parse_class(value)?),
            Setting::RaiseReplication => self.raise_replication = Some(parse_replication(value)?),
            Setting::RaiseAfterSeconds => self.raise_after_s = Some(parse_number(value)?),
            _ => return Err(FsError::NotPermitted),
        }
        Ok(())
    }
}

/// The text of a setting; none for a class that is not set.
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

/// Parses the text of a quota or a time; the type excludes 0 where it makes no sense.
pub(super) fn parse_number<T: FromStr>(value: &[u8]) -> Result<T, FsError> {
    std::str::from_utf8(value)
        .ok()
        .and_then(|text| text.parse().ok())
        .ok_or_else(|| {
            FsError::InvalidArgument(
                "it is a number, a time one of seconds; remove the attribute for none".into(),
            )
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
