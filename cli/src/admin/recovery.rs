//! `harvestfs admin recover`, `quarantine` and `fsck --recover`: for a namenode that was restored from
//! a copy which lacks later changes.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_protocol::admin::{AdminReply, AdminRequest, QuarantinedBlock};
use harvestfs_protocol::codec::StreamKind;
use harvestfs_protocol::data::{DataRequest, Opening, ReadPacket, ReadRequest, first_mismatch};
use harvestfs_protocol::durable::{self, PendingFile};
use harvestfs_protocol::identity::{Peer, Role};
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::limits::{CHUNK_BYTES, TOKEN_LIFETIME};
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::types::NodeInfo;

use super::DEADLINE;
use super::link::{self, AdminLink};
use crate::units;

/// A datanode that sends nothing for this long is given up.
const SILENCE_MAX: Duration = Duration::from_secs(30);
/// Age at which tokens are replaced by new ones: a block that is begun before has as long left to be read.
const TOKENS_AGE_MAX: Duration = Duration::from_secs(TOKEN_LIFETIME.as_secs() / 2);
/// How long the tokens are used on when new ones were asked for in vain.
const RENEWAL_PAUSE: Duration = Duration::from_secs(600);

/// `harvestfs admin recover`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs admin recover --accept-loss")]
pub struct RecoverArgs {
    /// Go on without what the namenode lacks. What was written since its copy was made is no longer
    /// in the file system, but stays in quarantine for a while.
    #[arg(long, required = true)]
    accept_loss: bool,
}

/// Runs `harvestfs admin recover`.
///
/// # Errors
/// When the namenode is not in recovery, or cannot be reached.
pub async fn recover(link: &AdminLink) -> anyhow::Result<()> {
    link.ask(AdminRequest::AcceptLoss, DEADLINE).await?;
    println!(
        "The namenode serves again, without what it lacked. `harvestfs admin quarantine` lists what \
         datanodes have of that."
    );
    Ok(())
}

/// Runs `harvestfs admin quarantine`.
///
/// # Errors
/// When the namenode cannot be reached.
pub async fn quarantine(link: &AdminLink, json: bool) -> anyhow::Result<()> {
    let blocks = quarantined(link).await?;
    if json {
        println!("{}", serde_json::to_string_pretty(&blocks)?);
        return Ok(());
    }
    println!(
        "{:<16} {:>10} {:>10}  DATANODES",
        "BLOCK", "BYTES", "KEPT FOR"
    );
    for it in &blocks {
        let names: Vec<&str> = it.nodes.iter().map(|node| node.name.as_str()).collect();
        let kept = Duration::from_secs(it.kept_ms.div_ceil(1_000));
        println!(
            "{:<16} {:>10} {:>10}  {}",
            it.block.to_string(),
            units::human(it.length_bytes),
            humantime::format_duration(kept).to_string(),
            names.join(" ")
        );
    }
    println!("{} in quarantine", count(blocks.len() as u64, "block"));
    Ok(())
}

async fn quarantined(link: &AdminLink) -> anyhow::Result<Vec<QuarantinedBlock>> {
    let mut all: Vec<QuarantinedBlock> = Vec::new();
    loop {
        let after = all.last().map_or(BlockId(0), |it| it.block);
        let blocks = quarantined_after(link, after).await?;
        if blocks.is_empty() {
            return Ok(all);
        }
        all.extend(blocks);
    }
}

/// The first blocks in quarantine after this one.
async fn quarantined_after(
    link: &AdminLink,
    after: BlockId,
) -> anyhow::Result<Vec<QuarantinedBlock>> {
    match link
        .ask(AdminRequest::Quarantine { after }, DEADLINE)
        .await?
    {
        AdminReply::Quarantine(blocks) => Ok(blocks),
        _ => Err(link::unexpected()),
    }
}

/// Blocks in quarantine, in ascending order, with tokens to read them.
struct Batch {
    /// When the tokens were made, or before that.
    made: Instant,
    /// When new ones were last asked for.
    asked: Instant,
    blocks: Vec<QuarantinedBlock>,
}

impl Batch {
    fn find(&self, block: BlockId) -> Option<&QuarantinedBlock> {
        let found = self.blocks.binary_search_by_key(&block, |it| it.block);
        found.ok().map(|at| &self.blocks[at])
    }

    /// Whether another one is needed to read this block: this one ends before it, or its tokens are too old.
    fn is_used_up(&self, block: BlockId, now: Instant) -> bool {
        let reaches = self.blocks.last().is_some_and(|last| block <= last.block);
        let is_old = now.duration_since(self.made) >= TOKENS_AGE_MAX
            && now.duration_since(self.asked) >= RENEWAL_PAUSE;
        !reaches || is_old || self.is_expired(now)
    }

    fn is_expired(&self, now: Instant) -> bool {
        now.duration_since(self.made) >= TOKEN_LIFETIME
    }
}

/// Runs `harvestfs admin fsck --recover DIR`.
///
/// # Errors
/// When the namenode cannot be reached, a block cannot be read from any datanode, or the directory
/// cannot be written to.
pub async fn read_back(link: &AdminLink, directory: &Path) -> anyhow::Result<()> {
    let made = Instant::now();
    let mut batch = Batch {
        made,
        asked: made,
        blocks: quarantined(link).await?,
    };
    let blocks: Vec<BlockId> = batch.blocks.iter().map(|it| it.block).collect();
    // The blocks contain data of users' files, so no other user may read them.
    durable::create_directories(directory, 0o700)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let mut failed = 0;
    for &block in &blocks {
        if batch.is_used_up(block, Instant::now()) {
            let made = Instant::now();
            match renewed(link, block).await {
                Ok(blocks) => {
                    batch = Batch {
                        made,
                        asked: made,
                        blocks,
                    };
                }
                // Its old token is still valid for some time.
                Err(error) if batch.find(block).is_some() && !batch.is_expired(made) => {
                    eprintln!("there are no new tokens yet: {error:#}");
                    batch.asked = made;
                }
                Err(error) => {
                    return Err(error.context(format!(
                        "neither block {block} nor those after it are read back"
                    )));
                }
            }
        }
        let read = match batch.find(block) {
            Some(it) => read_block(link, it, directory).await,
            None => Err(anyhow::anyhow!(
                "no datanode that runs has it now, or its time in quarantine is over"
            )),
        };
        match read {
            Ok(path) => println!("{}", path.display()),
            Err(error) => {
                failed += 1;
                eprintln!("block {block} cannot be read back: {error:#}");
            }
        }
    }
    println!(
        "{} of {} read back",
        blocks.len() - failed,
        count(blocks.len() as u64, "block")
    );
    if failed > 0 {
        bail!("{} could not be read back", count(failed as u64, "block"));
    }
    Ok(())
}

/// The blocks in quarantine from this one on, with new tokens.
async fn renewed(link: &AdminLink, block: BlockId) -> anyhow::Result<Vec<QuarantinedBlock>> {
    let after = BlockId(block.0.saturating_sub(1));
    if let Ok(blocks) = quarantined_after(link, after).await {
        return Ok(blocks);
    }
    // The namenode may have been restarted since it was last asked.
    link.turn_to(None).await;
    quarantined_after(link, after).await
}

/// Reads a block from the first datanode that gives all of it. The file appears when it is complete.
async fn read_block(
    link: &AdminLink,
    it: &QuarantinedBlock,
    directory: &Path,
) -> anyhow::Result<PathBuf> {
    let path = directory.join(it.block.to_string());
    let mut last = anyhow::anyhow!("no datanode has it");
    for node in &it.nodes {
        match read_replica(link, it, node, &path).await {
            Ok(()) => return Ok(path),
            Err(error) => last = error.context(format!("from {}", node.name)),
        }
    }
    Err(last)
}

async fn read_replica(
    link: &AdminLink,
    it: &QuarantinedBlock,
    node: &NodeInfo,
    path: &Path,
) -> anyhow::Result<()> {
    let mut pending = PendingFile::create(path, 0o600)?;
    let peer = Peer::new(Role::Datanode, node.name.clone())?;
    let connection = link.connect_to(node.data_addr, &peer).await?;
    let (mut sender, mut receiver) = connection.open_stream(StreamKind::Data).await?;
    let request = DataRequest::Read(ReadRequest {
        block: it.block,
        token: it.token,
        block_offset: 0,
        length_bytes: it.length_bytes,
    });
    sender.send(&Opening::from(request)).await?;
    sender.finish()?;
    let mut at = 0;
    while at < it.length_bytes {
        let (block_offset, checksums) = match receiver.recv(SILENCE_MAX).await? {
            Some((
                ReadPacket::Data {
                    block_offset,
                    checksums,
                },
                _,
            )) => (block_offset, checksums),
            Some((ReadPacket::Failed(error), _)) => return Err(error.into()),
            None => bail!("it ended early"),
        };
        let data = receiver.read_data(SILENCE_MAX).await?;
        let is_next = block_offset == at && !data.is_empty() && data.len() % CHUNK_BYTES == 0;
        if !is_next || first_mismatch(&data, &checksums).is_some() {
            bail!("what it sent at {block_offset} is not what was stored");
        }
        pending.file().write_all(&data)?;
        at += data.len() as u64;
    }
    // The last packet is padded to a whole chunk.
    pending.file().set_len(it.length_bytes)?;
    pending.install(true)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::token::{Right, TokenKey, TokenSigner};

    use super::*;

    #[test]
    fn tokens_are_replaced_while_they_are_valid() {
        let signer = TokenSigner::new(&TokenKey {
            key_id: 1,
            secret: [0; 32],
        });
        let blocks = [3, 7].map(|number| QuarantinedBlock {
            block: BlockId(number),
            length_bytes: 0,
            nodes: Vec::new(),
            kept_ms: 0,
            token: signer.sign(BlockId(number), Right::Read, 0),
        });
        let made = Instant::now();
        let mut batch = Batch {
            made,
            asked: made,
            blocks: blocks.to_vec(),
        };
        assert!(!batch.is_used_up(BlockId(3), made));
        assert!(!batch.is_used_up(BlockId(7), made));
        assert!(batch.is_used_up(BlockId(8), made), "it has none for that");
        let late = made + TOKEN_LIFETIME - Duration::from_secs(3600);
        assert!(batch.is_used_up(BlockId(3), late), "an hour is left");
        batch.asked = late;
        assert!(!batch.is_used_up(BlockId(3), late), "asked in vain");
        assert!(batch.is_used_up(BlockId(3), late + RENEWAL_PAUSE));
        assert!(batch.is_used_up(BlockId(3), made + TOKEN_LIFETIME));
        let block = batch.find(BlockId(7)).expect("it is in it");
        assert_eq!(block.block, BlockId(7));
        assert!(batch.find(BlockId(5)).is_none());
    }
}
