//! Holding a restored job back until its images are known to be whole.
//!
//! CRIU executes a program at the stages of a restore ("action scripts" in criu(8)): here the program
//! that started it. Once everything is restored and nothing runs yet, that waits until the process that verifies
//! no longer holds the lock of the verdict. When there is none then, CRIU gives the restore up and kills
//! what it restored. The lock goes with its holder, also when that is killed.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{FlockOperation, flock};

use crate::manifest::Allow;

/// Tells the action script the file of the verdict.
const VERDICT_VARIABLE: &str = "HARVESTFS_VERDICT";
/// Tells the action script the stage.
const STAGE_VARIABLE: &str = "CRTOOLS_SCRIPT_ACTION";
/// The stage at which everything is restored, and connections of the job are not open yet.
const STAGE_RESTORED: &str = "post-restore";

/// Whether images that are being restored are whole. Until that is known, the job does not run; when
/// this is dropped without [`Verdict::whole`], it never does.
#[derive(Debug)]
pub struct Verdict {
    /// Locked while it is open.
    file: File,
    path: PathBuf,
}

impl Verdict {
    /// Not known yet. It is kept in `work`.
    ///
    /// # Errors
    /// When its file cannot be made.
    pub fn pending(work: &Path) -> io::Result<Self> {
        let path = work.join("verdict");
        let file = File::create_new(&path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        Ok(Self { file, path })
    }

    /// They are whole.
    ///
    /// # Errors
    /// When that cannot be written: the job does not run then.
    pub fn whole(mut self) -> io::Result<()> {
        self.file.write_all(b"whole\n")
    }

    /// Has a restore wait for it.
    pub(crate) fn hold(&self, restore: &mut Command, allow: &[Allow]) {
        // This program as it is now, until it ends: without it there is no verdict either.
        let script = format!("/proc/{}/exe", std::process::id());
        restore.arg("--action-script").arg(script);
        restore.env(VERDICT_VARIABLE, &self.path);
        // Ctrl-C is for us: CRIU, which would leave what it has restored so far, ends by the verdict.
        // A job that shares our session is restored into CRIU's group.
        if !allow.contains(&Allow::ShellJob) {
            restore.process_group(0);
        }
    }
}

/// To be asked before anything else by a program that restores: whether a restore may go on, when it is
/// CRIU that executes this program as its action script.
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
