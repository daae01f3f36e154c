//! Mounts a HarvestFS cluster: a thin adapter from the kernel's FUSE protocol to [`harvestfs_client`]. Nothing here
//! decides what the file system does; this crate translates, and keeps the kernel's caches consistent with the
//! client's.
//!
//! The threads that read requests from the kernel never wait for the network: requests that the client's cache or
//! buffers can answer are answered immediately, all others in a task.

#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Instant;

use harvestfs_client::Client;
use tokio::runtime::Handle;

use self::metrics::Metrics;
use self::shared::Shared;

mod blocking;
mod caller;
mod convert;
mod credentials;
mod device;
mod directory;
mod errno;
mod guard;
mod handles;
mod inner;
mod invalidations;
pub mod kernel;
mod kernel_cache;
pub mod kernel_options;
pub mod metrics;
mod mount;
pub mod mount_table;
mod nodes;
mod notices;
mod pages;
mod read;
mod read_ahead;
pub mod reply;
mod requests;
mod serve;
mod session_end;
mod shared;
mod submounts;
mod unmount;
mod write;
mod write_buffers;

pub use self::caller::Processes;
pub use self::kernel::Kernel;
pub use self::mount::{Mount, MountError, MountOptions};
pub use self::read::Read;
pub use self::serve::{Adapter, Header};
pub use self::unmount::{asked_by_mount, remove_dead};
pub use self::write::Write;

/// The time of the runtime's clock, which is virtual in a simulation.
fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// Serves the requests of a simulated kernel, without a device. The kernel is notified of changes by other sessions.
#[must_use]
pub fn without_device(
    client: &Client,
    kernel: Arc<dyn Kernel>,
    processes: Arc<dyn Processes>,
) -> Adapter {
    let shared = Arc::new(Shared::new());
    let adapter = Adapter::new(
        client.clone(),
        shared.clone(),
        Arc::new(Metrics::new()),
        processes,
        Handle::current(),
    );
    mount::connect(client, shared, kernel);
    adapter
}
