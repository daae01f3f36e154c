//! A repository of `git` with a commit for each step.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use rand::RngExt;
use rand::rngs::SmallRng;

use super::job::{Check, Job, Place, output};
use super::state::{Era, Shared};
use super::work::Reports;
use crate::live::metrics::Operation;
use crate::live::verify::{Comparison, note};
use crate::random;

const DIRECTORY: &str = "git";
const FILES: u32 = 10;
const FILE_BYTES_MAX: usize = 20_000;
/// Files that an interrupted git leaves behind, and asks the user to remove.
const LOCKS: [&str; 4] = [
    ".git/index.lock",
    ".git/HEAD.lock",
    ".git/refs/heads/main.lock",
    ".git/config.lock",
];

/// The program that commits to a repository.
pub(crate) struct Git {
    place: Place,
    /// The directory on the mount on which it is checked at the end.
    checked: PathBuf,
    rng: SmallRng,
    /// The message and the id of each commit that returned.
    commits: Vec<(u64, String)>,
    next: u64,
    bytes: u64,
}

impl Git {
    /// Creates a program on a mount; `checked_at` is the mount point on which it is checked.
    pub fn new(
        mount: (usize, &Path),
        checked_at: &Path,
        seed: u64,
        all: (&Arc<Shared>, &Reports),
    ) -> Self {
        Self {
            place: Place::new(mount, DIRECTORY, all),
            checked: checked_at.join(DIRECTORY),
            rng: random::stream(seed, "git"),
            commits: Vec::new(),
            next: 0,
            bytes: 0,
        }
    }

    fn commit(&mut self) -> io::Result<(u64, String, usize)> {
        let number = self.next;
        self.next += 1;
        let file = format!("file-{}", self.rng.random_range(0..FILES));
        let len = self.rng.random_range(1..FILE_BYTES_MAX);
        let text: String = (0..len)
            .map(|_| char::from(self.rng.random_range(b'\n'..=b'z')))
            .collect();
        fs::write(self.place.directory.join(&file), text)?;
        git(&self.place.directory, &["add", &file])?;
        let message = number.to_string();
        git(
            &self.place.directory,
            &["commit", "--quiet", "--allow-empty", "-m", &message],
        )?;
        let id = git(&self.place.directory, &["rev-parse", "HEAD"])?;
        Ok((number, id.trim().to_owned(), len))
    }

    /// Checks the repository, and returns what is wrong.
    fn difference(&self) -> io::Result<Option<String>> {
        let checked = git(
            &self.checked,
            &["fsck", "--full", "--strict", "--no-dangling"],
        );
        if let Err(error) = checked {
            return Ok(Some(format!("git fsck says: {error}")));
        }
        let log = git(&self.checked, &["log", "--reverse", "--format=%s %H"])?;
        Ok(missing(&self.commits, &log))
    }
}

/// The first commit that returned and is not in its place in a list of commits, each a line with its
/// message and id.
fn missing(commits: &[(u64, String)], log: &str) -> Option<String> {
    let mut lines = log.lines();
    commits.iter().find_map(|(number, id)| {
        let wanted = format!("{number} {id}");
        let found = lines.any(|line| line == wanted);
        (!found).then(|| format!("commit {number} ({id}) is not there, or not in its place"))
    })
}

impl Job for Git {
    fn begin(&mut self) -> io::Result<()> {
        self.place.make()?;
        for lock in LOCKS {
            match fs::remove_file(self.place.directory.join(lock)) {
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                removed => removed?,
            }
        }
        if self.commits.is_empty() {
            // Repeated after one that was interrupted.
            git(&self.place.directory, &["init", "--quiet"])?;
        } else {
            // The index may be from an `add` that was not committed.
            git(&self.place.directory, &["reset", "--quiet", "--mixed"])?;
        }
        Ok(())
    }

    fn step(&mut self, era: Era) {
        let began = Instant::now();
        match self.commit() {
            Ok((number, id, len)) => {
                let reports = &self.place.reports;
                reports.done(Operation::Write, began.elapsed(), 0);
                if self.place.counts(era) {
                    self.commits.push((number, id));
                    self.bytes += len as u64;
                }
            }
            Err(error) => self.place.failed(Operation::Write, "commit to git", &error),
        }
    }

    fn compare(&mut self, _check: &Check<'_>, to: &mut Comparison) {
        if self.commits.is_empty() {
            note(
                &mut to.wrong,
                format!("/{DIRECTORY}: nothing was committed"),
            );
            return;
        }
        to.names += 1;
        match self.difference() {
            Ok(None) => {
                to.files += self.commits.len() as u64;
                to.bytes += self.bytes;
            }
            Ok(Some(difference)) => note(&mut to.wrong, format!("/{DIRECTORY}: {difference}")),
            Err(error) => note(&mut to.lost, format!("/{DIRECTORY}: {error}")),
        }
    }
}

/// Runs git without the settings of any user, and with everything synced.
fn git(directory: &Path, arguments: &[&str]) -> io::Result<String> {
    let mut command = Command::new("git");
    command
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .arg("-C")
        .arg(directory);
    for setting in [
        "user.name=program",
        "user.email=program@localhost",
        "init.defaultBranch=main",
        "safe.directory=*",
        "core.fsync=all",
        "core.fsyncMethod=fsync",
        "gc.auto=0",
    ] {
        command.args(["-c", setting]);
    }
    output(command.args(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_that_returned_are_there_in_their_order() {
        let commits = [(0, "a".to_owned()), (2, "c".to_owned())];
        assert_eq!(missing(&commits, "0 a\n1 b\n2 c\n"), None);
        for wrong in ["", "0 a\n", "2 c\n0 a\n", "0 a\n2 d\n"] {
            assert!(missing(&commits, wrong).is_some(), "{wrong}");
        }
    }
}
