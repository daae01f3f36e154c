//! Tests of the journal: on a real directory, on a simulated disk that loses power, with damaged
//! files, and in a process that is killed.

mod basics;
mod crash;
mod damage;
mod failures;
mod kill;
mod replicated;
mod replicated_crash;
mod sim_disk;

use std::pin::pin;
use std::task::{Context, Waker};

use super::*;

const CLUSTER: u128 = 0x00c0_ffee;

/// The payload that tests give to the record `lsn`.
fn record(lsn: Lsn) -> Vec<u8> {
    record_in_epoch(lsn, 0)
}

/// A payload of the same length as [`record`], but of other bytes in each `epoch`: what a test
/// appends after a recovery must not be mistaken for what was cut off there.
fn record_in_epoch(lsn: Lsn, epoch: usize) -> Vec<u8> {
    let len = match (lsn, lsn % 23) {
        // With its header exactly a sector: then a sector that did not reach the disk leaves
        // its neighbours whole.
        (60..120, _) => 512 - 28,
        (_, 0) => 3000,
        (_, rest) => (rest * lsn) as usize % 400,
    };
    (0..len)
        .map(|i| (lsn as usize * 31 + i * 7 + epoch * 101) as u8)
        .collect()
}

/// Hands in a batch. False: it would have to wait for room, and is dropped.
fn submit(writer: &JournalWriter, batch: Batch) -> bool {
    let submitted = pin!(writer.submit(batch));
    let polled = submitted.poll(&mut Context::from_waker(Waker::noop()));
    polled.is_ready()
}

fn records(from: Lsn, through: Lsn) -> Vec<Vec<u8>> {
    (from..=through).map(record).collect()
}

/// Small segments, so that tests meet many of them.
fn options() -> JournalOptions {
    JournalOptions {
        segment_bytes: 16 * 1024,
        create_if_empty: true,
        ..JournalOptions::new("unused", CLUSTER)
    }
}

/// Reads all records and checks that they are exactly `from..=through`.
fn assert_records(records: RecordReader, from: Lsn, through: Lsn) {
    let mut expected = from;
    for item in records {
        let (lsn, payload) = item.unwrap();
        assert_eq!(lsn, expected);
        assert!(payload == record(lsn), "payload of record {lsn}");
        expected += 1;
    }
    assert_eq!(expected, through + 1, "one past the last record");
}
