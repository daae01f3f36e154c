//! Records: the framing of a byte stream between processes on one host, which distinguishes the end of the
//! stream from the loss of the peer.
//!
//! ```text
//! stream: record* end
//! record: len: u32 LE, not 0 | len bytes
//! end:    0: u32 LE
//! ```

use bytes::Bytes;

/// Bytes before a record.
pub const RECORD_PREFIX_BYTES: usize = 4;

/// The marker of the end.
pub const END: [u8; RECORD_PREFIX_BYTES] = [0; RECORD_PREFIX_BYTES];

/// Takes a stream apart into records, from pieces of any size. Allocates nothing, whatever length is claimed.
#[derive(Debug, Default)]
pub struct Records {
    prefix: [u8; RECORD_PREFIX_BYTES],
    prefix_filled: usize,
    remaining: usize,
    ended: bool,
}

impl Records {
    /// Bytes of the current record that have not been taken.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.remaining
    }

    /// Whether the end marker was seen.
    #[must_use]
    pub fn ended(&self) -> bool {
        self.ended
    }

    /// Counts bytes of the current record as taken that were read elsewhere; at most the remaining ones.
    pub fn taken(&mut self, bytes: usize) {
        self.remaining -= bytes;
    }

    /// Returns at most `max_bytes` of content from the start of `arrived`; `None` if it contains none, because
    /// more must arrive or the stream has ended.
    pub fn next(&mut self, arrived: &mut Bytes, max_bytes: usize) -> Option<Bytes> {
        while self.remaining == 0 && !self.ended {
            let wanted = RECORD_PREFIX_BYTES - self.prefix_filled;
            let piece = arrived.split_to(wanted.min(arrived.len()));
            self.prefix[self.prefix_filled..][..piece.len()].copy_from_slice(&piece);
            self.prefix_filled += piece.len();
            if self.prefix_filled < RECORD_PREFIX_BYTES {
                return None;
            }
            self.prefix_filled = 0;
            self.remaining = u32::from_le_bytes(self.prefix) as usize;
            self.ended = self.remaining == 0;
        }
        let len = self.remaining.min(max_bytes).min(arrived.len());
        self.remaining -= len;
        (len > 0).then(|| arrived.split_to(len))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn records_come_out_as_they_went_in_however_they_arrive(
            records in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..50), 0..20),
            pieces in prop::collection::vec(1..40_usize, 1..20),
            max_bytes in 1..60_usize,
            finished: bool,
        ) {
            let mut stream = Vec::new();
            for record in &records {
                stream.extend_from_slice(&(record.len() as u32).to_le_bytes());
                stream.extend_from_slice(record);
            }
            if finished {
                stream.extend_from_slice(&END);
                stream.extend_from_slice(b"nothing of this counts");
            }
            let mut decoder = Records::default();
            let mut content = Vec::new();
            let mut rest = Bytes::from(stream);
            for piece in pieces.into_iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let mut arrived = rest.split_to(piece.min(rest.len()));
                while let Some(bytes) = decoder.next(&mut arrived, max_bytes) {
                    prop_assert!(bytes.len() <= max_bytes);
                    content.extend_from_slice(&bytes);
                }
                prop_assert!(arrived.is_empty() || decoder.ended());
            }
            prop_assert_eq!(content, records.concat());
            prop_assert_eq!(decoder.ended(), finished);
            prop_assert_eq!(decoder.remaining(), 0);
        }
    }
}
