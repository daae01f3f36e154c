//! A value whose changes many tasks await. It has the interface of tokio's `watch`, but wakes waiters in the order of
//! their arrival: tokio distributes them over several lists at random, so that a seed would not determine what a
//! simulation does.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::{MappedRwLockReadGuard, RwLock, RwLockReadGuard};
use tokio::sync::Notify;

/// The sender was dropped, and the value no longer changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("what was waited for will not happen any more")]
pub struct Closed;

/// Read access to the value. It must not be held for long, because the value cannot change meanwhile.
pub type Ref<'a, T> = MappedRwLockReadGuard<'a, T>;

/// Changes the value.
#[derive(Debug)]
pub struct Sender<T>(Arc<Shared<T>>);

/// Waits for changes.
#[derive(Debug)]
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    /// The last version that was seen.
    seen: u64,
}

#[derive(Debug)]
struct Shared<T> {
    state: RwLock<State<T>>,
    changed: Notify,
    receivers: AtomicUsize,
    /// Notified when the last receiver is dropped.
    abandoned: Notify,
}

#[derive(Debug)]
struct State<T> {
    value: T,
    version: u64,
    is_closed: bool,
}

/// Creates a value that changes, and a receiver that waits for changes.
pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
    let sender = Sender::new(value);
    let receiver = sender.subscribe();
    (sender, receiver)
}

impl<T> Shared<T> {
    fn borrow(&self) -> Ref<'_, T> {
        RwLockReadGuard::map(self.state.read(), |state| &state.value)
    }
}

impl<T> Sender<T> {
    /// Creates a value that nothing waits for yet.
    pub fn new(value: T) -> Self {
        Self(Arc::new(Shared {
            state: RwLock::new(State {
                value,
                version: 0,
                is_closed: false,
            }),
            changed: Notify::new(),
            receivers: AtomicUsize::new(0),
            abandoned: Notify::new(),
        }))
    }

    /// The value.
    pub fn borrow(&self) -> Ref<'_, T> {
        self.0.borrow()
    }

    /// Whether any receiver could see a change.
    #[must_use]
    pub fn has_receivers(&self) -> bool {
        self.0.receivers.load(Ordering::Acquire) > 0
    }

    /// Returns a receiver that waits for changes from now on.
    #[must_use]
    pub fn subscribe(&self) -> Receiver<T> {
        self.0.receivers.fetch_add(1, Ordering::Relaxed);
        Receiver {
            seen: self.0.state.read().version,
            shared: Arc::clone(&self.0),
        }
    }

    /// Changes the value; returns the previous one.
    pub fn send_replace(&self, value: T) -> T {
        let mut before = value;
        self.send_modify(|value| std::mem::swap(value, &mut before));
        before
    }

    /// Changes the value.
    pub fn send_modify(&self, modify: impl FnOnce(&mut T)) {
        self.send_if_modified(|value| {
            modify(value);
            true
        });
    }

    /// Changes the value if `modify` returns true. Returns whether it did.
    pub fn send_if_modified(&self, modify: impl FnOnce(&mut T) -> bool) -> bool {
        let is_modified = {
            let mut state = self.0.state.write();
            let is_modified = modify(&mut state.value);
            state.version += u64::from(is_modified);
            is_modified
        };
        if is_modified {
            self.0.changed.notify_waiters();
        }
        is_modified
    }

    /// Waits until no receiver is left.
    pub async fn closed(&self) {
        loop {
            let mut abandoned = pin!(self.0.abandoned.notified());
            abandoned.as_mut().enable();
            if !self.has_receivers() {
                return;
            }
            abandoned.await;
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        self.0.state.write().is_closed = true;
        self.0.changed.notify_waiters();
    }
}

impl<T> Receiver<T> {
    /// The value.
    pub fn borrow(&self) -> Ref<'_, T> {
        self.shared.borrow()
    }

    /// Returns the value and marks it as seen, so that [`Receiver::changed`] waits for another one.
    pub fn borrow_and_update(&mut self) -> Ref<'_, T> {
        let state = self.shared.state.read();
        self.seen = state.version;
        RwLockReadGuard::map(state, |state| &state.value)
    }

    /// Whether the value has changed since it was last seen.
    ///
    /// # Errors
    /// [`Closed`].
    pub fn has_changed(&self) -> Result<bool, Closed> {
        let state = self.shared.state.read();
        if state.is_closed {
            return Err(Closed);
        }
        Ok(state.version != self.seen)
    }

    /// Waits until the value has changed since it was last seen.
    ///
    /// # Errors
    /// [`Closed`].
    pub async fn changed(&mut self) -> Result<(), Closed> {
        loop {
            let mut changed = pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            {
                let state = self.shared.state.read();
                if state.version != self.seen {
                    self.seen = state.version;
                    return Ok(());
                }
                if state.is_closed {
                    return Err(Closed);
                }
            }
            changed.await;
        }
    }

    /// Waits for a value that satisfies the condition, which the current one may already do.
    ///
    /// # Errors
    /// [`Closed`].
    pub async fn wait_for(
        &mut self,
        mut is_wanted: impl FnMut(&T) -> bool,
    ) -> Result<Ref<'_, T>, Closed> {
        loop {
            let mut changed = pin!(self.shared.changed.notified());
            changed.as_mut().enable();
            {
                let state = self.shared.state.read();
                self.seen = state.version;
                if is_wanted(&state.value) {
                    return Ok(RwLockReadGuard::map(state, |state| &state.value));
                }
                if state.is_closed {
                    return Err(Closed);
                }
            }
            changed.await;
        }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Self {
        self.shared.receivers.fetch_add(1, Ordering::Relaxed);
        Self {
            shared: Arc::clone(&self.shared),
            seen: self.seen,
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        if self.shared.receivers.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.shared.abandoned.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;

    #[tokio::test]
    async fn those_who_wait_are_woken_in_the_order_in_which_they_came() {
        let (sender, receiver) = channel(0);
        let woken = Arc::new(Mutex::new(Vec::new()));
        let waiting: Vec<_> = (0..50)
            .map(|number| {
                let (mut receiver, woken) = (receiver.clone(), Arc::clone(&woken));
                tokio::spawn(async move {
                    receiver.wait_for(|&value| value == 2).await.map(drop)?;
                    woken.lock().push(number);
                    Ok::<(), Closed>(())
                })
            })
            .collect();
        tokio::task::yield_now().await;
        for value in [1, 2] {
            sender.send_replace(value);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for task in waiting {
            assert_eq!(task.await.unwrap(), Ok(()));
        }
        assert_eq!(*woken.lock(), (0..50).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn the_last_value_is_seen_and_then_the_end() {
        let (sender, mut receiver) = channel(0);
        assert_eq!(receiver.has_changed(), Ok(false));
        assert_eq!(sender.send_replace(1), 0);
        assert!(!sender.send_if_modified(|_| false));
        assert_eq!(receiver.has_changed(), Ok(true));
        drop(sender);
        assert_eq!(receiver.changed().await, Ok(()));
        assert_eq!(*receiver.borrow_and_update(), 1);
        assert_eq!(receiver.changed().await, Err(Closed));
        assert_eq!(receiver.has_changed(), Err(Closed));
        assert!(receiver.wait_for(|&value| value == 2).await.is_err());
        assert_eq!(*receiver.wait_for(|&value| value == 1).await.unwrap(), 1);
    }

    #[tokio::test]
    async fn a_sender_knows_when_nothing_waits_any_more() {
        let sender = Sender::new(());
        let receivers = [sender.subscribe(), sender.subscribe().clone()];
        assert!(sender.has_receivers());
        let closed = async {
            sender.closed().await;
        };
        let dropped = async {
            tokio::task::yield_now().await;
            drop(receivers);
        };
        tokio::join!(closed, dropped);
        assert!(!sender.has_receivers());
    }
}
