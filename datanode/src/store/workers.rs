//! A few threads that wait for one disk, so that nothing else has to.

use std::collections::VecDeque;
use std::sync::Arc;

use harvestfs_protocol::machine;
use harvestfs_protocol::panics::contained;
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Semaphore, oneshot};

/// Most jobs that wait for a thread; a caller with another one waits to hand it in.
const JOBS_QUEUED_MAX: usize = 1024;

type Job = Box<dyn FnOnce() + Send>;

/// The threads of one disk. They end when the last clone is gone and the queue is empty.
#[derive(Clone)]
pub struct Workers {
    inner: Arc<Handle>,
}

struct Handle {
    queue: Arc<Queue>,
    room: Arc<Semaphore>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

/// The job panicked, which is logged; its result is gone.
#[derive(Debug)]
pub struct JobLost;

impl Workers {
    /// Starts `threads` threads.
    ///
    /// # Errors
    /// What the system says.
    pub fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let workers = Self {
            inner: Arc::new(Handle {
                queue: Arc::default(),
                room: Arc::new(Semaphore::new(JOBS_QUEUED_MAX)),
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

    /// Runs a job on one of the threads. A job that was handed in runs even if the caller no longer
    /// waits for it.
    ///
    /// # Errors
    /// [`JobLost`].
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, JobLost> {
        if machine::is_simulated() {
            return contained(job).map_err(|_| JobLost);
        }
        let (sender, result) = oneshot::channel();
        let room = self.inner.room.clone().acquire_owned().await;
        let job = move || {
            // Room is for jobs that wait.
            drop(room);
            // Fails only if the caller no longer waits for the result.
            let _ = sender.send(job());
        };
        self.inner.queue.state.lock().jobs.push_back(Box::new(job));
        self.inner.queue.changed.notify_one();
        result.await.map_err(|_| JobLost)
    }
}

impl Queue {
    fn work(&self) {
        while let Some(job) = self.next_job() {
            if contained(job).is_err() {
                tracing::error!("a disk job panicked: this is a bug");
            }
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
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
    use super::*;

    #[tokio::test]
    async fn jobs_run_and_a_panic_takes_nothing_else_down() {
        let workers = Workers::start("test", 1).unwrap();
        assert_eq!(workers.run(|| 7).await.unwrap(), 7);
        assert!(workers.run(|| panic!("on purpose")).await.is_err());
        assert_eq!(workers.run(|| 8).await.unwrap(), 8);
    }

    #[tokio::test]
    async fn a_job_runs_though_nobody_waits() {
        let workers = Workers::start("test", 1).unwrap();
        let (done, wait) = std::sync::mpsc::channel();
        {
            let job = workers.run(move || done.send(()));
            tokio::pin!(job);
            tokio::select! {
                biased;
                _ = &mut job => {}
                () = std::future::ready(()) => {}
            }
        }
        drop(workers);
        wait.recv_timeout(std::time::Duration::from_secs(10))
            .unwrap();
    }
}
