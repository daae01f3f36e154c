//! Queries which jobs run on a Hadoop cluster, and where.

use std::collections::BTreeMap;

use anyhow::Context;
use harvestfs_protocol::limits::HARVEST_JOBS_MAX;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::{OneOrMany, ROOT, Yarn};
use crate::cycles::follow::report::{Jobs, RunningJob, Used};

/// Maximum number of jobs whose containers are queried in one turn: each takes two requests.
const LOOKED_AT_MAX: usize = 32;

/// Answer to `GET apps`; empty when nothing runs.
#[derive(Deserialize)]
struct AppsAnswer {
    #[serde(default)]
    apps: Option<Apps>,
}

#[derive(Deserialize)]
struct Apps {
    #[serde(default)]
    app: OneOrMany<App>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct App {
    id: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    user: String,
    #[serde(default)]
    app_node_label_expression: Option<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct AttemptsAnswer {
    #[serde(default)]
    app_attempts: Option<Attempts>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Attempts {
    #[serde(default)]
    app_attempt: OneOrMany<Attempt>,
}

#[derive(Deserialize)]
struct Attempt {
    id: Number,
}

#[derive(Deserialize)]
struct ContainersAnswer {
    #[serde(default)]
    containers: Option<Containers>,
    /// Used by releases that do not wrap the list in an object.
    #[serde(default)]
    container: OneOrMany<Container>,
}

#[derive(Deserialize)]
struct Containers {
    #[serde(default)]
    container: OneOrMany<Container>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Container {
    #[serde(default)]
    assigned_node_id: Option<String>,
    #[serde(rename = "allocatedMB")]
    allocated_mib: Number,
    #[serde(rename = "allocatedVCores")]
    allocated_cores: Number,
    #[serde(default)]
    container_state: Option<String>,
}

/// A number, which some releases put in quotes.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Number {
    Plain(u64),
    Quoted(String),
}

impl Number {
    fn get(&self) -> u64 {
        match self {
            Self::Plain(number) => *number,
            Self::Quoted(text) => text.parse().unwrap_or(0),
        }
    }
}

/// The name of an attempt: `application_1_0002` and 3 make `appattempt_1_0002_000003`.
fn attempt_name(app: &str, number: u64) -> Option<String> {
    let rest = app.strip_prefix("application_")?;
    Some(format!("appattempt_{rest}_{number:06}"))
}

fn sum(containers: Vec<Container>) -> BTreeMap<String, Used> {
    let mut on: BTreeMap<String, Used> = BTreeMap::new();
    for container in containers {
        let has_ended = container.container_state.as_deref() == Some("COMPLETE");
        if let Some(node) = container.assigned_node_id.filter(|_| !has_ended) {
            let cores = u32::try_from(container.allocated_cores.get()).unwrap_or(u32::MAX);
            let used = on.entry(node).or_default();
            used.add(cores, container.allocated_mib.get());
        }
    }
    on
}

impl Yarn {
    async fn ask<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let joint = if path.contains('?') { '&' } else { '?' };
        let path = format!("{ROOT}/{path}{joint}user.name={}", self.user);
        let body = self.clients[self.active].get(&path).await?;
        serde_json::from_slice(&body).with_context(|| format!("{path} was answered strangely"))
    }

    async fn containers(&self, app: &str) -> anyhow::Result<BTreeMap<String, Used>> {
        let path = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        let attempts = format!("apps/{}/appattempts", path(app));
        let answer: AttemptsAnswer = self.ask(&attempts).await?;
        let all: Vec<Attempt> = answer
            .app_attempts
            .map_or_else(Vec::new, |it| it.app_attempt.into());
        let last = all.iter().map(|attempt| attempt.id.get()).max();
        let Some(name) = last.and_then(|number| attempt_name(app, number)) else {
            return Ok(BTreeMap::new());
        };
        let answer: ContainersAnswer = self
            .ask(&format!("{attempts}/{}/containers", path(&name)))
            .await?;
        let mut found: Vec<Container> = answer.container.into();
        if let Some(named) = answer.containers {
            found.extend(Vec::from(named.container));
        }
        Ok(sum(found))
    }

    async fn running(&self) -> anyhow::Result<(Vec<RunningJob>, u32)> {
        // Requests one more than is reported, to detect that there are more.
        let limit = HARVEST_JOBS_MAX + 1;
        let answer: AppsAnswer = self
            .ask(&format!("apps?states=RUNNING&limit={limit}"))
            .await?;
        let apps: Vec<App> = answer.apps.map_or_else(Vec::new, |it| it.app.into());
        let mut jobs = Vec::with_capacity(apps.len());
        for (place, app) in apps.into_iter().enumerate() {
            let on = if place < LOOKED_AT_MAX {
                // It may have ended in the meantime.
                self.containers(&app.id).await.unwrap_or_else(|error| {
                    tracing::debug!("{}: {error:#}", app.id);
                    BTreeMap::new()
                })
            } else {
                BTreeMap::new()
            };
            jobs.push(RunningJob {
                id: app.id,
                name: app.name,
                user: app.user,
                label: app.app_node_label_expression.filter(|it| !it.is_empty()),
                on,
            });
        }
        Ok((jobs, 0))
    }
}

impl Jobs for Yarn {
    async fn jobs(&mut self) -> anyhow::Result<(Vec<RunningJob>, u32)> {
        let jobs = self.running().await;
        if jobs.is_err() {
            self.active = (self.active + 1) % self.clients.len();
        }
        jobs
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_of_several_releases_are_read() {
        let container = |quote: &str| {
            format!(
                r#"{{"containerId":"c","allocatedMB":{quote}1024{quote},"allocatedVCores":{quote}2{quote},
                    "assignedNodeId":"n:1","containerState":"RUNNING"}}"#
            )
        };
        let two = format!("[{},{}]", container("\""), container(""));
        let used = |text: &str| {
            let answer: ContainersAnswer = serde_json::from_str(text).unwrap();
            let mut found: Vec<Container> = answer.container.into();
            if let Some(named) = answer.containers {
                found.extend(Vec::from(named.container));
            }
            sum(found)
        };
        let on = used(&format!(r#"{{"containers":{{"container":{two}}}}}"#));
        let both = Used {
            containers: 2,
            cores: 4,
            memory_mib: 2_048,
        };
        assert_eq!(on, [("n:1".to_owned(), both)].into());
        let one = used(&format!(r#"{{"container":{}}}"#, container("")));
        assert_eq!(one["n:1"].containers, 1);
        assert!(used("{}").is_empty());
        let ended = container("").replace("RUNNING", "COMPLETE");
        assert!(used(&format!(r#"{{"container":[{ended}]}}"#)).is_empty());
        let none: AppsAnswer = serde_json::from_str(r#"{"apps":null}"#).unwrap();
        assert!(none.apps.is_none());
        assert_eq!(
            attempt_name("application_17_0002", 3).as_deref(),
            Some("appattempt_17_0002_000003")
        );
        assert_eq!(attempt_name("job_1", 1), None);
    }
}
