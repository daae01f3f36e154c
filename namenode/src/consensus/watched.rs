//! Values that openraft's tasks watch. Waiting tasks are woken in the order in which they began to wait, whereas
//! tokio's `watch` chooses one of several lists at random, so that a simulation would not depend on the seed alone.

use std::sync::Arc;

use harvestfs_protocol::watch;
use openraft::async_runtime::watch::{RecvError, SendError};
use openraft::async_runtime::{Watch, WatchReceiver, WatchSender};
use openraft::{OptionalSend, OptionalSync};

/// A `watch` implementation that wakes its waiters in order.
pub struct InOrder;

/// The sending half. The value is closed when the last copy of it is dropped.
pub struct Sender<T>(Arc<watch::Sender<T>>);

/// The receiving half, see [`watch::Receiver`].
pub struct Receiver<T>(watch::Receiver<T>);

impl Watch for InOrder {
    type Sender<T: OptionalSend + OptionalSync> = Sender<T>;
    type Receiver<T: OptionalSend + OptionalSync> = Receiver<T>;
    type Ref<'a, T: OptionalSend + 'a> = watch::Ref<'a, T>;

    fn channel<T: OptionalSend + OptionalSync>(init: T) -> (Sender<T>, Receiver<T>) {
        let (sender, receiver) = watch::channel(init);
        (Sender(Arc::new(sender)), Receiver(receiver))
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<T: OptionalSend + OptionalSync> WatchSender<InOrder, T> for Sender<T> {
    fn send(&self, value: T) -> Result<(), SendError<T>> {
        if !self.0.has_receivers() {
            return Err(SendError(value));
        }
        self.0.send_replace(value);
        Ok(())
    }

    fn send_if_modified<F: FnOnce(&mut T) -> bool>(&self, modify: F) -> bool {
        self.0.send_if_modified(modify)
    }

    fn borrow_watched(&self) -> watch::Ref<'_, T> {
        self.0.borrow()
    }

    fn subscribe(&self) -> Receiver<T> {
        Receiver(self.0.subscribe())
    }
}

impl<T: OptionalSend + OptionalSync> WatchReceiver<InOrder, T> for Receiver<T> {
    async fn changed(&mut self) -> Result<(), RecvError> {
        self.0
            .changed()
            .await
            .map_err(|watch::Closed| RecvError(()))
    }

    fn borrow_watched(&self) -> watch::Ref<'_, T> {
        self.0.borrow()
    }

    fn borrow_and_update(&mut self) -> watch::Ref<'_, T> {
        self.0.borrow_and_update()
    }
}
