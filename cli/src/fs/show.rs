//! `harvestfs fs` commands that print the content of files: `cat`, `tail`.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use harvestfs_client::{File, OpenFlags};
use harvestfs_protocol::ids::InodeId;

use super::failures::is_of_its_path;
use super::transfer::READ_BYTES;
use super::{Files, names};
use crate::output::Stdout;

/// Between two looks at a file that is followed.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);
/// Bytes that are searched for lines at a time.
const SEARCH_BYTES: u64 = 64 << 10;

/// `harvestfs fs tail`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs fs tail -n 20 /log\n  \
    harvestfs fs tail -f /log                 and what is added, until Ctrl-C")]
pub(super) struct TailArgs {
    /// Path in the cluster.
    path: OsString,
    /// How many lines.
    #[arg(short = 'n', long, default_value_t = 10, value_name = "NUMBER")]
    lines: u64,
    /// Instead, how many bytes.
    #[arg(short = 'c', long, value_name = "NUMBER", conflicts_with = "lines")]
    bytes: Option<u64>,
    /// Go on printing what is added, until Ctrl-C.
    #[arg(short, long)]
    follow: bool,
}

impl Files {
    pub(super) async fn cat(&self, path: &OsString) -> anyhow::Result<()> {
        let attr = self.find(path).await?;
        let context = || path.to_string_lossy().into_owned();
        let file = self.open_to_read(attr.ino).await.with_context(context)?;
        let mut out = crate::output::stdout();
        print(&file, 0, &mut out).await.with_context(context)?;
        Ok(())
    }

    pub(super) async fn tail(&self, args: &TailArgs) -> anyhow::Result<()> {
        let context = || args.path.to_string_lossy().into_owned();
        let attr = self.find(&args.path).await?;
        let mut ino = attr.ino;
        let mut file = self.open_to_read(ino).await.with_context(context)?;
        let start = match args.bytes {
            Some(bytes) => attr.size_bytes.saturating_sub(bytes),
            None => start_of_lines(&file, attr.size_bytes, args.lines)
                .await
                .with_context(context)?,
        };
        let mut out = crate::output::stdout();
        let mut offset = print(&file, start, &mut out).await.with_context(context)?;
        if !args.follow {
            return Ok(());
        }
        let path = names::harmless(args.path.as_bytes());
        loop {
            tokio::time::sleep(FOLLOW_INTERVAL).await;
            let found = match self.find(&args.path).await {
                // A file that has lost its name, or whose name may not be looked up any more, exists while it is open.
                Err(error) if is_of_its_path(&error) => ino,
                found => found?.ino,
            };
            // An `open` sees data that another client has flushed before it.
            file = self.open_to_read(ino).await.with_context(context)?;
            let now = file.attr().await.with_context(context)?;
            if now.size_bytes < offset {
                eprintln!("harvestfs: {path} was cut; what is in it now follows");
                // Like tail(1): otherwise, what has been written since would be skipped.
                offset = 0;
            }
            offset = print(&file, offset, &mut out).await.with_context(context)?;
            // `fs put -f` replaces the file with another one. The content of the old one has been printed.
            if found != ino {
                match self.open_to_read(found).await {
                    // It may be unreadable, or replaced again already.
                    Err(error) if is_of_its_path(&error) => {}
                    opened => {
                        file = opened.with_context(context)?;
                        eprintln!("harvestfs: {path} was replaced; what is in it now follows");
                        ino = found;
                        offset = print(&file, 0, &mut out).await.with_context(context)?;
                    }
                }
            }
        }
    }

    async fn open_to_read(&self, ino: InodeId) -> anyhow::Result<File> {
        let flags = OpenFlags::READ;
        Ok(self.client.open(&self.credentials, ino, flags).await?)
    }
}

/// Prints what a file has from an offset on. Returns where it ended.
async fn print(file: &File, mut offset: u64, out: &mut Stdout) -> anyhow::Result<u64> {
    loop {
        let pieces = file.read_pieces(offset, READ_BYTES).await?;
        if pieces.is_empty() {
            out.flush()?;
            return Ok(offset);
        }
        for piece in pieces {
            offset += piece.len() as u64;
            out.write_all(&piece)?;
        }
    }
}

/// Where the last lines of a file of this size begin.
async fn start_of_lines(file: &File, size_bytes: u64, lines: u64) -> anyhow::Result<u64> {
    if lines == 0 {
        return Ok(size_bytes);
    }
    let mut end = size_bytes;
    let mut found = 0;
    while end > 0 {
        let start = end.saturating_sub(SEARCH_BYTES);
        let mut chunk = Vec::new();
        while start + (chunk.len() as u64) < end {
            let missing = (end - start) as usize - chunk.len();
            let pieces = file
                .read_pieces(start + chunk.len() as u64, missing)
                .await?;
            if pieces.is_empty() {
                // The file has become shorter in the meantime.
                break;
            }
            pieces
                .iter()
                .for_each(|piece| chunk.extend_from_slice(piece));
        }
        for (at, _) in chunk.iter().enumerate().rev().filter(|it| *it.1 == b'\n') {
            let after = start + at as u64 + 1;
            // No line begins after the newline at the end of the file.
            if after == size_bytes {
                continue;
            }
            found += 1;
            if found == lines {
                return Ok(after);
            }
        }
        end = start;
    }
    Ok(0)
}
