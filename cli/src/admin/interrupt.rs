//! What a command has begun is not left behind when a signal ends it.

use anyhow::Context;

use crate::signals::{self, Ending};

/// Does the work, and drops it before a signal ends this process. What the process was started to ignore it goes on
/// ignoring. Nothing after the work is ended by a signal.
///
/// # Errors
/// What the work fails with; when signals cannot be waited for.
pub async fn dropped_by_signal<T>(
    work: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    let mut signals = Ending::listen().context("cannot wait for signals")?;
    tokio::select! {
        result = work => result,
        number = signals.received() => signals::end_by(number),
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::Command;
    use std::time::Duration;

    use harvestfs_protocol::durable::PendingFile;
    use rustix::process::{Signal, getpid, kill_process};
    use tokio::signal::unix::SignalKind;

    use super::super::link;
    use super::*;
    use crate::process;

    const CHILD: &str = "HARVESTFS_TEST_INTERRUPTED_FILE";

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
            link::block_on(dropped_by_signal(work)).unwrap();
        }
        for (ignored, signal) in [("", Signal::INT), ("trap '' INT;", Signal::TERM)] {
            // What a script starts in the background is started so, and no shell can change it.
            if signal == Signal::INT && process::ignores(SignalKind::interrupt()) {
                eprintln!("SIGINT is ignored: what it does otherwise is not tried");
                continue;
            }
            let directory = tempfile::tempdir().unwrap();
            let output = Command::new("sh")
                .args(["-c", &format!("{ignored} exec \"$0\" \"$@\"")])
                .arg(env::current_exe().unwrap())
                .args([
                    "--exact",
                    "admin::interrupt::tests::a_signal_leaves_nothing_behind_unless_it_is_ignored",
                ])
                .env(CHILD, directory.path().join("file"))
                .output()
                .unwrap();
            let ended_by = output.status.signal();
            assert_eq!(ended_by, Some(signal.as_raw()), "{output:?}");
            let left = directory.path().read_dir().unwrap();
            assert_eq!(left.count(), 0);
        }
    }
}
