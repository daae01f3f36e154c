//! Where blocks are, and the tokens to use them.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::net::IpAddr;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{BlockId, InodeId, NodeId, SessionId};
use harvestfs_protocol::limits::XATTR_VALUE_BYTES_MAX;
use harvestfs_protocol::meta::MetaReply;
use harvestfs_protocol::token::Right;
use harvestfs_protocol::types::{BlockInfo, Credentials, Extent, Located, PlacementRules};

use super::Owner;
use crate::engine::namespace::{BlockChange, BlockView};
use crate::server::clock;
use crate::server::sessions::OpenTo;

/// The extended attribute that shows where a file's replicas are.
pub(super) const LOCATIONS_XATTR: &[u8] = b"user.harvestfs.locations";

/// Blocks that the reply to an `Open` locates: those that a reader wants first. The rest is requested later.
const BLOCKS_PER_OPEN: usize = 16;

/// The last line when the rest does not fit.
const CUT_OFF: &str = "...\n";

impl Owner {
    /// Whether a caller may read a file, without regard to what is open.
    pub(super) fn may_read(&self, credentials: &Credentials, ino: InodeId) -> bool {
        self.namespace.check_readable(credentials, ino).is_ok()
    }

    /// The credentials for the content of a file that a session has open: its permission was checked when it was
    /// opened.
    pub(super) fn opener(
        &self,
        session: SessionId,
        ino: InodeId,
        to: OpenTo,
    ) -> Option<Credentials> {
        let is_open = self.sessions.has_open(session, ino, to);
        is_open.then(Credentials::root)
    }

    /// Locates blocks for reading.
    pub(super) fn located(
        &self,
        blocks: impl IntoIterator<Item = BlockId>,
        reader: IpAddr,
    ) -> Located {
        let now_unix_ms = clock::unix_now_ms();
        let infos = blocks.into_iter().filter_map(|block| {
            let view = self.namespace.block(block)?;
            Some(BlockInfo {
                block,
                committed_bytes: view.committed_bytes,
                replicas: self.cluster.replicas(block, Some(reader)),
                due_replicas: self.cluster.due_of_new(&view.rules),
                token: self.tokens.sign(block, Right::Read, now_unix_ms),
            })
        });
        self.with_nodes(infos.collect())
    }

    /// Locates the blocks of a file's first extents.
    pub(super) fn located_first(&self, extents: &[Extent], reader: IpAddr) -> Located {
        let mut first = Vec::with_capacity(BLOCKS_PER_OPEN);
        for extent in extents {
            if first.len() == BLOCKS_PER_OPEN {
                break;
            }
            if !first.contains(&extent.block) {
                first.push(extent.block);
            }
        }
        self.located(first, reader)
    }

    /// Returns new blocks with the nodes that they are to be written to.
    pub(super) fn located_for_writing(
        &self,
        pipelines: Vec<(BlockId, PlacementRules, Vec<NodeId>)>,
    ) -> Located {
        let now_unix_ms = clock::unix_now_ms();
        let infos = pipelines
            .into_iter()
            .map(|(block, rules, replicas)| BlockInfo {
                block,
                committed_bytes: 0,
                replicas,
                due_replicas: self.cluster.due_of_new(&rules),
                token: self.tokens.sign(block, Right::Write, now_unix_ms),
            });
        self.with_nodes(infos.collect())
    }

    fn with_nodes(&self, blocks: Vec<BlockInfo>) -> Located {
        let named: BTreeSet<NodeId> = blocks
            .iter()
            .flat_map(|info| info.replicas.iter().copied())
            .collect();
        let nodes = named
            .into_iter()
            .filter_map(|node| self.cluster.node_info(node))
            .collect();
        Located { blocks, nodes }
    }

    /// The content of [`LOCATIONS_XATTR`]: a line for each extent with its offset in the file, its
    /// length in bytes, its block and the names of the nodes that hold it. What does not fit in an
    /// extended attribute is cut off behind a line of dots.
    pub(super) fn locations(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<MetaReply, FsError> {
        self.namespace.check_readable(credentials, ino)?;
        let mut text = String::new();
        let mut from_offset = 0;
        loop {
            let (extents, end) = self.namespace.extents(credentials, ino, from_offset)?;
            for extent in &extents {
                let line = self.location_line(extent);
                if text.len() + line.len() + CUT_OFF.len() > XATTR_VALUE_BYTES_MAX {
                    text.push_str(CUT_OFF);
                    return Ok(MetaReply::Bytes(text.into_bytes()));
                }
                text.push_str(&line);
            }
            match extents.last() {
                Some(last) if !end => from_offset = last.file_end(),
                _ => return Ok(MetaReply::Bytes(text.into_bytes())),
            }
        }
    }

    fn location_line(&self, extent: &Extent) -> String {
        let Extent {
            file_offset,
            length_bytes,
            block,
            ..
        } = extent;
        let mut line = format!("{file_offset} {length_bytes} {block}");
        for node in self.cluster.replicas(*block, None) {
            if let Some(info) = self.cluster.node_info(node) {
                // Writing to a string cannot fail.
                let _ = write!(line, " {}", info.name);
            }
        }
        line.push('\n');
        line
    }
}

/// The changes that introduce an existing block to the cluster.
pub(super) fn changes_of(view: &BlockView) -> Vec<BlockChange> {
    let block = view.block;
    let allocated = BlockChange::Allocated {
        block,
        rules: view.rules,
        // A block whose writer has ended is sealed; its writer is not needed.
        writer: view.writer.unwrap_or(SessionId(0)),
    };
    let grew = (view.committed_bytes > 0).then_some(BlockChange::Grew {
        block,
        committed_bytes: view.committed_bytes,
    });
    let sealed = view.sealed_bytes.map(|length_bytes| BlockChange::Sealed {
        block,
        length_bytes,
    });
    std::iter::once(allocated)
        .chain(grew)
        .chain(sealed)
        .collect()
}
