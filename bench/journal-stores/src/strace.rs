//! Records a store's system calls with strace, and parses the recording.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::child;
use crate::store::{Kind, Result};

const CALLS: &str = "openat,open,creat,close,dup,dup2,dup3,fcntl,lseek,read,write,writev,pwrite64,\
                     pwritev,pwritev2,ftruncate,truncate,fallocate,fsync,fdatasync,sync_file_range,\
                     msync,syncfs,rename,renameat,renameat2,link,linkat,unlink,unlinkat,mkdir,\
                     mkdirat,rmdir,copy_file_range,sendfile,io_uring_setup";

/// An event in the directory of the store.
#[derive(Debug)]
pub enum Event {
    /// The path of a new empty file with this id.
    Create(PathBuf, usize),
    Write(usize, u64, Vec<u8>),
    SetLen(usize, u64),
    /// An fsync or fdatasync of a file or directory that is part of the store.
    Sync(usize),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    MakeDir(PathBuf),
    /// The store acknowledged that so many records are durable.
    Acknowledged(u64),
}

#[derive(Debug)]
pub struct Timed {
    pub started: f64,
    pub ended: f64,
    pub event: Event,
}

pub struct Recording {
    /// Ordered by the start of the calls.
    pub events: Vec<Timed>,
    /// The number of calls of each function that affects durability.
    pub sync_calls: Vec<(&'static str, usize)>,
}

/// Whether strace is available.
pub fn is_installed() -> bool {
    let version = Command::new("strace")
        .arg("-V")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    version.is_ok_and(|status| status.success())
}

/// Runs `commits` commits on a new store in `dir` under strace, whose output is written to `trace_dir`.
pub fn record(kind: Kind, dir: &Path, trace_dir: &Path, commits: u64) -> Result<Recording> {
    let appending = child::command("append", kind, dir, commits)?;
    let status = Command::new("strace")
        .args(["-f", "-ff", "-xx", "-s", "100000000", "-e", "signal=none"])
        .args(["--absolute-timestamps=format:unix,precision:ns"])
        .args(["--syscall-times=ns", "-e"])
        .arg(format!("trace={CALLS}"))
        .arg("-o")
        .arg(trace_dir.join("trace"))
        .arg(appending.get_program())
        .args(appending.get_args())
        .stdout(Stdio::null())
        .status()?;
    if !status.success() {
        return Err(format!("{}: under strace: {status}", kind.name()).into());
    }
    let mut calls = Vec::new();
    for entry in fs::read_dir(trace_dir)? {
        let text = fs::read_to_string(entry?.path())?;
        calls.extend(text.lines().filter_map(Call::parse));
    }
    calls.sort_by(|a, b| a.started.total_cmp(&b.started));
    Parser::new(dir).run(&calls)
}

/// A line of strace's output.
struct Call {
    started: f64,
    ended: f64,
    name: String,
    args: String,
    result: i64,
}

impl Call {
    /// Parses a line; `None` for lines that are not calls, and for calls that failed.
    fn parse(line: &str) -> Option<Self> {
        let (started, rest) = line.split_once(' ')?;
        let (name, rest) = rest.split_once('(')?;
        let (args, rest) = rest.rsplit_once(") ")?;
        let (result, seconds) = rest.trim_start().strip_prefix("= ")?.split_once(" <")?;
        let result = result.split_whitespace().next()?.parse().ok()?;
        let started: f64 = started.parse().ok()?;
        let seconds: f64 = seconds.strip_suffix('>')?.parse().ok()?;
        (result >= 0).then(|| Self {
            started,
            ended: started + seconds,
            name: name.to_owned(),
            args: args.to_owned(),
            result,
        })
    }

    /// An argument; only usable where no argument is a structure.
    fn arg(&self, index: usize) -> &str {
        self.args.split(", ").nth(index).unwrap_or_default()
    }

    fn number(&self, index: usize) -> Result<u64> {
        let arg = self.arg(index);
        arg.parse().map_err(|_| {
            format!(
                "{}({}): argument {index}",
                self.name,
                &self.args[..60.min(self.args.len())]
            )
            .into()
        })
    }

    fn fd(&self) -> Result<i64> {
        Ok(self.arg(0).parse()?)
    }

    /// The contents of all string arguments, which strace prints in hexadecimal.
    fn strings(&self) -> Result<Vec<Vec<u8>>> {
        let quoted = self.args.split('"').skip(1).step_by(2);
        quoted
            .map(|text| {
                let digits = text.split("\\x").skip(1);
                let bytes = digits.map(|digit| u8::from_str_radix(digit, 16));
                Ok(bytes.collect::<std::result::Result<_, _>>()?)
            })
            .collect()
    }

    fn paths(&self) -> Result<Vec<PathBuf>> {
        let strings = self.strings()?.into_iter();
        strings.map(|s| Ok(String::from_utf8(s)?.into())).collect()
    }
}

/// An open file description; duplicated descriptors share it.
#[derive(Clone)]
struct Open {
    file: usize,
    description: usize,
    appends: bool,
}

struct Parser<'a> {
    dir: &'a Path,
    fds: HashMap<i64, Open>,
    /// Position of each open file description.
    positions: Vec<u64>,
    ids: HashMap<PathBuf, usize>,
    lens: Vec<u64>,
    recording: Recording,
}

const SYNC_CALLS: [&str; 5] = ["fsync", "fdatasync", "sync_file_range", "msync", "syncfs"];

impl<'a> Parser<'a> {
    fn new(dir: &'a Path) -> Self {
        Self {
            dir,
            fds: HashMap::new(),
            positions: Vec::new(),
            ids: HashMap::new(),
            lens: Vec::new(),
            recording: Recording {
                events: Vec::new(),
                sync_calls: SYNC_CALLS.map(|name| (name, 0)).into(),
            },
        }
    }

    fn run(mut self, calls: &[Call]) -> Result<Recording> {
        for call in calls {
            self.call(call)?;
        }
        Ok(self.recording)
    }

    fn call(&mut self, call: &Call) -> Result<()> {
        for (name, count) in &mut self.recording.sync_calls {
            if *name == call.name {
                *count += 1;
            }
        }
        match call.name.as_str() {
            "openat" | "open" | "creat" => self.open(call),
            "close" => {
                self.fds.remove(&call.fd()?);
                Ok(())
            }
            "dup" | "dup2" | "dup3" => self.duplicate(call),
            "fcntl" if call.args.contains("F_DUPFD") => self.duplicate(call),
            "lseek" | "read" => self.move_position(call),
            "write" | "writev" | "pwrite64" | "pwritev" | "pwritev2" => self.write(call),
            "ftruncate" => self.set_len(call, call.number(1)?),
            "fallocate" if call.arg(1) == "0" => {
                let end = call.number(2)? + call.number(3)?;
                match self.fds.get(&call.fd()?) {
                    Some(open) if self.lens[open.file] < end => self.set_len(call, end),
                    _ => Ok(()),
                }
            }
            "fsync" | "fdatasync" => {
                if let Some(open) = self.fds.get(&call.fd()?) {
                    let event = Event::Sync(open.file);
                    self.push(call, event);
                }
                Ok(())
            }
            "rename" | "renameat" | "renameat2" => self.rename(call),
            "unlink" | "unlinkat" | "rmdir" => {
                for path in self.own(call.paths()?) {
                    self.ids.remove(&path);
                    self.push(call, Event::Remove(path));
                }
                Ok(())
            }
            "mkdir" | "mkdirat" => {
                for path in self.own(call.paths()?) {
                    self.push(call, Event::MakeDir(path));
                }
                Ok(())
            }
            // These were counted above.
            "fcntl" | "sync_file_range" => Ok(()),
            other => Err(format!("the recording has a call of {other}, not understood").into()),
        }
    }

    fn push(&mut self, call: &Call, event: Event) {
        self.recording.events.push(Timed {
            started: call.started,
            ended: call.ended,
            event,
        });
    }

    /// The paths that are inside the directory of the store, relative to it.
    fn own(&self, paths: Vec<PathBuf>) -> Vec<PathBuf> {
        let paths = paths.iter();
        let own = paths.filter_map(|path| path.strip_prefix(self.dir).ok());
        own.map(Path::to_owned).collect()
    }

    fn open(&mut self, call: &Call) -> Result<()> {
        let Some(path) = self.own(call.paths()?).pop() else {
            return Ok(());
        };
        let flags = &call.args;
        let file = match self.ids.get(&path) {
            Some(&file) => file,
            None => {
                let file = self.lens.len();
                self.lens.push(0);
                self.ids.insert(path.clone(), file);
                if flags.contains("O_CREAT") {
                    self.push(call, Event::Create(path, file));
                }
                file
            }
        };
        if flags.contains("O_TRUNC") && self.lens[file] > 0 {
            self.lens[file] = 0;
            self.push(call, Event::SetLen(file, 0));
        }
        let open = Open {
            file,
            description: self.positions.len(),
            appends: flags.contains("O_APPEND"),
        };
        self.positions.push(0);
        self.fds.insert(call.result, open);
        Ok(())
    }

    fn duplicate(&mut self, call: &Call) -> Result<()> {
        if let Some(open) = self.fds.get(&call.fd()?).cloned() {
            self.fds.insert(call.result, open);
        }
        Ok(())
    }

    fn move_position(&mut self, call: &Call) -> Result<()> {
        if let Some(open) = self.fds.get(&call.fd()?) {
            let position = &mut self.positions[open.description];
            match call.name.as_str() {
                "lseek" => *position = call.result as u64,
                _ => *position += call.result as u64,
            }
        }
        Ok(())
    }

    fn write(&mut self, call: &Call) -> Result<()> {
        let fd = call.fd()?;
        if fd == 1 {
            let text = String::from_utf8(call.strings()?.concat())?;
            if let Some(number) = text.strip_prefix("acknowledged ") {
                self.push(call, Event::Acknowledged(number.trim().parse()?));
            }
            return Ok(());
        }
        let Some(open) = self.fds.get(&fd).cloned() else {
            return Ok(());
        };
        let mut bytes = call.strings()?.concat();
        bytes.truncate(call.result as usize);
        let position = &mut self.positions[open.description];
        let offset = match call.name.as_str() {
            "pwrite64" => call.number(3)?,
            "write" | "writev" => {
                if open.appends {
                    *position = self.lens[open.file];
                }
                let offset = *position;
                *position += bytes.len() as u64;
                offset
            }
            other => return Err(format!("{other} is not understood").into()),
        };
        let len = &mut self.lens[open.file];
        *len = (*len).max(offset + bytes.len() as u64);
        self.push(call, Event::Write(open.file, offset, bytes));
        Ok(())
    }

    fn set_len(&mut self, call: &Call, len: u64) -> Result<()> {
        if let Some(open) = self.fds.get(&call.fd()?).cloned() {
            self.lens[open.file] = len;
            self.push(call, Event::SetLen(open.file, len));
        }
        Ok(())
    }

    fn rename(&mut self, call: &Call) -> Result<()> {
        if let [from, to] = self.own(call.paths()?).as_slice() {
            if let Some(file) = self.ids.remove(from) {
                self.ids.insert(to.clone(), file);
            }
            self.push(call, Event::Rename(from.clone(), to.clone()));
        }
        Ok(())
    }
}
