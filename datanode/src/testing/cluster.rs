//! A few datanodes on loopback, with a fake namenode.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::types::{NodeInfo, StorageClass};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::FlockOperation;

use super::data_client::DataClient;
use super::fake_namenode::{FakeNamenode, NAMENODE, VALIDITY};
use super::primary::TestPrimary;
use crate::store::{Disk, RealDisk};
use crate::{Datanode, DatanodeOptions, VolumeOptions};

/// A namenode, datanodes, and a client.
pub struct TestCluster {
    pub authority: CertificateAuthority,
    /// The initial leader.
    pub namenode: FakeNamenode,
    /// The standbys.
    pub standbys: Vec<FakeNamenode>,
    pub client: DataClient,
    pub datanodes: Vec<Option<Datanode>>,
    pub nodes: Vec<NodeInfo>,
    pub primaries: Vec<TestPrimary>,
    pub dir: tempfile::TempDir,
}

impl TestCluster {
    pub async fn start(datanodes: usize) -> Self {
        Self::start_on((0..datanodes).map(|_| Arc::new(RealDisk)).collect()).await
    }

    pub async fn start_on<D: Disk>(disks: Vec<Arc<D>>) -> Self {
        let mut cluster = Self::without_datanodes(0);
        for (index, disk) in disks.into_iter().enumerate() {
            let options = cluster.options(index);
            let primary = TestPrimary::idle();
            cluster.primaries.push(primary.clone());
            let sampler = Some(Box::new(primary) as _);
            let datanode = Datanode::start_on(options, disk, sampler).await.unwrap();
            cluster.datanodes.push(Some(datanode));
            let node = cluster.namenode.node(&name(index)).await;
            cluster.nodes.push(node);
        }
        cluster
    }

    /// Only the namenodes: a leader in the first epoch, and so many standbys.
    pub fn without_datanodes(standbys: usize) -> Self {
        let authority = CertificateAuthority::in_memory().unwrap();
        let any = "127.0.0.1:0".parse().unwrap();
        let namenode = FakeNamenode::start(&authority, any);
        let secrets = (1..).take(standbys);
        let standbys: Vec<FakeNamenode> = secrets
            .map(|secret| FakeNamenode::start_with_secret(&authority, any, secret))
            .collect();
        for standby in &standbys {
            standby.stand_by();
        }
        Self {
            client: DataClient::new(&authority, "client1"),
            authority,
            namenode,
            standbys,
            datanodes: Vec::new(),
            nodes: Vec::new(),
            primaries: Vec::new(),
            dir: tempfile::tempdir().unwrap(),
        }
    }

    /// The directory of a datanode's only volume.
    pub fn volume(&self, index: usize) -> PathBuf {
        self.dir.path().join(name(index))
    }

    pub fn options(&self, index: usize) -> DatanodeOptions {
        let identity = self
            .authority
            .issue(Role::Datanode, &name(index), VALIDITY)
            .unwrap();
        let namenodes = std::iter::once(&self.namenode).chain(&self.standbys);
        let namenodes = namenodes.map(|it| it.addr).collect();
        let mut options = DatanodeOptions::new(identity, NAMENODE.to_owned(), namenodes);
        options.volumes.push(VolumeOptions {
            path: self.volume(index),
            quota_bytes: 1 << 30,
            class: StorageClass::Disk,
        });
        let socket = format!("{}.sock", name(index));
        options.short_circuit_socket = Some(self.dir.path().join(socket));
        options.scrub_bytes_per_second = 0;
        options.primary.interval = std::time::Duration::from_millis(5);
        options.primary.gate.settle = std::time::Duration::from_millis(50);
        options
    }

    /// Stops a datanode abruptly, as when its process crashes.
    pub async fn kill(&mut self, index: usize) {
        drop(self.datanodes[index].take());
        // Its disk threads let go of the volume once their last job is done.
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }

    pub async fn restart(&mut self, options: DatanodeOptions, index: usize) {
        self.namenode.lock().full_reports.clear();
        let mut attempts = 0;
        let datanode = loop {
            let sampler = Some(Box::new(self.primaries[index].clone()) as _);
            let disk = Arc::new(RealDisk);
            match Datanode::start_on(options.clone(), disk, sampler).await {
                Ok(datanode) => break datanode,
                Err(error) if attempts == 100 => panic!("{error}"),
                Err(_) => attempts += 1,
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        };
        self.datanodes[index] = Some(datanode);
        self.nodes[index] = self.namenode.node(&name(index)).await;
    }

    pub async fn write_block(&self, pipeline: &[NodeInfo], block: u64, data: &[u8]) {
        let token = self.namenode.token(BlockId(block), Right::Write);
        self.client
            .write_block(pipeline, BlockId(block), token, data)
            .await;
    }

    pub async fn read(
        &self,
        node: usize,
        block: u64,
        range: (u64, u64),
    ) -> Result<Vec<u8>, harvestfs_protocol::error::DataError> {
        let token = self.namenode.token(BlockId(block), Right::Read);
        self.client
            .read(&self.nodes[node], BlockId(block), token, range)
            .await
    }
}

pub fn name(index: usize) -> String {
    format!("dn{}", index + 1)
}

/// The line of the metrics about a volume that is known only by its directory, and is not used.
pub fn down(volume: &Path) -> String {
    let path = volume.display();
    format!("harvestfs_datanode_volume_healthy{{storage=\"{path}\"}} 0\n")
}

/// Waits until no process uses a volume any more.
pub async fn wait_until_unlocked(volume: &Path) {
    let lock = File::open(volume.join("LOCK")).unwrap();
    while rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

/// Data that differs from seed to seed.
pub fn data(seed: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    StdRng::seed_from_u64(seed).fill_bytes(&mut data);
    data
}
