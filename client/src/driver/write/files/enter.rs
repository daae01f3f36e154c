//! The entry of written data into the memory of a file.
//!
//! Data at offsets and appends are committed separately. Therefore data of one kind enters only
//! when none of the other is held: otherwise an append could become part of the file before data
//! that was written earlier, which then would be on top of it.

use std::sync::Arc;

use bytes::Bytes;
use harvestfs_protocol::types::{Credentials, Timestamp};
use tokio::sync::MutexGuard;

use super::{FileState, Files, Inner};
use crate::driver::clock;
use crate::engine::write::file::Moment;
use crate::engine::write::writeback::Order;
use crate::error::ClientError;

/// The place of written data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// At an offset of the file.
    At(u64),
    /// At the end of the file.
    End,
}

/// Until it is dropped, no other caller's data enters the file.
struct Turn<'a> {
    file: &'a FileState,
    _queue: MutexGuard<'a, ()>,
}

impl Target {
    fn order(self) -> Order {
        match self {
            Self::At(_) => Order::File,
            Self::End => Order::Append,
        }
    }
}

impl Inner {
    fn take_in(&mut self, credentials: &Credentials, target: Target, data: Bytes) {
        let when = moment();
        match target {
            Target::At(offset) => self.data.write(offset, data, credentials, when),
            Target::End => self.data.append(data, credentials, when),
        }
    }
}

impl FileState {
    /// Whether data for this target may enter before anything else is stored.
    fn takes(&self, target: Target) -> bool {
        self.inner.lock().data.takes(target.order())
    }

    /// Waits for all earlier callers.
    async fn turn(&self) -> Turn<'_> {
        let queue = self.turns.lock().await;
        self.inner.lock().is_kept = true;
        Turn {
            file: self,
            _queue: queue,
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.file.inner.lock().is_kept = false;
    }
}

impl Files {
    /// Takes in data if nothing has to be stored first; otherwise gives it back.
    pub(crate) fn try_take_in(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        credentials: &Credentials,
        target: Target,
        data: Bytes,
    ) -> Result<(), Bytes> {
        self.take_in_now(file, credentials, target, data, false)
    }

    fn take_in_now(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        credentials: &Credentials,
        target: Target,
        data: Bytes,
        has_turn: bool,
    ) -> Result<(), Bytes> {
        self.update(file, |inner| {
            let is_kept = inner.is_kept && !has_turn;
            // Checked under the lock, or data of both kinds could enter simultaneously.
            if is_kept || inner.data.holds_commits() || !inner.data.takes(target.order()) {
                return Err(data);
            }
            inner.take_in(credentials, target, data);
            Ok(())
        })
    }

    /// Takes in data after storing whatever has to be stored first.
    ///
    /// # Errors
    /// The error that kept that from being stored, or the memory from being freed.
    pub(crate) async fn take_in(
        self: &Arc<Self>,
        file: &Arc<FileState>,
        credentials: &Credentials,
        target: Target,
        data: Bytes,
    ) -> Result<(), ClientError> {
        if !file.takes(target) {
            self.flush(file, false).await?;
        }
        if !self.dirty.has_room(data.len()) {
            self.wait_for_room(file, data.len()).await?;
        }
        self.find_rules(file).await?;
        let Err(mut data) = self.try_take_in(file, credentials, target, data) else {
            return Ok(());
        };
        // Other callers were faster, and could be again and again.
        let _turn = file.turn().await;
        loop {
            // Data that entered now would be cut off with the rest.
            file.once(|data| (!data.holds_commits()).then_some(()))
                .await;
            if !file.takes(target) {
                self.flush(file, false).await?;
            }
            self.find_rules(file).await?;
            match self.take_in_now(file, credentials, target, data, true) {
                Ok(()) => return Ok(()),
                // The file is being truncated again.
                Err(given_back) => data = given_back,
            }
        }
    }
}

/// Returns the time of a write that happens now.
fn moment() -> Moment {
    Moment {
        now: clock::now(),
        wall_clock: Timestamp::now(),
    }
}
