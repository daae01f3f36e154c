//! Fetching a replica from other datanodes on the namenode's command: which source is asked for which range, and what
//! follows from its answer.

#[cfg(test)]
mod tests;

use harvestfs_protocol::data::ReadPacket;
use harvestfs_protocol::limits::{CHUNK_BYTES, PACKET_BYTES_MAX};

/// The state of fetching one replica.
#[derive(Debug)]
pub struct Fetch {
    length_bytes: u64,
    /// The same, rounded up to the end of a chunk.
    end: u64,
    /// The bytes written here so far.
    offset: u64,
    sources: usize,
    /// The first source that was not asked yet.
    next_source: usize,
}

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Ask this source for so many bytes from this offset on.
    Ask {
        /// Its number.
        source: usize,
        /// Where in the block, in bytes.
        offset: u64,
        /// How many bytes.
        length_bytes: u64,
    },
    /// Everything has arrived: seal the replica.
    Seal,
    /// There is no source left: discard what was written.
    GiveUp,
}

/// Why a source was of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// The source could not be reached, disconnected, refused, or sent something other than requested.
    Source,
    /// The source's data was damaged on the way.
    Damaged,
    /// This datanode cannot write.
    Here,
    /// The primary tenant needs this server.
    BusyHere,
}

/// The consequence of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The next source continues where this one stopped.
    GoOn,
    /// Discard what was written; the next source starts from scratch. The data before the damage was verified, but
    /// this writer accepts no more.
    BeginAnew,
    /// Discard what was written; the repair has failed.
    Fail,
}

impl Fetch {
    /// Starts to fetch a replica of this length from so many sources.
    pub fn new(length_bytes: u64, sources: usize) -> Self {
        Self {
            length_bytes,
            // No replica is that long, which its writer will find out.
            end: length_bytes
                .checked_next_multiple_of(CHUNK_BYTES as u64)
                .unwrap_or(u64::MAX),
            offset: 0,
            sources,
            next_source: 0,
        }
    }

    /// Returns the next action after a source has sent everything or failed. A replica is sealed only if there is a
    /// source, even if it is empty.
    pub fn next(&mut self) -> Step {
        if self.sources > 0 && self.is_complete() {
            return Step::Seal;
        }
        if self.next_source >= self.sources {
            return Step::GiveUp;
        }
        assert!(
            self.offset <= self.length_bytes,
            "a source is asked for what comes after the end: {self:?}"
        );
        let source = self.next_source;
        self.next_source += 1;
        Step::Ask {
            source,
            offset: self.offset,
            length_bytes: self.length_bytes - self.offset,
        }
    }

    /// Whether everything requested has arrived.
    pub fn is_complete(&self) -> bool {
        self.offset >= self.end
    }

    /// The bytes written here so far.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the checksums of a data packet, if it is the packet expected next: whole chunks from where the last one
    /// ended.
    pub fn accept(&self, packet: ReadPacket, data_bytes: usize) -> Option<Vec<u32>> {
        let ReadPacket::Data {
            block_offset,
            checksums,
        } = packet
        else {
            return None;
        };
        let fits = block_offset == self.offset
            && data_bytes > 0
            && data_bytes <= PACKET_BYTES_MAX
            && data_bytes.is_multiple_of(CHUNK_BYTES)
            && data_bytes as u64 <= self.end - self.offset;
        fits.then_some(checksums)
    }

    /// Records that so many more bytes were written.
    pub fn wrote(&mut self, bytes: u64) {
        self.offset += bytes;
        assert!(
            self.offset <= self.end,
            "more is written than the replica has, of which {bytes} bytes: {self:?}"
        );
    }

    /// Records that the current source failed, and returns the consequence.
    pub fn failed(&mut self, trouble: Trouble) -> After {
        match trouble {
            Trouble::Source => After::GoOn,
            Trouble::Damaged => {
                self.offset = 0;
                After::BeginAnew
            }
            Trouble::Here | Trouble::BusyHere => After::Fail,
        }
    }
}
