//! The file that identifies the volume in a directory.
//!
//! ```text
//! harvestfs-volume 1
//! storage 0123456789abcdef0123456789abcdef
//! cluster 0123456789abcdef0123456789abcdef      ("-" until the first registration)
//! server dn1
//! crc32 01234567                                (of everything above)
//! ```

use std::fs::File;
use std::io::Read;
use std::path::Path;

use harvestfs_protocol::ids::{ClusterId, StorageId};

use super::checked_text;
use super::error::VolumeError;

/// Name of the file.
pub const VERSION_FILE: &str = "VERSION";
const MAGIC: &str = "harvestfs-volume";
const FORMAT_VERSION: u32 = 1;
/// More than any version file contains: a server's name has limited length.
const FILE_BYTES_MAX: u64 = 4096;

/// The contents of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VersionFile {
    /// The volume.
    pub storage: StorageId,
    /// The cluster that it belongs to, once that is known.
    pub cluster: Option<ClusterId>,
    /// The server that it belongs to.
    pub server: String,
}

impl VersionFile {
    /// Reads the file of the volume at `dir`; `None` if there is none.
    pub fn read(dir: &Path) -> Result<Option<Self>, VolumeError> {
        let path = dir.join(VERSION_FILE);
        let mut bytes = Vec::new();
        match File::open(&path) {
            Ok(file) => file
                .take(FILE_BYTES_MAX + 1)
                .read_to_end(&mut bytes)
                .map_err(VolumeError::io(&path))?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(VolumeError::io(&path)(error)),
        };
        Self::parse(&bytes, &path).map(Some)
    }

    /// Writes the file durably, replacing an existing one.
    pub fn write(&self, dir: &Path) -> Result<(), VolumeError> {
        let path = dir.join(VERSION_FILE);
        checked_text::replace(&path, &self.body()).map_err(VolumeError::io(&path))
    }

    fn body(&self) -> String {
        let cluster = match self.cluster {
            Some(cluster) => cluster.to_string(),
            None => "-".to_owned(),
        };
        format!(
            "{MAGIC} {FORMAT_VERSION}\nstorage {}\ncluster {cluster}\nserver {}\n",
            self.storage, self.server
        )
    }

    fn parse(bytes: &[u8], path: &Path) -> Result<Self, VolumeError> {
        let corrupt = |reason: &str| VolumeError::CorruptVersionFile {
            path: path.to_owned(),
            reason: reason.to_owned(),
        };
        let text = std::str::from_utf8(bytes).map_err(|_| corrupt("it is not text"))?;
        let body = checked_text::body(text).map_err(|error| corrupt(&error.to_string()))?;
        let mut lines = body.lines();
        let mut field = |name: &str| {
            lines
                .next()
                .and_then(|line| line.strip_prefix(name)?.strip_prefix(' '))
                .ok_or_else(|| corrupt(&format!("it has no {name}")))
        };
        let found: u32 = field(MAGIC)?
            .parse()
            .map_err(|_| corrupt("its format version is no number"))?;
        if found != FORMAT_VERSION {
            return Err(VolumeError::UnknownFormat {
                path: path.to_owned(),
                found,
                known: FORMAT_VERSION,
            });
        }
        let id = |text: &str| u128::from_str_radix(text, 16).map_err(|_| corrupt("an id is wrong"));
        Ok(Self {
            storage: StorageId(id(field("storage")?)?),
            cluster: match field("cluster")? {
                "-" => None,
                text => Some(ClusterId(id(text)?)),
            },
            server: field("server")?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version() -> VersionFile {
        VersionFile {
            storage: StorageId(7),
            cluster: None,
            server: "dn1".into(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(VersionFile::read(dir.path()).unwrap(), None);
        let mut version = version();
        for cluster in [None, Some(ClusterId(8))] {
            version.cluster = cluster;
            version.write(dir.path()).unwrap();
            assert_eq!(
                VersionFile::read(dir.path()).unwrap().as_ref(),
                Some(&version)
            );
        }
    }

    #[test]
    fn any_changed_byte_is_noticed() {
        let good = checked_text::with_checksum(&version().body()).into_bytes();
        let path = Path::new("VERSION");
        assert_eq!(VersionFile::parse(&good, path).unwrap(), version());
        for index in 0..good.len() {
            let mut bad = good.clone();
            bad[index] ^= 0x20;
            assert!(VersionFile::parse(&bad, path).is_err(), "byte {index}");
            assert!(VersionFile::parse(&good[..index], path).is_err());
        }
    }

    #[test]
    fn another_format_is_distinguished_from_corruption() {
        let body = "harvestfs-volume 2\nanything\n";
        let text = format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()));
        let error = VersionFile::parse(text.as_bytes(), Path::new("VERSION")).unwrap_err();
        assert!(matches!(
            error,
            VolumeError::UnknownFormat {
                found: 2,
                known: 1,
                ..
            }
        ));
    }
}
