//! The program on whose behalf the kernel makes a request, and which may be killed while it waits.
//!
//! The kernel lets a killed program end only once its request is answered. It would announce that (`FUSE_INTERRUPT`),
//! but the library that reads the requests answers this itself, with "not known". So for a program that waits for
//! long, `/proc` is read.
//!
//! Only signals that are about to kill the program count. A signal that the program handles interrupts nothing, as on
//! other file systems: programs do not expect that of files.

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

/// How long a request waits before its caller is checked, and between two checks. Most requests are answered sooner.
const LOOK_INTERVAL: Duration = Duration::from_millis(200);
/// Number of callers that are checked at the same time; further ones are checked later.
const LOOKS_MAX: usize = 16;

/// Signals that do not end a program by default.
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

/// The processes that use the mount. Calls may block, as reading `/proc` does.
pub trait Processes: Send + Sync + 'static {
    /// The supplementary groups of a process, given the id of a thread.
    fn groups(&self, pid: u32) -> Vec<u32>;
    /// Whether the thread is being killed.
    fn is_dying(&self, pid: u32) -> bool;
}

/// The processes of this machine.
pub struct ProcFs;

impl Processes for ProcFs {
    fn groups(&self, pid: u32) -> Vec<u32> {
        read_groups(pid)
    }

    fn is_dying(&self, pid: u32) -> bool {
        // If the file cannot be read, nothing is known.
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        status.is_ok_and(|status| is_dying(&status))
    }
}

/// State shared by all checks of callers.
pub struct Looks {
    processes: Arc<dyn Processes>,
    left: Arc<Semaphore>,
    /// The caller that was most recently found to be killed; 0 if there is none. Before it ends, it makes a request
    /// for each file that it has open.
    last_killed: AtomicU32,
}

impl Looks {
    /// No caller has been checked yet.
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
    /// The thread's id; 0 for the kernel itself, or for a process in a namespace that this one does not see.
    pid: u32,
    looks: Arc<Looks>,
}

impl Caller {
    /// The thread with this id, as the mount sees it.
    pub fn new(pid: u32, looks: Arc<Looks>) -> Self {
        Self { pid, looks }
    }

    /// Returns the result of `work`, or [`ClientError::Interrupted`] once the caller is being killed. Requests already
    /// sent to the namenode may still take effect.
    pub async fn unless_killed<T>(
        self,
        work: impl Future<Output = Result<T, ClientError>>,
    ) -> Result<T, ClientError> {
        let mut work = pin!(work);
        // No timer is needed as long as there is nothing to wait for.
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

    /// Checks in a thread that nothing waits for: reading `/proc` for a process can wait for a lock that the process
    /// holds until one of its requests is answered.
    async fn is_killed(&self) -> bool {
        let Ok(permit) = self.looks.left.clone().try_acquire_owned() else {
            return false;
        };
        let (looks, pid) = (self.looks.clone(), self.pid);
        let looked = blocking::run(async move {
            let is_dying = looks.processes.is_dying(pid);
            // Only now: a check that was given up still runs.
            drop(permit);
            is_dying
        });
        looked.await.unwrap_or(false)
    }
}

/// Whether a signal is about to end a thread, or has begun to, according to its `status` in `/proc`.
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
        // The tracer decides about other signals.
        return pending & kill != 0;
    }
    let harmless = HARMLESS.into_iter().map(bit).fold(0, |set, bit| set | bit);
    let survived = harmless | set("SigBlk:") | set("SigIgn:") | set("SigCgt:");
    pending & (kill | !survived) != 0
}

/// The signal's bit in the masks of `/proc`.
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
        // A program that was killed and not yet waited for: that is as far as it can get here.
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
