//! Writes images as they stream in, and verifies them.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;

use harvestfs_protocol::durable;
use ring::digest::{Context, SHA256};

use crate::manifest::Image;
use crate::page::{PAGE_BYTES, PageTable, PageTableError};
use crate::pages_file::{PagesFile, ParentImage};
use crate::pieces::{for_each_piece, read_full};
use crate::store::{Checkpoint, Job, JobLock, StoreError, io_error};

/// Subdirectory of a checkpoint in which compaction stores images without sharing pages.
const COMPACTED_DIRECTORY: &str = ".compacted";

/// Why an image cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A file could not be read or written.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An image could not be read from CRIU.
    #[error("cannot read image {name} from CRIU: {source}")]
    Stream {
        /// The image's name.
        name: String,
        /// The cause.
        source: io::Error,
    },
    /// The name is that of an image of pages, but the content does not consist of whole pages.
    #[error("image {0} does not consist of whole pages")]
    Pages(String),
    /// An image does not match its manifest.
    #[error("image {name} is damaged: {reason}")]
    Damaged {
        /// The image's name.
        name: String,
        /// What is wrong.
        reason: String,
    },
}

/// Stores an image that is not one of pages. When this returns, it is durable.
///
/// # Errors
/// When it cannot be read or written.
pub fn store_plain(
    directory: &Path,
    name: &str,
    mut source: impl Read,
) -> Result<Image, ImageError> {
    let path = directory.join(name);
    // An existing file of that name was not created by CRIU, so it must not be overwritten.
    let mut file = File::create_new(&path).map_err(io_error("create", &path))?;
    let mut context = Context::new(&SHA256);
    let mut size_bytes = 0;
    let mut buffer = vec![0; 64 << 10];
    loop {
        let length = read_full(&mut source, &mut buffer).map_err(stream_error(name))?;
        context.update(&buffer[..length]);
        file.write_all(&buffer[..length])
            .map_err(io_error("write", &path))?;
        size_bytes += length as u64;
        if length < buffer.len() {
            break;
        }
    }
    file.sync_all().map_err(io_error("sync", &path))?;
    Ok(Image {
        name: name.to_owned(),
        size_bytes,
        sent_bytes: size_bytes,
        sha256: hex(context.finish().as_ref()),
    })
}

/// Stores an image of pages and its hashes, sharing equal pages with the parent. When this
/// returns, both are durable.
///
/// # Errors
/// When it cannot be read or written.
pub fn store_pages(
    directory: &Path,
    name: &str,
    source: impl Read + Send,
    parent: Option<ParentImage>,
) -> Result<Image, ImageError> {
    let mut image = PagesFile::create(directory, name, parent)?;
    let parent = image.parent();
    for_each_piece(source, parent.table(), stream_error(name), |piece| {
        let (pages, rest) = piece.bytes.as_chunks::<PAGE_BYTES>();
        if !rest.is_empty() {
            return Err(ImageError::Pages(name.to_owned()));
        }
        image.write_groups(pages, &piece.groups)
    })?;
    image.finish()
}

/// Number of earlier checkpoints that may share pages with one before it is stored whole again. Each
/// one adds extents, and prevents blocks of its predecessors from being collected.
pub const CHAIN_DEPTH_MAX: u32 = 8;

/// Stores the newest checkpoint of a job whole if more than `depth_max` earlier ones may share pages
/// with it. An interruption at any point leaves the checkpoint intact. Returns whether there was
/// something to do.
///
/// # Errors
/// When it cannot be read or written, or is damaged.
pub fn compact_newest(job: &Job, _lock: &JobLock, depth_max: u32) -> Result<bool, ImageError> {
    let Some(mut checkpoint) = job.newest()? else {
        return Ok(false);
    };
    if checkpoint.manifest.depth <= depth_max {
        return Ok(false);
    }
    let directory = &checkpoint.directory;
    let new = directory.join(COMPACTED_DIRECTORY);
    let pages = checkpoint.manifest.images.iter_mut();
    for image in pages.filter(|image| image.has_pages()) {
        // Left over from an interrupted compaction.
        match std::fs::remove_dir_all(&new) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("remove", &new)(error).into());
            }
            _ => {}
        }
        std::fs::create_dir(&new).map_err(io_error("make", &new))?;
        let path = directory.join(&image.name);
        let file = File::open(&path).map_err(io_error("open", &path))?;
        let whole = store_pages(&new, &image.name, file, None)?;
        // The existing table stays. Only page hashes are compared, as a group hash may be unknown in one
        // table and known in the other.
        if load_table(&new, &whole)?.pages_from(0) != load_table(directory, image)?.pages_from(0) {
            return Err(damaged(image, "its pages are not what was stored".into()));
        }
        durable::rename(&new.join(&image.name), &path).map_err(io_error("replace", &path))?;
        image.sent_bytes = whole.sent_bytes;
        std::fs::remove_dir_all(&new).map_err(io_error("remove", &new))?;
    }
    checkpoint.manifest.depth = 0;
    checkpoint.manifest.parent = None;
    job.replace_manifest(&checkpoint)?;
    Ok(true)
}

/// Verifies the images of a checkpoint's state, and the sizes of those of its memory, against the
/// manifest. This reads little.
///
/// # Errors
/// [`ImageError::Damaged`] for the first image that differs from what was written; also when a file cannot
/// be read.
pub fn verify_state(checkpoint: &Checkpoint) -> Result<(), ImageError> {
    for image in &checkpoint.manifest.images {
        let path = checkpoint.directory.join(&image.name);
        let mut file = File::open(&path).map_err(io_error("open", &path))?;
        let size_bytes = file.metadata().map_err(io_error("look at", &path))?.len();
        if size_bytes != image.size_bytes {
            return Err(damaged(
                image,
                format!("it has {size_bytes} bytes instead of {}", image.size_bytes),
            ));
        }
        if !image.has_pages() {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)
                .map_err(io_error("read", &path))?;
            if sha256(&bytes) != image.sha256 {
                return Err(damaged(image, "its checksum is wrong".into()));
            }
        }
    }
    Ok(())
}

/// Verifies the images of a checkpoint's memory against the manifest. This reads all of them.
///
/// # Errors
/// [`ImageError::Damaged`] for the first image that differs from what was written; also when a file cannot
/// be read.
pub fn verify_memory(checkpoint: &Checkpoint) -> Result<(), ImageError> {
    let images = checkpoint.manifest.images.iter();
    for image in images.filter(|image| image.has_pages()) {
        verify_pages(&checkpoint.directory, image)?;
    }
    Ok(())
}

fn verify_pages(directory: &Path, image: &Image) -> Result<(), ImageError> {
    let path = directory.join(&image.name);
    let file = File::open(&path).map_err(io_error("open", &path))?;
    let table = load_table(directory, image)?;
    if table.image_bytes() != image.size_bytes {
        return Err(damaged(
            image,
            "its hashes are those of another length".into(),
        ));
    }
    let unreadable = |error| ImageError::from(io_error("read", &path)(error));
    let mut found = PageTable::default();
    for_each_piece(file, &table, unreadable, |piece| {
        let first = found.len() as usize;
        found.extend(&piece.groups);
        // The file may have grown since its length was checked.
        let mut pairs = found.pages_from(first).iter().zip(table.pages_from(first));
        if let Some(wrong) = pairs.position(|(hash, stored)| hash != stored) {
            let page = first + wrong;
            let reason = format!("page {page} is not what was stored");
            return Err(damaged(image, reason));
        }
        Ok(())
    })?;
    if found.len() != table.len() {
        return Err(damaged(image, format!("it ends at page {}", found.len())));
    }
    Ok(())
}

/// Reads the hashes of an image, and verifies their checksum.
pub(crate) fn load_table(directory: &Path, image: &Image) -> Result<PageTable, ImageError> {
    let path = directory.join(image.table_name());
    let bytes = std::fs::read(&path).map_err(io_error("read", &path))?;
    if sha256(&bytes) != image.sha256 {
        return Err(damaged(image, "the checksum of its hashes is wrong".into()));
    }
    PageTable::decode(&bytes).map_err(|error: PageTableError| damaged(image, error.to_string()))
}

fn damaged(image: &Image, reason: String) -> ImageError {
    ImageError::Damaged {
        name: image.name.clone(),
        reason,
    }
}

fn stream_error(name: &str) -> impl FnOnce(io::Error) -> ImageError {
    let name = name.to_owned();
    move |source| ImageError::Stream { name, source }
}

/// The SHA-256 of bytes, in hex.
#[must_use]
pub fn sha256(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&SHA256, bytes).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use proptest::prelude::*;

    use super::*;
    use crate::manifest::Manifest;
    use crate::page::PAGE_BYTES_U64;

    fn verify(checkpoint: &Checkpoint) -> Result<(), ImageError> {
        verify_state(checkpoint)?;
        verify_memory(checkpoint)
    }

    /// A checkpoint with one image of pages, each filled with one byte, and the bytes sent for that image.
    fn checkpoint(
        directory: PathBuf,
        pages: &[u8],
        parent: Option<&Checkpoint>,
    ) -> (Checkpoint, u64) {
        fs::create_dir(&directory).expect("it is made");
        let memory = memory(pages);
        let parent = parent.and_then(|parent| ParentImage::open(parent, "pages-1.img"));
        let image =
            store_pages(&directory, "pages-1.img", &memory[..], parent).expect("it is stored");
        let core = store_plain(&directory, "core-1.img", &b"registers"[..]).expect("it is stored");
        assert_eq!(fs::read(directory.join("pages-1.img")).expect("it"), memory);
        let sent_bytes = image.sent_bytes;
        let checkpoint = Checkpoint {
            manifest: Manifest::sample(vec![image, core]),
            directory,
        };
        verify(&checkpoint).expect("it is whole");
        (checkpoint, sent_bytes)
    }

    fn memory(pages: &[u8]) -> Vec<u8> {
        pages.iter().flat_map(|&byte| [byte; PAGE_BYTES]).collect()
    }

    #[test]
    fn a_second_image_sends_only_what_changed() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut pages: Vec<u8> = (0..200).map(|n| (n % 199) as u8 + 1).collect();
        let (first, sent) = checkpoint(directory.path().join("1"), &pages, None);
        assert_eq!(sent, 200 * PAGE_BYTES_U64);
        pages[20..40].fill(255);
        let (_, sent) = checkpoint(directory.path().join("2"), &pages, Some(&first));
        assert_eq!(sent, 20 * PAGE_BYTES_U64);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_found() {
        let directory = tempfile::tempdir().expect("a directory");
        let (checkpoint, _) = checkpoint(directory.path().join("1"), &[1, 2, 3], None);
        for name in ["pages-1.img", "pages-1.img.hashes", "core-1.img"] {
            let path = checkpoint.directory.join(name);
            let good = fs::read(&path).expect("it is there");
            let mut flipped = good.clone();
            flipped[good.len() / 2] ^= 1;
            for bad in [&flipped[..], &good[..good.len() - 1]] {
                fs::write(&path, bad).expect("it is written");
                let error = verify(&checkpoint).expect_err("it is damaged");
                assert!(matches!(error, ImageError::Damaged { .. }), "{error}");
            }
            fs::write(&path, good).expect("it is written");
        }
        verify(&checkpoint).expect("it is whole again");
    }

    #[test]
    fn half_a_page_is_no_image() {
        let directory = tempfile::tempdir().expect("a directory");
        let error = store_pages(directory.path(), "pages-1.img", &[0; 100][..], None);
        assert!(matches!(error, Err(ImageError::Pages(_))));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// With any parent and image, the stored file equals the image (asserted in `checkpoint`).
        #[test]
        fn an_image_is_stored_as_it_came(
            parent in proptest::collection::vec(0..4u8, 0..90),
            start in 0..40usize,
            image in proptest::collection::vec(0..4u8, 0..90),
        ) {
            let directory = tempfile::tempdir().expect("a directory");
            let (first, _) = checkpoint(directory.path().join("1"), &parent, None);
            // Part of it is the parent's content at another offset.
            let mut pages = image;
            pages.extend(parent.iter().skip(start));
            checkpoint(directory.path().join("2"), &pages, Some(&first));
        }
    }
}
