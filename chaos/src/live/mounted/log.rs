//! A log to which one program appends, and which another one follows on another mount.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::Credentials;
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::SmallRng;

use super::job::{Check, Job, Place};
use super::state::{Era, Shared};
use super::work::Reports;
use crate::live::metrics::Operation;
use crate::live::verify::{Comparison, note};
use crate::random;

const DIRECTORY: &str = "log";
const RECORD_BYTES_MAX: usize = 4_000;
/// The follower reads a file from its beginning once out of this many reads.
const WHOLE: u32 = 10;

/// One file of the log. The next one begins when this one is full, or when an append has failed or was interrupted.
#[derive(Debug, Default)]
struct Segment {
    /// All records whose append began.
    content: Vec<u8>,
    /// The end of each record.
    ends: Vec<usize>,
    /// The number of bytes that are durable.
    acknowledged_bytes: usize,
    /// The last append failed: a part of its record may be there.
    failed: bool,
}

/// The log as the writer knows it.
#[derive(Debug, Default)]
pub(crate) struct Log {
    segments: Mutex<Vec<Segment>>,
}

fn name(segment: usize) -> String {
    format!("log-{}", segment + 1)
}

impl Segment {
    /// What is wrong with bytes that were read from `offset` to the end of the file, of which `acknowledged_bytes` were
    /// acknowledged before.
    fn difference(&self, offset: usize, read: &[u8], acknowledged_bytes: usize) -> Option<String> {
        let end = offset + read.len();
        if end < acknowledged_bytes {
            let text = format!("{end} bytes, but {acknowledged_bytes} were acknowledged");
            return Some(text);
        }
        let written = self.content.get(offset..).unwrap_or_default();
        let same = read.iter().zip(written).take_while(|(a, b)| a == b).count();
        (same < read.len()).then(|| {
            let at = offset + same;
            format!("byte {at} of {end} is not the one that was appended")
        })
    }

    /// Whether a record ends at this length.
    fn is_end(&self, bytes: usize) -> bool {
        bytes == 0 || self.ends.binary_search(&bytes).is_ok()
    }
}

/// The program that appends to the log.
pub(crate) struct Writer {
    place: Place,
    segment_bytes_max: usize,
    log: Arc<Log>,
    rng: SmallRng,
    file: Option<File>,
}

impl Writer {
    /// Creates a program on a mount.
    pub fn new(
        mount: (usize, &Path),
        segment_bytes_max: usize,
        seed: u64,
        log: &Arc<Log>,
        all: (&Arc<Shared>, &Reports),
    ) -> Self {
        Self {
            place: Place::new(mount, DIRECTORY, all),
            segment_bytes_max,
            log: Arc::clone(log),
            rng: random::stream(seed, "log"),
            file: None,
        }
    }

    fn record(&mut self, number: usize) -> Vec<u8> {
        let len = self.rng.random_range(1..RECORD_BYTES_MAX);
        let mut record = format!("{number:08} ").into_bytes();
        record.extend((0..len).map(|_| self.rng.random_range(b'a'..=b'z')));
        record.push(b'\n');
        record
    }

    fn open(&mut self) -> io::Result<File> {
        let mut segments = self.log.segments.lock();
        let path = self.place.directory.join(name(segments.len()));
        segments.push(Segment::default());
        drop(segments);
        File::options().append(true).create_new(true).open(path)
    }
}

impl Job for Writer {
    fn interrupted(&mut self) {
        self.file = None;
    }

    fn begin(&mut self) -> io::Result<()> {
        self.place.make()
    }

    fn step(&mut self, era: Era) {
        let began = Instant::now();
        let file = match self.file.take() {
            Some(file) => Ok(file),
            None => self.open(),
        };
        let mut end = 0;
        let appended = file.and_then(|mut file| {
            let number = self.log.last(|segment| segment.ends.len());
            let record = self.record(number);
            end = self.log.last(|segment| {
                segment.content.extend_from_slice(&record);
                segment.ends.push(segment.content.len());
                segment.content.len()
            });
            file.write_all(&record)?;
            file.sync_data()?;
            Ok(file)
        });
        match appended {
            Ok(file) => {
                self.place
                    .reports
                    .done(Operation::Write, began.elapsed(), 0);
                if self.place.counts(era) {
                    self.log.last(|segment| segment.acknowledged_bytes = end);
                    self.file = Some(file).filter(|_| end < self.segment_bytes_max);
                }
            }
            Err(error) => {
                self.log.last(|segment| segment.failed = true);
                self.place.failed(Operation::Write, "append", &error);
            }
        }
    }

    fn compare(&mut self, check: &Check<'_>, to: &mut Comparison) {
        let me = Credentials::root();
        let segments = self.log.segments.lock();
        if segments.iter().all(|it| it.acknowledged_bytes == 0) {
            note(&mut to.wrong, format!("/{DIRECTORY}: nothing was synced"));
        }
        for (number, segment) in segments.iter().enumerate() {
            to.names += 1;
            let path = format!("/{DIRECTORY}/{}", name(number));
            let read = check.client.read_file(&me, path.as_bytes());
            let acknowledged_bytes = segment.acknowledged_bytes;
            match check.runtime.block_on(read) {
                Ok(read) => match segment.difference(0, &read, acknowledged_bytes) {
                    Some(difference) => note(&mut to.wrong, format!("{path}: {difference}")),
                    None => {
                        to.files += 1;
                        to.bytes += read.len() as u64;
                    }
                },
                Err(ClientError::Fs(FsError::NotFound)) if acknowledged_bytes == 0 => {}
                Err(error) => note(&mut to.lost, format!("{path}: {error}")),
            }
        }
    }
}

impl Log {
    /// Applies `of` to the segment that is being written. It exists while a program has it open.
    fn last<T: Default>(&self, of: impl FnOnce(&mut Segment) -> T) -> T {
        self.segments.lock().last_mut().map(of).unwrap_or_default()
    }
}

/// The program that follows the log.
pub(crate) struct Follower {
    place: Place,
    /// The mount of the program that appends.
    writer: usize,
    log: Arc<Log>,
    rng: SmallRng,
    /// The segment that it reads, and its position there.
    segment: usize,
    offset: usize,
}

impl Follower {
    /// Creates a program on a mount; `writer` is the mount of the program that appends.
    pub fn new(
        mount: (usize, &Path),
        writer: usize,
        seed: u64,
        log: &Arc<Log>,
        all: (&Arc<Shared>, &Reports),
    ) -> Self {
        Self {
            place: Place::new(mount, DIRECTORY, all),
            writer,
            log: Arc::clone(log),
            rng: random::stream(seed, "log followed"),
            segment: 0,
            offset: 0,
        }
    }

    fn wrong(&self, what: &str) {
        let name = name(self.segment);
        let text = format!("/{DIRECTORY}/{name} during the run: {what}");
        self.place.reports.wrong(&text);
    }

    fn read(&self) -> io::Result<Vec<u8>> {
        let mut file = File::open(self.place.directory.join(name(self.segment)))?;
        file.seek(SeekFrom::Start(self.offset as u64))?;
        let mut read = Vec::new();
        file.read_to_end(&mut read)?;
        Ok(read)
    }
}

impl Job for Follower {
    fn begin(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn step(&mut self, era: Era) {
        if self.rng.random_range(0..WHOLE) == 0 {
            self.offset = 0;
        }
        let before = {
            let segments = self.log.segments.lock();
            let before = segments.get(self.segment);
            before.map(|segment| {
                (
                    segment.acknowledged_bytes,
                    self.segment + 1 == segments.len(),
                )
            })
        };
        let Some((acknowledged_bytes, is_last)) = before else {
            return;
        };
        let undisturbed = self.place.shared.undisturbed(self.writer);
        let began = Instant::now();
        let read = match self.read() {
            Ok(read) => read,
            Err(error) if error.kind() == ErrorKind::NotFound && acknowledged_bytes == 0 => {
                self.segment += usize::from(!is_last);
                return;
            }
            Err(error) => {
                if self.place.counts(era) && error.kind() == ErrorKind::NotFound {
                    self.wrong("it is not there");
                }
                return self.place.failed(Operation::Read, "follow", &error);
            }
        };
        let took = began.elapsed();
        let counts = self.place.counts(era);
        let end = self.offset + read.len();
        let difference = {
            let segments = self.log.segments.lock();
            let segment = &segments[self.segment];
            // A record that a kill of the writer's mount interrupts may be there in part.
            let whole = undisturbed.is_some()
                && undisturbed == self.place.shared.undisturbed(self.writer)
                && self.segment + 1 == segments.len()
                && !segment.failed;
            let torn =
                (whole && !segment.is_end(end)).then(|| format!("{end} bytes: a record is torn"));
            segment
                .difference(self.offset, &read, acknowledged_bytes)
                .or(torn)
        };
        let difference = difference.filter(|_| counts);
        let right = counts && difference.is_none();
        let compared_bytes = if right { read.len() } else { 0 };
        self.place
            .reports
            .done(Operation::Read, took, compared_bytes);
        if let Some(difference) = difference {
            self.wrong(&difference);
        }
        if right {
            // Records that were in flight are read again.
            self.offset = acknowledged_bytes.min(end);
            if !is_last && end >= acknowledged_bytes {
                self.segment += 1;
                self.offset = 0;
            }
        }
    }

    fn compare(&mut self, _check: &Check<'_>, _to: &mut Comparison) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_torn_or_out_of_order_is_found() {
        let segment = Segment {
            content: b"1 a\n2 b\n3 c\n".to_vec(),
            ends: vec![4, 8, 12],
            acknowledged_bytes: 8,
            failed: false,
        };
        let difference = |offset, read: &[u8]| segment.difference(offset, read, 8);
        assert_eq!(difference(0, b"1 a\n2 b\n"), None);
        assert_eq!(difference(4, b"2 b\n3 c\n"), None);
        for (offset, wrong) in [
            (0, &b"1 a\n"[..]),
            (0, b"2 b\n1 a\n"),
            (4, b"2 b\n3 c\n4 d\n"),
            (4, b"2 b\n\0\0\0\0"),
        ] {
            assert!(difference(offset, wrong).is_some(), "{wrong:?}");
        }
        assert!(segment.is_end(0) && segment.is_end(8) && !segment.is_end(9));
    }
}
