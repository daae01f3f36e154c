//! Files of sealed replicas, lent to readers on the same host.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use harvestfs_protocol::data::{DataRequest, Opening, ShortCircuitReply, first_mismatch};
use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::replica_layout::{chunk_position, entry_position, file_bytes};
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::short_circuit::{FileRequest, ask, is_connected, this_host};
use harvestfs_protocol::token::Right;
use tokio::task::spawn_blocking;

use crate::testing::cluster::{TestCluster, data};

/// No wait of these tests takes longer unless something is broken.
const PATIENCE: Duration = Duration::from_secs(60);

async fn socket_for(cluster: &TestCluster, host: String) -> Option<PathBuf> {
    let (mut sender, mut receiver) = cluster.client.open_stream(&cluster.nodes[0]).await;
    let request = DataRequest::ShortCircuit { host };
    sender.send(&Opening::from(request)).await.unwrap();
    let reply = receiver.recv::<ShortCircuitReply>(PATIENCE).await.unwrap();
    reply.unwrap().0
}

async fn connect(cluster: &TestCluster) -> UnixStream {
    let path = socket_for(cluster, this_host().unwrap()).await.unwrap();
    let socket = UnixStream::connect(path).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

/// Waits until the datanode has ended a connection.
async fn wait_for_end(socket: &UnixStream) {
    let ended = async {
        while is_connected(socket) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, ended).await.unwrap();
}

async fn borrow(
    cluster: &TestCluster,
    socket: &UnixStream,
    block: u64,
    token_of: u64,
) -> std::io::Result<Result<File, DataError>> {
    let request = FileRequest {
        block: BlockId(block),
        token: cluster.namenode.token(BlockId(token_of), Right::Read),
        request: RequestId::NONE,
    };
    let socket = socket.try_clone().unwrap();
    let asked = spawn_blocking(move || ask(&socket, &request)).await;
    Ok(asked.unwrap()?.map(File::from))
}

#[tokio::test]
async fn a_reader_on_this_host_is_lent_a_sealed_replica_and_nothing_else() {
    let cluster = TestCluster::start(1).await;
    let content = data(3, 20_000);
    cluster.write_block(&cluster.nodes, 1, &content).await;
    assert_eq!(socket_for(&cluster, "elsewhere".into()).await, None);
    let socket = connect(&cluster).await;

    let file = borrow(&cluster, &socket, 1, 1).await.unwrap().unwrap();
    assert_eq!(file.metadata().unwrap().len(), file_bytes(5));
    assert!(file.write_at(&[1; 4096], 0).is_err(), "it is for reading");
    // Opened again, without the demands of direct I/O.
    let whole = std::fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let at = |position: u64| position as usize;
    let chunk = &whole[at(chunk_position(4))..][..4096];
    assert_eq!(chunk[..20_000 - 4 * 4096], content[4 * 4096..]);
    let entry = whole[at(entry_position(4))..][..4].try_into().unwrap();
    assert_eq!(first_mismatch(chunk, &[u32::from_le_bytes(entry)]), None);

    let token = cluster.namenode.token(BlockId(2), Right::Write);
    let mut growing = cluster
        .client
        .write(&cluster.nodes, BlockId(2), token)
        .await;
    growing.send(content.clone().into(), false).await.unwrap();
    assert!(growing.ack().await.is_some());
    let refused = borrow(&cluster, &socket, 2, 2).await.unwrap();
    assert!(
        matches!(refused, Err(DataError::OutOfOrder(_))),
        "{refused:?}"
    );
    let refused = borrow(&cluster, &socket, 7, 7).await.unwrap();
    assert_eq!(refused.unwrap_err(), DataError::NoSuchReplica);
    let refused = borrow(&cluster, &socket, 1, 2).await.unwrap();
    assert!(
        matches!(refused, Err(DataError::BadToken(_))),
        "{refused:?}"
    );
}

/// There is room for a few readers at a time.
#[tokio::test]
async fn a_reader_that_asks_for_nothing_for_long_makes_room_for_others() {
    let cluster = TestCluster::start(1).await;
    let socket = connect(&cluster).await;
    let refused = borrow(&cluster, &socket, 7, 7).await.unwrap();
    assert_eq!(refused.unwrap_err(), DataError::NoSuchReplica);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(3600)).await;
    tokio::time::resume();
    wait_for_end(&socket).await;
}

#[tokio::test]
async fn nothing_is_lent_while_the_primary_needs_the_server() {
    let cluster = TestCluster::start(1).await;
    cluster.write_block(&cluster.nodes, 1, &data(3, 5000)).await;
    let socket = connect(&cluster).await;
    borrow(&cluster, &socket, 1, 1).await.unwrap().unwrap();
    cluster.primaries[0].uses(0.95);
    wait_for_end(&socket).await;
    let again = connect(&cluster).await;
    assert!(borrow(&cluster, &again, 1, 1).await.is_err());

    cluster.primaries[0].uses(0.1);
    let lent_again = async {
        loop {
            let socket = connect(&cluster).await;
            if let Ok(lent) = borrow(&cluster, &socket, 1, 1).await {
                return lent;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let lent = tokio::time::timeout(PATIENCE, lent_again).await.unwrap();
    assert!(lent.is_ok());
}
