//! What the namenodes that `up` started are asked before the other parts are ready.

use std::cell::Cell;
use std::convert::Infallible;
use std::time::Duration;

use harvestfs_protocol::admin::{AdminReply, AdminRequest, RecoveryStatus};
use tokio::time::{Instant, sleep};

use super::layout::Layout;
use crate::admin::link::{AdminLink, unexpected};
use crate::cluster;

/// How often several namenodes are asked whether one of them leads.
const LEADER_TICK: Duration = Duration::from_millis(100);
/// How often it is asked for recovery. Parts are mostly ready before it is asked once.
const RECOVERY_TICK: Duration = Duration::from_secs(1);
const STATUS_DEADLINE: Duration = Duration::from_secs(10);

async fn connect(layout: &Layout) -> anyhow::Result<AdminLink> {
    AdminLink::connect(&cluster::access(&layout.data.join("admin/client.toml"))?).await
}

/// Waits until one of several namenodes leads. Without a leader the other parts would wait, and could not say what is
/// wrong with the namenodes.
///
/// # Errors
/// When none does within `deadline`, and at once when most are copies.
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

/// How long parts are waited for: while the namenode is in recovery, without an end, since an operator decides then, and
/// needs it to run.
#[derive(Default)]
pub struct Patience {
    in_recovery: Cell<bool>,
}

impl Patience {
    /// Returns after `deadline`, or when that is over once more after the recovery.
    pub async fn ends(&self, deadline: Duration) {
        loop {
            sleep(deadline).await;
            if !self.in_recovery.get() {
                return;
            }
        }
    }

    /// Notes whether the namenode is in recovery, and says so, with what to do.
    pub async fn watch(&self, layout: &Layout) -> Infallible {
        loop {
            sleep(RECOVERY_TICK).await;
            match recovery(layout).await {
                Ok(None) => self.in_recovery.set(false),
                Ok(Some(recovery)) => {
                    if !self.in_recovery.replace(true) {
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
    async fn parts_are_waited_for_as_long_as_the_namenode_is_in_recovery() {
        let patience = Patience::default();
        assert!(timeout(DEADLINE * 2, patience.ends(DEADLINE)).await.is_ok());
        patience.in_recovery.set(true);
        let ends = patience.ends(DEADLINE);
        tokio::pin!(ends);
        assert!(timeout(DEADLINE * 100, &mut ends).await.is_err());
        patience.in_recovery.set(false);
        assert!(timeout(DEADLINE * 2, ends).await.is_ok());
    }
}
