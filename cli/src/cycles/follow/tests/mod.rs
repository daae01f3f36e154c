//! Tests controllers with resource managers that are unreachable, forget, refuse, or have foreign nodes and labels.

mod kubernetes;
mod service;
mod yarn;

use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use clap::Parser;
use harvestfs_protocol::classes::{CLASSES_VERSION, ClassedServer, Classes, UtilisationClass};
use harvestfs_protocol::history::TenantPattern;
use parking_lot::Mutex;

use super::owners::Owners;
use super::{FollowArgs, Follower, Manager};

const DEADLINE: Duration = Duration::from_secs(30);

/// What a test has HarvestFS say: servers with classes and what their owners use; nothing while the namenode is gone.
#[derive(Clone, Default)]
struct TestOwners(Arc<Mutex<Option<Vec<TestOwner>>>>);

/// Name, cores and share of the processor.
type TestOwner = (&'static str, u32, Option<u16>);

impl TestOwners {
    fn say(&self, servers: &[(&'static str, u32, Option<u16>)]) {
        *self.0.lock() = Some(servers.to_vec());
    }

    fn go(&self) {
        *self.0.lock() = None;
    }
}

impl Owners for TestOwners {
    async fn ask(&mut self) -> anyhow::Result<Classes> {
        let Some(servers) = self.0.lock().clone() else {
            bail!("the namenode is gone");
        };
        let class = |number| UtilisationClass {
            class: number,
            pattern: TenantPattern::Periodic,
            average_cpu_permille: 0,
            peak_cpu_permille: 0,
            tenants: Vec::new(),
            servers: servers
                .iter()
                .filter(|it| it.1 == number)
                .map(|it| ClassedServer {
                    name: it.0.to_owned(),
                    cpu_permille: it.2,
                    memory_permille: None,
                    cores: None,
                    memory_mib: None,
                })
                .collect(),
            cpu_permille: None,
            headroom: None,
        };
        Ok(Classes {
            version: CLASSES_VERSION,
            // Its clock is far ahead of ours.
            analysed_unix_s: Some(1 << 40),
            classes: (0..10).map(class).collect(),
            without_class: Vec::new(),
        })
    }
}

#[derive(Parser)]
struct Args {
    #[command(flatten)]
    follow: FollowArgs,
}

/// Quick ones.
fn args(more: &[&str]) -> FollowArgs {
    let quick = ["test", "--grow-after=30ms", "--unknown-after=300ms"];
    let all = quick.iter().chain(more);
    let mut args = Args::try_parse_from(all).unwrap().follow;
    args.interval = Duration::from_millis(5).into();
    args
}

#[test]
fn intervals_leave_others_time() {
    for (interval, status) in [("50ms", None), ("0s", Some(2)), ("49ms", Some(2))] {
        let parsed = Args::try_parse_from(["test", "--interval", interval]);
        let refused = parsed.err().map(|error| error.exit_code());
        assert_eq!(refused, status, "{interval}");
    }
}

/// Lets it run until something holds, and ends it.
async fn until<M: Manager>(
    follower: &mut Follower<'_, M, TestOwners>,
    holds: impl Fn() -> bool,
) -> anyhow::Result<()> {
    let stop = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let run = follower.run(stop);
    tokio::time::timeout(DEADLINE, run)
        .await
        .expect("it happens in time")
}

/// Lets it run for so long, and ends it.
async fn for_a_while<M: Manager>(follower: &mut Follower<'_, M, TestOwners>, time: Duration) {
    let end = tokio::time::Instant::now() + time;
    until(follower, || tokio::time::Instant::now() > end)
        .await
        .unwrap();
}
