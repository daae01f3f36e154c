//! How the kernel is told to talk to us. Public, so that a benchmark can measure what that takes alone.

use std::{fs::File, io, time::Duration};

use fuser::{Config, InitFlags, KernelConfig, MountOption, SessionACL};
use harvestfs_protocol::limits::{LEASE, PACKET_BYTES_MAX};

pub use crate::read_ahead::raise as raise_read_ahead;

/// Threads that read requests from the kernel. They only hand over, so that a few serve many
/// callers; each holds a buffer of 16 MiB.
const THREADS: usize = 2;
/// Requests of read-ahead and write-back that the kernel has under way.
const BACKGROUND_REQUESTS_MAX: u16 = 64;
/// How long an answer is taken to be on its way to the kernel at most, which counts its time to live
/// from when it arrives: what is cached must be old before the lease is over.
pub(crate) const ANSWER_DELAY_MAX: Duration = Duration::from_secs(2);

/// How long the kernel may cache what it is told, at most.
pub const TTL_MAX: Duration = LEASE.saturating_sub(ANSWER_DELAY_MAX);

/// How a file system is mounted, under this name.
#[must_use]
pub fn config(name: &str, allow_other: bool) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(name.into()),
        MountOption::Subtype(name.into()),
        // The kernel checks first, with the groups that only it knows for sure; the namenode
        // checks again.
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
    ];
    if rustix::process::geteuid().is_root() {
        config
            .mount_options
            .extend([MountOption::Dev, MountOption::Suid]);
    }
    if allow_other {
        config.acl = SessionACL::All;
    }
    config.n_threads = Some(THREADS);
    // Answers to requests that were read from one file share a lock, so each thread has a file of its
    // own; but `fusermount3` may have opened a device for us that we may not open.
    config.clone_fd = open_device().is_ok();
    config
}

/// Agrees with the kernel on what both can do, as far as it can.
pub fn negotiate(config: &mut KernelConfig) {
    for capability in [
        InitFlags::FUSE_WRITEBACK_CACHE,
        InitFlags::FUSE_ATOMIC_O_TRUNC,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_CACHE_SYMLINKS,
        InitFlags::FUSE_EXPLICIT_INVAL_DATA,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
    ] {
        if config.add_capabilities(capability).is_err() {
            tracing::debug!(?capability, "this kernel lacks a capability");
        }
    }
    // Errors say what the nearest possible value is; the kernel's own is near enough.
    let _ = config.set_max_write(PACKET_BYTES_MAX as u32);
    let _ = config.set_max_background(BACKGROUND_REQUESTS_MAX);
}

/// Opens what the kernel's requests are read from.
///
/// # Errors
/// There is none, or its mode does not let us read and write it.
pub fn open_device() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/fuse")
}
