//! The last part of `fsync`, once everything is committed: waiting until the blocks of the file are
//! on stable storage of enough datanodes.

use std::sync::Arc;
use std::time::Duration;

use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::types::{Credentials, Extent, FileBlock, NodeInfo};
use harvestfs_protocol::unix_now_ms;
use rustc_hash::FxHashSet;

use super::{FileState, Files, Job};
use crate::driver::clock;
use crate::driver::write::allocator::Wanted;
use crate::driver::write::pipeline::BlockStream;
use crate::driver::write::seal::seal_on;
use crate::engine::write::block::{STABLE_REPLICAS_MIN, Saved, Stability};
use crate::error::ClientError;

/// Interval between checks whether repair has made another replica: at first, and at most.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
const LOOK_INTERVAL_MAX: Duration = Duration::from_secs(4);
/// Maximum number of blocks that are remembered; beyond it, the oldest that ended badly are forgotten.
const UNSEALED_MAX: usize = 4_096;

type Stream = Arc<BlockStream<Job>>;

impl Files {
    pub(super) async fn make_durable(&self, file: &FileState) -> Result<(), ClientError> {
        let (mut unstable, relaxed, taken_over, has_more) = {
            let inner = file.inner.lock();
            let has_more = inner.taken_over != inner.taken_over_stable;
            (
                inner.unstable.clone(),
                inner.relaxed,
                inner.taken_over,
                has_more,
            )
        };
        if has_more {
            unstable.extend(self.unsealed_blocks(file.ino).await?);
        }
        for stream in &unstable {
            let stable = self.make_stable(file, stream).await;
            let lost = match &stable {
                Err(lost @ ClientError::DataLost { .. }) => Some(lost.clone()),
                _ => None,
            };
            let mut inner = file.inner.lock();
            if stable.is_ok() || lost.is_some() {
                let own = inner.unstable.len();
                inner.unstable.retain(|other| !Arc::ptr_eq(other, stream));
                if let Some(lost) = lost
                    && inner.unstable.len() < own
                {
                    // From now on each `fsync` finds this, as long as the file contains the block.
                    inner.taken_over += 1;
                    inner.data.lost(lost);
                }
            }
            stable?;
        }
        {
            let mut inner = file.inner.lock();
            inner.taken_over_stable = inner.taken_over_stable.max(taken_over);
        }
        self.cluster.session.make_durable(relaxed).await
    }

    /// Remembers a block that was begun.
    pub(super) fn remember(&self, stream: &Stream) {
        let mut unsealed = self.unsealed.lock();
        unsealed.retain(|other| !other.is_sealed());
        if unsealed.len() >= UNSEALED_MAX
            && let Some(oldest) = unsealed
                .iter()
                .position(|other| other.state().ended_badly())
        {
            unsealed.remove(oldest);
        }
        unsealed.push(stream.clone());
    }

    /// Returns the blocks of a file that this client has written, through any handle, and not
    /// sealed on enough datanodes.
    async fn unsealed_blocks(&self, ino: InodeId) -> Result<Vec<Stream>, ClientError> {
        let mut unsealed = self.unsealed.lock().clone();
        unsealed.retain(|stream| !stream.is_sealed());
        if !unsealed.is_empty() {
            let root = Credentials::root();
            let (_, extents) = self.cluster.session.content(&root, ino).await?;
            let blocks: FxHashSet<_> = extents.from(0).map(|extent| extent.block).collect();
            unsealed.retain(|stream| blocks.contains(&stream.new.block));
        }
        Ok(unsealed)
    }

    /// Waits until a block's data of a file is on stable storage of enough datanodes. If the pipeline
    /// broke and too few could seal the block, others do so later, and repair creates more replicas.
    async fn make_stable(&self, file: &FileState, stream: &Stream) -> Result<(), ClientError> {
        let mut lost = match stream.stable().await {
            Stability::Lost(reason) => Some(reason),
            Stability::TooFew => None,
            Stability::Stable | Stability::Waiting => return Ok(()),
        };
        let (began, block) = (clock::now(), stream.new.block);
        let patience = self.cluster.session.options.unreachable_timeout;
        let written_to = stream.new.nodes.len();
        let enough = STABLE_REPLICAS_MIN.min(written_to);
        // The first attempt does not wait for datanodes that do not answer: one may be enough.
        let (mut wanted, mut pause) = (1, LOOK_INTERVAL);
        loop {
            let Some((located, end_of_file)) = self.located(file.ino, block).await? else {
                return Ok(());
            };
            let session = &self.cluster.session;
            let has_ended = stream.new.generation != session.generation();
            let may_seal =
                unix_now_ms().is_some_and(|now| stream.new.token.expires_unix_ms() > now);
            let (sealed, stable) = match may_seal {
                true => {
                    // Use the addresses that the namenode knows: a restarted datanode may have another one.
                    let mut nodes = located;
                    let is_other =
                        |node: &&Arc<NodeInfo>| nodes.iter().all(|it| it.node != node.node);
                    let others = stream.new.nodes.iter().filter(is_other).cloned();
                    let others: Vec<_> = others.collect();
                    nodes.extend(others);
                    let seal = async |at_least| {
                        let sealed = seal_on(&self.cluster, stream, &nodes, wanted, at_least);
                        sealed.await.len()
                    };
                    let sealed = seal(stream.acked_bytes()).await;
                    // The namenode has sealed it at its committed length. That may be enough for
                    // this file, but not for others.
                    let shorter = match sealed < wanted && has_ended {
                        true => seal(end_of_file).await,
                        false => 0,
                    };
                    (sealed, sealed.max(shorter))
                }
                // The token has expired after hours: the namenode's answer has to suffice.
                false => (located.len(), located.len()),
            };
            if sealed > 0 {
                stream.settle(Saved::of(sealed, written_to, String::new));
            }
            lost = lost.filter(|_| stable == 0);
            if let Some(reason) = lost {
                return Err(ClientError::DataLost { reason });
            }
            if stable >= enough {
                return Ok(());
            }
            if stable > 0 && self.new_blocks_get(stable, file).await {
                if sealed > 0 {
                    stream.settle(Saved::Enough);
                }
                return Ok(());
            }
            let waited = clock::now().saturating_duration_since(began);
            if waited >= patience {
                return Err(ClientError::TooFewReplicas { block, waited });
            }
            if wanted == enough {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LOOK_INTERVAL_MAX);
            }
            wanted = enough;
        }
    }

    /// Returns the present location of a block, and the end of the part that the file uses. `None`
    /// if the file no longer contains it.
    async fn located(
        &self,
        ino: InodeId,
        block: BlockId,
    ) -> Result<Option<(Vec<Arc<NodeInfo>>, u64)>, ClientError> {
        let root = Credentials::root();
        let (session, locations) = (&self.cluster.session, &self.cluster.locations);
        let (_, extents) = session.content(&root, ino).await?;
        let mut of_block = extents.from(0).filter(|extent| extent.block == block);
        let Some(extent) = of_block.next() else {
            return Ok(None);
        };
        let end_of = |it: &Extent| it.block_offset + it.length_bytes;
        let end = of_block.map(end_of).fold(end_of(extent), u64::max);
        let at = FileBlock {
            block,
            file_offset: extent.file_offset,
        };
        locations.replicas().forget(block);
        match locations.locate(session, &root, (ino, at), Vec::new).await {
            Ok(location) => Ok(Some((location.replicas.clone(), end))),
            Err(ClientError::NoReplica { .. } | ClientError::LeftFile { .. }) => {
                Ok(Some((Vec::new(), end)))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether a new block of the file would get no more replicas than these: the cluster has no
    /// more datanodes, or is configured to accept so few.
    async fn new_blocks_get(&self, replicas: usize, file: &FileState) -> bool {
        if self.find_rules(file).await.is_err() {
            return false;
        }
        let Some(rules) = file.rules() else {
            return false;
        };
        let wanted = Wanted {
            rules,
            file: file.ino,
            may_release: false,
        };
        let allocator = &self.writers.allocator;
        let of_new = allocator.replicas_of_new(&self.cluster, wanted).await;
        of_new.is_ok_and(|of_new| of_new <= replicas)
    }
}
