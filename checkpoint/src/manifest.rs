//! The manifest, which lists the contents of a checkpoint. It is stored next to the images as
//! `manifest.json` and written last: a directory without one is not a checkpoint.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The version that this release reads and writes. Version 1 had SHA-256 in its tables of hashes.
pub const MANIFEST_VERSION: u32 = 2;
/// Name of the manifest's file.
pub const MANIFEST_FILE: &str = "manifest.json";
/// Maximum length of the file in bytes: a process tree with 10,000 images needs about 2 MiB.
pub const MANIFEST_BYTES_MAX: u64 = 64 << 20;
/// Maximum length of a job's name in bytes.
pub const JOB_NAME_BYTES_MAX: usize = 128;

/// The name of a job, which is also that of its directory: letters, digits, `.`, `_` and `-`, not
/// starting with a dot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct JobName(String);

impl JobName {
    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for JobName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for JobName {
    type Error = ManifestError;

    fn try_from(name: String) -> Result<Self, ManifestError> {
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let is_name = !name.is_empty()
            && name.len() <= JOB_NAME_BYTES_MAX
            && !name.starts_with('.')
            && name.chars().all(is_plain);
        if is_name {
            Ok(Self(name))
        } else {
            Err(ManifestError::JobName(name))
        }
    }
}

impl From<JobName> for String {
    fn from(name: JobName) -> Self {
        name.0
    }
}

impl FromStr for JobName {
    type Err = ManifestError;

    fn from_str(name: &str) -> Result<Self, ManifestError> {
        name.to_owned().try_into()
    }
}

/// Why a manifest is not usable.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// Written by another release.
    #[error(
        "its manifest has version {version}, and this harvestfs reads version {MANIFEST_VERSION}: \
         use the release that wrote it"
    )]
    Version {
        /// The version in the manifest.
        version: u32,
    },
    /// The file is not a manifest.
    #[error("its manifest is damaged: {0}")]
    Damaged(#[from] serde_json::Error),
    /// An image's name could refer to a file outside the directory.
    #[error("its manifest names an image `{0}`, which is not a plain file name")]
    ImageName(String),
    /// Not a name for a job.
    #[error(
        "`{0}` cannot be the name of a job: use letters, digits, `.`, `_` and `-`, not starting \
         with a dot, at most {JOB_NAME_BYTES_MAX}"
    )]
    JobName(String),
}

/// Something that CRIU does only with permission; a restore needs the same permissions as the dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allow {
    /// The job was started from a shell, and shares its session and terminal.
    ShellJob,
    /// The job has TCP connections that are to be kept.
    TcpEstablished,
    /// The job is connected to Unix sockets of processes outside it.
    ExtUnixSk,
    /// The job holds file locks.
    FileLocks,
}

impl Allow {
    /// All permissions.
    pub const ALL: [Self; 4] = [
        Self::ShellJob,
        Self::TcpEstablished,
        Self::ExtUnixSk,
        Self::FileLocks,
    ];

    /// The option of CRIU that grants the permission.
    #[must_use]
    pub fn option(self) -> &'static str {
        match self {
            Self::ShellJob => "--shell-job",
            Self::TcpEstablished => "--tcp-established",
            Self::ExtUnixSk => "--ext-unix-sk",
            Self::FileLocks => "--file-locks",
        }
    }
}

impl FromStr for Allow {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let known = |allow: &Self| allow.option().strip_prefix("--") == Some(text);
        Self::ALL.into_iter().find(known).ok_or_else(|| {
            format!(
                "`{text}` cannot be allowed; write `shell-job`, `tcp-established`, `ext-unix-sk` \
                 or `file-locks`"
            )
        })
    }
}

/// One image of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Image {
    /// Its file name, in the manifest's directory.
    pub name: String,
    /// Its length in bytes.
    pub size_bytes: u64,
    /// Bytes of it that were sent and stored for this checkpoint; the rest is shared with the parent, or
    /// consists of zeros.
    pub sent_bytes: u64,
    /// SHA-256, in hex, of its content; for an image of pages, that of its table of hashes.
    pub sha256: String,
}

impl Image {
    /// Whether it consists of pages of memory, and has a table of their hashes next to it.
    #[must_use]
    pub fn has_pages(&self) -> bool {
        is_pages_image(&self.name)
    }

    /// Name of the table of page hashes.
    #[must_use]
    pub fn table_name(&self) -> String {
        table_name(&self.name)
    }
}

/// Whether the CRIU image of that name consists of pages of memory.
#[must_use]
pub fn is_pages_image(name: &str) -> bool {
    name.starts_with("pages-") && name.ends_with(".img")
}

/// Name of the table of page hashes of an image.
#[must_use]
pub fn table_name(image: &str) -> String {
    format!("{image}.hashes")
}

/// Description of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`MANIFEST_VERSION`] of the release that wrote it.
    pub version: u32,
    /// The job.
    pub job: JobName,
    /// Its number in the chain, from 1.
    pub number: u32,
    /// Number of the checkpoint that it was compared with and shares pages with. It can be restored without
    /// that one.
    pub parent: Option<u32>,
    /// How many earlier checkpoints may share pages with it; 0 if it was stored whole.
    pub depth: u32,
    /// The node on which the job ran.
    pub node: String,
    /// Id of the job's first process.
    pub pid: i32,
    /// When it was made: milliseconds since 1970-01-01T00:00:00Z.
    pub created_unix_ms: u64,
    /// Milliseconds for which the job was stopped for it.
    pub stopped_ms: u64,
    /// Milliseconds of CPU time that the job's processes had used since they were started or restored.
    pub progress_ms: u64,
    /// Whether the job continued afterwards.
    pub left_running: bool,
    /// Version of CRIU that made it.
    pub criu: String,
    /// What CRIU was allowed to do.
    pub allow: Vec<Allow>,
    /// The images.
    pub images: Vec<Image>,
}

impl Manifest {
    /// The image of that name.
    #[must_use]
    pub fn image(&self, name: &str) -> Option<&Image> {
        self.images.iter().find(|image| image.name == name)
    }

    /// Decodes the content of the file.
    ///
    /// # Errors
    /// When it was written by another release, is damaged, or names an image that is not a plain file name.
    pub fn decode(bytes: &[u8]) -> Result<Self, ManifestError> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let Version { version } = serde_json::from_slice(bytes)?;
        if version != MANIFEST_VERSION {
            return Err(ManifestError::Version { version });
        }
        let manifest: Self = serde_json::from_slice(bytes)?;
        for image in &manifest.images {
            check_image_name(&image.name)?;
        }
        Ok(manifest)
    }

    /// Encodes it as the content of the file.
    ///
    /// # Errors
    /// Never for what [`Manifest::decode`] accepts.
    pub fn encode(&self) -> Result<Vec<u8>, ManifestError> {
        let mut bytes = serde_json::to_vec_pretty(self)?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Total length of all images in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.images.iter().map(|image| image.size_bytes).sum()
    }

    /// Bytes that were sent and stored for it.
    #[must_use]
    pub fn sent_bytes(&self) -> u64 {
        self.images.iter().map(|image| image.sent_bytes).sum()
    }
}

/// Refuses an image's name that is not a plain file name.
///
/// # Errors
/// [`ManifestError::ImageName`]
pub fn check_image_name(name: &str) -> Result<(), ManifestError> {
    let is_plain = !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
    if is_plain {
        Ok(())
    } else {
        Err(ManifestError::ImageName(name.to_owned()))
    }
}

#[cfg(test)]
impl Manifest {
    /// The manifest of the first checkpoint of a job that continued.
    pub(crate) fn sample(images: Vec<Image>) -> Self {
        Self {
            version: MANIFEST_VERSION,
            job: "job".parse().expect("a name"),
            number: 1,
            parent: None,
            depth: 0,
            node: "here".into(),
            pid: 42,
            created_unix_ms: 1,
            stopped_ms: 2,
            progress_ms: 3,
            left_running: true,
            criu: "4.1".into(),
            allow: Vec::new(),
            images,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn manifest() -> Manifest {
        let image = |name: &str, size_bytes, sent_bytes| Image {
            name: name.into(),
            size_bytes,
            sent_bytes,
            sha256: "00".into(),
        };
        Manifest {
            number: 2,
            parent: Some(1),
            depth: 1,
            allow: vec![Allow::ShellJob],
            ..Manifest::sample(vec![
                image("pages-1.img", 8192, 4096),
                image("core-42.img", 10, 10),
            ])
        }
    }

    #[test]
    fn a_manifest_is_read_as_it_was_written() {
        let manifest = manifest();
        let bytes = manifest.encode().expect("it can be written");
        assert_eq!(Manifest::decode(&bytes).expect("it is whole"), manifest);
        assert_eq!((manifest.size_bytes(), manifest.sent_bytes()), (8202, 4106));
    }

    #[test]
    fn a_manifest_of_another_version_is_refused_with_any_content() {
        for other in [MANIFEST_VERSION - 1, MANIFEST_VERSION + 1] {
            let manifest = format!(r#"{{"version": {other}, "shape": "unknown"}}"#);
            let error = Manifest::decode(manifest.as_bytes());
            assert!(matches!(error, Err(ManifestError::Version { version }) if version == other));
        }
    }

    #[test]
    fn every_cut_manifest_is_damaged() {
        let bytes = manifest().encode().expect("it can be written");
        // Without the last line's end it is still whole.
        for length in 0..bytes.len() - 1 {
            let error = Manifest::decode(&bytes[..length]);
            assert!(matches!(error, Err(ManifestError::Damaged(_))), "{length}");
        }
    }

    #[test]
    fn no_image_leads_out_of_the_directory() {
        for name in ["../core.img", "/etc/passwd", "", ".lock", "a/b.img"] {
            let mut bad = manifest();
            bad.images[0].name = name.into();
            let bytes = bad.encode().expect("it can be written");
            let error = Manifest::decode(&bytes);
            assert!(matches!(error, Err(ManifestError::ImageName(_))), "{name}");
        }
    }

    #[test]
    fn jobs_have_plain_names() {
        for name in ["", ".x", "a/b", "a b", "ä", &"x".repeat(129)] {
            assert!(name.parse::<JobName>().is_err(), "{name}");
        }
        assert!("kmeans_2.low-priority".parse::<JobName>().is_ok());
    }
}
