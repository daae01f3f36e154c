//! Small text files that end with a checksum of the preceding text.

use std::io;
use std::path::Path;

use harvestfs_protocol::durable;

/// Durably replaces a file by one with this body, which must end with a newline.
///
/// # Errors
/// The disk's error.
pub fn replace(path: &Path, body: &str) -> io::Result<()> {
    durable::replace_file(path, with_checksum(body).as_bytes(), 0o644)
}

/// Returns the text to write: the body, which must end with a newline, and its checksum.
pub fn with_checksum(body: &str) -> String {
    format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()))
}

/// Why a text cannot be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// It was truncated, or is something else.
    #[error("it has no checksum")]
    NoChecksum,
    /// It was changed.
    #[error("its checksum does not match")]
    Mismatch,
}

/// Returns the body of a text.
///
/// # Errors
/// Why the text cannot be trusted.
pub fn body(text: &str) -> Result<&str, Untrusted> {
    let (body, _) = text.split_once("crc32 ").ok_or(Untrusted::NoChecksum)?;
    if text == with_checksum(body) {
        Ok(body)
    } else {
        Err(Untrusted::Mismatch)
    }
}
