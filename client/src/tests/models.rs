//! Random operations compared with simple models.

use std::collections::BTreeMap;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{FallocateMode, RenameMode};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::{create, name, root};
use crate::testing::{Cluster, Mood};
use crate::{Client, ClientError, OpenFlags};

/// A file behaves like a `Vec<u8>`, through all failures of datanodes and of the namenode.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_is_an_array_of_bytes() {
    for seed in 0..4 {
        println!("seed {seed}");
        file_against_model(seed).await;
    }
}

async fn file_against_model(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let cluster = Cluster::with_block_bytes(6, 3, 1 << 20).await;
    let client = cluster.client("a").await;
    let (_, file) = create(&client, "file").await;
    let mut model: Vec<u8> = Vec::new();
    // Every other seed uses large writes, which are streamed.
    let longest = if seed.is_multiple_of(2) {
        20_000
    } else {
        2 << 20
    };
    for step in 0..100_u32 {
        let offset = rng.random_range(0..longest);
        let len = rng.random_range(1..longest / 4);
        match rng.random_range(0..100) {
            0..45 => {
                let data = vec![step as u8 + 1; len];
                model.resize(model.len().max(offset + len), 0);
                model[offset..offset + len].copy_from_slice(&data);
                file.write(offset as u64, data.into()).await.unwrap();
            }
            45..75 => {
                let read = file.read(offset as u64, len).await.unwrap();
                let end = model.len().min(offset + len);
                let expected = model.get(offset..end).unwrap_or_default();
                assert!(
                    read == expected,
                    "seed {seed}, step {step}: read of {len} at {offset}"
                );
            }
            75..80 => {
                model.resize(offset, 0);
                let attr = file.truncate(offset as u64).await.unwrap();
                assert_eq!(attr.size_bytes, offset as u64);
            }
            80..83 => {
                let end = model.len().min(offset + len);
                if let Some(range) = model.get_mut(offset..end) {
                    range.fill(0);
                }
                let mode = FallocateMode::PunchHole;
                file.fallocate(offset as u64, len as u64, mode)
                    .await
                    .unwrap();
            }
            83..90 => file.flush().await.unwrap(),
            90..94 => file.sync().await.unwrap(),
            94..97 => {
                // At most one datanode at a time misbehaves.
                for datanode in &cluster.datanodes {
                    datanode.set_mood(Mood::Well);
                }
                let mood = match rng.random_range(0..4) {
                    0 => Mood::Busy,
                    1 => Mood::Corrupt,
                    2 => Mood::Empty,
                    _ => Mood::FailsAtPacket(rng.random_range(1..4)),
                };
                cluster.datanode(rng.random_range(1..=6)).set_mood(mood);
            }
            97..98 => cluster.namenode.lose_replies(1),
            98..99 => cluster.namenode.expire_sessions(),
            _ => {
                cluster.namenode.crash().await;
                cluster.namenode.restart().await;
            }
        }
        assert_eq!(
            file.attr().await.unwrap().size_bytes,
            model.len() as u64,
            "seed {seed}, step {step}"
        );
    }
    file.sync().await.unwrap();
    assert!(file.read(0, 64 << 20).await.unwrap() == model);
    for datanode in &cluster.datanodes {
        datanode.set_mood(Mood::Well);
        datanode.lose_unstable();
    }
    let other = cluster.client("b").await;
    assert!(
        other.read_file(&root(), b"/file").await.unwrap() == model,
        "seed {seed}"
    );
}

/// Both clients see the current namespace, whichever of them changes it.
#[tokio::test(flavor = "multi_thread")]
async fn two_clients_agree_on_the_namespace() {
    for seed in 0..4 {
        println!("seed {seed}");
        names_against_model(seed).await;
    }
}

async fn names_against_model(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let cluster = Cluster::start(3, 3).await;
    let clients = [cluster.client("a").await, cluster.client("b").await];
    let me = root();
    let mut directories = Vec::new();
    for text in ["x", "y"] {
        let made = clients[0]
            .mkdir(&me, InodeId::ROOT, &name(text), 0o755)
            .await;
        directories.push(made.unwrap().ino);
    }
    let mut model: BTreeMap<(InodeId, String), InodeId> = BTreeMap::new();
    for step in 0..400 {
        let client = &clients[rng.random_range(0..2)];
        let place = |rng: &mut SmallRng| {
            let directory = directories[rng.random_range(0..2)];
            (directory, format!("name-{}", rng.random_range(0..6)))
        };
        let (directory, text) = place(&mut rng);
        let at = (directory, text.clone());
        let context = || format!("seed {seed}, step {step}: {text} in {directory}");
        match rng.random_range(0..10) {
            0..3 => {
                let created = client
                    .create_file(&me, directory, &name(&text), 0o644, OpenFlags::WRITE)
                    .await;
                match (created, model.contains_key(&at)) {
                    (Ok((attr, _)), false) => {
                        model.insert(at, attr.ino);
                    }
                    (Err(ClientError::Fs(FsError::Exists)), true) => {}
                    (other, _) => panic!("{}: {other:?}", context()),
                }
            }
            3..5 => {
                let removed = client.unlink(&me, directory, &name(&text)).await;
                assert_eq!(
                    removed.is_ok(),
                    model.remove(&at).is_some(),
                    "{}",
                    context()
                );
            }
            5 => {
                let to = place(&mut rng);
                let renamed = client
                    .rename(
                        &me,
                        directory,
                        &name(&text),
                        to.0,
                        &name(&to.1),
                        RenameMode::Replace,
                    )
                    .await;
                let moved = model.remove(&at);
                assert_eq!(renamed.is_ok(), moved.is_some(), "{}", context());
                model.extend(moved.map(|ino| (to, ino)));
            }
            _ => {
                let listed = client
                    .readdir(&me, directory, None, 100, true)
                    .await
                    .unwrap();
                let names = listed.entries.iter().map(|entry| entry.name.to_string());
                let expected = model.keys().filter(|(parent, _)| *parent == directory);
                assert!(
                    names.eq(expected.map(|(_, text)| text.clone())),
                    "{}",
                    context()
                );
            }
        }
        for client in &clients {
            let (directory, text) = place(&mut rng);
            check_name(client, &model, directory, &text).await;
        }
    }
}

async fn check_name(
    client: &Client,
    model: &BTreeMap<(InodeId, String), InodeId>,
    directory: InodeId,
    text: &str,
) {
    let found = client.lookup(&root(), directory, &name(text)).await;
    let found = match found {
        Ok(attr) => Some(attr.ino),
        Err(ClientError::Fs(FsError::NotFound)) => None,
        Err(error) => panic!("{error}"),
    };
    assert_eq!(found, model.get(&(directory, text.to_owned())).copied());
}

/// Content written by one client and read by another, through caches.
#[tokio::test(flavor = "multi_thread")]
async fn two_clients_agree_on_content() {
    let mut rng = SmallRng::seed_from_u64(11);
    let cluster = Cluster::start(3, 3).await;
    let clients = [cluster.client("a").await, cluster.client("b").await];
    let (attr, _file) = create(&clients[0], "file").await;
    let mut files = Vec::new();
    for client in &clients {
        files.push(
            client
                .open(&root(), attr.ino, OpenFlags::READ_WRITE)
                .await
                .unwrap(),
        );
    }
    let mut model = Vec::new();
    for step in 0..300_u32 {
        let file = &files[rng.random_range(0..2)];
        let offset = rng.random_range(0..10_000_usize);
        let len = rng.random_range(1..3_000_usize);
        if rng.random_bool(0.4) {
            model.resize(model.len().max(offset + len), 0);
            model[offset..offset + len].fill(step as u8);
            file.write(offset as u64, Bytes::from(vec![step as u8; len]))
                .await
                .unwrap();
            file.flush().await.unwrap();
        } else if rng.random_bool(0.1) {
            model.resize(offset, 0);
            file.truncate(offset as u64).await.unwrap();
        } else {
            let read = file.read(offset as u64, len).await.unwrap();
            let end = model.len().min(offset + len);
            assert!(
                read == model.get(offset..end).unwrap_or_default(),
                "step {step}"
            );
        }
    }
}
