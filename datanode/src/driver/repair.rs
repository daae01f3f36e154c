//! Fetching a replica from another datanode, on the namenode's command.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::data::{DataRequest, Opening, ReadPacket, ReadRequest};
use harvestfs_protocol::ids::{BlockId, StorageId};
use harvestfs_protocol::node::ReplicaChange;
use harvestfs_protocol::token::BlockToken;
use harvestfs_protocol::transport::{FrameReceiver, TransportError};
use harvestfs_protocol::types::NodeInfo;

use crate::driver::budget::Budget;
use crate::driver::node::Node;
use crate::engine::repair::{After, Fetch, Step, Trouble};
use crate::store::{BlockWriter, Origin, StoreError, WritePacket};

/// How long a source may take to send its next packet.
const PACKET_DEADLINE: Duration = Duration::from_secs(30);

/// A replica that is to be fetched.
#[derive(Clone, Debug)]
pub struct Repair {
    pub block: BlockId,
    pub length_bytes: u64,
    pub sources: Vec<NodeInfo>,
    pub token: BlockToken,
}

/// Fetches replicas within a budget.
pub struct Repairer {
    node: Arc<Node>,
    repairs_max: usize,
    budget: Budget,
}

/// Why one source was of no use.
#[derive(Debug, thiserror::Error)]
enum SourceError {
    #[error("{0}")]
    Unreachable(String),
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("it refuses: {0}")]
    Refused(harvestfs_protocol::error::DataError),
    #[error("it ended after {0} bytes")]
    Incomplete(u64),
    #[error("it sent something else than was asked for")]
    UnexpectedPacket,
    #[error("the primary tenant needs this server")]
    BusyHere,
    #[error(transparent)]
    Here(#[from] StoreError),
}

impl Repairer {
    pub fn new(node: Arc<Node>, repairs_max: usize, bytes_per_second: u64) -> Arc<Self> {
        Arc::new(Self {
            node,
            repairs_max,
            budget: Budget::new(bytes_per_second),
        })
    }

    /// Repairs that may be under way at a time.
    pub fn repairs_max(&self) -> usize {
        self.repairs_max
    }

    /// Fetches a replica unless it is here already, and reports the outcome.
    pub async fn repair(&self, repair: Repair) {
        let store = &self.node.store;
        if store.report(repair.block).is_some() {
            // The command was repeated, or the namenode does not know of the replica.
            store.report_again(repair.block);
            return;
        }
        let fetched = match self.node.busy.denial() {
            // The namenode finds another target.
            Some(_) => Err(StoreError::Busy),
            None => {
                let _timer = self.node.metrics.repair.timer();
                self.fetch(&repair).await
            }
        };
        if let Err(error) = fetched {
            match error {
                StoreError::Busy => self.node.metrics.denied_repairs.inc(),
                _ => self.node.metrics.repair.count_failure(),
            }
            tracing::warn!(block = %repair.block, %error, "a repair failed");
            if let Some(&storage) = store.healthy_storages().first() {
                self.report_failure(storage, repair.block);
            }
        }
    }

    fn report_failure(&self, storage: StorageId, block: BlockId) {
        let change = ReplicaChange::RepairFailed(block);
        self.node.store.changes().push(storage, change);
    }

    async fn fetch(&self, repair: &Repair) -> Result<(), StoreError> {
        let store = &self.node.store;
        store.delete_abandoned_repair(repair.block).await?;
        let create = || store.create(repair.block, None, Origin::Repair, repair.length_bytes);
        let mut writer = create().await?;
        let mut fetch = Fetch::new(repair.length_bytes, repair.sources.len());
        loop {
            let (source, opening) = match fetch.next() {
                Step::Ask {
                    source,
                    offset,
                    length_bytes,
                } => (
                    &repair.sources[source],
                    Opening::from(DataRequest::Read(ReadRequest {
                        block: repair.block,
                        token: repair.token,
                        block_offset: offset,
                        length_bytes,
                    })),
                ),
                Step::Seal => {
                    let sealed = writer.seal(repair.length_bytes).await;
                    if sealed.is_err() {
                        discard(writer).await;
                    }
                    return sealed;
                }
                Step::GiveUp => {
                    discard(writer).await;
                    return Err(StoreError::NoSource);
                }
            };
            let fetching = self.fetch_from(source, &opening, &mut writer, &mut fetch);
            let Err(error) = fetching.await else {
                continue;
            };
            let after = fetch.failed(error.trouble());
            if after == After::Fail {
                discard(writer).await;
                return Err(match error {
                    SourceError::Here(error) => error,
                    _ => StoreError::Busy,
                });
            }
            tracing::warn!(
                block = %repair.block, source = %source.name, %error,
                "cannot fetch a replica from this source"
            );
            if after == After::BeginAnew {
                discard(writer).await;
                writer = create().await?;
            }
        }
    }

    /// Fetches the requested range from one source.
    async fn fetch_from(
        &self,
        source: &NodeInfo,
        opening: &Opening,
        writer: &mut BlockWriter,
        fetch: &mut Fetch,
    ) -> Result<(), SourceError> {
        let opened = self.node.open_stream(source).await;
        let (mut sender, mut receiver) = opened.map_err(SourceError::Unreachable)?;
        sender.send(opening).await?;
        while !fetch.is_complete() {
            let packet = self.next_packet(&mut receiver, fetch).await?;
            let data_bytes = packet.data.len() as u64;
            self.budget.spend(data_bytes).await;
            if self.node.busy.denial().is_some() {
                return Err(SourceError::BusyHere);
            }
            writer.write(vec![packet], false).await?;
            fetch.wrote(data_bytes);
            self.node.metrics.written_by_repair.inc_by(data_bytes);
        }
        Ok(())
    }

    async fn next_packet(
        &self,
        receiver: &mut FrameReceiver,
        fetch: &Fetch,
    ) -> Result<WritePacket, SourceError> {
        let block_offset = fetch.offset();
        let (packet, data_len) = match receiver.recv::<ReadPacket>(PACKET_DEADLINE).await? {
            Some((ReadPacket::Failed(error), _)) => return Err(SourceError::Refused(error)),
            Some((packet, data_len)) => (packet, data_len),
            None => return Err(SourceError::Incomplete(block_offset)),
        };
        let Some(checksums) = fetch.accept(packet, data_len) else {
            return Err(SourceError::UnexpectedPacket);
        };
        let mut buffer = self.node.store.buffers().take(data_len, true).await;
        receiver
            .read_data_into(&mut buffer, PACKET_DEADLINE)
            .await?;
        Ok(WritePacket {
            block_offset,
            data: buffer.freeze(),
            checksums,
            sync: false,
        })
    }
}

impl SourceError {
    fn trouble(&self) -> Trouble {
        match self {
            Self::Unreachable(_)
            | Self::Transport(_)
            | Self::Refused(_)
            | Self::Incomplete(_)
            | Self::UnexpectedPacket => Trouble::Source,
            Self::Here(StoreError::Corrupt { .. }) => Trouble::Damaged,
            Self::Here(_) => Trouble::Here,
            Self::BusyHere => Trouble::BusyHere,
        }
    }
}

async fn discard(writer: BlockWriter) {
    if let Err(error) = writer.discard().await {
        tracing::warn!(%error, "cannot remove what a repair has fetched");
    }
}
