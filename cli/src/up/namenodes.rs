//! Queries to the namenodes that `up` started, until the other parts are ready.

use std::cell::Cell;
use std::convert::Infallible;
use std::time::Duration;

use harvestfs_protocol::admin::{AdminReply, AdminRequest, RecoveryStatus};
use tokio::time::{Instant, sleep, sleep_until};

use super::layout::Layout;
use crate::admin::link::{AdminLink, unexpected};
use crate::cluster;

/// Interval at which several namenodes are asked whether one of them leads.
const LEADER_TICK: Duration = Duration::from_millis(100);
/// Interval at which to ask whether the namenode is in recovery. Parts are usually ready before the first time.
const RECOVERY_TICK: Duration = Duration::from_secs(1);
const STATUS_DEADLINE: Duration = Duration::from_secs(10);

async fn connect(layout: &Layout) -> anyhow::Result<AdminLink> {
    AdminLink::connect(&cluster::access(&layout.data.join("admin/client.toml"))?).await
}

/// Waits until one of several namenodes leads. Without a leader the other parts would wait, and could not report what
/// is wrong with the namenodes.
///
/// # Errors
/// When none does within `deadline`, and immediately when most are copies.
pub async fn wait_for_leader(layout: &Layout, deadline: Duration) -> anyhow::Result<()> {
    let link = connect(layout).await?;
    let end = Instant::now() + deadline;
    let result = loop {
        match link.no_leader(None).await {
            None => break Ok(()),
            Some(none) if none.needs_operator() || Instant::now() >= end => {
                break Err(none.into());
            }
            Some(_) => sleep(LEADER_TICK).await,
        }
    };
    link.close().await;
    result
}

/// Limits the wait for parts. While the namenode is in recovery, the wait has no limit, since an operator has to
/// decide, and needs the namenode to run.
pub struct Patience {
    deadline: Duration,
    /// Last time that the namenode was seen in recovery.
    in_recovery: Cell<Option<Instant>>,
}

impl Patience {
    /// A limit of `deadline`, not counting recoveries.
    pub fn new(deadline: Duration) -> Self {
        Self {
            deadline,
            in_recovery: Cell::new(None),
        }
    }

    /// Returns once `deadline` has passed without a recovery.
    pub async fn ends(&self) {
        let mut waiting_since = Instant::now();
        loop {
            sleep_until(waiting_since + self.deadline).await;
            match self.in_recovery.get() {
                Some(later) if later > waiting_since => waiting_since = later,
                _ => return,
            }
        }
    }

    /// Records whether the namenode is in recovery, and reports it once, with what to do.
    pub async fn watch(&self, layout: &Layout) -> Infallible {
        loop {
            sleep(RECOVERY_TICK).await;
            match recovery(layout).await {
                Ok(None) => {}
                Ok(Some(recovery)) => {
                    if self.in_recovery.replace(Some(Instant::now())).is_none() {
                        say(&recovery, layout);
                    }
                }
                Err(error) => {
                    tracing::debug!(
                        "the namenode did not say whether it is in recovery: {error:#}"
                    );
                }
            }
        }
    }
}

async fn recovery(layout: &Layout) -> anyhow::Result<Option<RecoveryStatus>> {
    let link = connect(layout).await?;
    let asked = link.ask_for_diagnosis(AdminRequest::Status, STATUS_DEADLINE);
    let answer = asked.await;
    link.close().await;
    match answer? {
        AdminReply::Status(status) => Ok(status.recovery),
        _ => Err(unexpected()),
    }
}

fn say(recovery: &RecoveryStatus, layout: &Layout) {
    eprintln!(
        "The namenode is in recovery and changes nothing: it {}. Stop this and put the newest copy of its directory \
         back, or give up what is missing, from another terminal: `harvestfs admin --data {} recover --accept-loss`",
        recovery.describe(),
        layout.data.display()
    );
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(60);

    #[tokio::test(start_paused = true)]
    async fn parts_are_waited_for_until_long_after_the_namenode_was_in_recovery() {
        let patience = Patience::new(DEADLINE);
        let began = Instant::now();
        patience.ends().await;
        assert_eq!(began.elapsed(), DEADLINE);

        let ends = patience.ends();
        tokio::pin!(ends);
        for _ in 0..300 {
            patience.in_recovery.set(Some(Instant::now()));
            let waited = timeout(RECOVERY_TICK, &mut ends).await;
            assert!(waited.is_err(), "it is in recovery");
        }
        let ended = Instant::now();
        ends.await;
        assert_eq!(ended.elapsed(), DEADLINE - RECOVERY_TICK);
    }
}
