//! A process that appends is killed with SIGKILL, again and again.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

const ROUNDS: u32 = 20;
const SEED: u64 = 1;
/// Set in the child only: the directory of its journal.
const CHILD_DIR: &str = "HARVESTFS_JOURNAL_TEST_CHILD_DIR";

fn options_in(dir: PathBuf) -> JournalOptions {
    JournalOptions { dir, ..options() }
}

/// The body of the child process; an ordinary test run has nothing to do here.
#[test]
fn child_process() {
    let Some(dir) = std::env::var_os(CHILD_DIR) else {
        return;
    };
    let (journal, recovered) = Journal::open(&options_in(dir.into())).unwrap();
    let mut lsn = recovered.last_lsn;
    drop(recovered);
    let writer = JournalWriter::start(journal, JournalWriterOptions::default()).unwrap();
    let (answers, answered) = mpsc::channel();
    // Ends when it is killed; the bound is for the case that its parent dies first.
    for count in (1..=4).cycle().take(1_000_000) {
        let answers = answers.clone();
        let batch = Batch {
            first: None,
            records: records(lsn + 1, lsn + count),
            wants_durable: true,
            done: Box::new(move |outcome| answers.send(outcome).unwrap()),
        };
        lsn += count;
        assert!(submit(&writer, batch));
        // Two batches in flight, so that a kill can hit a group.
        if count % 2 == 0 {
            for _ in 0..2 {
                println!("acknowledged {}", answered.recv().unwrap().unwrap());
            }
        }
    }
}

#[test]
fn every_acknowledged_record_survives_kill_9() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = SmallRng::seed_from_u64(SEED);
    let mut acknowledged = 0;
    for round in 0..ROUNDS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "--nocapture",
                "journal::tests::kill::child_process",
            ])
            .env(CHILD_DIR, dir.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let answers_before_kill = rng.random_range(1..200);
        let mut answers = 0;
        for line in BufReader::new(child.stdout.take().unwrap()).lines() {
            let line = line.unwrap();
            let Some(lsn) = line.strip_prefix("acknowledged ") else {
                continue;
            };
            acknowledged = lsn.parse().unwrap();
            answers += 1;
            if answers == answers_before_kill {
                child.kill().unwrap();
            }
        }
        child.wait().unwrap();
        assert!(answers >= answers_before_kill, "round {round}: no child");

        let (_journal, recovered) = Journal::open(&options_in(dir.path().into())).unwrap();
        assert!(
            recovered.last_lsn >= acknowledged,
            "round {round}: record {acknowledged} was acknowledged, found {}",
            recovered.last_lsn
        );
        assert_records(recovered.records, 1, recovered.last_lsn);
    }
}
