//! The end of a namenode that is stopped or deposed.

use std::thread;
use std::time::Duration;

use tokio::sync::mpsc;

use super::Owner;
use super::group::Group;
use crate::consensus::blocking;
use crate::server::connection::Event;
use crate::server::gate::Gate;
use crate::server::recovery::Kept;
use crate::server::{NamenodeError, clock};

/// How long requests in flight may take when the namenode stops.
const SHUTDOWN_DEADLINE: Duration = Duration::from_secs(5);

/// How the namenode is to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// Answer what is in flight first.
    Gracefully,
    /// End as if the process were killed.
    AtOnce,
}

/// How an owner ended.
pub(crate) enum Ended {
    /// As it was asked to.
    Stopped,
    /// It no longer leads, or what its engine had was replaced. Carries the engine's state if that may still be
    /// right.
    Deposed(Option<Box<Kept>>),
}

/// Drops in-memory state on another thread. With ten million files that takes a third of a second, during which this
/// namenode could not tell anyone that it no longer leads.
fn drop_elsewhere(memory: impl Send + 'static) {
    let dropping = move || drop(memory);
    if let Err(error) = thread::Builder::new()
        .name("drop".to_owned())
        .spawn(dropping)
    {
        // The closure was dropped here.
        tracing::debug!(%error, "no thread to drop the namespace on");
    }
}

impl Owner {
    /// Closes everything, after the work has ended.
    pub(super) async fn end(
        self,
        worked: Result<(), NamenodeError>,
    ) -> Result<Ended, NamenodeError> {
        if matches!(worked, Err(NamenodeError::Deposed)) {
            // Both when the next leader is known and when nobody took over in time.
            self.leave_if_removed().await;
        }
        let led = self.log.last_led();
        let is_replaced = self.log.is_replaced();
        // First of all: nobody receives committed entries any more, and openraft would wait forever for room for
        // them.
        drop(self.committed);
        // Replies that are still held are given up: their mutations may be repeated.
        let closed = self.log.close().await;
        let mut historian = self.historian;
        blocking(move || historian.stop(clock::unix_now_s())).await;
        drop_elsewhere(self.cluster);
        let (namespace, raised) = (self.namespace, self.raised);
        if let (Err(NamenodeError::Deposed), Ok(()), Some(last), false) =
            (&worked, &closed, led, is_replaced)
        {
            let kept = Kept {
                namespace,
                last,
                raised,
            };
            return Ok(Ended::Deposed(Some(Box::new(kept))));
        }
        drop_elsewhere(namespace);
        match worked {
            // Starting over is of no use without what the disk refused to store.
            Err(NamenodeError::Deposed) => closed.map(|()| Ended::Deposed(None)),
            worked => worked.and(closed).map(|()| Ended::Stopped),
        }
    }

    /// Drops what keeps connections of peers open.
    pub(super) fn let_go(&mut self) {
        self.connections.clear();
        self.gate = Gate::new();
        self.deferred.clear();
        self.group = Group::default();
        self.checkpoints.let_go();
    }

    /// Takes what arrived before the stop and waits until it is answered.
    pub(super) async fn answer_what_is_in_flight(&mut self, mut events: mpsc::Receiver<Event>) {
        let deadline = tokio::time::Instant::now() + SHUTDOWN_DEADLINE;
        let commits = self.log.commits();
        for _ in 0..events.len() {
            if let Ok(event) = events.try_recv()
                && self.may_answer()
            {
                self.on_event(event);
            }
        }
        self.stopping = true;
        let mut tick = tokio::time::interval(self.options.tick);
        loop {
            self.log.flush().await;
            self.on_progress();
            if self.gate.len() == 0 || self.log.failure().is_some() {
                return;
            }
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(deadline) => break,
                () = commits.changed() => {}
                _ = tick.tick() => {
                    let expired = self.leases.expire(self.clock.now_ms());
                    self.release(expired.released);
                }
                Some(event) = events.recv() => self.on_event(event),
            }
        }
        tracing::warn!(
            requests = self.gate.len(),
            "some requests were not answered in time; clients will repeat them"
        );
    }
}
