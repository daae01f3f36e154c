//! An image of pages that is being stored: it starts as a clone of its parent's image, and only the
//! differences are written.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::compare::{Content, MOVED_PAGES_MIN, Parent, Segment};
use crate::image::{ImageError, load_table, sha256};
use crate::manifest::{Image, table_name};
use crate::page::{GroupHashes, PAGE_BYTES, PAGE_BYTES_U64, PAGES_MAX, PageHash, PageTable};
use crate::store::{Checkpoint, io_error, write_synced};

/// An image of the parent with which a new one is compared.
#[derive(Debug)]
pub struct ParentImage {
    file: File,
    pages: Parent,
}

impl ParentImage {
    /// Opens the image of that name in a checkpoint; `None` when it is missing or damaged, so that nothing
    /// can be shared with it.
    #[must_use]
    pub fn open(checkpoint: &Checkpoint, name: &str) -> Option<Self> {
        let image = checkpoint.manifest.image(name)?;
        let table = load_table(&checkpoint.directory, image).ok()?;
        let file = File::open(checkpoint.directory.join(name)).ok()?;
        let is_whole = file.metadata().ok()?.len() == table.image_bytes();
        is_whole.then(|| Self {
            file,
            pages: Parent::new(table),
        })
    }
}

/// An image of pages that is being written.
pub(crate) struct PagesFile {
    directory: PathBuf,
    name: String,
    path: PathBuf,
    file: File,
    /// The image of which the file is a clone.
    base: Option<File>,
    /// The pages of `base`; empty without one.
    parent: Arc<Parent>,
    table: PageTable,
    /// Pages that the parent has at another offset. They are shared at the end, when no more writes to the
    /// file are in flight.
    moved: Vec<Segment>,
    sent_bytes: u64,
}

impl PagesFile {
    /// Creates the file; it has no base when there is no parent, or the file system cannot clone it.
    pub fn create(
        directory: &Path,
        name: &str,
        parent: Option<ParentImage>,
    ) -> Result<Self, ImageError> {
        let path = directory.join(name);
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(&path)
            .map_err(io_error("create", &path))?;
        let (base, parent) = match parent {
            Some(parent)
                if clone_whole(&parent.file, parent.pages.pages(), &file)
                    .map_err(io_error("share pages with", &path))? =>
            {
                (Some(parent.file), parent.pages)
            }
            _ => (None, Parent::new(PageTable::default())),
        };
        Ok(Self {
            directory: directory.to_owned(),
            name: name.to_owned(),
            path,
            file,
            base,
            parent: Arc::new(parent),
            table: PageTable::default(),
            moved: Vec::new(),
            sent_bytes: 0,
        })
    }

    /// Whether it shares pages with a parent.
    pub fn has_base(&self) -> bool {
        self.base.is_some()
    }

    /// The pages of the image of which it is a clone.
    pub fn parent(&self) -> Arc<Parent> {
        Arc::clone(&self.parent)
    }

    /// Appends whole groups of pages; only the last group of the image may be shorter.
    pub fn write_groups(
        &mut self,
        pages: &[[u8; PAGE_BYTES]],
        groups: &[GroupHashes],
    ) -> Result<(), ImageError> {
        let first = self.begin(pages.len() as u64)?;
        self.table.extend(groups);
        self.place(first, pages)
    }

    /// Appends pages.
    pub fn write(
        &mut self,
        pages: &[[u8; PAGE_BYTES]],
        hashes: &[PageHash],
    ) -> Result<(), ImageError> {
        let first = self.begin(pages.len() as u64)?;
        self.table.extend_pages(hashes);
        self.place(first, pages)
    }

    /// Appends pages that equal those of the parent from number `from` on.
    pub fn share(&mut self, from: u64, pages: u64) -> Result<(), ImageError> {
        let first = self.begin(pages)?;
        let hashes = from
            .checked_add(pages)
            .and_then(|end| self.parent.table().pages_in(from..end))
            .ok_or_else(|| ImageError::Pages(self.name.clone()))?;
        self.table.extend_pages(hashes);
        if from != first {
            let pages = first..first + pages;
            let content = Content::Moved { from };
            push_moved(&mut self.moved, Segment { pages, content });
        }
        Ok(())
    }

    /// Completes the image. When this returns, the image and its hashes are durable.
    pub fn finish(mut self) -> Result<Image, ImageError> {
        for Segment { pages, content } in std::mem::take(&mut self.moved) {
            if let Content::Moved { from } = content {
                self.share_moved(from, pages)
                    .map_err(io_error("share pages with", &self.path))?;
            }
        }
        self.file
            .set_len(self.table.image_bytes())
            .and_then(|()| self.file.sync_all())
            .map_err(io_error("sync", &self.path))?;
        self.table.complete_groups(self.parent.table());
        let bytes = self.table.encode();
        write_synced(&self.directory.join(table_name(&self.name)), &bytes)?;
        Ok(Image {
            name: self.name,
            size_bytes: self.table.image_bytes(),
            sent_bytes: self.sent_bytes,
            sha256: sha256(&bytes),
        })
    }

    /// Shares pages of the parent at another offset, or writes them when they are too few for sharing to be faster.
    fn share_moved(&mut self, from: u64, to: Range<u64>) -> io::Result<()> {
        let base = self.base.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let [source, target] = [from, to.start].map(|page| page * PAGE_BYTES_U64);
        let length = (to.end - to.start) * PAGE_BYTES_U64;
        if to.end - to.start >= MOVED_PAGES_MIN {
            return copy_range(base, source, &self.file, target, length);
        }
        let mut bytes = vec![0; length as usize];
        base.read_exact_at(&mut bytes, source)?;
        self.file.write_all_at(&bytes, target)?;
        self.sent_bytes += length;
        Ok(())
    }

    /// Returns the number of the next page, after checking that the image has room for `pages` more.
    fn begin(&self, pages: u64) -> Result<u64, ImageError> {
        let first = self.table.len();
        if pages > PAGES_MAX - first {
            return Err(ImageError::Pages(self.name.clone()));
        }
        Ok(first)
    }

    /// Brings the file up to date with these pages, whose hashes are already in the table.
    fn place(&mut self, first: u64, pages: &[[u8; PAGE_BYTES]]) -> Result<(), ImageError> {
        let hashes = self.table.pages_from(first as usize);
        for segment in self.parent.compare(first, hashes) {
            match segment.content {
                Content::Same => {}
                Content::Moved { .. } => push_moved(&mut self.moved, segment),
                Content::Zero => self
                    .clear(&segment)
                    .map_err(io_error("write", &self.path))?,
                Content::New => {
                    let range = &segment.pages;
                    // Numbers of pages in this piece, which is small.
                    let (from, to) = ((range.start - first) as usize, (range.end - first) as usize);
                    let bytes = pages[from..to].as_flattened();
                    self.file
                        .write_all_at(bytes, range.start * PAGE_BYTES_U64)
                        .map_err(io_error("write", &self.path))?;
                    self.sent_bytes += bytes.len() as u64;
                }
            }
        }
        Ok(())
    }

    /// Punches a hole for pages of zeros. Beyond the parent's end there is nothing to clear.
    fn clear(&self, segment: &Segment) -> io::Result<()> {
        let end = segment.pages.end.min(self.parent.pages());
        if segment.pages.start >= end {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (offset, length) = (segment.pages.start, end - segment.pages.start);
        rustix::fs::fallocate(
            &self.file,
            flags,
            offset * PAGE_BYTES_U64,
            length * PAGE_BYTES_U64,
        )?;
        Ok(())
    }
}

/// Appends a run, merging it with the last one where it continues that one.
fn push_moved(moved: &mut Vec<Segment>, segment: Segment) {
    if let (Some(last), Content::Moved { from }) = (moved.last_mut(), segment.content)
        && let Content::Moved { from: start } = last.content
        && last.pages.end == segment.pages.start
        && start + (last.pages.end - last.pages.start) == from
    {
        last.pages.end = segment.pages.end;
    } else {
        moved.push(segment);
    }
}

/// Clones `from` into `to`. Returns false when the file system cannot do that.
fn clone_whole(from: &File, pages: u64, to: &File) -> io::Result<bool> {
    match copy_range(from, 0, to, 0, pages * PAGE_BYTES_U64) {
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::XDEV | Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
            _ => Err(error),
        },
        Ok(()) => Ok(true),
    }
}

/// Copies a range with `copy_file_range(2)`, which on HarvestFS creates extents that share the source's blocks.
///
/// # Errors
/// When the file system cannot do that, or `from` ends before the range does.
pub fn copy_range(
    from: &File,
    mut from_offset: u64,
    to: &File,
    mut to_offset: u64,
    mut length: u64,
) -> io::Result<()> {
    while length > 0 {
        let step = usize::try_from(length).unwrap_or(usize::MAX);
        let copied = rustix::fs::copy_file_range(
            from,
            Some(&mut from_offset),
            to,
            Some(&mut to_offset),
            step,
        )?;
        if copied == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        length -= copied as u64;
    }
    Ok(())
}
