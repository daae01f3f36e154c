//! Reading the file of a backup.

use std::io::{self, Read};

use harvestfs_protocol::backup::BackupContent;
use ring::digest::{Context, SHA256};

use super::{
    BackupError, DESCRIPTION_BYTES_MAX, DIGEST_BYTES, HEADER_BYTES, MAGIC, PART_BYTES_MAX,
    PART_HEADER_BYTES, VERSION, header_checksum, part_checksum,
};
use crate::journal::{Failure, SnapshotReader, fill, u32_at};

/// Reads the snapshot in the file of a backup. The bytes that it returns were verified by the checksum of their
/// part; it reports the end only if the file is complete. Damage is an error of kind
/// [`io::ErrorKind::InvalidData`] with a [`BackupError`].
pub struct BackupReader<R> {
    from: R,
    digest: Context,
    content: BackupContent,
    /// Bytes of the file that were read.
    offset: u64,
    parts: u64,
    part: Vec<u8>,
    /// Bytes of the part that were returned.
    returned: usize,
    /// Payload bytes of all parts that were read.
    read_bytes: u64,
    is_over: bool,
    failure: Failure,
}

impl<R: Read> BackupReader<R> {
    /// Opens a backup and reads its description.
    ///
    /// # Errors
    /// The file is no backup that this software can read, or its beginning is damaged.
    pub fn open(mut from: R) -> Result<Self, BackupError> {
        let mut header = [0; HEADER_BYTES];
        let read = fill(&mut from, &mut header)?;
        if read < MAGIC.len() || header[..MAGIC.len()] != MAGIC {
            return Err(BackupError::Other);
        }
        let damaged = |offset: usize, reason: &str| BackupError::Damaged {
            offset: offset as u64,
            reason: reason.to_owned(),
        };
        if read < HEADER_BYTES {
            return Err(damaged(read, "the file ends in its header"));
        }
        let (version, length) = (u32_at(&header, 8), u32_at(&header, 12) as usize);
        if length > DESCRIPTION_BYTES_MAX {
            return Err(damaged(12, "the description is longer than the limit"));
        }
        let mut description = vec![0; length];
        let read = fill(&mut from, &mut description)?;
        let is_whole =
            read == length && header_checksum(&header[..16], &description) == u32_at(&header, 16);
        if !is_whole {
            return Err(damaged(
                HEADER_BYTES + read,
                "the checksum of the description does not match",
            ));
        }
        if version != VERSION {
            return Err(BackupError::Version { found: version });
        }
        let content = match postcard::take_from_bytes(&description) {
            Ok((content, [])) => content,
            Ok(_) => return Err(damaged(HEADER_BYTES, "the description is too long")),
            Err(error) => return Err(damaged(HEADER_BYTES, &error.to_string())),
        };
        let mut digest = Context::new(&SHA256);
        digest.update(&header);
        digest.update(&description);
        Ok(Self {
            from,
            digest,
            content,
            offset: (HEADER_BYTES + length) as u64,
            parts: 0,
            part: Vec::new(),
            returned: 0,
            read_bytes: 0,
            is_over: false,
            failure: Failure::default(),
        })
    }

    /// The description of the backup.
    pub fn content(&self) -> &BackupContent {
        &self.content
    }

    /// Reads the next part. The last one is empty; after it, checks the end of the file.
    fn next_part(&mut self) -> Result<(), BackupError> {
        let mut header = [0; PART_HEADER_BYTES];
        self.take(&mut header)?;
        let length = u32_at(&header, 0) as usize;
        if length > PART_BYTES_MAX {
            return Err(self.damaged("a part is longer than the limit"));
        }
        let mut part = std::mem::take(&mut self.part);
        part.resize(length, 0);
        self.take(&mut part)?;
        if part_checksum(self.parts, &part) != u32_at(&header, 4) {
            return Err(self.damaged("the checksum of a part does not match"));
        }
        self.parts += 1;
        self.read_bytes += length as u64;
        if self.read_bytes > self.content.length_bytes {
            return Err(self.damaged("there is more than the description says"));
        }
        if length == 0 {
            self.check_end()?;
            self.is_over = true;
        }
        (self.part, self.returned) = (part, 0);
        Ok(())
    }

    fn check_end(&mut self) -> Result<(), BackupError> {
        if self.read_bytes != self.content.length_bytes {
            return Err(self.damaged("there is less than the description says"));
        }
        let computed = self.digest.clone().finish();
        let mut digest = [0; DIGEST_BYTES];
        self.take(&mut digest)?;
        if computed.as_ref() != digest {
            return Err(self.damaged("the checksum of the whole does not match"));
        }
        if fill(&mut self.from, &mut [0])? > 0 {
            return Err(self.damaged("the file goes on after its end"));
        }
        Ok(())
    }

    fn take(&mut self, buffer: &mut [u8]) -> Result<(), BackupError> {
        let read = fill(&mut self.from, buffer)?;
        self.offset += read as u64;
        if read < buffer.len() {
            return Err(self.damaged("the file ends too early"));
        }
        self.digest.update(buffer);
        Ok(())
    }

    fn damaged(&self, reason: &str) -> BackupError {
        BackupError::Damaged {
            offset: self.offset,
            reason: reason.to_owned(),
        }
    }
}

impl<R: Read> Read for BackupReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.failure.check()?;
        while self.returned == self.part.len() && !self.is_over {
            if let Err(error) = self.next_part() {
                let error = match error {
                    BackupError::Io(error) => error,
                    error => io::Error::new(io::ErrorKind::InvalidData, error),
                };
                return Err(self.failure.note(error));
            }
        }
        let left = &self.part[self.returned..];
        let returned = left.len().min(buffer.len());
        buffer[..returned].copy_from_slice(&left[..returned]);
        self.returned += returned;
        Ok(returned)
    }
}

/// Reads and verifies a whole backup, with little memory, and returns its description.
///
/// # Errors
/// The file is no backup, or is damaged.
pub fn verify(from: impl Read) -> Result<BackupContent, BackupError> {
    let mut reader = BackupReader::open(from)?;
    let content = reader.content().clone();
    let snapshot = SnapshotReader::of_bytes(&mut reader, content.record, content.cluster.0);
    snapshot
        .and_then(SnapshotReader::verify)
        .map_err(BackupError::of_snapshot)?;
    Ok(content)
}
