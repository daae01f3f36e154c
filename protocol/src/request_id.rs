//! The id of a request, which connects the log lines that a client, the namenode and datanodes write for it.
//!
//! A client chooses it for each operation; calls and block streams that are made while a future or a closure runs in
//! its scope carry it, and it is added to everything logged there. It is neither secret nor proof of anything.

use std::fmt;
use std::future::Future;

use serde::{Deserialize, Serialize};

use crate::machine;

tokio::task_local! {
    static CURRENT: RequestId;
}

/// The id of a request. Random, since clients do not coordinate their ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RequestId(u64);

impl RequestId {
    /// No request: background work.
    pub const NONE: Self = Self(0);

    /// Returns a new id.
    #[must_use]
    pub fn random() -> Self {
        Self(machine::random::<u64>().max(1))
    }

    /// Returns the request in whose scope this is called.
    #[must_use]
    pub fn current() -> Self {
        CURRENT.try_with(|current| *current).unwrap_or(Self::NONE)
    }

    /// Whether there is a request.
    #[must_use]
    pub fn is_some(self) -> bool {
        self != Self::NONE
    }

    /// Runs a future in the scope of this request. A task that the future spawns is outside this scope, unless it is
    /// given one of its own.
    pub fn scope<F: Future>(self, future: F) -> impl Future<Output = F::Output> {
        CURRENT.scope(self, future)
    }

    /// Runs a closure in the scope of this request.
    pub fn during<T>(self, work: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(self, work)
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_scope_ends_where_it_ends() {
        let request = RequestId::random();
        assert!(request.is_some());
        assert_eq!(request.to_string().len(), 16);
        let inner = async {
            tokio::task::yield_now().await;
            let nested = RequestId::random().during(RequestId::current);
            let spawned = tokio::spawn(async { RequestId::current() }).await;
            (RequestId::current(), nested, spawned.unwrap())
        };
        let (current, nested, spawned) = request.scope(inner).await;
        assert_eq!(current, request);
        assert!(nested != request && nested.is_some());
        assert_eq!(spawned, RequestId::NONE);
        assert_eq!(RequestId::current(), RequestId::NONE);
    }
}
