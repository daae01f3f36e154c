//! The `harvestfs` command: every part of the system in one binary.

#![deny(unsafe_code)]

#[macro_use]
mod output;

mod admin;
mod chaos;
mod checkpoint;
mod cluster;
mod config;
mod cycles;
mod daemon;
mod fs;
mod http;
mod init;
mod locations;
mod logging;
mod primary;
mod priority;
mod process;
mod signals;
mod simulate;
mod units;
mod up;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use harvestfs_protocol::panics::stop_on_panic;
use harvestfs_protocol::settings::SettingsError;

/// Packets of a megabyte come and go: an allocator that gives each back to the kernel costs a
/// datanode a fifth to two fifths of its CPU (measured with the benchmark of the datanode).
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// A distributed block file system on the spare disk of servers that belong to somebody else.
#[derive(Debug, Parser)]
#[command(
    name = "harvestfs",
    version,
    after_help = "Examples:\n  \
                  harvestfs up                       a cluster on this machine, mounted, until Ctrl-C\n  \
                  harvestfs fs put -r photos /       copy into it\n  \
                  harvestfs admin doctor             what is wrong, and what to do\n  \
                  harvestfs init cluster --help      a cluster of several machines\n\n\
                  `harvestfs COMMAND --help` shows what every command takes as well: which cluster, and \
                  how to log.\n\
                  Log detail is set by HARVESTFS_LOG, for example `HARVESTFS_LOG=debug`."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,

    #[command(flatten)]
    log: logging::LogArgs,

    /// End when the process with this id, our parent, ends.
    #[arg(long, global = true, hide = true, value_name = "PID")]
    supervised_by: Option<u32>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make a cluster on this machine, start it and mount it, until Ctrl-C.
    Up(up::UpArgs),
    /// Stop the cluster that `up --detach` started.
    Down(up::DownArgs),
    /// Make the certificates, configuration and directories of a cluster or of one part.
    Init(init::InitArgs),
    /// Run a namenode.
    Namenode(daemon::NamenodeArgs),
    /// Run a datanode.
    Datanode(daemon::DatanodeArgs),
    /// Mount the file system.
    Mount(daemon::MountArgs),
    /// Work with files without a mount.
    Fs(fs::FsArgs),
    /// Look at the cluster and check it.
    Admin(admin::AdminArgs),
    /// Simulate years of a datacentre with the production engine.
    Simulate(simulate::SimulateArgs),
    /// Inflict faults on a real cluster and compare every byte afterwards.
    Chaos(chaos::ChaosArgs),
    /// Suspend jobs, keep them as files, resume them on any node.
    Checkpoint(checkpoint::CheckpointArgs),
    /// What the spare cycles of a cluster are good for.
    Cycles(cycles::CyclesArgs),
    /// Print a completion script for a shell.
    #[command(after_help = "Example:\n  \
        harvestfs completions bash               for a file in /etc/bash_completion.d")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// Whether it does something that must not end half-way when what it prints has no reader.
    fn goes_on_without_reader(&self) -> bool {
        match self {
            Self::Up(_)
            | Self::Down(_)
            | Self::Namenode(_)
            | Self::Datanode(_)
            | Self::Mount(_)
            | Self::Chaos(_) => true,
            Self::Checkpoint(args) => args.changes_jobs(),
            Self::Cycles(args) => args.goes_on_without_reader(),
            Self::Init(_)
            | Self::Fs(_)
            | Self::Admin(_)
            | Self::Simulate(_)
            | Self::Completions { .. } => false,
        }
    }
}

fn main() -> ExitCode {
    if let Some(may_go_on) = harvestfs_checkpoint::verdict::asked_by_criu() {
        return ExitCode::from(u8::from(!may_go_on));
    }
    if let Some(goes_on) = harvestfs_checkpoint::guard::asked() {
        return ExitCode::from(u8::from(!goes_on));
    }
    if let Some(unmounted) = harvestfs_fuse_mount::asked_by_mount() {
        return ExitCode::from(u8::from(!unmounted));
    }
    run(Cli::parse())
}

fn run(cli: Cli) -> ExitCode {
    // In every command, since those that wait for a task would wait forever if it panicked.
    stop_on_panic();
    logging::start(cli.log);
    if let Some(parent) = cli.supervised_by
        && let Err(error) = daemon::end_with_parent(parent)
    {
        output::complain(&error);
        return ExitCode::FAILURE;
    }
    if cli.command.goes_on_without_reader() {
        output::go_on_without_reader();
    }
    let result = match cli.command {
        Command::Up(args) => up::up(&args),
        Command::Down(args) => up::down(&args),
        Command::Init(args) => init::run(&args),
        Command::Namenode(args) => daemon::namenode(&args),
        Command::Datanode(args) => daemon::datanode(&args),
        Command::Mount(args) => daemon::mount(&args),
        Command::Fs(args) => fs::run(&args),
        Command::Admin(args) => admin::run(&args),
        Command::Simulate(args) => simulate::run(&args),
        Command::Chaos(args) => chaos::run(&args),
        Command::Checkpoint(args) => checkpoint::run(&args),
        Command::Cycles(args) => cycles::run(&args),
        Command::Completions { shell } => {
            // clap_complete panics when it cannot write, so it writes to memory.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "harvestfs", &mut script);
            let written = std::io::Write::write_all(&mut output::stdout(), &script);
            written.map_err(Into::into)
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(status) = output::status_without_reader(&error) {
                return ExitCode::from(status);
            }
            if let Some(ended) = error.downcast_ref::<cycles::Ended>() {
                return ExitCode::from(ended.status);
            }
            if let Some(interrupted) = error.downcast_ref::<fs::Interrupted>() {
                signals::end_by(interrupted.signal);
            }
            if error.is::<fs::DoesNotHold>() || error.is::<fs::Incomplete>() {
                return ExitCode::FAILURE;
            }
            output::complain(&error);
            // 2, as with clap: the request is invalid. 1: it was attempted and failed; for a command that tests a
            // condition, such a failure is 2.
            if error.is::<SettingsError>()
                || error.is::<simulate::BadArgument>()
                || error.is::<fs::CannotTell>()
            {
                ExitCode::from(2)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::sync::mpsc;
    use std::{env, process, thread};

    use super::*;

    const CHILD: &str = "HARVESTFS_TEST_COMMAND_PANICS";

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// The commands that help shows as examples, each without what is said of it.
    fn examples(help: &str) -> Vec<Vec<String>> {
        let help = help.replace("\\\n", "");
        let lines = help
            .lines()
            .filter_map(|line| line.strip_prefix("  harvestfs "));
        let words = |line: &str| {
            // A continued line begins with its indentation.
            let line = line.replace("      --", "--");
            let command = line.split("   ").next().unwrap_or_default();
            let words = command.split_whitespace();
            words
                .map(|word| word.trim_matches('\'').to_owned())
                .collect()
        };
        lines.map(words).collect()
    }

    #[test]
    fn examples_in_help_are_commands() {
        fn check(command: &clap::Command, path: &str, without: &mut Vec<String>) {
            let help = command.get_after_help().map(ToString::to_string);
            let examples = help.as_deref().map(examples).unwrap_or_default();
            let is_typed = !command.is_hide_set() && command.get_subcommands().next().is_none();
            if examples.is_empty() && is_typed {
                without.push(path.to_owned());
            }
            for words in examples {
                if words[0] == "COMMAND" {
                    continue;
                }
                let words = [vec!["harvestfs".to_owned()], words].concat();
                let parsed = Cli::try_parse_from(&words);
                let error = parsed.err().map(|error| error.to_string());
                let asks = words.iter().any(|word| word == "--help");
                assert!(asks || error.is_none(), "{path}: {words:?}: {error:?}");
            }
            for below in command.get_subcommands() {
                check(below, &format!("{path} {}", below.get_name()), without);
            }
        }
        let mut without = Vec::new();
        check(&Cli::command(), "harvestfs", &mut without);
        assert!(without.is_empty(), "no example in the help of {without:?}");
    }

    /// What every command takes is in a few lines, or nobody finds the options of the command itself.
    #[test]
    fn global_options_take_few_lines() {
        let mut command = Cli::command();
        command.build();
        let fs = command.find_subcommand_mut("fs").unwrap();
        let help = fs.find_subcommand_mut("mkdir").unwrap().render_long_help();
        let help = help.to_string();
        let (_, global) = help.split_once("Global options:").unwrap();
        // Examples come last.
        let (global, _) = global.split_once("Example").unwrap();
        assert!(global.contains("`text` or `json`"), "{global}");
        assert!(global.lines().count() <= 12, "{global}");
    }

    /// A command that is no part of a cluster waits for a task that panics.
    #[test]
    fn a_panic_of_a_task_ends_a_command() {
        if env::var_os(CHILD).is_some() {
            run(Cli::parse_from(["harvestfs", "completions", "bash"]));
            let (_result, wait) = mpsc::channel::<()>();
            thread::spawn(|| panic!("this task panics"));
            let _ = wait.recv();
            unreachable!("the task has no result");
        }
        let output = process::Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "tests::a_panic_of_a_task_ends_a_command",
                "--nocapture",
            ])
            .env(CHILD, "1")
            .output()
            .unwrap();
        let printed = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "{printed}");
        assert!(printed.contains("this task panics"), "{printed}");
    }
}
