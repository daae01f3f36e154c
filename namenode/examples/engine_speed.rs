//! How long the namespace engine takes for one operation, without journal and network.
//!
//! Run: `cargo run --release -p harvestfs-namenode --example engine_speed [files]`

use std::time::Instant;

#[path = "engine_common/mod.rs"]
mod engine_common;

use engine_common::{Driver, commit, create, name};
use harvestfs_namenode::engine::namespace::{Command, Namespace};
use harvestfs_protocol::{
    ids::InodeId,
    meta::{MetaOp, RenameMode},
    types::Credentials,
};

/// Numbers below `count`, each once, in an order that no cache likes.
fn scattered(count: u64) -> impl Iterator<Item = u64> {
    // A prime that divides no count tried here: steps of it visit each number once.
    const STEP: u64 = 7_368_787;
    (0..count).map(move |number| number * STEP % count)
}

/// Times commands that were made before, so that only the engine is measured.
fn measure(label: &str, driver: &mut Driver, commands: &[Command]) {
    let start = Instant::now();
    for command in commands {
        driver.apply(command);
    }
    report(label, start, commands.len() as u64);
}

fn report(label: &str, start: Instant, count: u64) {
    let ns = start.elapsed().as_nanos() as f64 / count as f64;
    println!("{label:<44} {ns:>7.0} ns");
}

fn main() {
    let files: u64 = std::env::args()
        .nth(1)
        .and_then(|text| text.parse().ok())
        .unwrap_or(1_000_000);
    for files_per_directory in [1_000, files] {
        println!("{files} files, {files_per_directory} to a directory");
        run(files, files_per_directory);
    }
}

fn run(files: u64, files_per_directory: u64) {
    let mut driver = Driver::new();
    let directories: Vec<InodeId> = (0..files.div_ceil(files_per_directory))
        .map(|number| {
            driver.make(MetaOp::MakeDir {
                parent: InodeId::ROOT,
                name: name("directory", number),
                mode: 0o755,
            })
        })
        .collect();
    let parent_of = |number: u64| directories[(number / files_per_directory) as usize];

    let commands: Vec<_> = (0..files)
        .map(|number| driver.command(create(parent_of(number), number)))
        .collect();
    measure("create", &mut driver, &commands);

    let root = Credentials::root();
    let start = Instant::now();
    let mut inodes = vec![InodeId::ROOT; files as usize];
    for number in scattered(files) {
        let op = MetaOp::Lookup {
            parent: parent_of(number),
            name: name("file", number),
        };
        match driver.namespace.query(&root, &op) {
            Ok(harvestfs_protocol::meta::MetaReply::Attr(attr)) => {
                inodes[number as usize] = attr.ino;
            }
            other => panic!("{other:?}"),
        }
    }
    report("lookup with attributes, at random", start, files);

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
        commands.push(driver.command(MetaOp::Rename {
            parent: parent_of(number),
            name: name("file", number),
            new_parent: parent_of(number),
            new_name: name("renamed", number),
            mode: RenameMode::Replace,
        }));
    }
    measure("rename, at random", &mut driver, &commands);

    let bytes: Vec<_> = commands.iter().flat_map(Command::encode).collect();
    let start = Instant::now();
    let decoded = bytes.iter().filter_map(|bytes| Command::decode(bytes).ok());
    let count = decoded.count() as u64;
    report("decode of a command", start, count);

    let start = Instant::now();
    let mut snapshot = Vec::new();
    if let Err(error) = driver.namespace.write_snapshot(&mut snapshot) {
        panic!("{error}");
    }
    report("snapshot, per file", start, files);
    let start = Instant::now();
    match Namespace::read_snapshot(&mut snapshot.as_slice()) {
        Ok(copy) => assert_eq!(copy.counts().files, files),
        Err(error) => panic!("{error}"),
    }
    report("reading it, checks included, per file", start, files);
    println!(
        "{:<44} {:>7} bytes",
        "snapshot, per file",
        snapshot.len() as u64 / files
    );

    commands.clear();
    for number in scattered(files) {
        commands.push(driver.command(MetaOp::Unlink {
            parent: parent_of(number),
            name: name("renamed", number),
        }));
    }
    measure("unlink, at random", &mut driver, &commands);
    assert_eq!(driver.namespace.check(), []);
}
