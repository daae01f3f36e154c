//! Writing the file of a backup.

use std::io::{self, Write};

use harvestfs_protocol::backup::BackupContent;
use ring::digest::{Context, SHA256};

use super::{
    DESCRIPTION_BYTES_MAX, MAGIC, PART_BYTES_MAX, VERSION, encode_description, header_checksum,
    part_checksum,
};

/// Writes the file of a backup, which is complete only when [`BackupWriter::end`] has returned.
pub struct BackupWriter<W> {
    to: W,
    digest: Context,
    length_bytes: u64,
    written_bytes: u64,
    parts: u64,
}

impl<W: Write> BackupWriter<W> {
    /// Begins a backup with this description.
    ///
    /// # Errors
    /// Those of writing; [`io::ErrorKind::InvalidInput`] if the description is too long.
    pub fn begin(to: W, content: &BackupContent) -> io::Result<Self> {
        let description = encode_description(content);
        if description.len() > DESCRIPTION_BYTES_MAX {
            return Err(refused("the description of the backup is too long"));
        }
        let mut writer = Self {
            to,
            digest: Context::new(&SHA256),
            length_bytes: content.length_bytes,
            written_bytes: 0,
            parts: 0,
        };
        let mut fixed = Vec::from(MAGIC);
        fixed.extend_from_slice(&VERSION.to_le_bytes());
        fixed.extend_from_slice(&(description.len() as u32).to_le_bytes());
        let checksum = header_checksum(&fixed, &description);
        for bytes in [&fixed, &checksum.to_le_bytes()[..], &description] {
            writer.write(bytes)?;
        }
        Ok(writer)
    }

    /// Bytes of the snapshot that were written.
    pub fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Writes the next bytes of the snapshot.
    ///
    /// # Errors
    /// Those of writing; [`io::ErrorKind::InvalidInput`] for an empty payload, or for more bytes than the
    /// description announces.
    pub fn part(&mut self, payload: &[u8]) -> io::Result<()> {
        let written_bytes = self.written_bytes + payload.len() as u64;
        if payload.is_empty() || written_bytes > self.length_bytes {
            return Err(refused("the snapshot has not the length that was said"));
        }
        for payload in payload.chunks(PART_BYTES_MAX) {
            self.write(&(payload.len() as u32).to_le_bytes())?;
            self.write(&part_checksum(self.parts, payload).to_le_bytes())?;
            self.write(payload)?;
            self.parts += 1;
        }
        self.written_bytes = written_bytes;
        Ok(())
    }

    /// Ends the backup. Returns the underlying writer, which is not flushed.
    ///
    /// # Errors
    /// Those of writing; [`io::ErrorKind::InvalidInput`] if a part of the snapshot is missing.
    pub fn end(mut self) -> io::Result<W> {
        if self.written_bytes != self.length_bytes {
            return Err(refused("the snapshot has not the length that was said"));
        }
        self.write(&0_u32.to_le_bytes())?;
        self.write(&part_checksum(self.parts, &[]).to_le_bytes())?;
        self.to.write_all(self.digest.finish().as_ref())?;
        Ok(self.to)
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.digest.update(bytes);
        self.to.write_all(bytes)
    }
}

fn refused(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}
