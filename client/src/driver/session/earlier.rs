//! Waiting for earlier mutations, for no longer than for a namenode.

use super::Session;
use super::sequences::Numbered;
use crate::engine::cache::MetaCache;
use crate::engine::session::call::Unanswered;
use crate::error::ClientError;

impl Session {
    /// Waits while a mutation whose caller no longer waits may still change what a later mutation
    /// changes too: they are to be executed in the order in which they were requested.
    ///
    /// # Errors
    /// This took as long as a namenode is waited for.
    pub(crate) async fn settled(
        &self,
        is_unsettled: impl Fn(&MetaCache) -> bool,
    ) -> Result<(), Unanswered> {
        let settled = async {
            loop {
                let settled = self.settled.notified();
                if !is_unsettled(&self.cache) {
                    return;
                }
                settled.await;
            }
        };
        self.in_time(settled).await
    }

    /// Waits for a number, at most a window after the oldest mutation in flight. That one may be a
    /// commit that is repeated as long as its session lasts.
    ///
    /// # Errors
    /// As [`Session::settled`].
    pub(super) async fn number(&self, window: u64) -> Result<Numbered, Unanswered> {
        self.in_time(self.sequences.begin(window)).await
    }

    async fn in_time<T>(&self, earlier: impl Future<Output = T>) -> Result<T, Unanswered> {
        let waited = self.options.unreachable_timeout;
        let in_time = tokio::time::timeout(waited, earlier).await;
        in_time.map_err(|_| {
            let reason = "it has not answered what was asked for before".to_owned();
            Unanswered::refused(ClientError::Unreachable { waited, reason })
        })
    }
}
