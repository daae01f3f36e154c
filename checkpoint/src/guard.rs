//! A guard process that lets a job continue when the dump that has stopped it is interrupted or killed.
//!
//! CRIU leaves a job stopped until its images are durable. If the process that stores them ends before that, nothing
//! reads what CRIU sends, so CRIU abandons the dump and lets the job continue; but once CRIU has ended, only the guard
//! is left to do that. Its standard input reaches its end when both have ended, as they hold the other end of the pipe.
//! The guard reports on its standard output when it has recorded the job's processes. CRIU stops them only after that:
//! the first one, through which the others are found, may end while they are stopped.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::process::Signal;

use crate::process::Tree;

/// Environment variable that identifies the job to the guard: id and start time of its first process.
const JOB_VARIABLE: &str = "HARVESTFS_DUMP_GUARD";
/// Maximum time for a guard to report that it has recorded the processes of the job.
const NOTE_DEADLINE: Duration = Duration::from_secs(30);

/// A running guard, which watches until this is dropped.
#[derive(Debug)]
pub struct Guard {
    child: Child,
    held: ChildStdin,
}

impl Guard {
    /// Starts a guard for a job that is about to be dumped. When this returns, the guard has recorded the job's
    /// processes, so that CRIU may stop them.
    ///
    /// # Errors
    /// When the guard cannot be started or does not report in time, or the job has ended.
    pub fn start(tree: &Tree) -> io::Result<Self> {
        let (heard, says) = UnixStream::pair()?;
        let mut child = Command::new("/proc/self/exe")
            .env(
                JOB_VARIABLE,
                format!("{} {}", tree.root(), tree.started_ticks()),
            )
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(OwnedFd::from(says))
            .stderr(Stdio::inherit())
            // Ctrl-C must reach only us.
            .process_group(0)
            .spawn()?;
        let held = child.stdin.take();
        let held = held.ok_or_else(|| io::Error::other("the guard has no pipe"))?;
        // On an error, dropping it ends the guard.
        let guard = Self { child, held };
        wait_for_note(heard, NOTE_DEADLINE)?;
        Ok(guard)
    }

    /// Another handle of the pipe whose end the guard waits for, for one more process to hold.
    pub(crate) fn held(&self) -> io::Result<Stdio> {
        Ok(self.held.as_fd().try_clone_to_owned()?.into())
    }
}

fn wait_for_note(mut heard: UnixStream, deadline: Duration) -> io::Result<()> {
    heard.set_read_timeout(Some(deadline))?;
    match heard.read_exact(&mut [0]) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(io::Error::other("the guard found no such job"))
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::Error::other(
            "the guard does not say that it has noted the processes",
        )),
        noted => noted,
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // This process has itself continued or ended the job. A guard that has already ended has nothing left to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the guard if this process was started as one, and returns whether it was successful; otherwise `None`. A
/// program that dumps must call this before anything else.
#[must_use]
pub fn asked() -> Option<bool> {
    let job = std::env::var(JOB_VARIABLE).ok()?;
    Some(match watch(&job) {
        Ok(()) => true,
        Err(error) => {
            let _ = writeln!(
                io::stderr(),
                "harvestfs: the dump was interrupted, and the job may still be stopped: {error}"
            );
            false
        }
    })
}

fn watch(job: &str) -> io::Result<()> {
    // A signal that ends a command is often sent to all of its processes; the guard must survive it.
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        signal_hook::flag::register(signal.as_raw(), Arc::<AtomicBool>::default())?;
    }
    let job = job.split_once(' ').ok_or(io::ErrorKind::InvalidInput)?;
    let (root, started_ticks) = (job.0.parse(), job.1.parse());
    let (Ok(root), Ok(started_ticks)) = (root, started_ticks) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let_go_on_after(io::stdin(), io::stdout(), root, started_ticks)
}

fn let_go_on_after(
    mut held: impl Read,
    mut says: impl Write,
    root: i32,
    started_ticks: u64,
) -> io::Result<()> {
    // Read while the first process lives: once it has ended, the others can no longer be found through it.
    let tree = Tree::of(root).ok();
    let Some(tree) = tree.filter(|tree| tree.started_ticks() == started_ticks) else {
        return Ok(());
    };
    // If nobody receives this, nobody makes CRIU stop anything either.
    let _ = says.write_all(b"\n").and_then(|()| says.flush());
    io::copy(&mut held, &mut io::sink())?;
    tree.go_on().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::thread;
    use std::time::Instant;

    use rustix::process::{Pid, kill_process};

    use super::*;

    fn state(pid: i32) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it is there");
        let (_, rest) = stat.rsplit_once(") ").expect("a name");
        rest.chars().next().expect("a state")
    }

    fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            thread::yield_now();
        }
    }

    #[test]
    fn a_job_goes_on_once_nobody_holds_the_pipe() {
        let mut job = Command::new("sleep").arg("600").spawn().expect("it runs");
        let pid = i32::try_from(job.id()).expect("a process id");
        let tree = Tree::of(pid).expect("it runs");
        kill_process(Pid::from_child(&job), Signal::STOP).expect("it is ours");
        wait_until("it is stopped", || state(pid) == 'T');

        // As if another process had had the id before.
        let other = tree.started_ticks() - 1;
        let_go_on_after(io::empty(), io::sink(), pid, other).expect("there is nothing to do");
        assert_eq!(state(pid), 'T');

        let (ours, held) = io::pipe().expect("a pipe");
        let of_criu = held.try_clone().expect("one more");
        thread::scope(|scope| {
            let guard =
                scope.spawn(|| let_go_on_after(ours, io::sink(), pid, tree.started_ticks()));
            drop(held);
            thread::sleep(Duration::from_millis(100));
            assert!(!guard.is_finished(), "CRIU is still at work");
            assert_eq!(state(pid), 'T');
            drop(of_criu);
            guard.join().expect("no panic").expect("it is ours");
        });
        wait_until("it goes on", || state(pid) != 'T');
        tree.end().expect("it is ours");
        job.wait().expect("it ended");
        let mut said = Vec::new();
        let_go_on_after(io::empty(), &mut said, pid, tree.started_ticks()).expect("it has ended");
        assert!(said.is_empty(), "nothing is noted");
    }

    #[test]
    fn a_guard_that_has_noted_nothing_is_none() {
        let pair = || UnixStream::pair().expect("a pair");
        let (heard, mut says) = pair();
        says.write_all(b"\n").expect("it is heard");
        wait_for_note(heard, NOTE_DEADLINE).expect("it has noted them");
        let (heard, says) = pair();
        drop(says);
        wait_for_note(heard, NOTE_DEADLINE).expect_err("it has ended");
        let (heard, _says) = pair();
        wait_for_note(heard, Duration::from_millis(10)).expect_err("it is silent");
    }

    #[test]
    fn the_others_go_on_though_the_first_process_has_ended() {
        let mut job = Command::new("sh")
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .expect("a shell");
        let root = i32::try_from(job.id()).expect("a process id");
        let started_ticks = Tree::of(root).expect("it runs").started_ticks();
        let mut line = String::new();
        let said = job.stdout.take().expect("a pipe");
        BufReader::new(said).read_line(&mut line).expect("it says");
        let other: i32 = line.trim().parse().expect("a process id");
        let pid = Pid::from_raw(other).expect("a process id");
        kill_process(pid, Signal::STOP).expect("it is ours");
        wait_until("it is stopped", || state(other) == 'T');
        let (ours, held) = io::pipe().expect("a pipe");
        let (heard, says) = UnixStream::pair().expect("a pair");
        thread::scope(|scope| {
            let guard = scope.spawn(|| let_go_on_after(ours, says, root, started_ticks));
            // From now on, the others are found even if the first process ends.
            wait_for_note(heard, NOTE_DEADLINE).expect("it has noted them");
            job.kill().expect("it is ours");
            job.wait().expect("it ended");
            drop(held);
            guard.join().expect("no panic").expect("they are ours");
        });
        wait_until("it goes on", || state(other) != 'T');
        kill_process(pid, Signal::KILL).expect("it is ours");
    }
}
