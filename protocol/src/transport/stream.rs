//! The two directions of a stream of frames.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::local::{LocalReceiver, LocalSender};
use super::{StreamCode, TransportError, within};
use crate::codec::{self, FRAME_PREFIX_BYTES, FramePrefix, StreamKind, WireError};
use crate::version::{Version, Versioned};

/// Most bytes of a stream that are taken from the transport in one call: more than one packet, so that it is no
/// bottleneck.
const READ_BYTES_MAX: usize = 128 * 1024;

/// The sending direction of a stream.
///
/// Sending is not cancellation-safe: a send that is cancelled in the middle of a frame makes the sender unusable
/// ([`TransportError::StreamUnusable`]), but never corrupts frames. Dropping the sender without
/// [`FrameSender::finish`] resets the stream.
#[derive(Debug)]
pub struct FrameSender {
    way: SendingWay,
    /// The version that the connection speaks.
    spoken: Version,
    /// What precedes the next frame: the kind of a new stream.
    before: Option<StreamKind>,
    deadline: Duration,
    usable: bool,
}

/// The path of bytes to the other side.
#[derive(Debug)]
pub(super) enum SendingWay {
    Remote(quinn::SendStream),
    Local(LocalSender),
}

impl FrameSender {
    pub(super) fn new(
        way: SendingWay,
        spoken: Version,
        before: Option<StreamKind>,
        deadline: Duration,
    ) -> Self {
        Self {
            way,
            spoken,
            before,
            deadline,
            usable: true,
        }
    }

    /// Whether it bypasses the network.
    #[cfg(test)]
    pub(super) fn is_local(&self) -> bool {
        matches!(self.way, SendingWay::Local(_))
    }

    /// How long one send may wait for the peer to read.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Sends a message without data.
    ///
    /// # Errors
    /// [`TransportError::Wire`] if the message is too large, or newer than the version of the connection (nothing was
    /// sent), otherwise whatever broke the stream; after [`TransportError::Deadline`] the stream is reset.
    pub async fn send<M: Serialize + Versioned>(
        &mut self,
        message: &M,
    ) -> Result<(), TransportError> {
        self.send_parts(message, &mut []).await
    }

    /// Sends a message with data attached. The data is not copied.
    ///
    /// # Errors
    /// As [`FrameSender::send`].
    pub async fn send_with_data<M: Serialize + Versioned>(
        &mut self,
        message: &M,
        data: Bytes,
    ) -> Result<(), TransportError> {
        self.send_parts(message, &mut [data]).await
    }

    /// Sends a message with attached data that is in several pieces, for example as it was received. The data is not
    /// copied; the pieces are left empty.
    ///
    /// # Errors
    /// As [`FrameSender::send`].
    pub async fn send_parts<M: Serialize + Versioned>(
        &mut self,
        message: &M,
        data: &mut [Bytes],
    ) -> Result<(), TransportError> {
        let data_len = data.iter().map(Bytes::len).sum();
        let mut head = Vec::with_capacity(256);
        head.extend(self.before.map(StreamKind::encode));
        let encoded = match codec::check_spoken(message, self.spoken) {
            Ok(()) => codec::encode_frame(&mut head, message, data_len),
            Err(error) => match message.older() {
                Some(older) => codec::encode_frame(&mut head, &older, data_len),
                None => Err(error),
            },
        };
        encoded?;
        self.write(head.into(), data).await
    }

    /// Announces a new stream to the peer before the first frame.
    pub(crate) async fn announce(&mut self) -> Result<(), TransportError> {
        match self.before {
            Some(kind) => {
                self.write(Bytes::copy_from_slice(&[kind.encode()]), &mut [])
                    .await
            }
            None => Ok(()),
        }
    }

    /// Writes encoded frames.
    pub(crate) async fn write(
        &mut self,
        head: Bytes,
        data: &mut [Bytes],
    ) -> Result<(), TransportError> {
        if !std::mem::replace(&mut self.usable, false) {
            return Err(TransportError::StreamUnusable);
        }
        let way = &mut self.way;
        let result = within(self.deadline, "sending", async {
            match way {
                SendingWay::Remote(quinn) => {
                    quinn.write_chunk(head).await?;
                    if !data.is_empty() {
                        quinn.write_all_chunks(data).await?;
                    }
                    Ok(())
                }
                SendingWay::Local(local) => local.write(head, data).await,
            }
        })
        .await;
        match result {
            Ok(()) => {
                self.before = None;
                self.usable = true;
                Ok(())
            }
            Err(error) => {
                self.reset(StreamCode::FAILED);
                Err(error)
            }
        }
    }

    /// Ends the stream after the last frame. The peer gets everything that was sent, if it is still reachable.
    ///
    /// # Errors
    /// [`TransportError::StreamUnusable`] if it was already finished or reset.
    pub fn finish(&mut self) -> Result<(), TransportError> {
        if !std::mem::replace(&mut self.usable, false) {
            return Err(TransportError::StreamUnusable);
        }
        match &mut self.way {
            SendingWay::Remote(quinn) => quinn.finish().map_err(|_| TransportError::StreamUnusable),
            SendingWay::Local(local) => {
                local.finish(self.deadline);
                Ok(())
            }
        }
    }

    /// Abandons sending: data that has not arrived yet is dropped, and the peer gets `code`, if the stream goes over
    /// the network.
    pub(super) fn reset(&mut self, code: StreamCode) {
        self.usable = false;
        match &mut self.way {
            // Fails only if the stream is already over.
            SendingWay::Remote(quinn) => drop(quinn.reset(code.0.into())),
            SendingWay::Local(local) => local.reset(),
        }
    }
}

impl Drop for FrameSender {
    fn drop(&mut self) {
        // Without this, a sender that is abandoned in the middle would end the stream as if it were complete. After
        // `finish` or `reset`, nothing is left to do.
        if self.usable {
            self.reset(StreamCode::CANCELLED);
        }
    }
}

/// The receiving direction of a stream.
///
/// After [`FrameReceiver::recv`] has returned a message with attached data, take the data with one of
/// [`FrameReceiver::read_data`], [`FrameReceiver::read_data_into`] or [`FrameReceiver::read_data_chunk`]; the next
/// `recv` skips the rest of it. Dropping the receiver asks the peer to stop sending.
#[derive(Debug)]
pub struct FrameReceiver {
    way: ReceivingWay,
    /// Bytes of the stream that were taken from the transport and not consumed yet.
    arrived: Bytes,
    /// Prefix and header of the next frame as far as they have arrived.
    head: BytesMut,
    /// Bytes of the current frame's data that were not taken yet.
    data_remaining: usize,
}

/// The path of bytes from the other side.
#[derive(Debug)]
pub(super) enum ReceivingWay {
    Remote(quinn::RecvStream),
    Local(LocalReceiver),
}

impl ReceivingWay {
    /// Reads some bytes into `buffer`, or returns `None` at the end. Cancellation-safe.
    async fn read(&mut self, buffer: &mut [u8]) -> Result<Option<usize>, TransportError> {
        match self {
            Self::Remote(quinn) => Ok(quinn.read(buffer).await?),
            Self::Local(local) => local.read(buffer).await,
        }
    }

    /// Returns some bytes as they arrive, or `None` at the end. Cancellation-safe.
    async fn read_chunk(&mut self) -> Result<Option<Bytes>, TransportError> {
        match self {
            Self::Remote(quinn) => {
                let chunk = quinn.read_chunk(READ_BYTES_MAX, true).await?;
                Ok(chunk.map(|chunk| chunk.bytes))
            }
            Self::Local(local) => local.read_chunk(READ_BYTES_MAX).await,
        }
    }
}

impl FrameReceiver {
    pub(super) fn new(way: ReceivingWay) -> Self {
        Self {
            way,
            arrived: Bytes::new(),
            head: BytesMut::new(),
            data_remaining: 0,
        }
    }

    /// Receives the next message and the length in bytes of its attached data, or returns `None` if the peer finished
    /// the stream. Cancellation-safe.
    ///
    /// # Errors
    /// [`TransportError::Deadline`] (call again to continue waiting), [`TransportError::StreamReset`],
    /// [`TransportError::Wire`], or whatever broke the connection.
    pub async fn recv<M: DeserializeOwned>(
        &mut self,
        deadline: Duration,
    ) -> Result<Option<(M, usize)>, TransportError> {
        within(deadline, "receiving", self.recv_unbounded()).await
    }

    async fn recv_unbounded<M: DeserializeOwned>(
        &mut self,
    ) -> Result<Option<(M, usize)>, TransportError> {
        while self.data_remaining > 0 {
            self.next_data_piece(usize::MAX).await?;
        }
        loop {
            let wanted = self.missing_from_head()?;
            if wanted == 0 {
                break;
            }
            if self.arrived.is_empty() && !self.fetch().await? {
                if self.head.is_empty() {
                    return Ok(None);
                }
                return Err(WireError::Truncated {
                    missing_bytes: wanted,
                }
                .into());
            }
            let piece = self.arrived.split_to(wanted.min(self.arrived.len()));
            self.head.extend_from_slice(&piece);
        }
        let prefix = FramePrefix::decode(&self.head)?;
        let message = codec::decode_header(&self.head[FRAME_PREFIX_BYTES..])?;
        self.head.clear();
        self.data_remaining = prefix.data_len;
        Ok(Some((message, prefix.data_len)))
    }

    /// Returns how many bytes of prefix and header have not arrived, as far as is known.
    fn missing_from_head(&self) -> Result<usize, WireError> {
        if self.head.len() < FRAME_PREFIX_BYTES {
            return Ok(FRAME_PREFIX_BYTES - self.head.len());
        }
        let prefix = FramePrefix::decode(&self.head)?;
        Ok(FRAME_PREFIX_BYTES + prefix.header_len - self.head.len())
    }

    /// Returns how many bytes of the current frame's data were not taken yet.
    pub fn data_remaining(&self) -> usize {
        self.data_remaining
    }

    /// Reads data of the current frame into `buffer` until it is full. The bytes go from the received packets
    /// straight to their destination. Not cancellation-safe: the progress of a cancelled read is lost, so the stream
    /// must be abandoned then.
    ///
    /// # Errors
    /// [`WireError::Truncated`] if `buffer` is longer than the remaining data, or the stream ends early;
    /// [`TransportError::Deadline`]; whatever broke the stream.
    pub async fn read_data_into(
        &mut self,
        buffer: &mut [u8],
        deadline: Duration,
    ) -> Result<(), TransportError> {
        if buffer.len() > self.data_remaining {
            return Err(WireError::Truncated {
                missing_bytes: buffer.len() - self.data_remaining,
            }
            .into());
        }
        within(deadline, "receiving data", async {
            let mut filled = 0;
            while filled < buffer.len() {
                let rest = &mut buffer[filled..];
                filled += if self.arrived.is_empty() {
                    let read = self.way.read(rest).await?;
                    read.ok_or(WireError::Truncated {
                        missing_bytes: rest.len(),
                    })?
                } else {
                    let len = rest.len().min(self.arrived.len());
                    self.arrived.copy_to_slice(&mut rest[..len]);
                    len
                };
            }
            self.data_remaining -= filled;
            Ok::<_, TransportError>(())
        })
        .await
    }

    /// Returns the rest of the current frame's data in one piece, without a copy if it arrived in one. Not
    /// cancellation-safe.
    ///
    /// # Errors
    /// As [`FrameReceiver::read_data_into`].
    pub async fn read_data(&mut self, deadline: Duration) -> Result<Bytes, TransportError> {
        within(deadline, "receiving data", async {
            let first = match self.next_data_piece(usize::MAX).await? {
                Some(piece) if self.data_remaining == 0 => return Ok(piece),
                Some(piece) => piece,
                None => return Ok(Bytes::new()),
            };
            // Grows with the bytes that arrive, not with the announced length.
            let mut all = BytesMut::from(first);
            while let Some(piece) = self.next_data_piece(usize::MAX).await? {
                all.extend_from_slice(&piece);
            }
            Ok::<_, TransportError>(all.freeze())
        })
        .await
    }

    /// Returns the next piece of the current frame's data as it arrived, without a copy; `None` after the last.
    /// Cancellation-safe.
    ///
    /// # Errors
    /// As [`FrameReceiver::read_data_into`].
    pub async fn read_data_chunk(
        &mut self,
        max_bytes: usize,
        deadline: Duration,
    ) -> Result<Option<Bytes>, TransportError> {
        within(deadline, "receiving data", self.next_data_piece(max_bytes)).await
    }

    async fn next_data_piece(&mut self, max_bytes: usize) -> Result<Option<Bytes>, TransportError> {
        if self.data_remaining == 0 {
            return Ok(None);
        }
        if self.arrived.is_empty() && !self.fetch().await? {
            return Err(WireError::Truncated {
                missing_bytes: self.data_remaining,
            }
            .into());
        }
        let len = self.data_remaining.min(max_bytes).min(self.arrived.len());
        self.data_remaining -= len;
        Ok(Some(self.arrived.split_to(len)))
    }

    /// Takes the next bytes of the stream from the transport; returns false at its end. Call it only when `arrived`
    /// is empty.
    async fn fetch(&mut self) -> Result<bool, TransportError> {
        match self.way.read_chunk().await? {
            Some(bytes) => {
                self.arrived = bytes;
                Ok(true)
            }
            None => Ok(false),
        }
    }

    /// Returns the next bytes of the stream, across frames, or `None` at its end. Cancellation-safe.
    pub(crate) async fn read_bytes(&mut self) -> Result<Option<Bytes>, TransportError> {
        if self.arrived.is_empty() && !self.fetch().await? {
            return Ok(None);
        }
        Ok(Some(std::mem::take(&mut self.arrived)))
    }
}
