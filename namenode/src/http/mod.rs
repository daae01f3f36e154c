//! The namenode's web page and metrics, served over HTTP. Everything is read-only.
//!
//! | path | answer |
//! |---|---|
//! | `/` | the page, with `/page.css` and `/page.js` |
//! | `/metrics` | metrics for Prometheus; see `docs/METRICS.md` |
//! | `/classes` | the utilisation classes for schedulers, as JSON; see `docs/OPERATIONS.md` |
//! | `/api/cluster?since=N` | the state of the cluster, and the events after event number N |
//! | `/api/directory?path=P&after=NAME` | entries of a directory |
//! | `/api/file?path=P` | a file's blocks and where their replicas are |
//! | `/api/users?blocks=B,B` | paths of the files that use blocks, given by their numbers; `null` in a large namespace |

use std::collections::BTreeSet;
use std::future::Future;

use futures::future::BoxFuture;
use harvestfs_http::{Answer, Get, Site};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_telemetry::metrics::CONTENT_TYPE;
use serde::Serialize;

use crate::server::{Gone, Observer};

/// The web page, metrics and JSON answers that a namenode serves over HTTP.
pub struct Page {
    observer: Observer,
}

impl Page {
    /// Creates the page of a running namenode.
    #[must_use]
    pub fn new(observer: Observer) -> Self {
        Self { observer }
    }

    async fn directory(&self, request: &Get) -> Answer {
        let path = request.parameter("path").unwrap_or_default();
        let after = request.parameter("after").filter(|name| !name.is_empty());
        let found = self
            .observer
            .ask(move |owner| owner.listing(&path, after.as_deref()));
        found_json(found).await
    }

    async fn file(&self, request: &Get) -> Answer {
        let path = request.parameter("path").unwrap_or_default();
        found_json(self.observer.ask(move |owner| owner.file_places(&path))).await
    }

    async fn users(&self, request: &Get) -> Answer {
        let text = request.parameter("blocks").unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let blocks: Result<BTreeSet<BlockId>, _> = text
            .split(',')
            .map(|number| number.parse().map(BlockId))
            .collect();
        let Ok(blocks) = blocks else {
            return Answer::bad_request("blocks are numbers, with commas between them");
        };
        match self
            .observer
            .ask(move |owner| owner.block_users(&blocks))
            .await
        {
            Ok(users) => json(&users),
            Err(gone) => Answer::unavailable(&gone.to_string()),
        }
    }

    async fn cluster(&self, request: &Get) -> Answer {
        let since = match request.parameter("since") {
            None => 0,
            Some(text) => match String::from_utf8_lossy(&text).parse() {
                Ok(since) => since,
                Err(_) => return Answer::bad_request("since is the number of a happening"),
            },
        };
        let watched = self
            .observer
            .ask_how_it_is(move |owner| owner.watched(since));
        match watched.await {
            Ok(watched) => json(&watched),
            Err(gone) => Answer::unavailable(&gone.to_string()),
        }
    }
}

impl Site for Page {
    fn answer<'a>(&'a self, request: &'a Get) -> BoxFuture<'a, Answer> {
        Box::pin(self.answer_to(request))
    }
}

impl Page {
    async fn answer_to(&self, request: &Get) -> Answer {
        match request.path.as_str() {
            "/" => Answer::content("text/html; charset=utf-8", include_str!("page/page.html")),
            "/page.css" => {
                Answer::content("text/css; charset=utf-8", include_str!("page/page.css"))
            }
            "/page.js" => Answer::content(
                "text/javascript; charset=utf-8",
                include_str!("page/page.js"),
            ),
            "/metrics" => match self.observer.metrics_text().await {
                Ok(text) => Answer::content(CONTENT_TYPE, text),
                Err(gone) => Answer::unavailable(&gone.to_string()),
            },
            "/classes" => match self.observer.ask(|owner| owner.classes()).await {
                Ok(classes) => json(&classes),
                Err(gone) => Answer::unavailable(&gone.to_string()),
            },
            "/api/cluster" => self.cluster(request).await,
            "/api/directory" => self.directory(request).await,
            "/api/file" => self.file(request).await,
            "/api/users" => self.users(request).await,
            _ => Answer::not_found("there is nothing here; the page is at /"),
        }
    }
}

async fn found_json<T: Serialize>(
    found: impl Future<Output = Result<Result<T, FsError>, Gone>>,
) -> Answer {
    match found.await {
        Ok(Ok(found)) => json(&found),
        Ok(Err(FsError::NotFound)) => Answer::not_found("there is no such file or directory"),
        Ok(Err(error)) => Answer::bad_request(&error.to_string()),
        Err(gone) => Answer::unavailable(&gone.to_string()),
    }
}

fn json<T: Serialize>(value: &T) -> Answer {
    match serde_json::to_vec(value) {
        Ok(text) => Answer::content("application/json", text),
        Err(error) => {
            tracing::error!(%error, "an answer cannot be written as JSON");
            Answer::unavailable("the answer cannot be written: this is a bug")
        }
    }
}
