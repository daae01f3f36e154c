//! A cgroup with a job in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use harvestfs_tests::skip;

use crate::DEADLINE;

/// A cgroup of this test, removed when it is dropped.
pub struct Cgroup(pub PathBuf);

impl Cgroup {
    /// Creates a cgroup; skips when that is not possible.
    pub fn new() -> Option<Self> {
        let mounted = Path::new("/sys/fs/cgroup");
        let freezer = mounted.join("freezer");
        let parent = if freezer.is_dir() { &freezer } else { mounted };
        let directory = parent.join(format!("harvestfs-test-{}", std::process::id()));
        if let Err(error) = fs::create_dir(&directory) {
            skip(&format!("{}: {error}", directory.display()));
            return None;
        }
        Some(Self(directory))
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A failed test may have left it frozen, and frozen processes do not end.
        for (file, thawed) in [("freezer.state", "THAWED"), ("cgroup.freeze", "0")] {
            let _ = fs::write(self.0.join(file), thawed);
        }
        // The job was killed or has ended; its cgroup is not empty until it has been reaped. Does not
        // panic, since a test may be failing.
        let end = Instant::now() + DEADLINE;
        while let Err(error) = fs::remove_dir(&self.0) {
            if Instant::now() > end {
                eprintln!("{} is left behind: {error}", self.0.display());
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
