//! Fills the journal of a namenode that was made and never started, as if clients had written many small files. It
//! shows how long a large namespace takes to start, to reach another namenode, and to be written as a snapshot.
//!
//! ```text
//! cargo run --release -p harvestfs-namenode --example fill_namenode -- DIR [FILES]
//! ```
//!
//! `DIR` is the namenode's data directory, with `journal` in it. The files have 4 KiB each, 1,000 to a directory; no
//! datanode has their blocks.

use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

#[path = "engine_common/mod.rs"]
mod engine_common;
#[path = "engine_common/small_files.rs"]
mod small_files;

use engine_common::Driver;
use harvestfs_namenode::consensus::{Content, decode};
use harvestfs_namenode::engine::namespace::{Command, Namespace};
use harvestfs_namenode::journal::{Journal, JournalError, JournalOptions};
use harvestfs_namenode::server::{cluster_id, journal_dir};
use small_files::make_small_files;

/// Number of files whose content is committed by one record.
const FILES_PER_COMMIT: usize = 100;
/// Number of records that are appended together.
const RECORDS_PER_APPEND: usize = 10_000;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().ok_or("which data directory?")?);
    let files: u64 = arguments.next().map_or(Ok(10_000_000), |it| it.parse())?;
    let options = JournalOptions::new(journal_dir(&dir), cluster_id(&dir)?.0);
    let (mut journal, recovered) = Journal::open(&options)?;
    let mut namespace = Namespace::new();
    for record in recovered.records {
        let (lsn, bytes) = record?;
        let (0, Content::Command(command)) = decode(&bytes)? else {
            return Err(format!("record {lsn} is that of a namenode that was started").into());
        };
        namespace.apply(&Command::decode(command)?)?;
    }
    let started = Instant::now();
    let mut driver = Driver::new(Some(namespace));
    driver.records = Some(Vec::new());
    driver.open_session();
    make_small_files(&mut driver, files, FILES_PER_COMMIT, |driver| {
        append(&mut journal, driver, RECORDS_PER_APPEND)
    })?;
    append(&mut journal, &mut driver, 1)?;
    journal.sync()?;
    let (records, seconds) = (journal.last_lsn(), started.elapsed().as_secs());
    println!("{files} files, {records} records, {seconds} s");
    println!("{:?}", driver.namespace.counts());
    Ok(())
}

/// Appends what the driver has recorded, if there is enough of it.
fn append(
    journal: &mut Journal,
    driver: &mut Driver,
    records_min: usize,
) -> Result<(), JournalError> {
    let records = driver.records.get_or_insert_default();
    if records.len() >= records_min {
        journal.append(records)?;
        records.clear();
    }
    Ok(())
}
