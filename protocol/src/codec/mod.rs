//! Frames: how messages and the raw data that follows them are laid out on a stream.
//!
//! ```text
//! frame:  header_len: u32 LE | data_len: u32 LE | header: header_len bytes | data: data_len bytes
//! header: one message in postcard
//! ```
//!
//! Everything here is a pure function over byte slices: no I/O, no panic on any input, and no allocation that
//! relies on a claimed length alone.

pub mod records;

use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::limits::{APPENDED_BYTES_MAX, SNAPSHOT_PART_BYTES_MAX};
use crate::version::{RELEASE_BYTES, Release, Version, Versioned, Versions};

/// Largest header in bytes. The largest messages (block reports, directory listings) are split into parts well
/// below it, and a corrupt length is noticed before much memory is allocated for it.
pub const MAX_HEADER_BYTES: usize = 1024 * 1024;
const _: () = assert!(
    2 * SNAPSHOT_PART_BYTES_MAX <= MAX_HEADER_BYTES && 2 * APPENDED_BYTES_MAX <= MAX_HEADER_BYTES,
    "what travels in parts leaves room for the rest of a header"
);

/// Largest attached data in bytes: the most that a single read or write of a block stream transfers. More per
/// frame saves nothing, and a receiver must be able to hold it.
pub const MAX_DATA_BYTES: usize = 4 * 1024 * 1024;

/// Bytes before the header: the two lengths.
pub const FRAME_PREFIX_BYTES: usize = 8;

/// Bytes of a [`Hello`], in all versions.
pub const HELLO_BYTES: usize = 12 + RELEASE_BYTES;

/// Most bytes that may follow a [`Hello`]. Each version reads the part that it knows, at the start, and skips
/// the rest.
pub const AFTER_HELLO_BYTES_MAX: usize = 4096;

/// First bytes of a [`Hello`].
const HELLO_MAGIC: [u8; 4] = *b"HVFS";

/// Errors of bytes from the wire, or of a message that is to be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Header or data are longer than the limit.
    #[error("{what} of {actual_bytes} bytes is over the limit of {max_bytes}")]
    TooLarge {
        /// `header` or `data`.
        what: &'static str,
        /// The length, as claimed or as counted.
        actual_bytes: usize,
        /// The limit.
        max_bytes: usize,
    },
    /// The bytes end before what was announced.
    #[error("truncated: {missing_bytes} bytes or more are missing")]
    Truncated {
        /// How many bytes are missing at least.
        missing_bytes: usize,
    },
    /// The bytes are not a message of the expected type.
    #[error("malformed: {reason}")]
    Malformed {
        /// What is wrong.
        reason: String,
    },
    /// The two sides have no version of the protocol in common.
    #[error(
        "this side speaks protocol version {ours}, the other side {theirs}: run releases that have one \
         in common"
    )]
    VersionMismatch {
        /// Versions of this side.
        ours: Versions,
        /// Versions of the other side.
        theirs: Versions,
    },
    /// A message exists only since a later version than the connection speaks; it was not sent.
    #[error(
        "the message exists since version {since}, and the other side speaks {spoken}: upgrade it first"
    )]
    NotSpoken {
        /// The version since which it exists.
        since: Version,
        /// The version that the connection speaks.
        spoken: Version,
    },
}

impl WireError {
    pub(crate) fn malformed(reason: impl std::fmt::Display) -> Self {
        Self::Malformed {
            reason: reason.to_string(),
        }
    }
}

/// The two lengths before a frame, checked against the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FramePrefix {
    /// Bytes of the header.
    pub header_len: usize,
    /// Bytes of the data.
    pub data_len: usize,
}

impl FramePrefix {
    /// Checks the lengths of a frame that is to be sent.
    ///
    /// # Errors
    /// [`WireError::TooLarge`].
    pub fn new(header_len: usize, data_len: usize) -> Result<Self, WireError> {
        check_length("header", header_len, MAX_HEADER_BYTES)?;
        check_length("data", data_len, MAX_DATA_BYTES)?;
        Ok(Self {
            header_len,
            data_len,
        })
    }

    /// Decodes the prefix at the start of `bytes`.
    ///
    /// # Errors
    /// [`WireError::Truncated`] or [`WireError::TooLarge`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let Some((header_len, rest)) = bytes.split_first_chunk::<4>() else {
            return Err(truncated(bytes.len(), FRAME_PREFIX_BYTES));
        };
        let Some((data_len, _)) = rest.split_first_chunk::<4>() else {
            return Err(truncated(bytes.len(), FRAME_PREFIX_BYTES));
        };
        Self::new(
            u32::from_le_bytes(*header_len) as usize,
            u32::from_le_bytes(*data_len) as usize,
        )
    }

    /// The bytes of the prefix.
    pub fn encode(self) -> [u8; FRAME_PREFIX_BYTES] {
        // Both lengths are within their limits, which fit in 32 bits.
        let lengths = (self.data_len as u64) << 32 | self.header_len as u64;
        lengths.to_le_bytes()
    }
}

/// Appends the prefix and the header of a frame to `out`; `data_len` bytes of data must follow.
///
/// # Errors
/// [`WireError::TooLarge`] or [`WireError::Malformed`] (a message that postcard cannot express);
/// `out` is then as before.
pub fn encode_frame<M: Serialize>(
    out: &mut Vec<u8>,
    message: &M,
    data_len: usize,
) -> Result<(), WireError> {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_PREFIX_BYTES]);
    let result = encode_after_prefix(out, start, message, data_len);
    if result.is_err() {
        out.truncate(start);
    }
    result
}

fn encode_after_prefix<M: Serialize>(
    out: &mut Vec<u8>,
    start: usize,
    message: &M,
    data_len: usize,
) -> Result<(), WireError> {
    postcard::to_io(message, &mut *out).map_err(WireError::malformed)?;
    let header_start = start + FRAME_PREFIX_BYTES;
    let prefix = FramePrefix::new(out.len() - header_start, data_len)?;
    out[start..header_start].copy_from_slice(&prefix.encode());
    Ok(())
}

/// Refuses a message that does not exist in the version that a connection speaks.
///
/// # Errors
/// [`WireError::NotSpoken`].
pub fn check_spoken(message: &impl Versioned, spoken: Version) -> Result<(), WireError> {
    let since = message.since();
    if since <= spoken {
        Ok(())
    } else {
        Err(WireError::NotSpoken { since, spoken })
    }
}

/// Decodes a header, which must be exactly one message.
///
/// # Errors
/// [`WireError::Malformed`].
pub fn decode_header<M: DeserializeOwned>(header: &[u8]) -> Result<M, WireError> {
    let (message, rest) = postcard::take_from_bytes(header).map_err(WireError::malformed)?;
    if rest.is_empty() {
        Ok(message)
    } else {
        Err(WireError::malformed(format_args!(
            "{} bytes after the message",
            rest.len()
        )))
    }
}

/// Decodes the frame at the start of `bytes`: its message, its data, and the bytes that follow the frame.
///
/// # Errors
/// [`WireError::Truncated`] if `bytes` holds only a part of a frame, or the error in it.
pub fn decode_frame<M: DeserializeOwned>(bytes: &[u8]) -> Result<(M, &[u8], &[u8]), WireError> {
    let prefix = FramePrefix::decode(bytes)?;
    let body = &bytes[FRAME_PREFIX_BYTES..];
    let Some((header, rest)) = body.split_at_checked(prefix.header_len) else {
        return Err(truncated(body.len(), prefix.header_len));
    };
    let Some((data, rest)) = rest.split_at_checked(prefix.data_len) else {
        return Err(truncated(rest.len(), prefix.data_len));
    };
    Ok((decode_header(header)?, data, rest))
}

/// Cuts a stream of bytes that arrives in pieces into frames without attached data.
///
/// The buffer holds only bytes that arrived, at most one frame and one piece.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    /// Start of a frame of which more must arrive; empty while frames arrive whole.
    partial: BytesMut,
    /// Bytes that were not examined yet. They follow `partial` in the stream.
    arrived: Bytes,
}

impl FrameDecoder {
    /// An empty decoder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that arrived. Call it once [`FrameDecoder::next_frame`] returned `None`.
    pub fn push(&mut self, bytes: Bytes) {
        if !self.arrived.is_empty() {
            let before = std::mem::take(&mut self.arrived);
            self.partial.extend_from_slice(&before);
        }
        self.arrived = bytes;
    }

    /// Whether the bytes so far end between two frames.
    pub fn is_at_boundary(&self) -> bool {
        self.partial.is_empty() && self.arrived.is_empty()
    }

    /// Returns the next whole frame's message, or `None` if more bytes must arrive first.
    ///
    /// # Errors
    /// The error in the frame; the decoder must not be used after that.
    pub fn next_frame<M: DeserializeOwned>(&mut self) -> Result<Option<M>, WireError> {
        if self.partial.is_empty() {
            return match whole_frame(&self.arrived)? {
                Some(prefix) => {
                    let message = decode_header(
                        &self.arrived[FRAME_PREFIX_BYTES..FRAME_PREFIX_BYTES + prefix.header_len],
                    );
                    self.arrived.advance(FRAME_PREFIX_BYTES + prefix.header_len);
                    message.map(Some)
                }
                None => {
                    self.partial.extend_from_slice(&self.arrived);
                    self.arrived = Bytes::new();
                    Ok(None)
                }
            };
        }
        self.fill_partial_to(FRAME_PREFIX_BYTES);
        if self.partial.len() < FRAME_PREFIX_BYTES {
            return Ok(None);
        }
        let prefix = prefix_without_data(&self.partial)?;
        let frame_len = FRAME_PREFIX_BYTES + prefix.header_len;
        self.fill_partial_to(frame_len);
        if self.partial.len() < frame_len {
            return Ok(None);
        }
        let message = decode_header(&self.partial[FRAME_PREFIX_BYTES..frame_len]);
        self.partial.advance(frame_len);
        message.map(Some)
    }

    /// Moves arrived bytes to `partial` until it has `len` bytes, or all of them.
    fn fill_partial_to(&mut self, len: usize) {
        let wanted = len.saturating_sub(self.partial.len());
        let piece = self.arrived.split_to(wanted.min(self.arrived.len()));
        self.partial.extend_from_slice(&piece);
    }
}

/// Returns the prefix of the frame at the start of `bytes` if `bytes` contains the whole frame.
fn whole_frame(bytes: &[u8]) -> Result<Option<FramePrefix>, WireError> {
    if bytes.len() < FRAME_PREFIX_BYTES {
        return Ok(None);
    }
    let prefix = prefix_without_data(bytes)?;
    Ok((bytes.len() - FRAME_PREFIX_BYTES >= prefix.header_len).then_some(prefix))
}

fn prefix_without_data(bytes: &[u8]) -> Result<FramePrefix, WireError> {
    let prefix = FramePrefix::decode(bytes)?;
    check_length("data", prefix.data_len, 0)?;
    Ok(prefix)
}

/// The first message that both sides of a connection send. Its layout is the same in all versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The versions of the protocol that the sender speaks.
    pub versions: Versions,
    /// The sender's release.
    pub release: Release,
}

impl Hello {
    /// The bytes of the hello.
    pub fn encode(self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&HELLO_MAGIC);
        bytes[4..8].copy_from_slice(&self.versions.newest.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.versions.oldest.0.to_le_bytes());
        bytes[12..].copy_from_slice(&self.release.encode());
        bytes
    }

    /// Decodes a hello, and returns the bytes that follow it. Builds from before the first release sent nothing
    /// but their version.
    ///
    /// # Errors
    /// [`WireError::Truncated`], or [`WireError::Malformed`] if the sender is not a part of HarvestFS.
    pub fn decode(bytes: &[u8]) -> Result<(Self, &[u8]), WireError> {
        let too_short = || truncated(bytes.len(), HELLO_BYTES);
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or_else(too_short)?;
        if *magic != HELLO_MAGIC {
            return Err(WireError::malformed("not a HarvestFS hello"));
        }
        let (newest, rest) = rest.split_first_chunk().ok_or_else(too_short)?;
        let newest = Version(u32::from_le_bytes(*newest));
        if newest < Version::V0_2 {
            let hello = Self {
                versions: Versions::only(newest),
                release: Release::cut("unreleased"),
            };
            return Ok((hello, rest));
        }
        let (oldest, rest) = rest.split_first_chunk().ok_or_else(too_short)?;
        let (release, rest) = rest.split_first_chunk().ok_or_else(too_short)?;
        let oldest = Version(u32::from_le_bytes(*oldest));
        if oldest > newest {
            return Err(WireError::malformed(
                "the oldest version is newer than the newest",
            ));
        }
        let hello = Self {
            versions: Versions { newest, oldest },
            release: Release::decode(*release),
        };
        Ok((hello, rest))
    }

    /// Returns the version that the two sides speak with each other.
    ///
    /// # Errors
    /// [`WireError::VersionMismatch`].
    pub fn agree(self, theirs: Hello) -> Result<Version, WireError> {
        let (ours, theirs) = (self.versions, theirs.versions);
        ours.in_common(theirs)
            .ok_or(WireError::VersionMismatch { ours, theirs })
    }
}

/// First byte of every bidirectional stream: the purpose of the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// Requests and answers, many of them in flight ([`crate::transport::RpcClient`]).
    Rpc,
    /// Block data: one transfer.
    Data,
}

impl StreamKind {
    /// The byte of this kind.
    pub fn encode(self) -> u8 {
        match self {
            StreamKind::Rpc => 1,
            StreamKind::Data => 2,
        }
    }

    /// The kind of a byte.
    ///
    /// # Errors
    /// [`WireError::Malformed`] for any other byte.
    pub fn decode(byte: u8) -> Result<Self, WireError> {
        match byte {
            1 => Ok(StreamKind::Rpc),
            2 => Ok(StreamKind::Data),
            other => Err(WireError::malformed(format_args!(
                "unknown kind of stream {other}"
            ))),
        }
    }
}

fn check_length(
    what: &'static str,
    actual_bytes: usize,
    max_bytes: usize,
) -> Result<(), WireError> {
    if actual_bytes <= max_bytes {
        Ok(())
    } else {
        Err(WireError::TooLarge {
            what,
            actual_bytes,
            max_bytes,
        })
    }
}

fn truncated(available: usize, wanted: usize) -> WireError {
    WireError::Truncated {
        missing_bytes: wanted.saturating_sub(available),
    }
}

#[cfg(test)]
mod tests;
