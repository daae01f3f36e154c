//! How long the namespace engine takes for one operation, without journal and network: in elapsed time, and in
//! processor time (which is less if other programs compete for the processor).
//!
//! Run: `cargo run --release -p harvestfs-namenode --example engine_speed [files]`

use std::fs;
use std::time::{Duration, Instant};

#[path = "engine_common/mod.rs"]
mod engine_common;

use engine_common::{Driver, commit, create, name};
use harvestfs_namenode::engine::namespace::{Command, Namespace};
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::limits::SNAPSHOT_ITEMS_MAX;
use harvestfs_protocol::meta::{Mutation, Query, RenameMode, mutation, query};
use harvestfs_protocol::types::Credentials;

/// The numbers below `count`, each once, in an order that defeats caches.
fn scattered(count: u64) -> impl Iterator<Item = u64> {
    // A prime that divides no count used here: steps of it visit each number once.
    const STEP: u64 = 7_368_787;
    (0..count).map(move |number| number * STEP % count)
}

struct Stopwatch {
    clock: Instant,
    processor: Duration,
}

/// The processor time that this process has used, as the kernel counts it; zero if the kernel does not.
fn processor_time() -> Duration {
    let spent = fs::read_to_string("/proc/self/schedstat").unwrap_or_default();
    let ns = spent.split(' ').next().and_then(|text| text.parse().ok());
    Duration::from_nanos(ns.unwrap_or(0))
}

impl Stopwatch {
    fn start() -> Self {
        Self {
            clock: Instant::now(),
            processor: processor_time(),
        }
    }

    fn report(self, label: &str, count: u64) {
        let each = |time: Duration| time.as_nanos() as f64 / count as f64;
        let clock = each(self.clock.elapsed());
        let processor = each(processor_time().saturating_sub(self.processor));
        println!("{label:<44} {clock:>7.0} ns {processor:>7.0} ns");
    }
}

/// Times commands that were prepared earlier, so that only the engine is measured.
fn measure(label: &str, driver: &mut Driver, commands: &[Command]) {
    let watch = Stopwatch::start();
    for command in commands {
        driver.apply(command);
    }
    watch.report(label, commands.len() as u64);
}

fn main() {
    let files: u64 = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(1_000_000);
    for files_per_directory in [1_000, files] {
        println!("{files} files, {files_per_directory} to a directory: clock, processor");
        run(files, files_per_directory);
    }
}

fn run(files: u64, files_per_directory: u64) {
    let mut driver = Driver::new(None);
    driver.open_session();
    let directories: Vec<InodeId> = (0..files.div_ceil(files_per_directory))
        .map(|number| {
            driver.make(Mutation::MakeDir(mutation::MakeDir {
                parent: InodeId::ROOT,
                name: name("directory", number),
                mode: 0o755,
            }))
        })
        .collect();
    let parent_of = |number: u64| directories[(number / files_per_directory) as usize];

    let commands: Vec<_> = (0..files)
        .map(|number| driver.command(create(parent_of(number), number)))
        .collect();
    measure("create", &mut driver, &commands);

    let root = Credentials::root();
    let watch = Stopwatch::start();
    let mut inodes = vec![InodeId::ROOT; files as usize];
    for number in scattered(files) {
        let op = Query::Lookup(query::Lookup {
            parent: parent_of(number),
            name: name("file", number),
        });
        match driver.namespace.query(&root, &op) {
            Ok(harvestfs_protocol::meta::MetaReply::Attr(attr)) => {
                inodes[number as usize] = attr.ino;
            }
            other => panic!("{other:?}"),
        }
    }
    watch.report("lookup with attributes, at random", files);

    // Blocks are allocated first: mutations are applied in the order of their numbers.
    let written: Vec<_> = inodes
        .iter()
        .map(|&ino| (ino, driver.next_extent()))
        .collect();
    let (single, batched) = written.split_at(inodes.len() / 2);
    let commands: Vec<_> = single
        .iter()
        .map(|&file| driver.command(commit(vec![file])))
        .collect();
    measure("commit of one extent", &mut driver, &commands);

    let mut commands: Vec<_> = batched
        .chunks(64)
        .map(|batch| driver.command(commit(batch.to_vec())))
        .collect();
    measure(
        "commit of one extent to each of 64 files",
        &mut driver,
        &commands,
    );

    commands.clear();
    for number in scattered(files) {
        commands.push(driver.command(Mutation::Rename(mutation::Rename {
            parent: parent_of(number),
            name: name("file", number),
            new_parent: parent_of(number),
            new_name: name("renamed", number),
            mode: RenameMode::Replace,
        })));
    }
    measure("rename, at random", &mut driver, &commands);

    let bytes: Vec<_> = commands.iter().flat_map(Command::encode).collect();
    let watch = Stopwatch::start();
    let decoded = bytes.iter().filter_map(|bytes| Command::decode(bytes).ok());
    let count = decoded.count() as u64;
    watch.report("decode of a command", count);

    let watch = Stopwatch::start();
    let mut snapshot = Vec::new();
    if let Err(error) = driver.namespace.write_snapshot(&mut snapshot) {
        panic!("{error}");
    }
    watch.report("snapshot, per file", files);
    let watch = Stopwatch::start();
    match Namespace::read_snapshot(&mut snapshot.as_slice()) {
        Ok(copy) => assert_eq!(copy.counts().files, files),
        Err(error) => panic!("{error}"),
    }
    watch.report("reading it, checks included, per file", files);
    println!(
        "{:<44} {:>7} bytes",
        "snapshot, per file",
        snapshot.len() as u64 / files
    );

    // One name and one inode per file.
    let kept = files_per_directory.min(files);
    if 2 * kept < SNAPSHOT_ITEMS_MAX {
        let command = driver.command(Mutation::CreateSnapshot(mutation::CreateSnapshot {
            ino: directories[0],
            name: name("snapshot", 0),
        }));
        let watch = Stopwatch::start();
        driver.apply(&command);
        watch.report("snapshot of a directory, per file", kept);
    }

    commands.clear();
    for number in scattered(files) {
        commands.push(driver.command(Mutation::Unlink(mutation::Unlink {
            parent: parent_of(number),
            name: name("renamed", number),
        })));
    }
    measure("unlink, at random", &mut driver, &commands);
    assert_eq!(driver.namespace.check(), []);
}
