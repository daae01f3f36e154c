//! Backups of the namespace: one file with the state that a namenode had committed at one moment, from
//! which a namenode's directory can be made when all namenodes are lost.
//!
//! # File
//!
//! Integers are little-endian, checksums CRC-32 (IEEE):
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic: `HFSBKUP\0` |
//! | 8 | 4 | format version, 1 |
//! | 12 | 4 | length of the description, at most 64 KiB |
//! | 16 | 4 | checksum of bytes 0..16 and of the description |
//! | 20 | | description: [`BackupContent`], by postcard |
//!
//! Then parts: length (4 bytes, at most 1 MiB), checksum of the number of the part (8 bytes, from 0), of the
//! length and of the payload (4 bytes), payload. Concatenated, the payloads are the file of a snapshot of the
//! [journal](crate::journal), which has checksums of its own. The last part has the length 0, and is followed by
//! the SHA-256 of everything before (32 bytes); then the file ends. Truncation at any point is detected.
//!
//! A backup contains the whole namespace: names, owners, attributes, and where data is. It contains no data and
//! no keys.

mod reader;
#[cfg(test)]
mod tests;
mod writer;

use std::io;

use harvestfs_protocol::backup::BackupContent;

use crate::journal::JournalError;

pub use reader::{BackupReader, verify};
pub use writer::BackupWriter;

const MAGIC: [u8; 8] = *b"HFSBKUP\0";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 20;
const DESCRIPTION_BYTES_MAX: usize = 64 << 10;
const PART_BYTES_MAX: usize = 1 << 20;
const PART_HEADER_BYTES: usize = 8;
const DIGEST_BYTES: usize = 32;

/// Why a file cannot be used as a backup.
#[derive(Debug, thiserror::Error)]
pub enum BackupError {
    /// It cannot be read.
    #[error("it cannot be read")]
    Io(#[from] io::Error),
    /// It is no backup.
    #[error("it is no backup of a namenode")]
    Other,
    /// It was written in another version of the format.
    #[error("it has format version {found}; this software reads version {VERSION}")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// It is damaged or truncated.
    #[error("it is damaged or cut off at byte {offset}: {reason}")]
    Damaged {
        /// The byte offset at which the damage was detected.
        offset: u64,
        /// What is wrong.
        reason: String,
    },
    /// The file is intact, but the snapshot in it was already damaged, or not the described one, when the
    /// backup was made.
    #[error("what it contains cannot be used")]
    Snapshot(#[from] JournalError),
}

impl BackupError {
    /// Converts the error of reading a snapshot through a [`BackupReader`].
    pub(crate) fn of_snapshot(error: JournalError) -> Self {
        match error {
            JournalError::Io { source, .. } => Self::of_read(source),
            other => Self::Snapshot(other),
        }
    }

    /// Converts the error of a read from a [`BackupReader`].
    pub(crate) fn of_read(error: io::Error) -> Self {
        match error.downcast::<Self>() {
            Ok(own) => own,
            Err(other) => Self::Io(other),
        }
    }
}

/// The checksum of the fixed part of the header and of the description.
fn header_checksum(fixed: &[u8], description: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(fixed);
    hasher.update(description);
    hasher.finalize()
}

fn part_checksum(number: u64, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&number.to_le_bytes());
    hasher.update(&(payload.len() as u32).to_le_bytes());
    hasher.update(payload);
    hasher.finalize()
}

fn encode_description(content: &BackupContent) -> Vec<u8> {
    // Encoding fails only for sequences of unknown length, and when memory is exhausted.
    postcard::to_extend(content, Vec::new()).expect("plain values are encoded")
}
