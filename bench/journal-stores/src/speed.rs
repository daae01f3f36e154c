//! Durable commits per second.

use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::task::{Context, Waker};
use std::thread;
use std::time::{Duration, Instant};

use harvestfs_namenode::journal::{
    Batch, Journal, JournalOptions, JournalWriter, JournalWriterOptions,
};

use crate::store::{Kind, Op, Result, Store};
use crate::workload::put;

const WRITERS: u64 = 16;

/// Measures operations per second, with one durable commit of `ops_per_commit` operations after the other.
pub fn alone(kind: Kind, dir: &Path, ops_per_commit: u64, time: Duration) -> Result<f64> {
    let mut store = kind.open(dir)?;
    let started = Instant::now();
    let mut done = 0;
    while started.elapsed() < time {
        let ops: Vec<_> = (done..done + ops_per_commit).map(put).collect();
        store.commit(&ops)?;
        done += ops_per_commit;
    }
    Ok(done as f64 / started.elapsed().as_secs_f64())
}

/// Measures operations per second of 16 threads, each of which waits for one durable operation at a time. One thread
/// owns the store and commits together all operations that arrived during the last commit.
pub fn grouped(kind: Kind, dir: &Path, time: Duration) -> Result<f64> {
    match kind {
        Kind::Segments => {
            let options = JournalOptions {
                create_if_empty: true,
                ..JournalOptions::new(dir, 1)
            };
            let (journal, _) = Journal::open(&options)?;
            let writer = JournalWriter::start(journal, JournalWriterOptions::default())?;
            Ok(run_writers(time, || {
                let writer = &writer;
                move |n| commit_through_writer(writer, n)
            }))
        }
        _ => {
            let store = kind.open(dir)?;
            let (queue, receiver) = mpsc::sync_channel(WRITERS as usize);
            let owner = thread::spawn(move || own(store, &receiver));
            let per_second = run_writers(time, || {
                let queue = queue.clone();
                move |n| {
                    let (answer, answered) = mpsc::channel();
                    queue.send((put(n), answer)).is_ok() && answered.recv().is_ok()
                }
            });
            drop(queue);
            match owner.join() {
                Ok(outcome) => outcome?,
                Err(_) => return Err("the owner of the store panicked".into()),
            }
            Ok(per_second)
        }
    }
}

fn commit_through_writer(writer: &JournalWriter, n: u64) -> bool {
    let Op::Put(key, value) = put(n) else {
        return false;
    };
    let (answer, answered) = mpsc::channel();
    let batch = Batch {
        first: None,
        records: vec![[&key.to_le_bytes(), value.as_slice()].concat()],
        wants_durable: true,
        done: Box::new(move |outcome| drop(answer.send(outcome))),
    };
    // Nothing else is queued, so it never waits.
    let handed_in = pin!(writer.submit(batch)).poll(&mut Context::from_waker(Waker::noop()));
    handed_in.is_ready() && matches!(answered.recv(), Ok(Ok(_)))
}

type Queued = (Op, mpsc::Sender<()>);

fn own(mut store: Box<dyn Store>, queue: &mpsc::Receiver<Queued>) -> Result<()> {
    while let Ok(first) = queue.recv() {
        let mut ops = vec![first.0];
        let mut answers = vec![first.1];
        while let Ok((op, answer)) = queue.try_recv() {
            ops.push(op);
            answers.push(answer);
        }
        store.commit(&ops)?;
        for answer in answers {
            // A writer that has ended does not matter.
            let _ = answer.send(());
        }
    }
    Ok(())
}

/// Runs the commit functions that `new_commit` makes, one per thread, for `time`.
fn run_writers<C>(time: Duration, new_commit: impl Fn() -> C) -> f64
where
    C: FnMut(u64) -> bool + Send,
{
    let stop = AtomicBool::new(false);
    let done = AtomicU64::new(0);
    let started = Instant::now();
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let mut commit = new_commit();
            let (stop, done) = (&stop, &done);
            scope.spawn(move || {
                let mut n = writer;
                while !stop.load(Ordering::Relaxed) && commit(n) {
                    n += WRITERS;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        thread::sleep(time);
        stop.store(true, Ordering::Relaxed);
    });
    done.load(Ordering::Relaxed) as f64 / started.elapsed().as_secs_f64()
}
