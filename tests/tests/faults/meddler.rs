//! Changes by another mount to files that are in use: modes, times, attributes, and names of the files and next to
//! them.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use rustix::fs::XattrFlags;

use crate::Workload;
use crate::logs::Step;
use crate::worker::{Said, Worker, last_of};

const PAUSE: Duration = Duration::from_millis(5);
/// Number of most recently changed files that are modified.
const FILES: usize = 40;
/// Number of steps after which these files are determined again.
const STEPS_BEFORE_LOOKING: u64 = 200;
/// Prefix of the names of files that it briefly creates next to others.
const OWN: &str = "meddled";

/// Modifies files, and reports its number of steps.
pub struct Meddler {
    pub mount: PathBuf,
}

impl Workload for Meddler {
    fn name(&self) -> String {
        "meddles".to_owned()
    }

    fn mount(&self) -> &'static str {
        "other"
    }

    fn start(&mut self, said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker> {
        let done = last_of(said, "meddles");
        let work = self.mount.join("work");
        vec![Worker::of_this_test("meddles", "meddle", &work, done)]
    }
}

/// The steps of a [`Meddler`].
pub fn meddle(place: &str, mut done: u64) -> Step {
    let place = PathBuf::from(place);
    let mut files = Vec::new();
    Box::new(move || {
        sleep(PAUSE);
        if files.is_empty() || done.is_multiple_of(STEPS_BEFORE_LOOKING) {
            files = changed_last(&place)?;
        }
        done += 1;
        let file = &files[usize::try_from(done).expect("it fits") % files.len()];
        match change(file, done) {
            // The file is removed and replaced by its user; see also the exceptions in SEMANTICS.
            Err(error) if is_gone(&error) => {}
            result => result?,
        }
        Ok(done)
    })
}

fn is_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle
    )
}

fn changed_last(place: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files: Vec<(SystemTime, PathBuf)> = Vec::new();
    let mut directories = vec![place.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let path = entry?.path();
            match fs::symlink_metadata(&path) {
                Ok(it) if it.is_dir() => directories.push(path),
                Ok(it) if it.is_file() => files.push((it.modified()?, path)),
                Ok(_) => {}
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
    files.sort_by_key(|(changed, _)| Reverse(*changed));
    files.truncate(FILES);
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

fn change(file: &Path, number: u64) -> io::Result<()> {
    // Another process may have begun the step with this number when its mount was killed.
    let own = format!("{OWN}-{}-{number}", std::process::id());
    let beside = file.with_file_name(&own);
    let moved = file.with_file_name(own + "-moved");
    match number / FILES as u64 % 6 {
        0 => fs::set_permissions(file, Permissions::from_mode(0o600)),
        1 => fs::set_permissions(file, Permissions::from_mode(0o640)),
        2 => File::open(file)?.set_modified(SystemTime::now()),
        3 => {
            let value = number.to_string();
            Ok(rustix::fs::setxattr(
                file,
                "user.meddled",
                value.as_bytes(),
                XattrFlags::empty(),
            )?)
        }
        4 => {
            fs::hard_link(file, &beside)?;
            fs::rename(&beside, &moved)?;
            fs::remove_file(moved)
        }
        _ => {
            fs::write(&beside, "beside")?;
            fs::rename(&beside, &moved)?;
            fs::remove_file(moved)
        }
    }
}
