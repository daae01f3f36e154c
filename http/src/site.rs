//! The sites that are served.

use futures::future::{self, BoxFuture, FutureExt};
use harvestfs_telemetry::metrics::CONTENT_TYPE;

use crate::{Answer, Get};

/// The content that an endpoint serves. Answers are complete: nothing is streamed.
pub trait Site: Send + Sync + 'static {
    /// Answers a request. The future is dropped if it takes longer than the endpoint's deadline.
    fn answer<'a>(&'a self, request: &'a Get) -> BoxFuture<'a, Answer>;
}

/// A site with `/metrics` only: the output of a function that does not wait.
pub struct MetricsSite<F>(pub F);

impl<F: Fn() -> String + Send + Sync + 'static> Site for MetricsSite<F> {
    fn answer<'a>(&'a self, request: &'a Get) -> BoxFuture<'a, Answer> {
        let answer = match request.path.as_str() {
            "/metrics" => Answer::content(CONTENT_TYPE, (self.0)()),
            _ => Answer::not_found("there is only /metrics here; the namenode has the page"),
        };
        future::ready(answer).boxed()
    }
}
