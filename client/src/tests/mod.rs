//! The client against a small cluster in this process.

mod durable;
mod faults;
mod files;
mod leaders;
mod models;
mod names;
mod overtaken;
mod quotas;
mod rights;
mod small;
mod unanswered;
mod waiting;

use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials};

use crate::testing::Cluster;
use crate::{Client, ClientOptions, File, OpenFlags};

/// For files that are appended to and read.
const APPEND: OpenFlags = OpenFlags {
    append: true,
    ..OpenFlags::READ_WRITE
};

fn root() -> Credentials {
    Credentials::root()
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

async fn create(client: &Client, text: &str) -> (Attr, File) {
    client
        .create_file(
            &root(),
            InodeId::ROOT,
            &name(text),
            0o644,
            OpenFlags::READ_WRITE,
        )
        .await
        .unwrap()
}

/// Returns options with which nothing is flushed except by the test.
fn unhurried(mut options: ClientOptions) -> ClientOptions {
    options.dirty_age_max = Duration::from_secs(3600);
    options
}

async fn unhurried_client(cluster: &Cluster) -> Client {
    let options = unhurried(cluster.options("a"));
    Client::connect(options).await.unwrap()
}

/// Bytes that differ from place to place and from seed to seed.
fn pattern(len: usize, seed: u64) -> Vec<u8> {
    use rand::rngs::SmallRng;
    use rand::{Rng, SeedableRng};
    let mut bytes = vec![0; len];
    SmallRng::seed_from_u64(seed).fill_bytes(&mut bytes);
    bytes
}
