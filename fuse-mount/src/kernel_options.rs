//! The options of the connection to the kernel. Public, so that a benchmark can measure the cost of FUSE alone.

use std::fs::File;
use std::io;
use std::time::Duration;

use fuser::{Config, InitFlags, KernelConfig, MountOption, SessionACL};
use harvestfs_protocol::limits::{LEASE, PACKET_BYTES_MAX};

pub use crate::read_ahead::raise as raise_read_ahead;

/// Number of threads that read requests from the kernel. They only hand requests over, so that a few threads serve
/// many callers; each holds a buffer of 16 MiB.
const THREADS: usize = 2;
/// Maximum number of read-ahead and write-back requests that the kernel has in flight.
const BACKGROUND_REQUESTS_MAX: u16 = 64;
/// Assumed maximum time for an answer to reach the kernel, which counts the time to live from the arrival: cached data
/// must expire before the lease does.
pub(crate) const ANSWER_DELAY_MAX: Duration = Duration::from_secs(2);

/// Longest time for which the kernel may cache attributes and entries.
pub const TTL_MAX: Duration = match LEASE.checked_sub(ANSWER_DELAY_MAX) {
    Some(ttl) => ttl,
    None => panic!("a lease is over before an answer has arrived"),
};

/// What the kernel allows programs to do in a mount. By default, neither set-id programs nor device files work:
/// otherwise root on one machine could become root on all.
#[derive(Clone, Copy, Debug, Default)]
pub struct Permissions {
    /// Users other than the mounting one may use the mount.
    pub allow_other: bool,
    /// Set-user-id and set-group-id bits, and file capabilities, take effect.
    pub suid: bool,
    /// Device files work as devices.
    pub dev: bool,
}

/// The session configuration for a file system with this source and subtype.
#[must_use]
pub fn config(source: &str, subtype: &str, permissions: Permissions) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(source.into()),
        // Not `MountOption::Subtype`, which reaches the kernel only by way of `fusermount3`.
        MountOption::CUSTOM(format!("subtype={subtype}")),
        // The kernel checks first, with the groups that only it knows for sure; the namenode
        // checks again.
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
        if permissions.suid {
            MountOption::Suid
        } else {
            MountOption::NoSuid
        },
        if permissions.dev {
            MountOption::Dev
        } else {
            MountOption::NoDev
        },
    ];
    if permissions.allow_other {
        config.acl = SessionACL::All;
    }
    config.n_threads = Some(THREADS);
    // Answers to requests that were read through one descriptor share a lock, so each thread has a descriptor of its
    // own; but `fusermount3` may have opened a device for us that we may not open ourselves.
    config.clone_fd = open_device().is_ok();
    config
}

/// Negotiates capabilities with the kernel, as far as it has them.
pub fn negotiate(config: &mut KernelConfig) {
    for capability in [
        InitFlags::FUSE_ATOMIC_O_TRUNC,
        InitFlags::FUSE_PARALLEL_DIROPS,
        InitFlags::FUSE_ASYNC_DIO,
        InitFlags::FUSE_DO_READDIRPLUS,
        InitFlags::FUSE_READDIRPLUS_AUTO,
        InitFlags::FUSE_HANDLE_KILLPRIV_V2,
        InitFlags::FUSE_CACHE_SYMLINKS,
        InitFlags::FUSE_EXPLICIT_INVAL_DATA,
        InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP,
        InitFlags::FUSE_EXPORT_SUPPORT,
    ] {
        if config.add_capabilities(capability).is_err() {
            tracing::debug!(?capability, "this kernel lacks a capability");
        }
    }
    // An error contains the nearest possible value; the kernel's own is near enough.
    let _ = config.set_max_write(PACKET_BYTES_MAX as u32);
    let _ = config.set_max_background(BACKGROUND_REQUESTS_MAX);
}

/// Opens the device from which the kernel's requests are read.
///
/// # Errors
/// There is none, or its mode does not allow us to read and write it.
pub fn open_device() -> io::Result<File> {
    File::options().read(true).write(true).open("/dev/fuse")
}
