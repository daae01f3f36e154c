//! Work that may block a thread, since it asks the kernel about something that the kernel may hold until we have
//! answered: not for the threads of the runtime.

use std::future::Future;

use harvestfs_protocol::machine;
use tokio::runtime::Handle;
use tokio::task::spawn_blocking;

/// Runs `work` on a thread that it may block, and to its end, even if the returned future is dropped. In a simulation,
/// where nothing blocks, it runs as a task. Returns `None` if the runtime ends.
pub async fn run<T: Send + 'static>(work: impl Future<Output = T> + Send + 'static) -> Option<T> {
    let run = if machine::is_simulated() {
        tokio::spawn(work)
    } else {
        let runtime = Handle::current();
        spawn_blocking(move || runtime.block_on(work))
    };
    // A panic ends the process.
    run.await.ok()
}
