//! Cleans up a command's unfinished work when a signal ends it.

use anyhow::Context;

use crate::signals::Interruption;

/// Runs `work`, and drops it when a signal arrives, which ends this process soon after. Signals that the process was
/// started to ignore stay ignored.
///
/// # Errors
/// The error of `work`; [`crate::signals::Interrupted`]; also when signals cannot be waited for.
pub async fn dropped_by_signal<T>(
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let mut interruption = Interruption::watch().context("cannot wait for signals")?;
    interruption.unless(work).await
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{Command, Output};
    use std::time::Duration;

    use harvestfs_protocol::durable::PendingFile;
    use rustix::process::{Signal, getpid, kill_process};
    use tokio::signal::unix::SignalKind;

    use super::super::link;
    use super::*;
    use crate::process;
    use crate::signals::{Interrupted, end_by};

    const CHILD: &str = "HARVESTFS_TEST_INTERRUPTED_FILE";

    /// Runs `work` as a command does, in a process that a test has started.
    fn run(work: impl Future<Output = anyhow::Result<()>>) {
        let error = link::block_on(dropped_by_signal(work)).unwrap_err();
        end_by(error.downcast::<Interrupted>().unwrap().signal);
    }

    /// Starts a process that runs one of these tests, from a shell that first executes `shell`.
    fn child(shell: &str, test: &str, file: &Path) -> Output {
        Command::new("sh")
            .args(["-c", &format!("{shell} exec \"$0\" \"$@\"")])
            .arg(env::current_exe().unwrap())
            .args(["--exact", &format!("admin::interrupt::tests::{test}")])
            .env(CHILD, file)
            .output()
            .unwrap()
    }

    #[test]
    fn a_signal_leaves_nothing_behind_unless_it_is_ignored() {
        if let Some(path) = env::var_os(CHILD) {
            let work = async {
                let _begun = PendingFile::create(Path::new(&path), 0o600).unwrap();
                for signal in [Signal::INT, Signal::TERM] {
                    kill_process(getpid(), signal).unwrap();
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
                std::future::pending::<anyhow::Result<()>>().await
            };
            run(work);
        }
        for (ignored, signal) in [("", Signal::INT), ("trap '' INT;", Signal::TERM)] {
            // A process that a script starts in the background ignores it, and no shell can change that.
            if signal == Signal::INT && process::ignores(SignalKind::interrupt()) {
                eprintln!("SIGINT is ignored: what it does otherwise is not tried");
                continue;
            }
            let directory = tempfile::tempdir().unwrap();
            let test = "a_signal_leaves_nothing_behind_unless_it_is_ignored";
            let output = child(ignored, test, &directory.path().join("file"));
            let ended_by = output.status.signal();
            assert_eq!(ended_by, Some(signal.as_raw()), "{output:?}");
            let left = directory.path().read_dir().unwrap();
            assert_eq!(left.count(), 0);
        }
    }

    #[test]
    fn a_signal_ends_also_what_waits_for_a_disk() {
        if env::var_os(CHILD).is_some() {
            let work = async {
                kill_process(getpid(), Signal::TERM).unwrap();
                // This blocks the runtime's only thread.
                std::thread::sleep(Duration::from_secs(60));
                anyhow::bail!("no signal ended it")
            };
            run(work);
        }
        let test = "a_signal_ends_also_what_waits_for_a_disk";
        let output = child("", test, Path::new("no-file"));
        let ended_by = output.status.signal();
        assert_eq!(ended_by, Some(Signal::TERM.as_raw()), "{output:?}");
    }
}
