//! `harvestfs admin backup` and `restore`: the state of a namenode, as one file.

use std::fs::File;
use std::io::{BufReader, BufWriter, Seek, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;
use harvestfs_namenode::backup::{self, BackupWriter};
use harvestfs_namenode::server;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::backup::{BackupContent, BackupReply, BackupRequest};
use harvestfs_protocol::durable::PendingFile;
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::limits::SNAPSHOT_PART_BYTES_MAX;
use harvestfs_protocol::outlook::count;
use serde::Serialize;
use tokio::task::spawn_blocking;

use super::interrupt::dropped_by_signal;
use super::link::{self, AdminLink};
use super::{DEADLINE, FSCK_DEADLINE};
use crate::cluster::ClusterArgs;
use crate::{fs, init, units};

/// Bytes that are read or written at once.
const BUFFER_BYTES: usize = 1 << 20;

/// `harvestfs admin backup`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs admin backup /backup/namenode.hfs\n  \
    harvestfs admin backup -f /backup/namenode.hfs --namenode 10.0.0.2:9310\n  \
    harvestfs admin backup --check /backup/namenode.hfs")]
pub struct BackupArgs {
    /// The file: what the namenode has is in it, all names too, so that only its owner may read it.
    file: PathBuf,
    /// Replace the file if it is there.
    #[arg(short, long)]
    force: bool,
    /// Take it from the namenode that listens there, also if that follows; otherwise from the one that leads.
    #[arg(long, value_name = "ADDRESS")]
    namenode: Option<SocketAddr>,
    /// Instead, read all of a file that was written before, and say what it has. It needs no cluster.
    #[arg(long, conflicts_with_all = ["force", "namenode"])]
    check: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// `harvestfs admin restore`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs admin restore /backup/namenode.hfs /var/lib/harvestfs/namenode/data")]
pub struct RestoreArgs {
    /// A file that `harvestfs admin backup` wrote.
    file: PathBuf,
    /// The data directory to make (`data` in `namenode.toml`): empty, not there yet, or one that
    /// `harvestfs init namenode` made.
    directory: PathBuf,
    /// The id that the cluster must have, for when the directory does not say.
    #[arg(long, value_parser = init::cluster_id)]
    cluster: Option<ClusterId>,
}

/// Runs `harvestfs admin backup`.
///
/// # Errors
/// When the namenode cannot be reached, or the file cannot be written or is no backup.
pub async fn run(cluster: &ClusterArgs, args: &BackupArgs) -> anyhow::Result<()> {
    if args.check {
        let content = check(&args.file)?;
        return tell(args, &content, "is whole");
    }
    if !args.force && args.file.symlink_metadata().is_ok() {
        bail!(exists(&args.file));
    }
    let mut access = cluster.access("admin")?;
    if let Some(namenode) = args.namenode {
        access.config.namenodes = vec![namenode];
    }
    let link = AdminLink::connect(&access).await?;
    let content = dropped_by_signal(take(&link, args)).await;
    link.close().await;
    tell(args, &content?, "is written")
}

fn exists(path: &Path) -> String {
    format!("{} exists; replace it with -f", path.display())
}

fn check(path: &Path) -> anyhow::Result<BackupContent> {
    let read = || -> anyhow::Result<BackupContent> {
        let file = File::open(path)?;
        Ok(backup::verify(BufReader::with_capacity(
            BUFFER_BYTES,
            file,
        ))?)
    };
    read().with_context(|| format!("{} is no backup to rely on", path.display()))
}

/// Writes the file. It gets its name when it is whole, durable, and was read once more.
async fn take(link: &AdminLink, args: &BackupArgs) -> anyhow::Result<BackupContent> {
    let writing = || format!("cannot write {}", args.file.display());
    let mut pending = PendingFile::create(&args.file, 0o600).with_context(writing)?;
    let of_any = args.namenode.is_some();
    let begin = AdminRequest::Backup(BackupRequest::Begin { of_any });
    let begun = if of_any {
        link.ask_connected(begin, FSCK_DEADLINE).await
    } else {
        link.ask(begin, FSCK_DEADLINE).await
    };
    let content = match begun.context("the namenode gives no backup")? {
        AdminReply::Backup(BackupReply::Begun(content)) => *content,
        _ => return Err(link::unexpected()),
    };
    let buffer = BufWriter::with_capacity(BUFFER_BYTES, pending.file());
    let mut writer = BackupWriter::begin(buffer, &content).with_context(writing)?;
    let progress = fs::progress(Some(content.length_bytes));
    while writer.written_bytes() < content.length_bytes {
        let offset = writer.written_bytes();
        let read = AdminRequest::Backup(BackupRequest::Read { offset });
        let part = match link.ask_connected(read, DEADLINE).await {
            Ok(AdminReply::Backup(BackupReply::Part(part))) => part,
            Ok(_) => return Err(link::unexpected()),
            Err(error) => return Err(error.context("the backup is not complete, and was given up")),
        };
        if part.is_empty() || part.len() > SNAPSHOT_PART_BYTES_MAX {
            return Err(link::unexpected());
        }
        writer.part(&part).with_context(writing)?;
        progress.inc(part.len() as u64);
    }
    progress.finish_and_clear();
    let mut buffer = writer.end().with_context(writing)?;
    buffer.flush().with_context(writing)?;
    drop(buffer);
    // The content has checksums of its own, which also reveal damage from the namenode's disk.
    let mut file = pending.file().try_clone().with_context(writing)?;
    file.rewind().with_context(writing)?;
    let verify = move || backup::verify(BufReader::with_capacity(BUFFER_BYTES, file));
    // On another thread, so that a signal is noticed in the meantime.
    let read = spawn_blocking(verify)
        .await?
        .context("what was written is not what the namenode had")?;
    if read != content {
        bail!("what was written is not what the namenode had");
    }
    pending.install(args.force).map_err(|error| {
        if error.kind() == std::io::ErrorKind::AlreadyExists {
            anyhow::anyhow!(exists(&args.file))
        } else {
            anyhow::Error::new(error).context(writing())
        }
    })?;
    Ok(content)
}

/// What a backup is of, as JSON has it.
#[derive(Serialize)]
struct Told<'a> {
    cluster: String,
    record: u64,
    term: u64,
    epoch: String,
    unix_ms: u64,
    version: &'a str,
    edition: u8,
    namenode: SocketAddr,
    led: bool,
    behind_records: u64,
    namenodes: &'a [SocketAddr],
    files: u64,
    directories: u64,
    blocks: u64,
    length_bytes: u64,
}

impl<'a> From<&'a BackupContent> for Told<'a> {
    fn from(content: &'a BackupContent) -> Self {
        Self {
            cluster: content.cluster.to_string(),
            record: content.record,
            term: content.term,
            epoch: content.epoch.to_string(),
            unix_ms: content.unix_ms,
            version: &content.version,
            edition: content.edition,
            namenode: content.addr,
            led: content.led,
            behind_records: content.behind_records,
            namenodes: &content.namenodes,
            files: content.files,
            directories: content.directories,
            blocks: content.blocks,
            length_bytes: content.length_bytes,
        }
    }
}

fn tell(args: &BackupArgs, content: &BackupContent, is_what: &str) -> anyhow::Result<()> {
    if args.json {
        println!("{}", serde_json::to_string_pretty(&Told::from(content))?);
        return Ok(());
    }
    println!("{} {is_what}. It has", args.file.display());
    describe(content);
    Ok(())
}

fn describe(content: &BackupContent) {
    println!(
        "  cluster {}, {}, {}, {} ({})",
        content.cluster,
        count(content.files, "file"),
        count(content.directories, "directory"),
        count(content.blocks, "block"),
        units::human(content.length_bytes)
    );
    println!(
        "  as of {}: record {} of term {}, epoch {}",
        units::utc(Duration::from_millis(content.unix_ms)),
        content.record,
        content.term,
        content.epoch
    );
    let part = match (content.led, content.behind_records) {
        (true, _) => "led".to_owned(),
        (false, 0) => "followed, and knew of nothing that it lacked".to_owned(),
        (false, records) => format!("followed, and was {} behind", count(records, "record")),
    };
    println!(
        "  of the namenode at {}, which {part} (version {}, edition {})",
        content.addr, content.version, content.edition
    );
}

/// Runs `harvestfs admin restore`, on the machine of the namenode.
///
/// # Errors
/// When the backup is damaged or of another cluster, or the directory is in use.
pub fn restore(args: &RestoreArgs) -> anyhow::Result<()> {
    let file =
        File::open(&args.file).with_context(|| format!("cannot open {}", args.file.display()))?;
    let content = server::restore(
        BufReader::with_capacity(BUFFER_BYTES, file),
        &args.directory,
        args.cluster,
        init::SEGMENT_BYTES,
    )
    .with_context(|| format!("nothing was restored to {}", args.directory.display()))?;
    println!("{} is that of a namenode with", args.directory.display());
    describe(&content);
    let addresses: Vec<String> = content.namenodes.iter().map(ToString::to_string).collect();
    println!(
        "None of the namenodes of before may be started again. What to do next:\n\
         1. Have this one listen where datanodes and clients look for a namenode (they looked at {}), with \
         `data` in its namenode.toml naming this directory, and start it. It is in recovery: what it has can \
         be read, and nothing is changed or removed.\n\
         2. When the datanodes are back, look at `harvestfs admin status`, `doctor` and `quarantine`, and read \
         some files.\n\
         3. `harvestfs admin recover --accept-loss` goes on without what was written since; blocks of that stay \
         in quarantine.\n\
         4. `harvestfs admin namenode add` takes others in.",
        addresses.join(", ")
    );
    Ok(())
}
