//! One process of the cluster.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use harvestfs_protocol::READY;
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout};

use super::lock::Inherited;
use crate::daemon;

/// A part that ran for longer than this is restarted after the minimum delay.
const STABLE: Duration = Duration::from_secs(60);
const RESTART_DELAY_MIN: Duration = Duration::from_millis(200);
const RESTART_DELAY_MAX: Duration = Duration::from_secs(10);
/// Maximum wait for a killed process. The kernel may keep it, for example while a disk does not respond.
const KILL_DEADLINE: Duration = Duration::from_secs(5);

/// One process of the cluster, which is started again when it ends.
pub struct Part {
    name: String,
    arguments: Vec<std::ffi::OsString>,
    log: PathBuf,
    lock: Rc<Inherited>,
    child: Option<Child>,
    started: Instant,
    restart_delay: Duration,
}

impl Part {
    /// Creates a part without starting it.
    pub fn new(
        name: &str,
        arguments: Vec<std::ffi::OsString>,
        log_directory: &Path,
        lock: &Rc<Inherited>,
    ) -> Self {
        Self {
            name: name.to_owned(),
            arguments,
            log: log_directory.join(format!("{name}.log")),
            lock: lock.clone(),
            child: None,
            started: Instant::now(),
            restart_delay: RESTART_DELAY_MIN,
        }
    }

    /// The part's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Path of its log.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Starts the process, and returns when it reports that it is ready, or when `patience` ends. If this future is
    /// dropped, the process keeps starting.
    pub async fn start(&mut self, patience: impl Future<Output = ()>) -> anyhow::Result<()> {
        // Before anything can fail: a failed start must not count as running since the last successful one.
        self.started = Instant::now();
        let log = File::options()
            .create(true)
            .append(true)
            .open(&self.log)
            .with_context(|| format!("cannot open {}", self.log.display()))?;
        // The running binary, even if its file has been replaced in the meantime.
        let mut command = Command::new("/proc/self/exe");
        command
            .arg0(daemon::PROGRAM)
            .arg("--supervised-by")
            .arg(std::process::id().to_string())
            .args(&self.arguments)
            .envs([crate::logging::environment()])
            // Ctrl-C must reach only the supervisor, which stops the parts in order.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        for variable in daemon::variables() {
            command.env_remove(variable);
        }
        let mut child = self
            .lock
            .hand_on(|| command.spawn())
            .with_context(|| format!("cannot start {}", self.name))?;
        let stdout = child.stdout.take();
        self.child = Some(child);
        let stdout = stdout.context("the pipe that was asked for is missing")?;
        let mut lines = BufReader::new(stdout).lines();
        let (is_ready, ready) = oneshot::channel();
        // In a task of its own: the part prints this even if nobody waits for it any more, and must not fail because
        // of that.
        tokio::spawn(async move {
            while let Ok(Some(line)) = lines.next_line().await {
                if line.starts_with(READY) {
                    let _ = is_ready.send(());
                    return;
                }
            }
        });
        let ready = tokio::select! {
            biased;
            ready = ready => Some(ready),
            () = patience => None,
        };
        match ready {
            Some(Ok(())) => Ok(()),
            Some(_) => bail!(
                "{} ended while starting:\n{}",
                self.name,
                super::tail(&self.log)
            ),
            None => bail!(
                "{} was not ready within {} s; see {}",
                self.name,
                self.started.elapsed().as_secs(),
                self.log.display()
            ),
        }
    }

    /// Waits until the process has ended, and returns its status; `None` if there is no process.
    pub async fn ended(&mut self) -> std::io::Result<Option<ExitStatus>> {
        let Some(child) = &mut self.child else {
            return Ok(None);
        };
        let status = child.wait().await?;
        // This was not a failure during a stop, which `finish` reports.
        self.child = None;
        Ok(Some(status))
    }

    /// Delay before the next start; it grows while the part keeps ending early.
    pub fn next_restart_delay(&mut self) -> Duration {
        if self.started.elapsed() > STABLE {
            self.restart_delay = RESTART_DELAY_MIN;
        }
        let delay = self.restart_delay;
        self.restart_delay = (delay * 2).min(RESTART_DELAY_MAX);
        delay
    }

    /// Asks the process to end.
    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Waits for the process to end; kills it at the deadline.
    pub async fn finish(&mut self, deadline: Duration) -> anyhow::Result<()> {
        let Some(child) = &mut self.child else {
            return Ok(());
        };
        let Ok(status) = timeout(deadline, child.wait()).await else {
            let why = format!("did not stop within {} s", deadline.as_secs());
            return self.kill(&why).await;
        };
        self.judge(status?)
    }

    /// Checks that the process ended in good order when it was stopped. Forgets the process, so that an error is
    /// reported only once.
    fn judge(&mut self, status: ExitStatus) -> anyhow::Result<()> {
        self.child = None;
        // A part first sets up its signal handling: if the signal kills it, it has not begun anything that needs
        // cleanup.
        let had_not_begun = status.signal() == Some(Signal::TERM.as_raw());
        if !status.success() && !had_not_begun {
            bail!(
                "{} ended with {status}; see {}",
                self.name,
                self.log.display()
            );
        }
        Ok(())
    }

    /// Kills the process, if there is one, and then returns `why` as an error.
    pub async fn kill(&mut self, why: &str) -> anyhow::Result<()> {
        let Some(child) = &mut self.child else {
            return Ok(());
        };
        if let Some(status) = child.try_wait()? {
            return self.judge(status);
        }
        self.signal(Signal::KILL);
        let yet = match timeout(KILL_DEADLINE, self.ended()).await {
            Ok(ended) => {
                ended?;
                ""
            }
            Err(_) => ", but has not ended yet",
        };
        bail!(
            "{} {why} and was killed{yet}; see {}",
            self.name,
            self.log.display()
        )
    }

    fn signal(&self, signal: Signal) {
        let pid = self
            .child
            .as_ref()
            .and_then(Child::id)
            .and_then(|pid| i32::try_from(pid).ok())
            .and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // It may have ended already, which is what the signal is for.
            let _ = kill_process(pid, signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::supervisor;
    use super::*;

    async fn part_in(directory: &Path) -> Part {
        let lock = Inherited::wait(&directory.join("lock")).await.unwrap();
        Part::new("part", Vec::new(), directory, &Rc::new(lock))
    }

    /// Gives the part a process that ignores requests to end.
    fn hang(part: &mut Part) {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let stat = format!("/proc/{}/stat", child.id().unwrap());
        part.child = Some(child);
        part.signal(Signal::STOP);
        // Before it has stopped, it would still end.
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            std::thread::yield_now();
        }
    }

    async fn three_that_hang(directory: &Path) -> Vec<Part> {
        let lock = Inherited::wait(&directory.join("lock")).await.unwrap();
        let lock = Rc::new(lock);
        let mut parts = Vec::new();
        for _ in 0..3 {
            let mut part = Part::new("part", Vec::new(), directory, &lock);
            hang(&mut part);
            parts.push(part);
        }
        parts
    }

    /// Its process ends by itself.
    async fn end(part: &mut Part) {
        part.signal(Signal::KILL);
        part.child.as_mut().unwrap().wait().await.unwrap();
    }

    #[tokio::test]
    async fn a_part_that_is_stopped_before_it_listens_ends_in_good_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut part = part_in(dir.path()).await;
        // It listens for no signal.
        let process = || Command::new("sleep").arg("60").spawn().unwrap();
        part.child = Some(process());
        part.terminate();
        part.finish(STABLE).await.unwrap();
        part.child = Some(process());
        part.signal(Signal::KILL);
        let failed = part.finish(STABLE).await.unwrap_err().to_string();
        assert!(failed.contains("signal: 9"), "{failed}");
    }

    #[tokio::test(start_paused = true)]
    async fn parts_that_do_not_stop_are_waited_for_together_and_killed() {
        let dir = tempfile::tempdir().unwrap();
        let mut parts = three_that_hang(dir.path()).await;
        let began = Instant::now();
        let mut stopped = Vec::new();
        supervisor::stop(&mut parts, &mut stopped).await;
        assert!(began.elapsed() < Duration::from_secs(90));
        assert_eq!(stopped.len(), 3);
        for result in stopped {
            let failed = result.unwrap_err().to_string();
            assert!(failed.contains("did not stop within"), "{failed}");
            assert!(failed.contains("and was killed"), "{failed}");
        }
    }

    #[tokio::test]
    async fn what_has_failed_is_told_once_though_the_stop_is_given_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut parts = three_that_hang(dir.path()).await;
        end(&mut parts[0]).await;
        let mut stopped = Vec::new();
        let given_up = timeout(
            Duration::from_millis(100),
            supervisor::stop(&mut parts, &mut stopped),
        );
        given_up.await.unwrap_err();
        assert_eq!(stopped.len(), 1);
        let failed = stopped.remove(0).unwrap_err().to_string();
        assert!(failed.contains("ended with signal: 9"), "{failed}");
        parts[0].kill("had not stopped").await.unwrap();

        end(&mut parts[1]).await;
        for (part, told) in parts[1..].iter_mut().zip(["ended with", "was killed"]) {
            let failed = part.kill("had not stopped").await.unwrap_err().to_string();
            assert!(failed.contains(told), "{failed}");
            part.kill("had not stopped").await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_be_started_is_tried_less_and_less_often() {
        let dir = tempfile::tempdir().unwrap();
        let mut part = part_in(dir.path()).await;
        // It cannot log there.
        std::fs::create_dir(part.log()).unwrap();
        // It ran for long before.
        tokio::time::advance(STABLE * 2).await;
        let mut delay = part.next_restart_delay();
        assert_eq!(delay, RESTART_DELAY_MIN);
        for _ in 0..10 {
            tokio::time::advance(delay).await;
            assert!(part.start(std::future::pending()).await.is_err());
            // There is no end to wait for.
            assert_eq!(part.ended().await.unwrap(), None);
            let next = part.next_restart_delay();
            assert_eq!(next, (delay * 2).min(RESTART_DELAY_MAX));
            delay = next;
        }
    }
}
