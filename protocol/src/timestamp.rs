//! The wall clock with which the kernel stamps files.

use std::os::fd::OwnedFd;

use rustix::fs::{
    AtFlags, MemfdFlags, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens,
    memfd_create, statx,
};
use rustix::io;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::machine;

/// Nanoseconds since 1970-01-01T00:00:00Z, negative before; the range is 1677 to 2262.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// Returns the time with which the kernel of this machine would stamp a file now.
    ///
    /// Some times of a file are set by the kernel that mounts it. With another clock, a later event on one machine
    /// could get an earlier time: the kernel's stamps are up to a tick behind the wall clock, and from Linux 6.13 on
    /// up to a tick ahead of `CLOCK_REALTIME_COARSE`, because they are never before a finer stamp that any file on
    /// the machine was given (Documentation/filesystems/multigrain-ts.rst). So a private file is stamped and read.
    /// Where that is not available (before Linux 6.3), the coarse clock is equivalent.
    ///
    /// Only the access time is read: after one of the other times is queried, the kernel takes the next stamp from
    /// the fine clock, and from then on gives no file of the machine an earlier one. With a query for every change,
    /// every `write` to any file would change that file's inode, too, instead of one per tick
    /// (docs/adr/0015-times.md).
    #[must_use]
    pub fn now() -> Self {
        if machine::is_simulated() {
            return Self::simulated();
        }
        thread_local! {
            // One file per thread, because a stamp by another thread between the two calls could be read half
            // written.
            static STAMPED: Option<OwnedFd> =
                memfd_create("clock", MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL).ok();
        }
        STAMPED
            .with(|file| stamp(file.as_ref()?).ok())
            .unwrap_or_else(|| {
                let now = clock_gettime(ClockId::RealtimeCoarse);
                Self::new(now.tv_sec, now.tv_nsec)
            })
    }

    /// Reads the clock of the simulated machine.
    fn simulated() -> Self {
        let now_ms = machine::unix_now_ms().and_then(|ms| i64::try_from(ms).ok());
        let now_ns = now_ms.and_then(|ms| ms.checked_mul(1_000_000));
        Self(now_ns.expect("simulated clocks show a time between 1970 and 2262"))
    }

    fn new(seconds: i64, nanoseconds: i64) -> Self {
        Self(
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(nanoseconds),
        )
    }
}

fn stamp(file: &OwnedFd) -> io::Result<Timestamp> {
    let time = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps {
        last_access: time(UTIME_NOW),
        last_modification: time(UTIME_OMIT),
    };
    futimens(file, &times)?;
    let accessed = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::ATIME)?.stx_atime;
    Ok(Timestamp::new(accessed.tv_sec, accessed.tv_nsec.into()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs::{self, File};
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn mtime(file: &File) -> Timestamp {
        let stat = file.metadata().expect("stat");
        Timestamp::new(stat.mtime(), stat.mtime_nsec())
    }

    #[test]
    fn looking_at_the_clock_makes_no_stamps_finer() {
        let looks: BTreeSet<_> = (0..1_000).map(|_| Timestamp::now()).collect();
        assert!(looks.len() < 500, "{} different stamps", looks.len());
    }

    #[test]
    fn what_the_kernel_stamps_and_what_is_stamped_here_are_in_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut last = Timestamp::now();
        for round in 0..500 {
            let path = directory.path().join(format!("{round}"));
            let file = File::create(&path).expect("create");
            let created = mtime(&file);
            // A file whose times were queried is stamped with the fine clock the next time.
            fs::write(&path, "x").expect("write");
            for time in [created, mtime(&file), Timestamp::now()] {
                assert!(time >= last, "round {round}: {time:?} after {last:?}");
                last = time;
            }
        }
    }
}
