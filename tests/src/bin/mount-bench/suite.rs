//! Measures all rows on one target, bringing it first into the state that a row needs.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use harvestfs_tests::free_bytes;

use crate::report::Sample;
use crate::rows::{Row, Unit};
use crate::source_tree::{self, Tarball};
use crate::target::Target;
use crate::work::{self, PAGE_BYTES, SmallFiles};
use crate::{cpu, interrupt};

/// Maximum wait for a removal: longer than a HarvestFS client may keep a file that was lent to it.
const REMOVAL_MAX: Duration = Duration::from_secs(30);
const REMOVAL_POLL: Duration = Duration::from_millis(200);

/// What is measured, and how much of it.
#[derive(Debug)]
pub struct Plan {
    /// The rows; the states that they need are produced without being measured.
    pub rows: Vec<Row>,
    /// Size of the large file.
    pub size_bytes: u64,
    /// Small files per row, over all threads.
    pub files: u64,
    /// Random reads of each thread.
    pub random_reads_per_thread: u64,
    /// The source tree, if a row needs it.
    pub tarball: Option<Tarball>,
}

impl Plan {
    fn wants(&self, rows: &[Row]) -> bool {
        rows.iter().any(|row| self.rows.contains(row))
    }
}

/// Starts the target, measures every row of the plan once, and stops the target.
pub fn run(plan: &Plan, target: &mut dyn Target, run: u32) -> Result<Vec<Sample>> {
    let dir = target.start().context("cannot start")?;
    let mut bench = Bench {
        plan,
        target,
        run,
        samples: Vec::new(),
    };
    let result = bench.all(&dir);
    let samples = bench.samples;
    let stopped = target.stop().context("cannot stop");
    result?;
    stopped?;
    Ok(samples)
}

/// Writes back dirty data of earlier rows now, instead of while the next row is measured.
fn write_back() {
    rustix::fs::sync();
}

/// Waits until a disk has as much free space as before something was written and removed: clusters
/// remove data later, and if the disk is notified of freed space, every sync waits for that. After
/// the maximum time, the next row begins while removal continues.
fn wait_for_removal(disk: &Path, before_bytes: u64, written_bytes: u64) -> Result<()> {
    let enough_bytes = before_bytes.saturating_sub(written_bytes / 20);
    let started = Instant::now();
    while free_bytes(disk)? < enough_bytes && started.elapsed() < REMOVAL_MAX {
        interrupt::check()?;
        std::thread::sleep(REMOVAL_POLL);
    }
    write_back();
    Ok(())
}

struct Bench<'a> {
    plan: &'a Plan,
    target: &'a mut dyn Target,
    run: u32,
    samples: Vec<Sample>,
}

/// How much work a row did.
struct Done {
    operations: u64,
    bytes: u64,
}

impl Done {
    fn bytes(bytes: u64) -> Self {
        Self {
            operations: 0,
            bytes,
        }
    }

    fn operations(operations: u64) -> Self {
        Self {
            operations,
            bytes: 0,
        }
    }
}

impl Bench<'_> {
    fn all(&mut self, dir: &Path) -> Result<()> {
        self.large_file(dir)?;
        self.small_files(
            &dir.join("small1"),
            1,
            [Row::Create1, Row::Stat1, Row::Rename1, Row::Unlink1],
        )?;
        self.small_files(
            &dir.join("small8"),
            8,
            [Row::Create8, Row::Stat8, Row::Rename8, Row::Unlink8],
        )?;
        self.small_files_with_fsync(&dir.join("fsync1"), 1, Row::CreateFsync1)?;
        self.small_files_with_fsync(&dir.join("fsync8"), 8, Row::CreateFsync8)?;
        self.source_tree(&dir.join("tree"))
    }

    /// Runs `work`, and records time and CPU if the row is wanted.
    fn measure(&mut self, row: Row, work: impl FnOnce() -> Result<Done>) -> Result<()> {
        interrupt::check()?;
        let cpu_before = cpu::Snapshot::take(self.target.marker())?;
        let started = Instant::now();
        let done = work().with_context(|| format!("row {}", row.id()))?;
        let elapsed_s = started.elapsed().as_secs_f64();
        let cpu = cpu::Snapshot::take(self.target.marker())?.since(&cpu_before);
        if !self.plan.wants(&[row]) {
            return Ok(());
        }
        let amount = match row.unit() {
            Unit::Bytes => done.bytes as f64 / 1e6,
            Unit::Operations | Unit::Files => done.operations as f64,
        };
        let value = amount / elapsed_s;
        eprintln!("  {:14} {value:10.1} {}", row.id(), row.unit().name());
        self.samples.push(Sample {
            run: self.run,
            target: self.target.label().to_owned(),
            row,
            unit: row.unit(),
            value,
            elapsed_s,
            operations: done.operations,
            bytes: done.bytes,
            cpu,
        });
        Ok(())
    }

    /// One large file: written, read cold, read again, read at random.
    fn large_file(&mut self, dir: &Path) -> Result<()> {
        let rows = [
            Row::SeqWrite,
            Row::SeqReadCold,
            Row::SeqReread,
            Row::RandRead1,
            Row::RandRead16,
        ];
        if !self.plan.wants(&rows) {
            return Ok(());
        }
        write_back();
        let size_bytes = self.plan.size_bytes;
        let reads = self.plan.random_reads_per_thread;
        let path = dir.join("large");
        work::require_space(dir, size_bytes * self.target.free_bytes_per_byte())?;
        let before_bytes = free_bytes(self.target.disk())?;

        self.measure(Row::SeqWrite, || {
            work::write_file(&path, size_bytes)?;
            Ok(Done::bytes(size_bytes))
        })?;
        if self.plan.wants(&[Row::SeqReadCold, Row::SeqReread]) {
            if self.plan.wants(&[Row::SeqReadCold]) {
                self.target.make_cold()?;
            }
            for row in [Row::SeqReadCold, Row::SeqReread] {
                self.measure(row, || {
                    work::read_file(&path, size_bytes)?;
                    Ok(Done::bytes(size_bytes))
                })?;
            }
        }
        for (row, threads) in [(Row::RandRead1, 1), (Row::RandRead16, 16)] {
            if self.plan.wants(&[row]) {
                self.target.make_cold()?;
                self.measure(row, || {
                    work::random_reads(&path, size_bytes, threads, reads)?;
                    Ok(Done {
                        operations: threads * reads,
                        bytes: threads * reads * PAGE_BYTES,
                    })
                })?;
            }
        }
        std::fs::remove_file(&path)?;
        wait_for_removal(self.target.disk(), before_bytes, size_bytes)
    }

    /// Small files: created, examined, renamed, removed.
    fn small_files(
        &mut self,
        dir: &Path,
        threads: u64,
        [create, stat, rename, unlink]: [Row; 4],
    ) -> Result<()> {
        let cold = (threads == 1).then_some(Row::StatCold1);
        if !self.plan.wants(&[create, stat, rename, unlink])
            && !cold.is_some_and(|row| self.plan.wants(&[row]))
        {
            return Ok(());
        }
        write_back();
        let mut files = SmallFiles::new(dir, threads, self.plan.files)?;
        let count = files.count();
        self.measure(create, || {
            files.create(false)?;
            Ok(Done::operations(count))
        })?;
        if let Some(row) = cold.filter(|row| self.plan.wants(&[*row])) {
            self.target.make_cold()?;
            self.measure(row, || {
                files.stat_once()?;
                Ok(Done::operations(count))
            })?;
        }
        if self.plan.wants(&[stat]) {
            self.measure(stat, || Ok(Done::operations(files.stat_repeatedly()?)))?;
        }
        if self.plan.wants(&[rename]) {
            self.measure(rename, || {
                files.rename()?;
                Ok(Done::operations(count))
            })?;
        }
        self.measure(unlink, || {
            files.unlink()?;
            Ok(Done::operations(count))
        })?;
        Ok(std::fs::remove_dir_all(dir)?)
    }

    fn small_files_with_fsync(&mut self, dir: &Path, threads: u64, row: Row) -> Result<()> {
        if !self.plan.wants(&[row]) {
            return Ok(());
        }
        write_back();
        let files = SmallFiles::new(dir, threads, self.plan.files)?;
        self.measure(row, || {
            files.create(true)?;
            Ok(Done::operations(files.count()))
        })?;
        Ok(std::fs::remove_dir_all(dir)?)
    }

    fn source_tree(&mut self, dir: &Path) -> Result<()> {
        let Some(tarball) = &self.plan.tarball else {
            return Ok(());
        };
        write_back();
        std::fs::create_dir(dir)?;
        let files = tarball.files();
        self.measure(Row::Unpack, || {
            tarball.unpack(dir)?;
            Ok(Done {
                operations: files,
                bytes: tarball.content_bytes(),
            })
        })?;
        self.measure(Row::RemoveTree, || {
            source_tree::remove(dir)?;
            Ok(Done::operations(files))
        })
    }
}
