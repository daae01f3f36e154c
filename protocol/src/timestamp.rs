//! The wall clock, as the kernel stamps files with it.

use std::{os::fd::OwnedFd, sync::OnceLock};

use rustix::{
    fs::{MemfdFlags, Timespec, Timestamps, UTIME_NOW, fstat, futimens, memfd_create},
    io,
    time::{ClockId, clock_gettime},
};
use serde::{Deserialize, Serialize};

/// Nanoseconds since 1970-01-01T00:00:00Z, negative before; reaches from 1677 to 2262.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The time that the kernel of this machine would stamp a file with now.
    ///
    /// Some times of a file are the kernel's that mounts it. By another clock, what happened later on
    /// one machine could have the earlier time: the kernel's stamps are up to a tick behind the wall
    /// clock, and from Linux 6.13 on up to a tick ahead of `CLOCK_REALTIME_COARSE`, because they are
    /// never before a finer stamp that any file on the machine was given
    /// (Documentation/filesystems/multigrain-ts.rst). So a file that nobody else sees is stamped, and
    /// read. Where that is refused, the coarse clock has to do.
    #[must_use]
    pub fn now() -> Self {
        static STAMPED: OnceLock<Option<OwnedFd>> = OnceLock::new();
        let stamped = STAMPED.get_or_init(|| memfd_create("clock", MemfdFlags::CLOEXEC).ok());
        stamped
            .as_ref()
            .and_then(|file| stamp(file).ok())
            .unwrap_or_else(|| {
                let now = clock_gettime(ClockId::RealtimeCoarse);
                Self::new(now.tv_sec, now.tv_nsec)
            })
    }

    fn new(seconds: i64, nanoseconds: i64) -> Self {
        Self(
            seconds
                .saturating_mul(1_000_000_000)
                .saturating_add(nanoseconds),
        )
    }
}

/// Threads may stamp the file between each other's two calls: what is read is not before the call.
fn stamp(file: &OwnedFd) -> io::Result<Timestamp> {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    let times = Timestamps {
        last_access: now,
        last_modification: now,
    };
    futimens(file, &times)?;
    let stat = fstat(file)?;
    Ok(Timestamp::new(
        stat.st_mtime,
        stat.st_mtime_nsec.cast_signed(),
    ))
}

#[cfg(test)]
mod tests {
    use std::{
        fs::{self, File},
        os::unix::fs::MetadataExt,
    };

    use super::*;

    fn mtime(file: &File) -> Timestamp {
        let stat = file.metadata().expect("stat");
        Timestamp::new(stat.mtime(), stat.mtime_nsec())
    }

    #[test]
    fn what_the_kernel_stamps_and_what_is_stamped_here_are_in_order() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut last = Timestamp::now();
        for round in 0..500 {
            let path = directory.path().join(format!("{round}"));
            let file = File::create(&path).expect("create");
            let created = mtime(&file);
            // Who has been looked at is stamped with the fine clock the next time.
            fs::write(&path, "x").expect("write");
            for stamp in [created, mtime(&file), Timestamp::now()] {
                assert!(stamp >= last, "round {round}: {stamp:?} after {last:?}");
                last = stamp;
            }
        }
    }
}
