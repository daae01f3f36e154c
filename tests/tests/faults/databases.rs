//! SQLite and PostgreSQL: rows of acknowledged transactions must be preserved.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::Duration;

use harvestfs_tests::wait_until;
use rustix::process::{Pid, Signal, kill_process};

use crate::Workload;
use crate::worker::{Said, Script, Worker};

/// Milliseconds for which a transaction waits for another one.
const BUSY_TIMEOUT_MS: u32 = 60_000;
const SERVER_DEADLINE: Duration = Duration::from_secs(60);
/// The user that runs PostgreSQL if the test runs as root, as which PostgreSQL refuses to run.
const NOBODY: u32 = 65_534;

fn text_of(output: &std::process::Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout.clone()).expect("text")
}

/// Length of the filler of a row, so that rows have many sizes.
fn filler_bytes(number: u64) -> u64 {
    number * 97 % 2000
}

/// Starts writers, each with rows numbered from 0. The numbers of unacknowledged rows are not reused, since these
/// rows may exist.
fn writers(
    database: &str,
    count: usize,
    said: &BTreeMap<String, Vec<Said>>,
    command: impl Fn() -> Command,
    script: impl Fn(usize) -> (String, Box<dyn Fn(u64) -> String + Send>),
) -> Vec<Worker> {
    (0..count)
        .map(|writer| {
            let name = format!("{database} {writer}");
            let last = said.get(&name).and_then(|said| said.last());
            let (greeting, step) = script(writer);
            let script = Script {
                greeting,
                first: last.map_or(0, |&(number, _)| number + 2),
                step,
            };
            Worker::start(&name, &mut command(), script)
        })
        .collect()
}

/// Checks that all acknowledged rows exist. Each row is `WRITER NUMBER`.
fn check_rows(database: &str, rows: &str, said: &BTreeMap<String, Vec<Said>>) {
    let rows: BTreeSet<&str> = rows.lines().collect();
    for (writer, said) in said {
        let id = writer.rsplit(' ').next().expect("a number");
        let lost = said
            .iter()
            .filter(|(number, _)| !rows.contains(&*format!("{id} {number}")));
        assert_eq!(
            lost.count(),
            0,
            "of {} of {writer} in {database}",
            said.len()
        );
    }
}

/// A database of SQLite with several writers.
pub struct Sqlite {
    pub mount: PathBuf,
    pub journal_mode: &'static str,
}

impl Sqlite {
    fn path(&self, mount: &Path) -> PathBuf {
        mount.join("work").join(format!("{}.db", self.journal_mode))
    }

    fn query(&self, mount: &Path, script: &str) -> String {
        let output = Command::new("sqlite3")
            .arg("-bail")
            .arg(self.path(mount))
            .arg(script)
            .output();
        text_of(&output.expect("sqlite3 runs"))
    }
}

impl Workload for Sqlite {
    fn name(&self) -> String {
        format!("SQLite {}", self.journal_mode)
    }

    fn mount(&self) -> &'static str {
        "one"
    }

    fn prepare(&mut self) {
        let script = format!(
            "PRAGMA journal_mode={}; CREATE TABLE t(writer, number, filler); \
             CREATE UNIQUE INDEX i ON t(writer, number);",
            self.journal_mode
        );
        self.query(&self.mount, &script);
    }

    fn start(&mut self, said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker> {
        let command = || {
            let mut command = Command::new("stdbuf");
            // Each answer is waited for, so it must not stay in a buffer.
            command.args(["-oL", "sqlite3", "-batch", "-bail"]);
            command.arg(self.path(&self.mount));
            command
        };
        let greeting = format!(
            ".timeout {BUSY_TIMEOUT_MS}\n.output /dev/null\nPRAGMA journal_mode={};\n.output stdout\n\
             PRAGMA synchronous=FULL;\nSELECT 'ready';\n",
            self.journal_mode
        );
        writers(&self.name(), 2, said, command, |writer| {
            let insert = move |number| {
                let filler = "x".repeat(filler_bytes(number) as usize);
                format!(
                    "BEGIN IMMEDIATE; INSERT INTO t VALUES({writer}, {number}, '{filler}'); COMMIT; \
                     SELECT {number};\n"
                )
            };
            (greeting.clone(), Box::new(insert))
        })
    }

    fn check(&self, mounts: [&Path; 2], said: &BTreeMap<String, Vec<Said>>) {
        for mount in mounts {
            let script = "PRAGMA integrity_check; SELECT writer || ' ' || number FROM t;";
            let found = self.query(mount, script);
            let rows = found.strip_prefix("ok\n");
            let rows = rows.unwrap_or_else(|| panic!("{} in {mount:?}: {found}", self.name()));
            check_rows(&self.name(), rows, said);
        }
    }
}

/// A server of PostgreSQL with several clients.
pub struct PostgreSql {
    mount: PathBuf,
    /// The directory of its programs.
    programs: PathBuf,
    /// Directory outside the mount, for sockets and logs.
    local: PathBuf,
    server: Option<Child>,
    starts: u32,
}

impl PostgreSql {
    pub fn new(mount: PathBuf, programs: PathBuf, local: PathBuf) -> Self {
        Self {
            mount,
            programs,
            local,
            server: None,
            starts: 0,
        }
    }

    fn data(&self) -> PathBuf {
        self.mount.join("work/postgres")
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.programs.join(program));
        command
            .current_dir(&self.local)
            .env("PGHOST", &self.local)
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres")
            .env("LC_ALL", "C");
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn run(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.command(program).args(arguments).output();
        text_of(&output.expect("it runs"))
    }

    fn log(&self) -> PathBuf {
        self.local.join(format!("postgres-{}.log", self.starts))
    }

    /// Checks that the server has logged no errors since it was started.
    fn check_log(&self) {
        let log = fs::read_to_string(self.log()).expect("its log");
        let mut lines = log.lines();
        let trouble = lines.find(|line| {
            let is_starting = line.contains("the database system is ");
            let complains = ["ERROR:", "FATAL:", "PANIC:"];
            !is_starting && complains.iter().any(|word| line.contains(word))
        });
        assert_eq!(trouble, None, "{log}");
    }

    fn start_server(&mut self) {
        self.starts += 1;
        let log = File::create(self.log()).expect("a log");
        let mut command = self.command("postgres");
        command.arg("-D").arg(self.data()).stderr(log);
        self.server = Some(command.spawn().expect("it starts"));
        wait_until("PostgreSQL is ready", SERVER_DEADLINE, || {
            let server = self.server.as_mut().expect("it was started");
            let ended = server.try_wait().expect("it is ours");
            let log = || fs::read_to_string(self.log()).unwrap_or_default();
            assert!(ended.is_none(), "PostgreSQL: {}", log());
            let ready = self.command("pg_isready").arg("-q").status();
            ready.expect("it runs").success()
        });
    }

    /// Stops the server: with SIGINT in good order, with SIGQUIT immediately, as in a crash.
    fn stop_server(&mut self, signal: Signal) {
        let Some(mut server) = self.server.take() else {
            return;
        };
        let pid = i32::try_from(server.id()).ok().and_then(Pid::from_raw);
        // It may have ended by itself.
        let _ = kill_process(pid.expect("a child has an id"), signal);
        wait_until("PostgreSQL has ended", SERVER_DEADLINE, || {
            server.try_wait().expect("it is ours").is_some()
        });
    }
}

impl Drop for PostgreSql {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return self.stop_server(Signal::INT);
        }
        let log = fs::read_to_string(self.log()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let end = lines[lines.len().saturating_sub(15)..].join("\n");
        eprintln!("--- the end of the log of PostgreSQL:\n{end}");
        if let Some(mut server) = self.server.take() {
            let pid = i32::try_from(server.id()).ok().and_then(Pid::from_raw);
            let _ = kill_process(pid.expect("a child has an id"), Signal::QUIT);
            let _ = server.wait();
        }
    }
}

impl Workload for PostgreSql {
    fn name(&self) -> String {
        "PostgreSQL".to_owned()
    }

    fn mount(&self) -> &'static str {
        "one"
    }

    fn prepare(&mut self) {
        fs::create_dir(self.data()).expect("mkdir");
        if rustix::process::geteuid().is_root() {
            for directory in [&self.data(), &self.local] {
                std::os::unix::fs::chown(directory, Some(NOBODY), Some(NOBODY)).expect("chown");
            }
        }
        let data = self.data();
        let data = data.to_str().expect("text");
        let small = ["--no-sync", "--wal-segsize=1", "--auth=trust", "--locale=C"];
        let mut arguments = vec!["-D", data, "-U", "postgres", "--encoding=UTF8"];
        arguments.extend(small);
        self.run("initdb", &arguments);
        let socket_directory = self.local.display();
        // Small limits, so that it constantly writes, renames and checkpoints; and verbose logs.
        let settings = format!(
            "listen_addresses = ''\nunix_socket_directories = '{socket_directory}'\n\
             shared_buffers = 1MB\nmax_connections = 10\nwal_level = minimal\nmax_wal_senders = 0\n\
             min_wal_size = 2MB\nmax_wal_size = 4MB\nrestart_after_crash = off\n"
        );
        let path = self.data().join("postgresql.auto.conf");
        fs::write(path, settings).expect("its configuration");
        self.start_server();
        let table =
            "CREATE TABLE t(writer int, number int, filler text, PRIMARY KEY(writer, number))";
        self.run("psql", &["-Xqc", table]);
        self.stop_server(Signal::INT);
    }

    fn start(&mut self, said: &BTreeMap<String, Vec<Said>>) -> Vec<Worker> {
        self.start_server();
        let command = || {
            let mut command = self.command("psql");
            command.args(["-XqAt", "-v", "ON_ERROR_STOP=1"]);
            command
        };
        writers(&self.name(), 2, said, command, |writer| {
            let insert = move |number| {
                let filler_bytes = filler_bytes(number);
                format!(
                    "INSERT INTO t VALUES({writer}, {number}, repeat('x', {filler_bytes})) RETURNING number;\n"
                )
            };
            ("SELECT 'ready';\n".to_owned(), Box::new(insert))
        })
    }

    fn before_the_mount_is_killed(&self) {
        self.check_log();
    }

    fn end_without_mount(&mut self) {
        self.stop_server(Signal::QUIT);
    }

    fn check(&self, _mounts: [&Path; 2], said: &BTreeMap<String, Vec<Said>>) {
        self.check_log();
        self.run(
            "pg_amcheck",
            &["--install-missing", "--heapallindexed", "--parent-check"],
        );
        let rows =
            "SELECT writer || ' ' || number FROM t WHERE length(filler) = number * 97 % 2000";
        let rows = self.run("psql", &["-XqAtc", rows]);
        check_rows("PostgreSQL", &rows, said);
    }
}
