//! A few threads that wait for one disk, so that nothing else has to.

use std::collections::BTreeMap;
use std::sync::Arc;

use harvestfs_protocol::machine;
use harvestfs_protocol::panics::contained;
use parking_lot::{Condvar, Mutex};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

/// Maximum number of jobs that wait for a thread; further callers wait to hand in theirs.
const JOBS_QUEUED_MAX: usize = 1024;

/// The threads of one disk. They end when the last clone is dropped and the queue is empty.
#[derive(Clone)]
pub struct Workers {
    inner: Arc<Handle>,
}

struct Handle {
    queue: Arc<Queue>,
    room: Arc<Semaphore>,
    on_panic: Arc<dyn Fn() + Send + Sync>,
}

struct Job {
    work: Box<dyn FnOnce() + Send>,
    /// Returned when the job no longer waits.
    room: OwnedSemaphorePermit,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Ordered by number.
    jobs: BTreeMap<u64, Job>,
    next_number: u64,
    closed: bool,
}

/// The job panicked, which is logged; its result is lost.
#[derive(Debug)]
pub struct JobLost;

/// A job that was handed in. When this is dropped before the job has started, the job is withdrawn: it is dropped with
/// everything that it owns.
struct HandedIn<'a> {
    queue: &'a Queue,
    number: u64,
}

impl Workers {
    /// Starts `threads` threads, which call `on_panic` for each job that panics, before its caller learns of that.
    ///
    /// # Errors
    /// The system's error.
    pub fn start(
        name: &str,
        threads: usize,
        on_panic: impl Fn() + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let workers = Self {
            inner: Arc::new(Handle {
                queue: Arc::default(),
                room: Arc::new(Semaphore::new(JOBS_QUEUED_MAX)),
                on_panic: Arc::new(on_panic),
            }),
        };
        let threads = if machine::is_simulated() {
            0
        } else {
            threads.max(1)
        };
        for _ in 0..threads {
            let queue = workers.inner.queue.clone();
            std::thread::Builder::new()
                .name(name.to_owned())
                .spawn(move || queue.work())?;
        }
        Ok(workers)
    }

    /// Runs a job on one of the threads. If the caller stops waiting, a job that has not started never runs, and one
    /// that has started runs to its end.
    ///
    /// # Errors
    /// [`JobLost`].
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JobLost> {
        if machine::is_simulated() {
            // A caller may stop waiting before the job starts, or after it is done.
            wait_for_disk().await;
            let result = contained(job).map_err(|_| JobLost);
            wait_for_disk().await;
            return result;
        }
        let (sender, result) = oneshot::channel();
        let room = self.inner.room.clone().acquire_owned().await;
        let room = room.expect("the semaphore is never closed");
        let on_panic = self.inner.on_panic.clone();
        let work = move || match contained(job) {
            // Fails only if the caller no longer waits for the result, which is then dropped here.
            Ok(done) => drop(sender.send(done)),
            Err(_) => {
                tracing::error!("a disk job panicked: this is a bug");
                on_panic();
                drop(sender);
            }
        };
        let _handed_in = self.inner.queue.push(Job {
            work: Box::new(work),
            room,
        });
        result.await.map_err(|_| JobLost)
    }
}

/// Waits for the latency of a simulated disk, which may be zero.
async fn wait_for_disk() {
    let latency = machine::disk_latency();
    if !latency.is_zero() {
        tokio::time::sleep(latency).await;
    }
}

impl Queue {
    fn push(&self, job: Job) -> HandedIn<'_> {
        let mut state = self.state.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.jobs.insert(number, job);
        drop(state);
        self.changed.notify_one();
        HandedIn {
            queue: self,
            number,
        }
    }

    fn work(&self) {
        while let Some(Job { work, room }) = self.next_job() {
            drop(room);
            work();
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some((_, job)) = state.jobs.pop_first() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

impl Drop for HandedIn<'_> {
    fn drop(&mut self) {
        let withdrawn = self.queue.state.lock().jobs.remove(&self.number);
        // Not under the lock: dropping the job may take other locks.
        drop(withdrawn);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn one_thread() -> Workers {
        Workers::start("test", 1, || {}).unwrap()
    }

    /// Polls a job once, so that it is handed in, and drops it.
    async fn give_up_on<T>(job: impl Future<Output = T>) {
        tokio::pin!(job);
        tokio::select! {
            biased;
            _ = &mut job => panic!("it cannot be done by now"),
            () = std::future::ready(()) => {}
        }
    }

    #[tokio::test]
    async fn jobs_run_and_a_panic_takes_nothing_else_down() {
        let panics = Arc::new(AtomicU32::new(0));
        let counted = panics.clone();
        let count = move || {
            counted.fetch_add(1, Ordering::Relaxed);
        };
        let workers = Workers::start("test", 1, count).unwrap();
        assert_eq!(workers.run(|| 7).await.unwrap(), 7);
        assert!(workers.run(|| panic!("on purpose")).await.is_err());
        assert_eq!(panics.load(Ordering::Relaxed), 1, "before the caller knows");
        assert_eq!(workers.run(|| 8).await.unwrap(), 8);
    }

    #[tokio::test]
    async fn a_job_that_has_begun_goes_on_without_its_caller() {
        let workers = one_thread();
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let (done, is_done) = mpsc::channel();
        let job = workers.run(move || {
            begun.send(()).unwrap();
            may_go_on.recv().unwrap();
            done.send(()).unwrap();
        });
        let mut job = Box::pin(job);
        tokio::select! {
            biased;
            _ = &mut job => panic!("it waits"),
            () = std::future::ready(()) => {}
        }
        has_begun.recv_timeout(DEADLINE).unwrap();
        drop(job);
        drop(workers);
        go_on.send(()).unwrap();
        is_done.recv_timeout(DEADLINE).unwrap();
    }

    #[tokio::test]
    async fn a_job_that_has_not_begun_is_withdrawn_with_its_caller() {
        let workers = one_thread();
        let (begun, has_begun) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let mut slow = Box::pin(workers.run(move || {
            begun.send(()).unwrap();
            may_go_on.recv()
        }));
        tokio::select! {
            biased;
            _ = &mut slow => panic!("it waits"),
            () = std::future::ready(()) => {}
        }
        has_begun.recv_timeout(DEADLINE).unwrap();
        let held = Arc::new(());
        let for_job = held.clone();
        give_up_on(workers.run(move || panic!("{for_job:?} is used too late"))).await;
        assert_eq!(
            Arc::strong_count(&held),
            1,
            "what it held is dropped at once"
        );
        assert_eq!(workers.inner.room.available_permits(), JOBS_QUEUED_MAX);
        go_on.send(()).unwrap();
        slow.await.unwrap().unwrap();
        assert_eq!(workers.run(|| 9).await.unwrap(), 9);
    }
}
