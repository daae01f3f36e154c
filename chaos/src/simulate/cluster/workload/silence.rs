//! How a client lets itself be cut off right after it renewed its lease ([`CutOffs`](crate::simulate::cluster::cut_off)): it
//! has everything cached then, and the namenode heard nothing from it since.

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

/// How often a client looks whether it is to be cut off, and while it is silent, whether it is.
const LOOK: Duration = Duration::from_millis(100);
const SILENT_LOOK: Duration = Duration::from_millis(5);
/// How often it looks at its lease to see when it is renewed, and how long.
const LEASE_LOOK: Duration = Duration::from_millis(1);
const RENEWED_WITHIN: Duration = Duration::from_millis(3_500);
/// So long before the next keepalive it caches what others replace.
const CACHES_BEFORE: Duration = Duration::from_millis(45);
const CACHES_WITHIN: Duration = Duration::from_millis(40);
/// From so long before a keepalive is due to so long after.
const RENEWS_BEFORE: Duration = Duration::from_millis(4);
const RENEWED_AFTER: Duration = Duration::from_millis(8);

impl Worker {
    /// Whether it is to send nothing that it can leave.
    pub(super) fn is_silent(&self) -> bool {
        self.cut_offs.is_silent(Part::Client(self.number))
    }

    /// Waits while it is to be silent.
    pub(super) async fn wait_silently(&self) {
        while self.is_silent() {
            tokio::time::sleep(SILENT_LOOK).await;
        }
    }

    /// Lets itself be cut off when it is asked to.
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
                // Something else is wrong.
                None => self.cut_offs.end(part),
            }
        }
    }

    /// When the lease was renewed.
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

    /// Looks at all files that clients replace.
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
