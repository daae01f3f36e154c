//! The client's part in being cut off right after it renewed its lease
//! ([`CutOffs`](crate::simulate::cluster::cut_off)): it has everything cached then, and the namenode has not heard from
//! it since.

use std::convert::Infallible;
use std::time::Duration;

use harvestfs_client::ClientError;
use harvestfs_protocol::limits::KEEPALIVE_INTERVAL;
use harvestfs_protocol::types::Credentials;
use tokio::time::Instant;

use super::Worker;
use super::shared::SHARED_DIRECTORY;
use crate::simulate::cluster::cut_off::Stage;
use crate::simulate::cluster::part::Part;

/// How often a client checks whether it is to be cut off, and while it is silent, whether it has been.
const LOOK: Duration = Duration::from_millis(100);
const SILENT_LOOK: Duration = Duration::from_millis(5);
/// How often it checks its lease to see when it is renewed, and for how long.
const LEASE_LOOK: Duration = Duration::from_millis(1);
const RENEWED_WITHIN: Duration = Duration::from_millis(3_500);
/// How long before the next keepalive it begins to cache what others replace, and how long that may take.
const CACHES_BEFORE: Duration = Duration::from_millis(45);
const CACHES_WITHIN: Duration = Duration::from_millis(40);
/// How long before a keepalive is due the renewal begins, and how long after that it is taken to be sent.
const RENEWS_BEFORE: Duration = Duration::from_millis(4);
const RENEWED_AFTER: Duration = Duration::from_millis(8);

impl Worker {
    /// Whether the client is to send nothing that it can omit.
    pub(super) fn is_silent(&self) -> bool {
        self.cut_offs.is_silent(Part::Client(self.number))
    }

    /// Waits while the client is to be silent.
    pub(super) async fn wait_silently(&self) {
        while self.is_silent() {
            tokio::time::sleep(SILENT_LOOK).await;
        }
    }

    /// Takes part in cut-offs when they are requested.
    pub(super) async fn be_cut_off(&self) -> Infallible {
        let part = Part::Client(self.number);
        loop {
            tokio::time::sleep(LOOK).await;
            if !self.is_silent() {
                continue;
            }
            self.cut_offs.go_on(part, Stage::Silent);
            match self.lease_renewed().await {
                Some(at) => self.be_cut_off_after(part, at + KEEPALIVE_INTERVAL).await,
                // The lease was not renewed in time: another fault is in the way.
                None => self.cut_offs.end(part),
            }
        }
    }

    /// Waits until the lease is renewed, and returns when that was; `None` if it takes too long.
    async fn lease_renewed(&self) -> Option<Instant> {
        let mut remaining = self.client.lease_remaining();
        let until = Instant::now() + RENEWED_WITHIN;
        while Instant::now() < until {
            tokio::time::sleep(LEASE_LOOK).await;
            let now = self.client.lease_remaining();
            if now > remaining {
                return Some(Instant::now());
            }
            remaining = now;
        }
        None
    }

    async fn be_cut_off_after(&self, part: Part, renews: Instant) {
        tokio::time::sleep_until(renews - CACHES_BEFORE).await;
        if let Ok(Err(error)) = tokio::time::timeout(CACHES_WITHIN, self.cache_shared()).await {
            self.journal.error(&self.name(), &error);
        }
        tokio::time::sleep_until(renews - RENEWS_BEFORE).await;
        self.cut_offs.go_on(part, Stage::Renewing);
        tokio::time::sleep_until(renews + RENEWED_AFTER).await;
        self.cut_offs.go_on(part, Stage::Renewed);
    }

    /// Looks up all files that clients replace, so that they are cached.
    async fn cache_shared(&self) -> Result<(), ClientError> {
        let me = Credentials::root();
        for name in self.shared_names() {
            let path = format!("/{SHARED_DIRECTORY}/{name}");
            let (parent, file) = self.client.resolve_parent(&me, path.as_bytes()).await?;
            match self.client.lookup(&me, parent.ino, &file).await {
                Ok(_) | Err(ClientError::Fs(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
