//! Receives images from `criu dump --stream`: for each one, CRIU names the file and passes the read end
//! of a pipe. So memory is compared with the parent in flight, without a copy on disk.
//!
//! CRIU's pages travel through the pipe by reference: the job must not run until all of them have
//! been read.

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

/// Name of the receiver's socket, which CRIU looks for in its images directory.
const SOCKET_FILE: &str = "streamer-capture.sock";
/// Interval at which to check whether CRIU still runs.
const TICK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// Maximum length of a request in bytes: a file name with its framing.
const REQUEST_BYTES_MAX: usize = 4096;
/// Maximum number of images received at the same time; CRIU has about ten open.
const IMAGES_AT_ONCE_MAX: usize = 256;
/// Maximum time that CRIU may take to send the rest of a request.
const REQUEST_DEADLINE: Duration = Duration::from_secs(10);
/// Capacity of a pipe in bytes: needs fewer wake-ups than the kernel's default of 64 KiB.
const PIPE_BYTES: usize = 1 << 20;

/// Errors while receiving from CRIU.
#[derive(Debug, thiserror::Error)]
pub enum IntakeError {
    /// An image could not be stored.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// CRIU sent a name that an image cannot have.
    #[error("CRIU sent an image that cannot be stored: {0}")]
    Name(#[from] ManifestError),
    /// The connection failed.
    #[error("the connection with CRIU failed: {0}")]
    Connection(#[from] io::Error),
    /// CRIU violated its protocol.
    #[error("CRIU sent a request that is not understood: {0}")]
    Protocol(&'static str),
    /// CRIU never connected, or ended without reporting that it has sent everything.
    #[error("CRIU ended before it sent all images")]
    NotConnected,
}

/// Receiver that listens for CRIU.
#[derive(Debug)]
pub struct Intake {
    listener: UnixListener,
}

impl Intake {
    /// Listens in the directory that is passed to CRIU as its images directory. Its path must fit into a
    /// socket address: about 80 bytes.
    ///
    /// # Errors
    /// When the socket cannot be created.
    pub fn bind(directory: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(directory.join(SOCKET_FILE))?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener })
    }

    /// Stores what CRIU sends, until CRIU ends or closes the connection. When this returns, every received image
    /// is durable.
    ///
    /// # Errors
    /// The first failure. CRIU notices that its pipe is closed, and lets the job continue.
    pub fn receive(
        self,
        directory: &Path,
        parent: Option<&Checkpoint>,
        mut is_alive: impl FnMut() -> bool,
    ) -> Result<Vec<Image>, IntakeError> {
        let connection = loop {
            // Checked first, since CRIU may connect and end in between.
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
            // Moved here so that it is closed on any return, including errors: otherwise CRIU would wait
            // for it forever, and the workers for CRIU.
            let connection = connection;
            let mut workers: Vec<thread::ScopedJoinHandle<'_, ()>> = Vec::new();
            loop {
                if !wait_readable(&connection)? {
                    if is_alive() {
                        continue;
                    }
                    // CRIU's last bytes may have arrived since.
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
        // If an image could not be stored, that is why CRIU closed the connection.
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

/// Waits for one tick. Returns whether there is something to read or the peer has closed the connection.
pub(crate) fn wait_readable(source: &impl std::os::fd::AsFd) -> io::Result<bool> {
    let mut wanted = [PollFd::new(source, PollFlags::IN)];
    match poll(&mut wanted, Some(&TICK)) {
        Ok(ready) => Ok(ready > 0),
        Err(rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Receives the next request: a length, a message, and then the pipe with a byte of its own. `None` when
/// CRIU has closed the connection.
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

/// Decodes `message { required string filename = 1; }`.
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
