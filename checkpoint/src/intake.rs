//! Receives images from `criu dump --stream`: for each one CRIU names the file and hands over the
//! end of a pipe. So memory is compared with the parent on its way, without a copy on a disk.
//!
//! CRIU's pages travel through the pipe by reference: the job must not run until all of them
//! were read.

use std::fs::File;
use std::io::{self, IoSliceMut, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::image::{ImageError, store_pages, store_plain};
use crate::manifest::{Image, ManifestError, check_image_name, is_pages_image};
use crate::pages_file::ParentImage;
use crate::store::Checkpoint;

/// Where CRIU looks for the receiver, in its directory of images.
const SOCKET_FILE: &str = "streamer-capture.sock";
/// How often it is asked whether CRIU still runs.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Most bytes of a request: a file name with its frame.
const REQUEST_BYTES_MAX: usize = 4096;
/// Most images that are received at the same time; CRIU has about ten open.
const IMAGES_AT_ONCE_MAX: usize = 256;
/// Most time that CRIU may take for the rest of a request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// What a pipe holds: fewer wake-ups than with the kernel's 64 KiB.
const PIPE_BYTES: usize = 1 << 20;

/// What went wrong while CRIU was sending.
#[derive(Debug, thiserror::Error)]
pub enum IntakeError {
    /// An image could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// CRIU named what cannot be an image.
    #[error("CRIU sent an image that cannot be stored: {0}")]
    Name(#[from] ManifestError),
    /// The connection failed.
    #[error("the connection with CRIU failed: {0}")]
    Connection(#[from] io::Error),
    /// CRIU does not speak its protocol.
    #[error("CRIU sent a request that is not understood: {0}")]
    Protocol(&'static str),
    /// CRIU never connected, or did not say that it has sent all.
    #[error("CRIU ended before it sent all images")]
    NotConnected,
}

/// Waits for CRIU.
#[derive(Debug)]
pub struct Intake {
    listener: UnixListener,
}

impl Intake {
    /// Listens in the directory that CRIU is given as its directory of images. Its path must fit a
    /// socket's address: about 80 bytes.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub fn bind(directory: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(directory.join(SOCKET_FILE))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// Stores what CRIU sends, until it ends or has sent all. Every image is durable then.
    ///
    /// # Errors
    /// The first thing that failed. CRIU notices by its pipe, and lets the job go on.
    pub fn receive(
        self,
        directory: &Path,
        parent: Option<&Checkpoint>,
        mut is_alive: impl FnMut() -> bool,
    ) -> Result<Vec<Image>, IntakeError> {
        let connection = loop {
            // Asked first: it may connect and end in between.
            let may_connect = is_alive();
            match self.listener.accept() {
                Ok((connection, _)) => break connection,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !may_connect {
                        return Err(IntakeError::NotConnected);
                    }
                    wait_readable(&self.listener)?;
                }
                Err(error) => return Err(error.into()),
            }
        };
        connection.set_nonblocking(false)?;
        connection.set_read_timeout(Some(REQUEST_DEADLINE))?;
        let stored: Mutex<Vec<Image>> = Mutex::default();
        let failed: Mutex<Option<ImageError>> = Mutex::default();
        let result = thread::scope(|scope| -> Result<(), IntakeError> {
            // Closed when this ends, also by an error: CRIU would wait for ever, and the workers
            // for CRIU.
            let connection = connection;
            let mut workers: Vec<thread::ScopedJoinHandle<'_, ()>> = Vec::new();
            loop {
                if !wait_readable(&connection)? {
                    if is_alive() {
                        continue;
                    }
                    // What CRIU sent last may have arrived since.
                    if !wait_readable(&connection)? {
                        return Ok(());
                    }
                }
                let Some((name, pipe)) = receive_request(&connection)? else {
                    return Ok(());
                };
                check_image_name(&name)?;
                workers.retain(|worker| !worker.is_finished());
                if workers.len() == IMAGES_AT_ONCE_MAX {
                    return Err(IntakeError::Protocol("too many images at once"));
                }
                let (stored, failed) = (&stored, &failed);
                workers.push(
                    scope.spawn(move || match store(directory, &name, pipe, parent) {
                        Ok(image) => stored.lock().push(image),
                        Err(error) => {
                            failed.lock().get_or_insert(error);
                        }
                    }),
                );
            }
        });
        // An image that could not be stored is why CRIU then closed the connection.
        if let Some(error) = failed.into_inner() {
            return Err(error.into());
        }
        result?;
        let mut images = stored.into_inner();
        images.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(images)
    }
}

fn store(
    directory: &Path,
    name: &str,
    pipe: OwnedFd,
    parent: Option<&Checkpoint>,
) -> Result<Image, ImageError> {
    // A smaller pipe is only slower.
    let _ = rustix::pipe::fcntl_setpipe_size(&pipe, PIPE_BYTES);
    let pipe = File::from(pipe);
    if is_pages_image(name) {
        let parent = parent.and_then(|parent| ParentImage::open(parent, name));
        store_pages(directory, name, pipe, parent)
    } else {
        store_plain(directory, name, pipe)
    }
}

/// Waits a moment; whether there is something to read, or the other side is gone.
pub(crate) fn wait_readable(source: &impl std::os::fd::AsFd) -> io::Result<bool> {
    let mut wanted = [PollFd::new(source, PollFlags::IN)];
    match poll(&mut wanted, Some(&TICK)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The next request: a length, a message, and then the pipe with a byte of its own. None: CRIU has
/// no more.
fn receive_request(mut connection: &UnixStream) -> Result<Option<(String, OwnedFd)>, IntakeError> {
    let mut length = [0; 4];
    if connection.read(&mut length[..1])? == 0 {
        return Ok(None);
    }
    connection.read_exact(&mut length[1..])?;
    let length = u32::from_ne_bytes(length) as usize;
    if length > REQUEST_BYTES_MAX {
        return Err(IntakeError::Protocol("its length is too large"));
    }
    let mut message = vec![0; length];
    connection.read_exact(&mut message)?;
    let name = decode_request(&message)?;
    Ok(Some((name, receive_pipe(connection)?)))
}

/// `message { required string filename = 1; }`
fn decode_request(message: &[u8]) -> Result<String, IntakeError> {
    const FILENAME: u8 = 1 << 3 | 2;
    let [FILENAME, rest @ ..] = message else {
        return Err(IntakeError::Protocol("no file name"));
    };
    let (length, name) = match rest {
        [length @ ..0x80, name @ ..] => (usize::from(*length), name),
        [low, high @ ..0x80, name @ ..] => {
            (usize::from(*low & 0x7f) | usize::from(*high) << 7, name)
        }
        _ => return Err(IntakeError::Protocol("no length of the file name")),
    };
    if name.len() != length {
        return Err(IntakeError::Protocol("a wrong length of the file name"));
    }
    String::from_utf8(name.to_vec())
        .map_err(|_| IntakeError::Protocol("a file name that is not UTF-8"))
}

fn receive_pipe(connection: &UnixStream) -> Result<OwnedFd, IntakeError> {
    let mut byte = [0];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(
        connection,
        &mut [IoSliceMut::new(&mut byte)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(io::Error::from)?;
    control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut pipes) => pipes.next(),
            _ => None,
        })
        .ok_or(IntakeError::Protocol("no pipe"))
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    /// Sends as CRIU does.
    fn send(connection: &UnixStream, name: &str) -> File {
        let mut message = vec![0x0a, name.len() as u8];
        message.extend(name.as_bytes());
        let mut connection_writer = connection;
        connection_writer
            .write_all(&(message.len() as u32).to_ne_bytes())
            .expect("sent");
        connection_writer.write_all(&message).expect("sent");
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let pipes = [reader.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&pipes)));
        sendmsg(
            connection,
            &[IoSlice::new(&[0])],
            &mut control,
            SendFlags::empty(),
        )
        .expect("sent");
        File::from(writer)
    }

    fn receive(send_all: impl FnOnce(UnixStream) + Send) -> Result<Vec<Image>, IntakeError> {
        let directory = tempfile::tempdir().expect("a directory");
        let images = tempfile::tempdir().expect("a directory");
        let intake = Intake::bind(directory.path()).expect("it listens");
        thread::scope(|scope| {
            let criu = scope.spawn(|| {
                send_all(UnixStream::connect(directory.path().join(SOCKET_FILE)).expect("there"));
            });
            intake.receive(images.path(), None, || !criu.is_finished())
        })
    }

    #[test]
    fn images_arrive_side_by_side() {
        let images = receive(|connection| {
            let mut pages = send(&connection, "pages-1.img");
            let mut map = send(&connection, "pagemap-1.img");
            for _ in 0..3 {
                pages.write_all(&[7; 4096]).expect("sent");
                map.write_all(b"entry").expect("sent");
            }
        })
        .expect("they are stored");
        let sizes: Vec<(&str, u64)> = images
            .iter()
            .map(|image| (&*image.name, image.size_bytes))
            .collect();
        assert_eq!(sizes, [("pagemap-1.img", 15), ("pages-1.img", 3 * 4096)]);
    }

    #[test]
    fn no_image_is_stored_elsewhere() {
        let error = receive(|connection| drop(send(&connection, "../evil.img")));
        assert!(matches!(error, Err(IntakeError::Name(_))));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        for bytes in [
            &[255, 255, 255, 255][..],
            &[2, 0, 0, 0, 0x0a, 5],
            &[1, 0, 0, 0, 0x0a],
            &[3, 0, 0, 0, 0x12, 1, b'x'],
        ] {
            let error = receive(|mut connection| connection.write_all(bytes).expect("sent"));
            assert!(matches!(error, Err(IntakeError::Protocol(_))), "{bytes:?}");
        }
    }

    #[test]
    fn a_criu_that_ends_at_once_is_noticed() {
        let directory = tempfile::tempdir().expect("a directory");
        let intake = Intake::bind(directory.path()).expect("it listens");
        let error = intake.receive(directory.path(), None, || false);
        assert!(matches!(error, Err(IntakeError::NotConnected)));
    }

    #[test]
    fn long_names_have_two_bytes_of_length() {
        let name = "x".repeat(300);
        let mut message = vec![0x0a, 0x80 | (300 & 0x7f) as u8, (300 >> 7) as u8];
        message.extend(name.as_bytes());
        assert_eq!(decode_request(&message).expect("a name"), name);
    }
}
