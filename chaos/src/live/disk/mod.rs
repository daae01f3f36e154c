//! A mount namespace of its own for the run, so that disks can be full and slow.
//!
//! A slow disk is a bind mount of the datanode's directory on itself, for which the kernel asks this
//! process before each access (fanotify). Mounts and questions end with this process.

mod failing;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::fd::AsFd;
use rustix::fs::CWD;
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::LiveError;
pub use failing::FailingDisk;

/// Moves this thread, and those that are started later, into a mount namespace of their own: what is
/// mounted there disappears when the last of its processes ends.
pub(crate) fn own_mounts() -> Result<(), LiveError> {
    let refused = |error: io::Error| {
        LiveError::Machine(format!(
            "full and slow disks need a mount namespace, that is root ({error})"
        ))
    };
    // SAFETY: NEWNS gives this thread another mount table, and does not unshare the table of file
    // descriptors, which is what would make it unsafe.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(|error| refused(error.into()))?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).map_err(|error| refused(error.into()))
}

/// A mount, which is unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = rustix::mount::unmount(&self.0, UnmountFlags::DETACH) {
            // It disappears with the mount namespace of this process.
            let what = self.0.display();
            let _ = writeln!(io::stderr(), "harvestfs: cannot unmount {what}: {error}");
        }
    }
}

/// Mounts a disk in memory.
pub(crate) fn mount_disk(at: &Path, mib: u64) -> Result<Mounted, LiveError> {
    let options = std::ffi::CString::new(format!("size={mib}m,mode=700"))
        .map_err(|error| LiveError::Machine(error.to_string()))?;
    let flags = MountFlags::empty();
    rustix::mount::mount("tmpfs", at, "tmpfs", flags, options.as_c_str())
        .map_err(LiveError::io(format!("mount a tmpfs at {}", at.display())))?;
    Ok(Mounted(at.to_owned()))
}

/// A disk that can be made slow.
#[derive(Debug)]
pub(crate) struct SlowDisk {
    delay_ms: Arc<AtomicU32>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
    _mounted: Mounted,
}

/// The kernel asks before reads and writes as well, not only before files are opened (Linux 6.14, on
/// file systems that support it).
const BEFORE_EACH_ACCESS: MaskFlags = MaskFlags::from_bits_retain(0x0010_0000);
/// How soon the thread notices that it is to end.
const POLL_MS: u8 = 100;

impl SlowDisk {
    /// Creates a disk that is not slow yet. `at` must be in the mount namespace of [`own_mounts`].
    pub fn new(at: &Path) -> Result<Self, LiveError> {
        let refused = |error: io::Error| {
            LiveError::Machine(format!(
                "slow disks need fanotify with permission events, that is root ({error})"
            ))
        };
        rustix::mount::mount_bind(at, at).map_err(|error| refused(error.into()))?;
        let mounted = Mounted(at.to_owned());
        let questions = Fanotify::init(
            InitFlags::FAN_CLASS_PRE_CONTENT | InitFlags::FAN_CLOEXEC,
            EventFFlags::O_RDONLY | EventFFlags::O_LARGEFILE | EventFFlags::O_CLOEXEC,
        )
        .map_err(|error| refused(error.into()))?;
        let mark = |mask| {
            let flags = MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_MOUNT;
            questions.mark(flags, mask, CWD, Some(at))
        };
        mark(MaskFlags::FAN_OPEN_PERM | BEFORE_EACH_ACCESS)
            // If that is not supported, then at least opens and reads.
            .or_else(|_| mark(MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_ACCESS_PERM))
            .map_err(|error| refused(error.into()))?;
        let delay_ms = Arc::new(AtomicU32::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let thread = {
            let (delay_ms, stop) = (Arc::clone(&delay_ms), Arc::clone(&stop));
            thread::Builder::new()
                .name("slow-disk".into())
                .spawn(move || answer(&questions, &delay_ms, &stop))
                .map_err(refused)?
        };
        Ok(Self {
            delay_ms,
            stop,
            thread: Some(thread),
            _mounted: mounted,
        })
    }

    /// Sets how long each access takes from now on, one at a time.
    pub fn set_delay(&self, ms: u32) {
        self.delay_ms.store(ms, Ordering::Relaxed);
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It answers pending questions; the kernel admits the rest when the descriptor is closed.
            let _ = thread.join();
        }
    }
}

fn answer(questions: &Fanotify, delay_ms: &AtomicU32, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        let mut asked = [PollFd::new(questions.as_fd(), PollFlags::POLLIN)];
        match poll(&mut asked, PollTimeout::from(POLL_MS)) {
            Ok(0) | Err(Errno::EINTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        // The kernel admits everything when the descriptor is closed.
        let Ok(events) = questions.read_events() else {
            return;
        };
        for event in &events {
            let delay = Duration::from_millis(delay_ms.load(Ordering::Relaxed).into());
            if !delay.is_zero() && !stop.load(Ordering::Relaxed) {
                thread::sleep(delay);
            }
            if let Some(file) = event.fd() {
                let response = FanotifyResponse::new(file, Response::FAN_ALLOW);
                // The process that waits may have been killed in the meantime.
                let _ = questions.write_response(response);
            }
        }
    }
}
