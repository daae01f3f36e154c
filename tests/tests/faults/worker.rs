//! A program that works on a mount step by step, and its reports.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use harvestfs_tests::wait_until;
use parking_lot::{Mutex, MutexGuard};

/// Maximum time for a program to end, even when its mount has been killed.
const END_DEADLINE: Duration = Duration::from_secs(60);

/// A number that a program reported after a step, and when.
pub type Said = (u64, Instant);

/// The last number that a program reported; 0 before its first.
pub fn last_of(said: &BTreeMap<String, Vec<Said>>, program: &str) -> u64 {
    let last = said.get(program).and_then(|said| said.last());
    last.map_or(0, |&(number, _)| number)
}

/// Environment variable with the role of processes of this test that are workers. See `works_as_told`.
pub const ROLE: &str = "HARVESTFS_TESTS_ROLE";
/// Environment variable with the path on which they work.
pub const PLACE: &str = "HARVESTFS_TESTS_PLACE";
/// Environment variable with their previous progress, if they are restarted.
pub const DONE: &str = "HARVESTFS_TESTS_DONE";

/// The standard input of a worker.
pub struct Script {
    /// Text to which it answers `ready`.
    pub greeting: String,
    /// The number of the first step.
    pub first: u64,
    /// Text that makes it do the step with a number, and answer with a number when that is done.
    pub step: Box<dyn Fn(u64) -> String + Send>,
}

/// A worker in a separate process: a process with open files on a mount cannot start parts of a cluster, since its
/// children first close these files, and one that waits for a hung part cannot let that continue.
pub struct Worker {
    pub name: String,
    process: Child,
    said: Arc<Mutex<Vec<Said>>>,
    end: Arc<AtomicBool>,
    /// Returns the first answer that was not a number, if there was one.
    conversation: Option<JoinHandle<Option<String>>>,
    complaints: Option<JoinHandle<String>>,
}

impl Worker {
    pub fn start(name: &str, command: &mut Command, script: Script) -> Self {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name}: {error}"));
        let stdin = process.stdin.take().expect("it was asked for");
        let stdout = process.stdout.take().expect("it was asked for");
        let mut stderr = process.stderr.take().expect("it was asked for");
        let said = Arc::<Mutex<Vec<Said>>>::default();
        let end = Arc::<AtomicBool>::default();
        let conversation = {
            let (said, end) = (said.clone(), end.clone());
            thread::spawn(move || converse(stdin, stdout, &script, &said, &end))
        };
        let complaints = thread::spawn(move || {
            let mut text = Vec::new();
            // Ends with the process.
            let _ = stderr.read_to_end(&mut text);
            String::from_utf8_lossy(&text).into_owned()
        });
        Self {
            name: name.to_owned(),
            process,
            said,
            end,
            conversation: Some(conversation),
            complaints: Some(complaints),
        }
    }

    /// A process of this test that does steps of its own; see `works_as_told`.
    pub fn of_this_test(name: &str, role: &str, place: &Path, done: u64) -> Self {
        let test = std::env::current_exe().expect("a process knows its executable");
        let mut command = Command::new(test);
        command
            .args(["--exact", "works_as_told", "--nocapture"])
            .env(ROLE, role)
            .env(PLACE, place)
            .env(DONE, done.to_string());
        let script = Script {
            greeting: String::new(),
            first: 0,
            step: Box::new(|_| "\n".to_owned()),
        };
        Self::start(name, &mut command, script)
    }

    pub fn said(&self) -> MutexGuard<'_, Vec<Said>> {
        self.said.lock()
    }

    /// Checks that it works.
    pub fn check_running(&mut self) {
        if self.process.try_wait().expect("it is ours").is_some() {
            let words = self.last_words();
            panic!("{} has ended: {words}", self.name);
        }
    }

    /// Ends it after its step, none of which may have failed.
    pub fn finish(mut self) -> Vec<Said> {
        self.end.store(true, Ordering::Relaxed);
        self.wait();
        let status = self.process.wait().expect("it is ours");
        let words = self.last_words();
        let is_well = status.success() && words.is_empty();
        assert!(is_well, "{}: {status}, {words}", self.name);
        self.said().clone()
    }

    /// Waits until it has noticed that its mount was killed.
    pub fn end_without_mount(mut self) -> Vec<Said> {
        self.wait();
        self.said().clone()
    }

    fn wait(&mut self) {
        let what = format!("{} has ended", self.name);
        wait_until(&what, END_DEADLINE, || {
            self.process.try_wait().expect("it is ours").is_some()
        });
    }

    /// Its other output, after it has ended.
    fn last_words(&mut self) -> String {
        let answer = self.conversation.take().map(|it| it.join().expect("joins"));
        let complaints = self.complaints.take().map(|it| it.join().expect("joins"));
        answer.flatten().unwrap_or_default() + &complaints.unwrap_or_default()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes a program do steps until it is time to end, or its answer is not a number, which is then
/// returned.
fn converse(
    mut stdin: ChildStdin,
    stdout: ChildStdout,
    script: &Script,
    said: &Mutex<Vec<Said>>,
    end: &AtomicBool,
) -> Option<String> {
    let mut answers = BufReader::new(stdout).lines().map_while(Result::ok);
    let mut tell = |text: String| stdin.write_all(text.as_bytes()).ok();
    tell(script.greeting.clone())?;
    // The test binary first prints other lines.
    answers.find(|line| line == "ready")?;
    for number in script.first.. {
        if end.load(Ordering::Relaxed) {
            break;
        }
        tell((script.step)(number))?;
        // After a minute, the test binary prints that it has been running for long.
        let answer = answers.find(|line| !line.starts_with("test "))?;
        let Ok(number) = answer.trim().parse() else {
            return Some(answer);
        };
        let now = Instant::now();
        said.lock().push((number, now));
    }
    drop(stdin);
    // Its final output must not block it.
    answers.for_each(drop);
    None
}
