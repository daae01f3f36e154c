//! Small text files that end with a checksum of what is before it.

use std::io;
use std::path::Path;

use harvestfs_protocol::durable;

/// Replaces a file durably by one of this body, which ends with a line end.
///
/// # Errors
/// What the disk says.
pub fn replace(path: &Path, body: &str) -> io::Result<()> {
    durable::replace_file(path, with_checksum(body).as_bytes(), 0o644)
}

/// What is to be written: the body, which ends with a line end, with its checksum.
pub fn with_checksum(body: &str) -> String {
    format!("{body}crc32 {:08x}\n", crc32fast::hash(body.as_bytes()))
}

/// Why a text is not to be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// It was cut off, or is something else.
    #[error("it has no checksum")]
    NoChecksum,
    /// It was changed.
    #[error("its checksum does not match")]
    Mismatch,
}

/// The body of a text.
///
/// # Errors
/// Why it is not to be trusted.
pub fn body(text: &str) -> Result<&str, Untrusted> {
    let (body, _) = text.split_once("crc32 ").ok_or(Untrusted::NoChecksum)?;
    if text == with_checksum(body) {
        Ok(body)
    } else {
        Err(Untrusted::Mismatch)
    }
}
