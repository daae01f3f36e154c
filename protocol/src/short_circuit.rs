//! Short circuit: a client reads sealed replicas on its own host from their files.
//!
//! The client asks the datanode, over the network, for its Unix socket ([`crate::data::DataRequest::ShortCircuit`]);
//! only a client on the same host gets it. On that socket, every request is a frame with a [`FileRequest`], and is
//! answered in order by a frame with a [`FileReply`]. With `Ok` comes the replica's file, opened for reading with
//! direct I/O. The client verifies that the file's header names the block, and every chunk against the checksums in
//! the file ([`crate::replica_layout`]). Answers are not numbered: a client whose wait for one timed out ends the
//! connection.
//!
//! A file is *lent*: until the connection ends, and no longer than [`LOAN`]. The datanode ends the connection when
//! the server is to be left to its owner, and when the datanode stops.
//!
//! When anything fails here, clients read over the network, which always works.

use std::io::{self, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bytes::Bytes;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};

use crate::codec::{FrameDecoder, encode_frame};
use crate::error::DataError;
use crate::ids::BlockId;
use crate::request_id::RequestId;
use crate::token::BlockToken;

/// How long a file may be used after it was requested. The datanode counts the space of a removed replica as used for
/// this long.
pub const LOAN: Duration = Duration::from_secs(20);
/// Most files that are simultaneously lent on one connection.
pub const LOANS_MAX: usize = 256;

/// Most bytes received in one call; all messages are far shorter.
const RECEIVED_BYTES_MAX: usize = 4096;

/// Asks for the file of a sealed replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRequest {
    /// Block.
    pub block: BlockId,
    /// A token to read it.
    pub token: BlockToken,
    /// The id of the request for which it is read.
    pub request: RequestId,
}

/// The answer to [`FileRequest`]. The file comes with `Ok`.
pub type FileReply = Result<(), DataError>;

/// Returns an identifier of this host that is unique until the host restarts.
///
/// # Errors
/// The kernel does not provide it.
pub fn this_host() -> io::Result<String> {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(boot_id.trim().to_owned())
}

/// Answers a [`FileRequest`]; `file` is sent along with `Ok`. Never waits.
///
/// # Errors
/// The other side has not taken earlier answers, or has closed the connection.
pub fn answer(
    socket: impl AsFd,
    reply: &FileReply,
    file: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut frame = Vec::new();
    encode_frame(&mut frame, reply, 0).map_err(invalid)?;
    let files: Vec<BorrowedFd<'_>> = file.into_iter().collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !attached.push(SendAncillaryMessage::ScmRights(&files)) {
        return Err(io::Error::other("there is no room for the file"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let sent = sendmsg(socket, &[IoSlice::new(&frame)], &mut attached, flags)?;
    if sent < frame.len() {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    Ok(())
}

/// Asks for a file and waits for the answer until the socket's timeouts expire. For one caller at a time.
///
/// # Errors
/// Any error makes the connection unusable: a late answer would be taken for the answer to the next request.
pub fn ask(
    mut socket: &UnixStream,
    request: &FileRequest,
) -> io::Result<Result<OwnedFd, DataError>> {
    let mut frame = Vec::new();
    encode_frame(&mut frame, request, 0).map_err(invalid)?;
    socket.write_all(&frame)?;
    let mut decoder = FrameDecoder::new();
    let mut file = None;
    loop {
        if let Some(reply) = decoder.next_frame::<FileReply>().map_err(invalid)? {
            return match (reply, file) {
                (Ok(()), Some(file)) => Ok(Ok(file)),
                (Ok(()), None) => Err(invalid("an answer without its file")),
                (Err(error), _) => Ok(Err(error)),
            };
        }
        let mut received = [0; RECEIVED_BYTES_MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut attached = RecvAncillaryBuffer::new(&mut space);
        let into = &mut [IoSliceMut::new(&mut received)];
        let message = recvmsg(socket, into, &mut attached, RecvFlags::CMSG_CLOEXEC)?;
        for part in attached.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = part {
                file = file.or(files.last());
            }
        }
        if message.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        decoder.push(Bytes::copy_from_slice(&received[..message.bytes]));
    }
}

/// Whether the other side still has the connection open. Never waits.
#[must_use]
pub fn is_connected(socket: &UnixStream) -> bool {
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    match rustix::net::recv(socket, &mut [0; 1], flags) {
        // An answer for which another thread waits.
        Ok((peeked, _)) => peeked > 0,
        Err(error) => error == rustix::io::Errno::AGAIN,
    }
}

fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use super::*;
    use crate::token::{Right, TokenKey, TokenSigner};

    fn request() -> FileRequest {
        let key = TokenKey {
            key_id: 1,
            secret: [3; 32],
        };
        FileRequest {
            block: BlockId(7),
            token: TokenSigner::new(&key).sign(BlockId(7), Right::Read, u64::MAX),
            request: RequestId::NONE,
        }
    }

    /// Takes one request and answers it.
    fn serve(mut socket: UnixStream, reply: FileReply, file: Option<File>) -> FileRequest {
        let mut decoder = FrameDecoder::new();
        loop {
            if let Some(request) = decoder.next_frame().unwrap() {
                answer(&socket, &reply, file.as_ref().map(AsFd::as_fd)).unwrap();
                return request;
            }
            let mut received = [0; 64];
            let bytes = socket.read(&mut received).unwrap();
            decoder.push(Bytes::copy_from_slice(&received[..bytes]));
        }
    }

    #[test]
    fn a_file_is_handed_over_and_can_be_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("replica");
        std::fs::write(&path, "content").unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        let file = File::open(&path).unwrap();
        let serving = std::thread::spawn(move || serve(there, Ok(()), Some(file)));
        let asked = request();
        let lent = ask(&here, &asked).unwrap().unwrap();
        assert_eq!(serving.join().unwrap(), asked);
        let mut content = String::new();
        File::from(lent).read_to_string(&mut content).unwrap();
        assert_eq!(content, "content");
    }

    #[test]
    fn a_refusal_has_no_file_and_a_promise_must_have_one() {
        let (here, there) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(|| serve(there, Err(DataError::NoSuchReplica), None));
        let refused = ask(&here, &request()).unwrap();
        assert_eq!(refused.unwrap_err(), DataError::NoSuchReplica);
        serving.join().unwrap();

        let (here, there) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(|| serve(there, Ok(()), None));
        let error = ask(&here, &request()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        serving.join().unwrap();
    }

    #[test]
    fn the_end_of_a_connection_is_seen_without_waiting() {
        let (here, there) = UnixStream::pair().unwrap();
        assert!(is_connected(&here));
        answer(&there, &Err(DataError::Stopping), None).unwrap();
        assert!(is_connected(&here), "an answer waits");
        let (here, there) = UnixStream::pair().unwrap();
        drop(there);
        assert!(!is_connected(&here));
        assert!(ask(&here, &request()).is_err());
    }

    #[test]
    fn what_is_no_answer_is_an_error() {
        let (here, mut there) = UnixStream::pair().unwrap();
        there.write_all(&[0xff; 64]).unwrap();
        let error = ask(&here, &request()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_host_has_a_name_of_its_own() {
        assert_eq!(this_host().unwrap().len(), 36);
    }
}
