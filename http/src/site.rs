//! What is served.

use std::future::Future;

use harvestfs_telemetry::metrics::CONTENT_TYPE;

use crate::{Answer, Get};

/// What an endpoint serves. Answers are whole: nothing is streamed.
pub trait Site: Send + Sync + 'static {
    /// Answers a request. It is given up when it takes longer than the endpoint's deadline.
    fn answer(&self, request: &Get) -> impl Future<Output = Answer> + Send;
}

/// `/metrics` alone: what a function returns that does not wait.
pub struct MetricsSite<F>(pub F);

impl<F: Fn() -> String + Send + Sync + 'static> Site for MetricsSite<F> {
    async fn answer(&self, request: &Get) -> Answer {
        match request.path.as_str() {
            "/metrics" => Answer::content(CONTENT_TYPE, (self.0)()),
            _ => Answer::not_found("there is only /metrics here; the namenode has the page"),
        }
    }
}
