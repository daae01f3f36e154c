//! Receives memory from a CRIU that knows which pages were changed since the parent (`criu dump
//! --track-mem --page-server`): for each run of pages, CRIU reports that the parent has them, or sends
//! them. The stored image is complete nevertheless: runs that the parent has are shared with it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};

use crate::image::{ImageError, sha256, store_plain};
use crate::intake::{IntakeError, wait_readable};
use crate::manifest::{Image, check_image_name, is_pages_image, table_name};
use crate::page::{PAGE_BYTES, PageHash};
use crate::page_message::{Layout, Message};
use crate::pagemap::{IN_PARENT, PRESENT, PageMap, Run};
use crate::pages_file::{PagesFile, ParentImage};
use crate::store::{Checkpoint, io_error};

/// Name of the symbolic link to the parent that CRIU creates in its images directory.
const PARENT_LINK: &str = "parent";
/// Number of pages read at a time.
const PIECE_PAGES: usize = 256;
/// Minimum number of pages that are worth handing to another core.
const HASHED_PAGES_MIN: usize = 16;
/// First number for images of pages to which the parent has not given one. CRIU's page server does the
/// same; CRIU itself counts from 1.
const PAGES_ID_MIN: u32 = 0x1_0000;

/// Stores the memory that CRIU sends, until it reports the end. When this returns, every received image is
/// durable.
///
/// # Errors
/// The first failure. CRIU notices that the socket is closed, and lets the job continue.
pub fn receive(
    socket: UnixStream,
    directory: &Path,
    parent: &Checkpoint,
    is_alive: impl FnMut() -> bool,
) -> Result<Vec<Image>, IntakeError> {
    let mut source = Source { socket, is_alive };
    let mut images = Vec::new();
    let mut open: Option<OpenMap> = None;
    let mut next_id = unused_id(parent)?;
    let mut start = [0; Layout::NARROW_BYTES];
    source.fill(&mut start)?;
    let layout = Layout::of(&start);
    let mut message = vec![0; layout.bytes()];
    message[..start.len()].copy_from_slice(&start);
    source.fill(&mut message[start.len()..])?;
    loop {
        match Message::decode(&message, layout).map_err(IntakeError::Protocol)? {
            Message::Open(name) => {
                if let Some(open) = open.take() {
                    images.extend(open.finish()?);
                }
                let map = OpenMap::new(directory, name, parent, &mut next_id)?;
                source.socket.write_all(&[u8::from(map.pages.has_base())])?;
                open = Some(map);
            }
            Message::Add(run) => {
                let map = open
                    .as_mut()
                    .ok_or(IntakeError::Protocol("pages of no map"))?;
                map.add(run, &mut source)?;
            }
            Message::Close => break,
        }
        source.fill(&mut message)?;
    }
    if let Some(open) = open.take() {
        images.extend(open.finish()?);
    }
    source.socket.write_all(&0_i32.to_ne_bytes())?;
    Ok(images)
}

/// Adds the images that CRIU wrote itself, once it has ended, to those that it sent (`received`). Returns
/// all of them, durable.
///
/// # Errors
/// When an image cannot be read, or should have been sent.
pub fn adopt(directory: &Path, received: Vec<Image>) -> Result<Vec<Image>, IntakeError> {
    let link = directory.join(PARENT_LINK);
    std::fs::remove_file(&link)
        .map_err(|error| ImageError::from(io_error("remove", &link)(error)))?;
    let known: BTreeSet<String> = received
        .iter()
        .flat_map(|image| [image.name.clone(), table_name(&image.name)])
        .collect();
    let mut names = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name().into_string();
        let name = name.map_err(|_| IntakeError::Protocol("an image without a name"))?;
        if known.contains(&name) {
            continue;
        }
        check_image_name(&name)?;
        if is_pages_image(&name) {
            return Err(IntakeError::Protocol("an image of pages that was not sent"));
        }
        names.push(name);
    }
    // In parallel, as each one waits for its sync.
    let written: Result<Vec<Image>, ImageError> = names
        .par_iter()
        .map(|name| store_in_place(directory, name))
        .collect();
    let mut images = received;
    images.extend(written?);
    images.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(images)
}

/// Makes an image durable that CRIU wrote to its final place.
fn store_in_place(directory: &Path, name: &str) -> Result<Image, ImageError> {
    let path = directory.join(name);
    let bytes = std::fs::read(&path).map_err(io_error("read", &path))?;
    let synced = File::open(&path).and_then(|file| file.sync_all());
    synced.map_err(io_error("sync", &path))?;
    let size_bytes = bytes.len() as u64;
    Ok(Image {
        name: name.to_owned(),
        size_bytes,
        sent_bytes: size_bytes,
        sha256: sha256(&bytes),
    })
}

/// A number such that neither it nor any greater one is used by the parent's images of pages.
fn unused_id(parent: &Checkpoint) -> Result<u32, IntakeError> {
    let images = parent.manifest.images.iter();
    let mut used = images.filter_map(|image| {
        let id = image.name.strip_prefix("pages-")?.strip_suffix(".img")?;
        id.parse::<u32>().ok()
    });
    // The manifest may contain any number.
    let next = used.try_fold(PAGES_ID_MIN, |next, id| Some(next.max(id.checked_add(1)?)));
    next.ok_or(IntakeError::Protocol(
        "the parent has used all numbers of images",
    ))
}

/// A page map, and its image of pages, while CRIU sends them.
struct OpenMap<'a> {
    directory: &'a Path,
    name: String,
    map: PageMap,
    pages: PagesFile,
    /// The parent's map of the same memory.
    parent: Option<PageMap>,
}

impl<'a> OpenMap<'a> {
    fn new(
        directory: &'a Path,
        name: String,
        parent: &Checkpoint,
        next_id: &mut u32,
    ) -> Result<Self, IntakeError> {
        let before = parent_map(parent, &name);
        // With the parent's name, the next checkpoint finds the image, too.
        let id = match &before {
            Some(before) => before.pages_id(),
            None => {
                let id = *next_id;
                *next_id = id
                    .checked_add(1)
                    .ok_or(IntakeError::Protocol("more maps than there are numbers"))?;
                id
            }
        };
        let image_name = format!("pages-{id}.img");
        let parent_image = before
            .as_ref()
            .and_then(|_| ParentImage::open(parent, &image_name));
        let pages = PagesFile::create(directory, &image_name, parent_image)?;
        Ok(Self {
            directory,
            name,
            map: PageMap::new(id),
            parent: before.filter(|_| pages.has_base()),
            pages,
        })
    }

    fn add<A: FnMut() -> bool>(
        &mut self,
        run: Run,
        source: &mut Source<A>,
    ) -> Result<(), IntakeError> {
        const DISORDER: IntakeError = IntakeError::Protocol("runs of pages in a wrong order");
        if run.flags & IN_PARENT != 0 {
            let parent = self.parent.as_ref();
            let shared = parent
                .and_then(|parent| parent.find(run.address, run.pages))
                .ok_or(IntakeError::Protocol("pages that the parent does not have"))?;
            for (first, run) in shared {
                self.map.push(run).map_err(|_| DISORDER)?;
                self.pages.share(first, run.pages)?;
            }
            return Ok(());
        }
        if run.flags & PRESENT == 0 {
            return Err(IntakeError::Protocol("pages that are nowhere"));
        }
        self.map.push(run).map_err(|_| DISORDER)?;
        let mut left = usize::try_from(run.pages).map_err(|_| DISORDER)?;
        let mut piece = vec![[0; PAGE_BYTES]; left.min(PIECE_PAGES)];
        while left > 0 {
            piece.truncate(left);
            source.fill(piece.as_flattened_mut())?;
            let hashes: Vec<PageHash> = piece
                .par_iter()
                .with_min_len(HASHED_PAGES_MIN)
                .map(|page| PageHash::of(page))
                .collect();
            self.pages.write(&piece, &hashes)?;
            left -= piece.len();
        }
        Ok(())
    }

    fn finish(self) -> Result<[Image; 2], ImageError> {
        let pages = self.pages.finish()?;
        let map = store_plain(self.directory, &self.name, &self.map.encode()[..])?;
        Ok([pages, map])
    }
}

/// The map of that name in the parent; `None` when it is missing or damaged.
fn parent_map(parent: &Checkpoint, name: &str) -> Option<PageMap> {
    let image = parent.manifest.image(name)?;
    let bytes = std::fs::read(parent.directory.join(name)).ok()?;
    let map = PageMap::decode(&bytes).ok()?;
    (sha256(&bytes) == image.sha256).then_some(map)
}

/// The stream that CRIU sends, for as long as CRIU lives.
struct Source<A> {
    socket: UnixStream,
    is_alive: A,
}

impl<A: FnMut() -> bool> Source<A> {
    fn fill(&mut self, mut buffer: &mut [u8]) -> Result<(), IntakeError> {
        while !buffer.is_empty() {
            if !wait_readable(&self.socket)? {
                // Its last bytes may have arrived since.
                if !(self.is_alive)() && !wait_readable(&self.socket)? {
                    return Err(IntakeError::NotConnected);
                }
                continue;
            }
            match self.socket.read(buffer) {
                Ok(0) => return Err(IntakeError::NotConnected),
                Ok(length) => buffer = &mut buffer[length..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::PathBuf;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::image::{store_pages, verify_memory, verify_state};
    use crate::manifest::Manifest;
    use crate::page::PAGE_BYTES_U64;
    use crate::page_message::{ADD, CLOSE, OPEN};

    const MAP: &str = "pagemap-42.img";
    const MAP_ID: u64 = 42 << 8 | 1;

    /// Memory: the byte with which each page is filled, by page number.
    type Memory = BTreeMap<u64, u8>;

    fn checkpoint(directory: PathBuf, images: Vec<Image>) -> Checkpoint {
        Checkpoint {
            manifest: Manifest::sample(images),
            directory,
        }
    }

    #[test]
    fn a_number_of_an_image_is_never_used_twice() {
        let image = |id: u32| Image {
            name: format!("pages-{id}.img"),
            size_bytes: 0,
            sent_bytes: 0,
            sha256: String::new(),
        };
        let next = |ids: &[u32]| {
            let images = ids.iter().map(|&id| image(id)).collect();
            unused_id(&checkpoint(PathBuf::new(), images))
        };
        assert_eq!(next(&[1, PAGES_ID_MIN + 6]).ok(), Some(PAGES_ID_MIN + 7));
        assert!(next(&[u32::MAX, 1]).is_err());
    }

    /// A checkpoint as a full dump leaves it.
    fn whole(directory: PathBuf, memory: &Memory) -> Checkpoint {
        fs::create_dir(&directory).expect("it is made");
        let mut map = PageMap::new(1);
        for &page in memory.keys() {
            let run = Run {
                address: page * PAGE_BYTES_U64,
                pages: 1,
                flags: PRESENT,
            };
            map.push(run).expect("they are in order");
        }
        let pages: Vec<u8> = memory
            .values()
            .flat_map(|&byte| [byte; PAGE_BYTES])
            .collect();
        let images = vec![
            store_pages(&directory, "pages-1.img", &pages[..], None).expect("it is stored"),
            store_plain(&directory, MAP, &map.encode()[..]).expect("it is stored"),
        ];
        checkpoint(directory, images)
    }

    /// The memory that a checkpoint would restore, with each byte checked.
    fn restored(checkpoint: &Checkpoint, name: &str) -> Memory {
        verify_state(checkpoint).expect("it is whole");
        verify_memory(checkpoint).expect("it is whole");
        let bytes = fs::read(checkpoint.directory.join(name)).expect("a map");
        let map = PageMap::decode(&bytes).expect("a map");
        let name = format!("pages-{}.img", map.pages_id());
        let pages = fs::read(checkpoint.directory.join(name)).expect("its pages");
        assert_eq!(pages.len() as u64, map.image_pages() * PAGE_BYTES_U64);
        let mut memory = Memory::new();
        for run in map.runs() {
            for (first, run) in map.find(run.address, run.pages).expect("all are there") {
                for number in 0..run.pages {
                    let at = ((first + number) * PAGE_BYTES_U64) as usize;
                    let page = &pages[at..at + PAGE_BYTES];
                    assert!(page.iter().all(|byte| *byte == page[0]));
                    memory.insert(run.address / PAGE_BYTES_U64 + number, page[0]);
                }
            }
        }
        memory
    }

    fn message(layout: Layout, command: u32, pages: u64, address: u64, map: u64) -> Vec<u8> {
        let mut bytes = command.to_ne_bytes().to_vec();
        match layout {
            Layout::Narrow => bytes.extend((pages as u32).to_ne_bytes()),
            Layout::Wide => {
                bytes.extend([0; 4]);
                bytes.extend(pages.to_ne_bytes());
            }
        }
        bytes.extend(address.to_ne_bytes());
        bytes.extend(map.to_ne_bytes());
        bytes
    }

    /// Sends what CRIU sends for memory in which only some pages were changed.
    fn send(mut socket: &UnixStream, layout: Layout, map: u64, memory: &Memory, changed: &[u64]) {
        let mut say = |bytes: &[u8]| socket.write_all(bytes).expect("it is sent");
        say(&message(layout, OPEN, 0, 0, map));
        let mut has_parent = [0];
        socket.read_exact(&mut has_parent).expect("it is answered");
        let mut say = |bytes: &[u8]| socket.write_all(bytes).expect("it is sent");
        for (&page, &byte) in memory {
            let is_sent = has_parent == [0] || changed.contains(&page);
            let flags = if is_sent { PRESENT } else { IN_PARENT };
            say(&message(
                layout,
                ADD | flags << 16,
                1,
                page * PAGE_BYTES_U64,
                map,
            ));
            if is_sent {
                say(&[byte; PAGE_BYTES]);
            }
        }
    }

    fn close(mut socket: &UnixStream, layout: Layout) {
        let close = message(layout, CLOSE[1], 0, 0, 0);
        socket.write_all(&close).expect("it is sent");
        let mut status = [1; 4];
        socket.read_exact(&mut status).expect("it is answered");
        assert_eq!(status, [0; 4]);
    }

    fn received(
        directory: PathBuf,
        parent: &Checkpoint,
        criu: impl FnOnce(UnixStream) + Send,
    ) -> Result<Checkpoint, IntakeError> {
        fs::create_dir(&directory).expect("it is made");
        std::os::unix::fs::symlink("../1", directory.join(PARENT_LINK)).expect("it is made");
        fs::write(directory.join("core-42.img"), "registers").expect("it is written");
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        let images = thread::scope(|scope| {
            let criu = scope.spawn(|| criu(theirs));
            receive(ours, &directory, parent, || !criu.is_finished())
        })?;
        let images = adopt(&directory, images)?;
        Ok(checkpoint(directory, images))
    }

    #[test]
    fn what_was_not_changed_is_the_parents() {
        for layout in [Layout::Narrow, Layout::Wide] {
            let directory = tempfile::tempdir().expect("a directory");
            let path = |name: &str| directory.path().join(name);
            let mut memory: Memory = (100..200).map(|page| (page, page as u8)).collect();
            let parent = whole(path("1"), &memory);
            memory.insert(150, 1);
            memory.insert(90, 2);
            memory.remove(&120);
            let second = received(path("2"), &parent, |socket| {
                send(&socket, layout, MAP_ID, &memory, &[90, 150]);
                // Of a process that was started since.
                send(&socket, layout, 43 << 8 | 1, &memory, &[]);
                close(&socket, layout);
            })
            .expect("it is received");
            assert_eq!(restored(&second, MAP), memory);
            assert_eq!(restored(&second, "pagemap-43.img"), memory);
            assert!(!path("2").join(PARENT_LINK).exists());
            let sent = |name: &str| {
                let mut images = second.manifest.images.iter();
                let image = images
                    .find(|image| image.name == name)
                    .expect("it is there");
                image.sent_bytes
            };
            assert_eq!(sent("pages-1.img"), 2 * PAGE_BYTES_U64);
            assert_eq!(sent("pages-65536.img"), 100 * PAGE_BYTES_U64);
            assert_eq!(sent("core-42.img"), 9);
            // Again, with the result as the parent.
            memory.insert(199, 9);
            let third = received(path("3"), &second, |socket| {
                send(&socket, layout, 43 << 8 | 1, &memory, &[199]);
                send(&socket, layout, 44 << 8 | 2, &memory, &[]);
                close(&socket, layout);
            })
            .expect("it is received");
            assert_eq!(restored(&third, "pagemap-43.img"), memory);
            assert_eq!(restored(&third, "pagemap-shmem-44.img"), memory);
        }
    }

    #[test]
    fn a_criu_that_says_nonsense_or_goes_is_an_error() {
        type Said = fn(&UnixStream);
        let wrong: [(&str, Said); 6] = [
            ("nothing", |_| {}),
            ("no map", |socket| {
                let mut socket = socket;
                let add = message(Layout::Narrow, ADD | PRESENT << 16, 1, 4096, MAP_ID);
                socket.write_all(&add).expect("it is sent");
            }),
            ("no such map", |socket| {
                let mut socket = socket;
                let open = message(Layout::Narrow, OPEN, 0, 0, 9);
                socket.write_all(&open).expect("it is sent");
            }),
            ("not in the parent", |socket| {
                send(socket, Layout::Wide, MAP_ID, &Memory::from([(7, 7)]), &[]);
            }),
            ("the same twice", |socket| {
                send(socket, Layout::Wide, MAP_ID, &Memory::from([(1, 7)]), &[1]);
                send(socket, Layout::Wide, MAP_ID, &Memory::from([(1, 7)]), &[1]);
            }),
            ("no end", |socket| {
                send(socket, Layout::Wide, MAP_ID, &Memory::from([(1, 7)]), &[1]);
            }),
        ];
        for (name, say) in wrong {
            let directory = tempfile::tempdir().expect("a directory");
            let path = |name: &str| directory.path().join(name);
            let parent = whole(path("1"), &Memory::from([(1, 1)]));
            let result = received(path("2"), &parent, |socket| {
                // It may be refused before everything is sent.
                let said = std::panic::catch_unwind(|| say(&socket));
                drop((said, socket));
            });
            assert!(result.is_err(), "{name}");
        }
    }

    /// A CRIU that refuses the job before it sent a page says that this was all, and waits for the answer.
    #[test]
    fn an_end_without_a_beginning_is_answered() {
        for layout in [Layout::Narrow, Layout::Wide] {
            let directory = tempfile::tempdir().expect("a directory");
            let path = |name: &str| directory.path().join(name);
            let parent = whole(path("1"), &Memory::from([(1, 1)]));
            let second = received(path("2"), &parent, |socket| close(&socket, layout));
            let images = second.expect("it is received").manifest.images;
            assert_eq!(images.len(), 1, "what CRIU wrote itself");
        }
    }

    #[test]
    fn pages_that_were_not_sent_are_an_error() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let parent = whole(path("1"), &Memory::from([(1, 1)]));
        let images = path("2");
        let error = received(images.clone(), &parent, |socket| {
            fs::write(images.join("pages-9.img"), "pages").expect("it is written");
            send(&socket, Layout::Wide, MAP_ID, &Memory::from([(1, 1)]), &[]);
            close(&socket, Layout::Wide);
        });
        assert!(matches!(error, Err(IntakeError::Protocol(_))), "{error:?}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// After any mapping, unmapping and change, the image is the memory.
        #[test]
        fn the_image_is_the_memory(
            before in proptest::collection::btree_map(0..120u64, 0..3u8, 0..100),
            changed in proptest::collection::btree_map(0..140u64, 0..3u8, 0..60),
            unmapped in proptest::collection::btree_set(0..120u64, 0..40),
            is_wide in any::<bool>(),
        ) {
            let directory = tempfile::tempdir().expect("a directory");
            let path = |name: &str| directory.path().join(name);
            let layout = if is_wide { Layout::Wide } else { Layout::Narrow };
            let parent = whole(path("1"), &before);
            let mut memory = before;
            memory.retain(|page, _| !unmapped.contains(page));
            let numbers: Vec<u64> = changed.keys().copied().collect();
            memory.extend(changed);
            let second = received(path("2"), &parent, |socket| {
                send(&socket, layout, MAP_ID, &memory, &numbers);
                close(&socket, layout);
            })
            .expect("it is received");
            prop_assert_eq!(restored(&second, MAP), memory);
        }
    }
}
