//! Runs CRIU, and explains in one sentence why it failed.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::guard::Guard;
use crate::manifest::Allow;
use crate::page::PAGE_BYTES;
use crate::verdict::Verdict;

/// Name of CRIU's log, in its work directory.
pub const LOG_FILE: &str = "criu.log";
/// The first version that can send its images instead of writing them.
const VERSION_MIN: (u32, u32) = (3, 15);
/// Number of bytes at the end of a log that are searched for the reason of a failure.
const LOG_BYTES_MAX: usize = 1 << 20;

/// Why CRIU cannot be used, or what it failed to do.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// The program does not exist.
    #[error(
        "there is no CRIU at `{}`: install it (4.1 or later for a recent kernel), or say where it \
         is with --criu or `criu` in [checkpoint] of the configuration",
        .0.display()
    )]
    Missing(PathBuf),
    /// The program could not be started.
    #[error("cannot run `{}`: {source}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The program does not print a version of CRIU.
    #[error("`{}` is not CRIU: `--version` printed {printed:?}", program.display())]
    NotCriu {
        /// The program.
        program: PathBuf,
        /// What it printed.
        printed: String,
    },
    /// The program is too old.
    #[error("CRIU {version} cannot send its images: use 4.1 or later")]
    Old {
        /// Its version.
        version: String,
    },
    /// CRIU does not support this kernel, which is too new for it or lacks a feature.
    #[error("CRIU {version} does not work with this kernel: {reason}")]
    Kernel {
        /// Its version.
        version: String,
        /// What `criu check` reported.
        reason: String,
    },
    /// CRIU ran and failed.
    #[error("CRIU refused to {what}: {reason}")]
    Refused {
        /// `dump` or `restore`.
        what: &'static str,
        /// Why.
        reason: String,
    },
}

/// A CRIU that works on this machine.
#[derive(Clone, Debug)]
pub struct Criu {
    program: PathBuf,
    version: String,
}

impl Criu {
    /// Checks that CRIU exists, is recent enough, and works with this kernel. `program` is a path, or a
    /// name that is looked up in `PATH`.
    ///
    /// # Errors
    /// When one of these is not the case.
    pub fn find(program: &Path) -> Result<Self, CriuError> {
        let run = |argument: &str| {
            let output = Command::new(program)
                .arg(argument)
                .stdin(Stdio::null())
                .output();
            output.map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => CriuError::Missing(program.to_owned()),
                _ => CriuError::Start {
                    program: program.to_owned(),
                    source,
                },
            })
        };
        let printed = String::from_utf8_lossy(&run("--version")?.stdout).into_owned();
        let Some((version, number)) = parse_version(&printed) else {
            return Err(CriuError::NotCriu {
                program: program.to_owned(),
                printed: printed.trim().to_owned(),
            });
        };
        if number < VERSION_MIN {
            return Err(CriuError::Old { version });
        }
        let check = run("check")?;
        if !check.status.success() {
            let said = String::from_utf8_lossy(&check.stderr);
            let reason = last_error(&said).unwrap_or_else(|| "`criu check` failed".into());
            return Err(CriuError::Kernel {
                version,
                reason: format!("{reason} (a later CRIU may know it; 4.1 knows Linux 6.18)"),
            });
        }
        Ok(Self {
            program: program.to_owned(),
            version,
        })
    }

    /// Its version, as it prints it.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.version
    }

    /// Whether the kernel can report which pages of a process were changed.
    #[must_use]
    pub fn tracks_memory(&self) -> bool {
        // CRIU counts in pages of the machine's size.
        if rustix::param::page_size() != PAGE_BYTES {
            return false;
        }
        let check = Command::new(&self.program)
            .args(["check", "--feature", "mem_dirty_track"])
            .stdin(Stdio::null())
            .output();
        check.is_ok_and(|check| check.status.success())
    }

    /// Starts a full dump. The images are sent to the receiver that listens in the directory for CRIU's
    /// log; the processes stay stopped.
    ///
    /// # Errors
    /// When CRIU does not start.
    pub fn dump(&self, dump: &Dump<'_>) -> Result<Child, CriuError> {
        let mut arguments = dump.arguments(dump.work);
        arguments.push("--stream".into());
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::null());
        self.spawn_guarded(&mut command, dump.guard)
    }

    /// Starts a dump of what was changed since the checkpoint in `parent`, a sibling directory of `images`.
    /// Memory is sent to `socket`, the other images are written to `images`; the processes stay stopped.
    ///
    /// # Errors
    /// When CRIU does not start.
    pub fn dump_changes(
        &self,
        dump: &Dump<'_>,
        images: &Path,
        parent: &OsStr,
        socket: OwnedFd,
    ) -> Result<Child, CriuError> {
        let mut arguments = dump.arguments(images);
        arguments.push("--prev-images-dir".into());
        arguments.push(Path::new("..").join(parent).into());
        // The socket is CRIU's standard input.
        for option in ["--page-server", "--ps-socket", "0"] {
            arguments.push(option.into());
        }
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(socket);
        self.spawn_guarded(&mut command, dump.guard)
    }

    /// Starts a dump by CRIU alone, with images and log in `directory`; it ends `pid`.
    ///
    /// # Errors
    /// When CRIU does not start.
    pub fn dump_to(&self, pid: i32, directory: &Path) -> Result<Child, CriuError> {
        let mut arguments: Vec<OsString> = vec!["dump".into(), "--tree".into()];
        arguments.push(pid.to_string().into());
        arguments.push("--images-dir".into());
        arguments.push(directory.into());
        push_common(&mut arguments, directory, &[]);
        self.spawn(
            Command::new(&self.program)
                .args(arguments)
                .stdin(Stdio::null()),
        )
    }

    /// Starts a restore of the images in `images`, with the log in `work`. The restored job does not depend
    /// on this process. It runs once the verdict on the images is that they are intact; without a verdict,
    /// as soon as it is restored.
    ///
    /// # Errors
    /// When CRIU does not start.
    pub fn restore(
        &self,
        images: &Path,
        work: &Path,
        allow: &[Allow],
        pid_file: &Path,
        verdict: Option<&Verdict>,
    ) -> Result<Child, CriuError> {
        let mut command = Command::new(&self.program);
        command
            .args(restore_arguments(images, work, allow, pid_file))
            .stdin(Stdio::null());
        if let Some(verdict) = verdict {
            verdict.hold(&mut command, allow);
        }
        self.spawn(&mut command)
    }

    /// Spawns CRIU so that it survives Ctrl-C: when a dump is abandoned, CRIU itself lets the job continue.
    fn spawn_guarded(&self, command: &mut Command, guard: &Guard) -> Result<Child, CriuError> {
        // Ctrl-C is for us. CRIU prints nothing: its log is a file.
        let held = guard.held().map_err(|source| self.not_started(source))?;
        self.spawn_with(command.process_group(0), held)
    }

    fn spawn(&self, command: &mut Command) -> Result<Child, CriuError> {
        self.spawn_with(command, Stdio::null())
    }

    fn spawn_with(&self, command: &mut Command, stdout: Stdio) -> Result<Child, CriuError> {
        command
            // With it, CRIU would rely on change tracking of shared memory, which is unreliable.
            .env_remove("CRIU_TRACK_SHMEM")
            .stdout(stdout)
            .stderr(Stdio::null())
            .spawn()
            .map_err(|source| self.not_started(source))
    }

    fn not_started(&self, source: io::Error) -> CriuError {
        CriuError::Start {
            program: self.program.clone(),
            source,
        }
    }
}

/// Parameters of a dump.
#[derive(Clone, Copy, Debug)]
pub struct Dump<'a> {
    /// The job's first process; its descendants are dumped with it.
    pub pid: i32,
    /// Directory for CRIU's log.
    pub work: &'a Path,
    /// What CRIU is allowed to do.
    pub allow: &'a [Allow],
    /// The cgroup with which the processes are frozen.
    pub freezer: Option<&'a Path>,
    /// Whether the kernel is to track changes from then on.
    pub track: bool,
    /// The guard that lets the processes continue if this process ends first.
    pub guard: &'a Guard,
}

impl Dump<'_> {
    fn arguments(&self, images: &Path) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["dump".into(), "--tree".into()];
        arguments.push(self.pid.to_string().into());
        // Stopped until the images are durable, so that a dump that fails later costs no job; and
        // because the pages travel by reference.
        arguments.push("--leave-stopped".into());
        arguments.push("--images-dir".into());
        arguments.push(images.into());
        if self.track {
            arguments.push("--track-mem".into());
        }
        if let Some(freezer) = self.freezer {
            arguments.push("--freeze-cgroup".into());
            arguments.push(freezer.into());
        }
        push_common(&mut arguments, self.work, self.allow);
        arguments
    }
}

/// Checks how a run ended, and takes the reason of a failure from its log.
///
/// # Errors
/// [`CriuError::Refused`] when it failed.
pub fn outcome(what: &'static str, status: ExitStatus, work: &Path) -> Result<(), CriuError> {
    if status.success() {
        return Ok(());
    }
    let log = fs::read(work.join(LOG_FILE)).unwrap_or_default();
    let end = &log[log.len().saturating_sub(LOG_BYTES_MAX)..];
    Err(CriuError::Refused {
        what,
        reason: explain(&String::from_utf8_lossy(end))
            .unwrap_or_else(|| format!("it ended with {status} and said nothing")),
    })
}

fn restore_arguments(
    images: &Path,
    work: &Path,
    allow: &[Allow],
    pid_file: &Path,
) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["restore".into(), "--restore-detached".into()];
    arguments.push("--images-dir".into());
    arguments.push(images.into());
    arguments.push("--pidfile".into());
    arguments.push(pid_file.into());
    push_common(&mut arguments, work, allow);
    arguments
}

fn push_common(arguments: &mut Vec<OsString>, work: &Path, allow: &[Allow]) {
    arguments.push("--work-dir".into());
    arguments.push(work.into());
    arguments.push("--log-file".into());
    arguments.push(LOG_FILE.into());
    arguments.push("-v3".into());
    arguments.extend(allow.iter().map(|allow| allow.option().into()));
}

/// Parses the line `Version: 4.1.1`; other lines are ignored.
fn parse_version(printed: &str) -> Option<(String, (u32, u32))> {
    let line = printed
        .lines()
        .find_map(|line| line.trim().strip_prefix("Version:"))?;
    let version = line.trim();
    let mut numbers = version.split('.').map(|part| {
        let end = part.find(|c: char| !c.is_ascii_digit());
        part[..end.unwrap_or(part.len())].parse::<u32>().ok()
    });
    let major = numbers.next()??;
    let minor = numbers.next().flatten().unwrap_or(0);
    Some((version.to_owned(), (major, minor)))
}

/// Messages in CRIU's log, each with its meaning and what to do. The first one in this list that occurs wins.
const REASONS: [(&str, &str); 18] = [
    (
        "Broken pipe",
        "the images could not be stored: the file system that they go to failed",
    ),
    (
        "is a session leader",
        "the job shares its session with a shell: start it with `setsid`, or pass --allow shell-job",
    ),
    (
        "non-leader session",
        "the job shares its session with a shell: start it with `setsid`, or pass --allow shell-job",
    ),
    (
        "A session leader of",
        "the job shares its session with a shell: start it with `setsid`, or pass --allow shell-job",
    ),
    (
        "Connected TCP socket",
        "the job has an open TCP connection: close it, or pass --allow tcp-established",
    ),
    (
        "TCP socket, consider using",
        "the job has an open TCP connection: close it, or pass --allow tcp-established",
    ),
    (
        "External socket is used",
        "the job is connected to a Unix socket of a process outside: pass --allow ext-unix-sk",
    ),
    (
        "Can't dump half of stream unix connection",
        "the job is connected to a Unix socket of a process outside: pass --allow ext-unix-sk",
    ),
    (
        "Some file locks are hold",
        "the job holds file locks: pass --allow file-locks",
    ),
    (
        "unsupported type of file",
        "the job has an open file of a kind that cannot be checkpointed",
    ),
    (
        "Can't handle mapped",
        "the job has mapped a device, which cannot be checkpointed",
    ),
    (
        "Can't lookup mount",
        "the job has an open file on a mount that is not visible here: run the command in the \
         mount namespace of the job",
    ),
    (
        "already exists: File exists",
        "the id of the job's process is in use here: does the job still run, or has the process that \
         started it not yet taken note of its end?",
    ),
    (
        "File exists",
        "the id of the job's process is in use here: does the job still run, or has the process that \
         started it not yet taken note of its end?",
    ),
    (
        "ptrace attach failed",
        "a debugger is attached to the job, or the privilege is missing",
    ),
    (
        "has bad size",
        "a file that the job has open was changed or is another one on this node",
    ),
    (
        "has bad build-ID",
        "a program or library of the job is another one on this node",
    ),
    (
        "Operation not permitted",
        "the privilege is missing: CRIU needs root, and in a container CAP_CHECKPOINT_RESTORE and \
         CAP_SYS_PTRACE",
    ),
];

/// Part of an error message that CRIU logs although it does not matter.
const HARMLESS: &str = "RLIMIT_NOFILE for self";

/// Explains a log in a sentence; `None` when it has no errors.
fn explain(log: &str) -> Option<String> {
    let errors: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("Error (") && !line.contains(HARMLESS))
        .collect();
    let known = REASONS.iter().find_map(|(said, meaning)| {
        let line = errors.iter().find(|line| line.contains(said))?;
        Some(format!("{meaning} (CRIU: {})", message_of(line)))
    });
    // The first error is the cause; later ones are its consequences.
    known.or_else(|| errors.first().map(|line| message_of(line).to_owned()))
}

/// The last error that `criu check` printed.
fn last_error(said: &str) -> Option<String> {
    let mut errors = said.lines().filter(|line| line.contains("Error ("));
    errors.next_back().map(|line| message_of(line).to_owned())
}

/// The message of a line such as `(00.012) Error (criu/file.c:12): message`.
fn message_of(line: &str) -> &str {
    line.split_once("Error (")
        .and_then(|(_, rest)| rest.split_once("): "))
        .map_or(line, |(_, message)| message)
        .trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        let parse = |text| parse_version(text).map(|(_, number)| number);
        assert_eq!(parse("Version: 4.1.1\n"), Some((4, 1)));
        assert_eq!(parse("Version: 3.17.1\nGitID: v3.17"), Some((3, 17)));
        assert_eq!(parse("Version: 4\n"), Some((4, 0)));
        assert_eq!(parse("bash, version 5"), None);
        assert_eq!(parse("Version: new"), None);
    }

    #[test]
    fn a_log_becomes_a_sentence() {
        let log = "(00.01) Dumping\n\
                   (00.02) Error (criu/sk-inet.c:191): inet: Connected TCP socket, consider using \
                   --tcp-established option.\n\
                   (00.03) Error (criu/cr-dump.c:2111): Dumping FAILED.\n";
        let sentence = explain(log).expect("it says something");
        assert!(sentence.contains("--allow tcp-established"), "{sentence}");
        assert!(sentence.contains("Connected TCP socket"), "{sentence}");
        let unknown =
            "(00.02) Error (criu/x.c:1): the moon is full\n(1) Error (a): Dumping FAILED.";
        assert_eq!(explain(unknown).as_deref(), Some("the moon is full"));
        assert_eq!(explain("(00.01) fine"), None);
        let harmless = "(1) Error (a): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not \
                        permitted\n(2) Error (b): Can't fork for 7: File exists";
        let sentence = explain(harmless).expect("it says something");
        assert!(sentence.contains("is in use here"), "{sentence}");
    }

    #[test]
    fn every_hint_names_what_can_be_allowed() {
        for (_, meaning) in REASONS {
            if let Some((_, hint)) = meaning.split_once("--allow ") {
                assert!(hint.parse::<Allow>().is_ok(), "{hint}");
            }
        }
    }

    #[test]
    fn what_is_not_there_or_is_no_criu_is_reported() {
        let error = Criu::find(Path::new("/nonexistent/criu")).expect_err("it is not there");
        assert!(matches!(error, CriuError::Missing(_)), "{error}");
        let error = Criu::find(Path::new("/bin/true")).expect_err("it is no criu");
        assert!(matches!(error, CriuError::NotCriu { .. }), "{error}");
    }

    #[test]
    fn an_old_one_and_one_that_does_not_know_the_kernel_are_reported() {
        let directory = tempfile::tempdir().expect("a directory");
        let criu = directory.path().join("criu");
        let find = |script: &str| {
            fs::write(&criu, format!("#!/bin/sh\n{script}\n")).expect("it is written");
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(&criu, mode).expect("it is made executable");
            Criu::find(&criu).expect_err("it cannot be used")
        };
        let error = find("echo Version: 3.5");
        assert!(matches!(error, CriuError::Old { .. }), "{error}");
        let error = find(
            "[ $1 = check ] && { echo 'Error (criu/cr-check.c:1): no mmap' >&2; exit 1; }\n\
             echo Version: 3.17",
        );
        assert!(matches!(error, CriuError::Kernel { .. }), "{error}");
        assert!(error.to_string().contains("no mmap"), "{error}");
    }
}
