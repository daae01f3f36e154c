//! Starts the parts in order, restarts those that end by themselves, and stops all of them.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use harvestfs_fuse_mount::remove_dead;
use tokio::time::sleep;

use super::layout::Layout;
use super::lock::Inherited;
use super::mount_point;
use super::namenodes::{self, Patience};
use super::part::Part;
use crate::daemon::StopSignal;

/// Maximum time for the start of one part, in which a namenode replays its journal.
const PART_START_DEADLINE: Duration = Duration::from_secs(60);
/// Additional time to wait for namenodes that are not needed for a majority.
const OTHERS_GRACE: Duration = Duration::from_secs(10);
/// Maximum time for the orderly stop of one part, in which a mount writes back dirty data.
const PART_STOP_DEADLINE: Duration = Duration::from_secs(65);

/// Runs the cluster until SIGINT, SIGTERM or SIGHUP.
pub fn run(layout: &mut Layout) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?
        .block_on(supervise(layout))
}

async fn supervise(layout: &mut Layout) -> anyhow::Result<()> {
    let mut signals = StopSignal::listen()?;
    // Left by an `up` that was killed.
    super::remove_if_there(&layout.ready_path())?;
    let lock_path = Layout::servers_lock_path(&layout.data);
    let lock = tokio::select! {
        lock = Inherited::wait(&lock_path) => lock?,
        () = signals.received() => return Ok(()),
    };
    layout.move_if_address_is_taken()?;
    let mut parts = servers(layout, &Rc::new(lock));
    let started = tokio::select! {
        biased;
        // First, as it would otherwise be taken for a second signal below.
        () = signals.received() => return finish(&mut parts, layout, &mut signals).await,
        started = start(&mut parts, layout) => started,
    };
    if let Err(error) = started {
        // The user needs to see the first error.
        let _ = finish(&mut parts, layout, &mut signals).await;
        return Err(error);
    }
    layout.announce_ready()?;
    println!("{}", layout.welcome()?);
    println!("Stop it with Ctrl-C.");
    tokio::select! {
        biased;
        // First, so that nothing that has just ended is restarted.
        () = signals.received() => {}
        _ = join_all(parts.all().map(keep)) => {}
    }
    finish(&mut parts, layout, &mut signals).await?;
    println!("Stopped. Everything is kept in {}.", layout.data.display());
    Ok(())
}

/// Restarts a part, forever, whenever it ends or could not be started. Each part has its own keeper, so that a slow one
/// does not delay the restart of another.
async fn keep(part: &mut Part) {
    loop {
        let status = match part.ended().await {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "it could not be started".to_owned(),
            Err(error) => error.to_string(),
        };
        let delay = part.next_restart_delay();
        tracing::warn!(
            part = part.name(),
            %status,
            delay_ms = delay.as_millis() as u64,
            "a part does not run, and is started again"
        );
        sleep(delay).await;
        if let Err(error) = part.start(sleep(PART_START_DEADLINE)).await {
            tracing::error!("{error:#}");
        }
    }
}

const MOUNT: &str = "mount";

/// The parts in the order in which they are started; those of a step start simultaneously.
struct Parts {
    namenodes: Vec<Part>,
    datanodes: Vec<Part>,
    /// Empty until the servers run.
    mount: Option<Part>,
}

impl Parts {
    fn all(&mut self) -> impl Iterator<Item = &mut Part> {
        let servers = self.namenodes.iter_mut().chain(&mut self.datanodes);
        servers.chain(&mut self.mount)
    }
}

fn servers(layout: &Layout, lock: &Rc<Inherited>) -> Parts {
    let logs = Layout::log_directory(&layout.data);
    let namenodes = layout.namenodes.iter().map(|namenode| {
        let arguments = vec![
            "namenode".into(),
            "--config".into(),
            namenode.config().into(),
        ];
        Part::new(&namenode.name, arguments, &logs, lock)
    });
    let datanodes = layout
        .datanodes()
        .enumerate()
        .map(|(index, (name, config))| {
            let mut arguments = vec!["datanode".into(), "--config".into(), config.into()];
            if let Some(cast) = &layout.cast {
                arguments.extend(cast.flags(index));
            }
            Part::new(&name, arguments, &logs, lock)
        });
    Parts {
        namenodes: namenodes.collect(),
        datanodes: datanodes.collect(),
        mount: None,
    }
}

async fn start(parts: &mut Parts, layout: &Layout) -> anyhow::Result<()> {
    let patience = Patience::new(PART_START_DEADLINE);
    start_namenodes(&mut parts.namenodes, &patience).await?;
    if layout.namenodes.len() > 1 {
        namenodes::wait_for_leader(layout, PART_START_DEADLINE).await?;
    }
    tokio::select! {
        biased;
        started = start_others(parts, layout, &patience) => started,
        never = patience.watch(layout) => match never {},
    }
}

async fn start_others(
    parts: &mut Parts,
    layout: &Layout,
    patience: &Patience,
) -> anyhow::Result<()> {
    start_all(&mut parts.datanodes, patience).await?;
    let lock = Rc::new(Inherited::wait(&Layout::mount_lock_path(&layout.data)).await?);
    // Programs may have continued to write when the previous mount ended.
    mount_point::make(layout)?;
    let mount = parts.mount.insert(mount(layout, &lock));
    mount.start(patience.ends()).await
}

/// Starts the namenodes simultaneously. A majority of the group is enough: the others are restarted until they run.
async fn start_namenodes(namenodes: &mut [Part], patience: &Patience) -> anyhow::Result<()> {
    let starting = namenodes.iter_mut().map(|part| part.start(patience.ends()));
    for (at, error) in most_started(starting.collect()).await? {
        let part = &namenodes[at];
        let what = match error {
            Some(error) => format!("{error:#}"),
            None => format!("{} is not ready yet", part.name()),
        };
        eprintln!(
            "{what}\nMost namenodes run, and the cluster starts without {}: see {}",
            part.name(),
            part.log().display()
        );
    }
    Ok(())
}

/// Waits until a majority has started, and a while longer for the others. Returns those that have not started, each
/// with the reason, if known.
async fn most_started(
    starting: Vec<impl Future<Output = anyhow::Result<()>>>,
) -> anyhow::Result<Vec<(usize, Option<anyhow::Error>)>> {
    let all = starting.len();
    let most = all / 2 + 1;
    let numbered = starting.into_iter().enumerate();
    let mut starting: FuturesUnordered<_> = numbered
        .map(|(at, started)| async move { (at, started.await) })
        .collect();
    let mut ready = BTreeSet::new();
    let mut failed = BTreeMap::new();
    let mut grace = pin!(None);
    loop {
        if ready.len() >= most && grace.is_none() {
            grace.set(Some(sleep(OTHERS_GRACE)));
        }
        let over = async {
            match grace.as_mut().as_pin_mut() {
                Some(grace) => grace.await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            biased;
            ended = starting.next() => ended,
            () = over => None,
        };
        match ended {
            Some((at, Ok(()))) => {
                ready.insert(at);
            }
            Some((at, Err(error))) => {
                if failed.len() + most == all {
                    return Err(error);
                }
                failed.insert(at, error);
            }
            None => break,
        }
    }
    let others = (0..all).filter(|at| !ready.contains(at));
    Ok(others.map(|at| (at, failed.remove(&at))).collect())
}

/// Starts all parts of a step simultaneously.
async fn start_all(step: &mut [Part], patience: &Patience) -> anyhow::Result<()> {
    let starting = step.iter_mut().map(|part| part.start(patience.ends()));
    futures::future::try_join_all(starting).await?;
    Ok(())
}

fn mount(layout: &Layout, lock: &Rc<Inherited>) -> Part {
    let mut arguments = vec![
        "mount".into(),
        layout.mount.clone().into(),
        "--config".into(),
        layout.data.join("client/client.toml").into(),
    ];
    if rustix::process::geteuid().is_root() {
        arguments.push("--allow-other".into());
    }
    Part::new(MOUNT, arguments, &Layout::log_directory(&layout.data), lock)
}

/// Stops everything, or kills what is left at another Ctrl-C, but not at SIGTERM, which each `down` sends. The error
/// lists all failures, one per line.
async fn finish(
    parts: &mut Parts,
    layout: &Layout,
    signals: &mut StopSignal,
) -> anyhow::Result<()> {
    println!(
        "Stopping ... Another Ctrl-C kills what has not stopped: what programs have not synced may be lost."
    );
    let mut results = vec![super::remove_if_there(&layout.ready_path())];
    let is_hurried = tokio::select! {
        () = stop_in_order(parts, layout, &mut results) => false,
        () = signals.interrupted() => true,
    };
    if is_hurried {
        let killing = parts.all().map(|part| part.kill("had not stopped"));
        results.extend(join_all(killing).await);
        results.push(remove_mount(layout));
    }
    let failed: Vec<String> = results
        .into_iter()
        .filter_map(Result::err)
        .map(|error| format!("{error:#}"))
        .collect();
    if !failed.is_empty() {
        bail!(failed.join("\n"));
    }
    Ok(())
}

/// Stops the mount first, so that it can still write back, and the namenodes last. Failures are added to `results` as
/// they occur, so that they are known even if this future is dropped.
async fn stop_in_order(parts: &mut Parts, layout: &Layout, results: &mut Vec<anyhow::Result<()>>) {
    stop(parts.mount.as_mut_slice(), results).await;
    results.push(remove_mount(layout));
    stop(&mut parts.datanodes, results).await;
    stop(&mut parts.namenodes, results).await;
}

/// Unmounts what a killed mount process has left, which no longer responds.
fn remove_mount(layout: &Layout) -> anyhow::Result<()> {
    remove_dead(&layout.mount).context("cannot unmount what was left of the mount")
}

/// Stops all parts of a step simultaneously, and adds to `results` as each of them ends.
pub(super) async fn stop(parts: &mut [Part], results: &mut Vec<anyhow::Result<()>>) {
    for part in parts.iter() {
        part.terminate();
    }
    let stopping = parts.iter_mut().map(|it| it.finish(PART_STOP_DEADLINE));
    let mut stopping: FuturesUnordered<_> = stopping.collect();
    while let Some(stopped) = stopping.next().await {
        results.push(stopped);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::BoxFuture;
    use tokio::time::{Instant, timeout};

    use super::*;

    #[tokio::test]
    async fn a_part_that_could_not_be_started_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Inherited::wait(&dir.path().join("lock")).await.unwrap();
        let mut part = Part::new("part", Vec::new(), dir.path(), &Rc::new(lock));
        let log = part.log().to_owned();
        // It cannot log there.
        std::fs::create_dir(&log).unwrap();
        assert!(part.start(std::future::pending()).await.is_err());
        let started = async {
            // Attempts before this fail.
            sleep(Duration::from_millis(500)).await;
            std::fs::remove_dir(&log).unwrap();
            // The started program is this test's binary, which does not know a part's arguments, and prints that.
            while std::fs::read(&log).unwrap_or_default().is_empty() {
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = keep(&mut part) => {}
            started = timeout(Duration::from_secs(60), started) => started.expect("it is started"),
        }
    }

    fn starts(after_s: u64, result: anyhow::Result<()>) -> BoxFuture<'static, anyhow::Result<()>> {
        let after = Duration::from_secs(after_s);
        async move {
            sleep(after).await;
            result
        }
        .boxed()
    }

    fn fails(after_s: u64) -> BoxFuture<'static, anyhow::Result<()>> {
        starts(after_s, Err(anyhow::anyhow!("no disk")))
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_starts_when_most_of_it_do() {
        let all = most_started(vec![
            starts(1, Ok(())),
            starts(5, Ok(())),
            starts(9, Ok(())),
        ]);
        assert!(all.await.expect("all start").is_empty());

        for late in [fails(0), fails(7), starts(600, Ok(()))] {
            let began = Instant::now();
            let started = most_started(vec![starts(1, Ok(())), late, starts(5, Ok(()))]);
            let others = started.await.expect("most start");
            assert_eq!(others.len(), 1);
            assert_eq!(others[0].0, 1);
            assert!(began.elapsed() <= Duration::from_secs(5) + OTHERS_GRACE);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_group_starts_without_most_of_it() {
        let only = most_started(vec![fails(1)]);
        assert!(only.await.is_err());
        let two = most_started(vec![fails(1), starts(3, Ok(())), fails(2)]);
        assert!(two.await.is_err());
        // Each start has its own limit, so a slow one is not taken for a failed one.
        let slow = most_started(vec![fails(1), starts(3, Ok(())), starts(50, Ok(()))]);
        assert_eq!(slow.await.expect("most start").len(), 1);
    }
}
