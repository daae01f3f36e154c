//! The program on whose behalf the kernel asks, as far as it may be killed while it waits.
//!
//! The kernel lets a killed program end only once its request is answered. It would say so
//! (`FUSE_INTERRUPT`), but the library that reads the requests answers that itself, with "not known". So of
//! a program that waits for long, `/proc` is asked.
//!
//! Only what is about to kill it counts. A signal that the program handles interrupts nothing, as on other
//! file systems: programs do not expect it of files.

use std::fs;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;
use std::time::Duration;

use harvestfs_client::ClientError;
use rustix::process::Signal;
use tokio::sync::Semaphore;
use tokio::time::sleep;

use crate::blocking;
use crate::credentials::read_groups;

/// How long a request waits before its caller is looked at, and between two looks. Most requests are
/// answered sooner.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Callers that are looked at at the same time; more are looked at later.
const LOOKS_MAX: usize = 16;

/// Signals that end nothing unless a program says what they are to do.
const HARMLESS: [Signal; 8] = [
    Signal::CHILD,
    Signal::CONT,
    Signal::STOP,
    Signal::TSTP,
    Signal::TTIN,
    Signal::TTOU,
    Signal::URG,
    Signal::WINCH,
];

/// The processes that use the mount. Asking may wait, as `/proc` does.
pub trait Processes: Send + Sync + 'static {
    /// The supplementary groups of one, by the number of a thread.
    fn groups(&self, pid: u32) -> Vec<u32>;
    /// Whether it is being killed.
    fn is_dying(&self, pid: u32) -> bool;
}

/// Those of this machine.
pub struct ProcFs;

impl Processes for ProcFs {
    fn groups(&self, pid: u32) -> Vec<u32> {
        read_groups(pid)
    }

    fn is_dying(&self, pid: u32) -> bool {
        // Of what cannot be read, nothing is known.
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|status| is_dying(&status))
    }
}

/// What the looks at callers share.
pub struct Looks {
    processes: Arc<dyn Processes>,
    left: Arc<Semaphore>,
    /// The caller that was found last to be killed; 0: none. Before it is gone, it asks for each file that
    /// it has open.
    last_killed: AtomicU32,
}

impl Looks {
    /// None has been looked at.
    pub fn new(processes: Arc<dyn Processes>) -> Self {
        Self {
            processes,
            left: Arc::new(Semaphore::new(LOOKS_MAX)),
            last_killed: AtomicU32::new(0),
        }
    }
}

/// The thread that made a request.
#[derive(Clone)]
pub struct Caller {
    /// 0: the kernel itself, or a process of a namespace that this one does not see.
    pid: u32,
    looks: Arc<Looks>,
}

impl Caller {
    /// The thread with an id, as the mount sees it.
    pub fn new(pid: u32, looks: Arc<Looks>) -> Self {
        Self { pid, looks }
    }

    /// What `work` comes to, or [`ClientError::Interrupted`] once the caller is being killed. What was
    /// asked of the namenode then may still happen.
    pub async fn unless_killed<T>(
        self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let mut work = pin!(work);
        // Without a timer, as long as there is nothing to wait for.
        let first = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
        if let Poll::Ready(result) = first {
            return result;
        }
        tokio::select! {
            biased;
            result = work => result,
            () = self.killed() => Err(ClientError::Interrupted),
        }
    }

    /// Returns once the caller is being killed.
    async fn killed(&self) {
        if self.pid == 0 {
            return std::future::pending().await;
        }
        if self.looks.last_killed.load(Ordering::Relaxed) != self.pid {
            sleep(LOOK_INTERVAL).await;
        }
        while !self.is_killed().await {
            sleep(LOOK_INTERVAL).await;
        }
        self.looks.last_killed.store(self.pid, Ordering::Relaxed);
    }

    /// In a thread that nothing waits for: what `/proc` says about a process can wait for a lock that
    /// the process holds until one of its requests is answered.
    async fn is_killed(&self) -> bool {
        let Ok(permit) = self.looks.left.clone().try_acquire_owned() else {
            return false;
        };
        let (looks, pid) = (self.looks.clone(), self.pid);
        let looked = blocking::run(async move {
            let is_dying = looks.processes.is_dying(pid);
            // Only now: a look that is given up goes on.
            drop(permit);
            is_dying
        });
        looked.await.unwrap_or(false)
    }
}

/// Whether a signal is about to end a thread, or has begun to, as its `status` in `/proc` says.
fn is_dying(status: &str) -> bool {
    let field = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(value.trim())
    };
    let set = |name| {
        let value = field(name).and_then(|value| u64::from_str_radix(value, 16).ok());
        value.unwrap_or(0)
    };
    let pending = set("SigPnd:") | set("ShdPnd:");
    let kill = bit(Signal::KILL);
    if field("TracerPid:").is_some_and(|tracer| tracer != "0") {
        // The others are for the tracer to decide.
        return pending & kill != 0;
    }
    let harmless = HARMLESS.into_iter().map(bit).fold(0, |set, bit| set | bit);
    let survived = harmless | set("SigBlk:") | set("SigIgn:") | set("SigCgt:");
    pending & (kill | !survived) != 0
}

/// Its place in the sets of `/proc`.
fn bit(signal: Signal) -> u64 {
    1 << (signal.as_raw() - 1)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn status(pending: u64, shared: u64, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tx\nTracerPid:\t0\nSigPnd:\t{pending:016x}\nShdPnd:\t{shared:016x}\n\
             SigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
    }

    #[test]
    fn what_ends_a_thread_is_told_from_what_does_not() {
        let (kill, int, quit) = (bit(Signal::KILL), bit(Signal::INT), bit(Signal::QUIT));
        assert!(is_dying(&status(kill, 0, 0, 0, 0)));
        assert!(is_dying(&status(0, kill, 0, 0, 0)));
        assert!(is_dying(&status(0, int, 0, 0, 0)));
        assert!(is_dying(&status(quit, 0, 0, int, int)));
        assert!(!is_dying(&status(0, 0, 0, 0, 0)));
        assert!(!is_dying(&status(int, 0, int, 0, 0)), "it is blocked");
        assert!(!is_dying(&status(0, int, 0, int, 0)), "it is ignored");
        assert!(!is_dying(&status(0, int, 0, 0, int)), "it is handled");
        let harmless = HARMLESS.into_iter().map(bit).fold(0, |set, bit| set | bit);
        assert!(!is_dying(&status(harmless, harmless, 0, 0, 0)));
        let traced = status(int, 0, 0, 0, 0).replace("TracerPid:\t0", "TracerPid:\t7");
        assert!(!is_dying(&traced), "its tracer may drop it");
        assert!(is_dying(&traced.replace("0002", "0100")));
        assert!(!is_dying(""));
    }

    #[tokio::test]
    async fn a_request_of_a_killed_program_ends() {
        // A program that was killed and that nobody has waited for, which is as far as it can get here.
        let mut child = Command::new("sleep")
            .arg("100")
            .stdout(Stdio::null())
            .spawn()
            .expect("sleep runs");
        let caller = Caller::new(child.id(), Arc::new(Looks::new(Arc::new(ProcFs))));
        let forever = std::future::pending::<Result<(), ClientError>>();
        let mut request = pin!(caller.unless_killed(forever));
        let waits = tokio::time::timeout(3 * LOOK_INTERVAL, &mut request).await;
        assert!(waits.is_err(), "it lives");
        child.kill().expect("it runs");
        let ended = tokio::time::timeout(Duration::from_secs(20), request).await;
        child.wait().expect("it is our child");
        assert_eq!(ended, Ok(Err(ClientError::Interrupted)));
    }

    #[tokio::test]
    async fn nobody_is_looked_at_who_need_not_wait_or_cannot_be_seen() {
        let looks = Arc::new(Looks::new(Arc::new(ProcFs)));
        let done = async { Ok(7) };
        let caller = Caller::new(std::process::id(), looks.clone());
        assert_eq!(caller.unless_killed(done).await, Ok(7));
        let unseen = Caller::new(0, looks.clone());
        let slow = async {
            sleep(2 * LOOK_INTERVAL).await;
            Ok(8)
        };
        assert_eq!(unseen.unless_killed(slow).await, Ok(8));
        let gone = Caller::new(u32::MAX, looks);
        let slow = async {
            sleep(2 * LOOK_INTERVAL).await;
            Ok(9)
        };
        assert_eq!(gone.unless_killed(slow).await, Ok(9));
    }
}
