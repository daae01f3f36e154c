//! Holds a restored job back until its images are known to be intact.
//!
//! CRIU executes a program at each stage of a restore ("action scripts" in criu(8)): here, the program
//! that started CRIU. Once everything is restored and nothing runs yet, the script waits until the verifying
//! process releases the lock on the verdict's file. If that file is empty then, CRIU abandons the restore and
//! kills what it restored. The lock is released when its holder ends, even if that is killed.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};

use crate::manifest::Allow;

/// Environment variable with the path of the verdict's file, for the action script.
const VERDICT_VARIABLE: &str = "HARVESTFS_VERDICT";
/// Environment variable in which CRIU passes the stage to the action script.
const STAGE_VARIABLE: &str = "CRTOOLS_SCRIPT_ACTION";
/// The stage at which everything is restored, and connections of the job are not open yet.
const STAGE_RESTORED: &str = "post-restore";

/// The verdict on whether images that are being restored are intact. Until it is known, the job does not
/// run; if this is dropped without [`Verdict::whole`], it never does.
#[derive(Debug)]
pub struct Verdict {
    /// Locked while this is open.
    file: File,
    path: PathBuf,
}

impl Verdict {
    /// A verdict that is not known yet. Its file is created in `work`.
    ///
    /// # Errors
    /// When the file cannot be created or locked.
    pub fn pending(work: &Path) -> io::Result<Self> {
        let path = work.join("verdict");
        let file = File::create_new(&path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(Self { file, path })
    }

    /// Declares the images intact.
    ///
    /// # Errors
    /// When the verdict cannot be written: then the job does not run.
    pub fn whole(mut self) -> io::Result<()> {
        self.file.write_all(b"whole\n")
    }

    /// Makes a restore wait for the verdict.
    pub(crate) fn hold(&self, restore: &mut Command, allow: &[Allow]) {
        // Refers to this very binary for as long as this process lives; without the process there is no verdict either.
        let script = format!("/proc/{}/exe", std::process::id());
        restore.arg("--action-script").arg(script);
        restore.env(VERDICT_VARIABLE, &self.path);
        // Ctrl-C must reach only us: it would make CRIU leave behind what it has restored so far; the verdict ends it.
        // A job that shares our session is restored into CRIU's group.
        if !allow.contains(&Allow::ShellJob) {
            restore.process_group(0);
        }
    }
}

/// Whether a restore may continue; `None` unless CRIU has executed this program as its action script. A
/// program that restores must call this before anything else.
#[must_use]
pub fn asked_by_criu() -> Option<bool> {
    let (stage, path) = (
        std::env::var_os(STAGE_VARIABLE)?,
        std::env::var_os(VERDICT_VARIABLE)?,
    );
    Some(may_go_on(&stage, Path::new(&path)).unwrap_or(false))
}

fn may_go_on(stage: &OsStr, path: &Path) -> io::Result<bool> {
    if stage != STAGE_RESTORED {
        return Ok(true);
    }
    let file = File::open(path)?;
    flock(&file, FlockOperation::LockShared)?;
    Ok(file.metadata()?.len() > 0)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_job_is_held_until_its_images_are_known_to_be_whole() {
        let allowed = |decide: fn(Verdict)| {
            let work = tempfile::tempdir().expect("a directory");
            let verdict = Verdict::pending(work.path()).expect("it is kept");
            let path = verdict.path.clone();
            let ask = |stage: &str| may_go_on(OsStr::new(stage), &path).expect("it can be read");
            assert!(ask("pre-restore"));
            thread::scope(|scope| {
                let held = scope.spawn(|| ask("post-restore"));
                thread::sleep(Duration::from_millis(100));
                assert!(!held.is_finished());
                decide(verdict);
                held.join().expect("it answers")
            })
        };
        assert!(allowed(|verdict| verdict.whole().expect("it is written")));
        assert!(!allowed(drop));
        assert!(may_go_on(OsStr::new("post-restore"), Path::new("/nonexistent")).is_err());
    }
}
