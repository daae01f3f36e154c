//! Fetching a replica from other datanodes, because the namenode says so: which source is asked from
//! where, and what follows from what it sends.

#[cfg(test)]
mod tests;

use harvestfs_protocol::data::ReadPacket;
use harvestfs_protocol::limits::{CHUNK_BYTES, PACKET_BYTES_MAX};

/// The fetching of one replica.
#[derive(Debug)]
pub struct Fetch {
    length_bytes: u64,
    /// The same, up to the end of a chunk.
    end: u64,
    /// What is written here.
    offset: u64,
    sources: usize,
    /// The first that was not asked yet.
    next_source: usize,
}

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// This source is to be asked for so many bytes from this offset on.
    Ask {
        /// Its number.
        source: usize,
        /// Where in the block, in bytes.
        offset: u64,
        /// How much.
        length_bytes: u64,
    },
    /// All is here: the replica is to be sealed.
    Seal,
    /// There is no source left: what was written is to be discarded.
    GiveUp,
}

/// Why a source was of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// It could not be reached, broke off, refused, or sent something else than was asked for.
    Source,
    /// Its data was damaged on the way.
    Damaged,
    /// This datanode cannot write.
    Here,
    /// The owner needs this server.
    BusyHere,
}

/// What follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum After {
    /// The next source goes on where this one ended.
    GoOn,
    /// What came before the damage was verified, but this writer takes no more: what was written is to be discarded,
    /// and the next source begins anew.
    BeginAnew,
    /// What was written is to be discarded, and the repair has failed.
    Fail,
}

impl Fetch {
    /// Of a replica of this length, from so many sources.
    pub fn new(length_bytes: u64, sources: usize) -> Self {
        Self {
            length_bytes,
            // No replica is that long, which its writer finds out.
            end: length_bytes
                .checked_next_multiple_of(CHUNK_BYTES as u64)
                .unwrap_or(u64::MAX),
            offset: 0,
            sources,
            next_source: 0,
        }
    }

    /// What is next, when a source has sent all or failed. There is no replica without a source, even an empty
    /// one.
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

    /// Whether a source has sent all that it was asked for.
    pub fn is_complete(&self) -> bool {
        self.offset >= self.end
    }

    /// What is written here, in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The checksums of a packet of data, if it is what has to come next: whole chunks from where the last one
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

    /// So much more is written.
    pub fn wrote(&mut self, bytes: u64) {
        self.offset += bytes;
        assert!(
            self.offset <= self.end,
            "more is written than the replica has, of which {bytes} bytes: {self:?}"
        );
    }

    /// The source that was asked is of no use any more.
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
