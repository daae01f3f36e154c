//! A queue of frames that wait to be written, and the task that writes them.

use std::mem;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use serde::Serialize;
use tokio::sync::{Notify, Semaphore};

use crate::codec::{self, WireError};
use crate::transport::{CloseCode, Connection, FrameSender, TransportError};

/// Encoded frames in the order in which they are sent. Adding one never waits.
#[derive(Debug)]
pub(super) struct Outgoing {
    queue: Mutex<Queue>,
    /// Something was queued, or the queue was closed.
    changed: Notify,
    /// The queue was taken for writing.
    drained: Notify,
}

#[derive(Debug, Default)]
struct Queue {
    frames: Vec<u8>,
    notices: usize,
    /// Permits to return to `written` once the frames are written.
    permits: usize,
    /// Nothing more will be added.
    closed: bool,
    /// Nothing more will be written; what is added is dropped.
    broken: bool,
}

/// How full the queue is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fill {
    pub(super) bytes: usize,
    pub(super) notices: usize,
}

/// How a frame counts towards the limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// It holds this many permits, which were acquired to queue it.
    Permits(usize),
    Notice,
}

impl Outgoing {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            queue: Mutex::default(),
            changed: Notify::new(),
            drained: Notify::new(),
        })
    }

    /// Queues a message.
    pub(super) fn push<M: Serialize>(
        &self,
        message: &M,
        counted: Counted,
    ) -> Result<Fill, WireError> {
        let mut queue = self.queue.lock();
        codec::encode_frame(&mut queue.frames, message, 0)?;
        Ok(self.pushed(queue, counted))
    }

    /// Queues a frame that is encoded already.
    pub(super) fn push_encoded(&self, frame: &[u8], counted: Counted) -> Fill {
        let mut queue = self.queue.lock();
        queue.frames.extend_from_slice(frame);
        self.pushed(queue, counted)
    }

    fn pushed(&self, mut queue: MutexGuard<'_, Queue>, counted: Counted) -> Fill {
        if queue.broken {
            queue.frames.clear();
        }
        match counted {
            Counted::Permits(permits) => queue.permits += permits,
            Counted::Notice => queue.notices += 1,
        }
        let fill = Fill {
            bytes: queue.frames.len(),
            notices: queue.notices,
        };
        drop(queue);
        self.changed.notify_one();
        fill
    }

    /// Declares that no more frames will be added: the queue is written and the stream finished.
    pub(super) fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_one();
    }

    /// Waits until at most `max_bytes` are queued. Only one task at a time may wait.
    pub(super) async fn wait_below(&self, max_bytes: usize) {
        while self.queue.lock().frames.len() > max_bytes {
            self.drained.notified().await;
        }
    }

    /// Writes the queue until it is closed and empty, or until the connection breaks: then the error is returned.
    /// Permits of written frames are returned to `written`.
    pub(super) async fn write_to(
        &self,
        mut sender: FrameSender,
        connection: &Connection,
        written: &Semaphore,
    ) -> Result<(), TransportError> {
        let result = self
            .write_until_closed(&mut sender, connection, written)
            .await;
        let mut queue = self.queue.lock();
        queue.broken = true;
        queue.frames = Vec::new();
        drop(queue);
        // Tasks that wait for room or for permits must not wait forever.
        self.drained.notify_one();
        written.close();
        result
    }

    async fn write_until_closed(
        &self,
        sender: &mut FrameSender,
        connection: &Connection,
        written: &Semaphore,
    ) -> Result<(), TransportError> {
        let lost = connection.closed();
        tokio::pin!(lost);
        loop {
            let (frames, permits) = {
                let mut queue = self.queue.lock();
                if queue.frames.is_empty() && queue.closed {
                    return sender.finish();
                }
                queue.notices = 0;
                (mem::take(&mut queue.frames), mem::take(&mut queue.permits))
            };
            if frames.is_empty() {
                tokio::select! {
                    biased;
                    error = &mut lost => return Err(error),
                    () = self.changed.notified() => continue,
                }
            }
            self.drained.notify_one();
            if let Err(error) = sender.write(frames.into(), &mut []).await {
                if matches!(error, TransportError::Deadline { .. }) {
                    connection.close(CloseCode::TOO_SLOW, "the peer does not read");
                }
                return Err(error);
            }
            written.add_permits(permits);
        }
    }
}

/// Closes the queue when its last producer is dropped.
#[derive(Debug)]
pub(super) struct Producer(pub(super) Arc<Outgoing>);

impl Drop for Producer {
    fn drop(&mut self) {
        self.0.close();
    }
}
