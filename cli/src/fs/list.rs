//! `harvestfs fs` commands that show information: `ls`, `stat`, `df`, `locations`.

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use anyhow::{Context, anyhow};
use clap::Args;
use harvestfs_client::ClientError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::types::{Attr, FileKind, Timestamp};
use serde_json::json;

use super::{Files, names, quota};
use crate::locations::{self, Location};
use crate::units;

/// `harvestfs fs ls`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs fs ls -lh /photos\n  \
    harvestfs fs ls -R /")]
pub struct LsArgs {
    /// Path in the cluster.
    #[arg(default_value = "/")]
    path: OsString,
    /// Show attributes.
    #[arg(short, long)]
    long: bool,
    /// List everything below.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// With -l: sizes in KiB, MiB and so on.
    #[arg(short, long)]
    human_readable: bool,
    /// Print JSON, one object for each line. A path that is not UTF-8 is also in `path_bytes`, as hexadecimal digits.
    #[arg(long)]
    json: bool,
    /// Print help.
    #[arg(long, action = clap::ArgAction::Help)]
    help: (),
}

impl Files {
    pub(super) async fn ls(&self, args: &LsArgs) -> anyhow::Result<()> {
        let attr = self.find(&args.path).await?;
        let mut out = crate::output::stdout();
        if attr.kind != FileKind::Directory {
            return show(&mut out, args, args.path.as_bytes(), &attr);
        }
        if args.recursive {
            let mut walk = self.listing(&args.path, attr.ino);
            while let Some(entry) = walk.next().await? {
                if !entry.path.is_empty() {
                    show(&mut out, args, &entry.path, &entry.attr)?;
                }
            }
            return Ok(());
        }
        let mut entries = self.client.entries(&self.credentials, attr.ino);
        while let Some((name, attr)) = entries
            .next()
            .await
            .with_context(|| args.path.to_string_lossy().into_owned())?
        {
            show(&mut out, args, name.as_bytes(), &attr)?;
        }
        Ok(())
    }

    /// The names in a directory.
    pub(super) async fn names(&self, directory: InodeId) -> Result<Vec<Name>, ClientError> {
        let mut names = Vec::new();
        let mut entries = self.client.entries(&self.credentials, directory);
        while let Some((name, _)) = entries.next().await? {
            names.push(name);
        }
        Ok(names)
    }

    pub(super) async fn stat(
        &self,
        path: &OsString,
        usage: bool,
        json: bool,
    ) -> anyhow::Result<()> {
        let attr = self
            .client
            .resolve_no_follow(&self.credentials, path.as_bytes())
            .await
            .with_context(|| path.to_string_lossy().into_owned())?;
        let usage = match (usage, attr.kind) {
            (true, FileKind::Directory) => {
                Some(self.client.usage(&self.credentials, attr.ino).await?)
            }
            _ => None,
        };
        if json {
            let mut shown = attributes(path.as_bytes(), &attr);
            if let Some(usage) = &usage {
                shown["usage"] = quota::fields(usage);
            }
            println!("{}", names::json_line(&shown));
            return Ok(());
        }
        println!("  path: {}", path.to_string_lossy());
        println!("  kind: {}", kind(attr.kind));
        println!(
            "  size: {} bytes, {} allocated",
            attr.size_bytes, attr.allocated_bytes
        );
        println!(
            "  mode: {:04o}  links: {}",
            attr.permission_bits(),
            attr.nlink
        );
        println!("   uid: {}  gid: {}", attr.uid, attr.gid);
        println!(" inode: {}", attr.ino);
        for (label, time) in [
            ("access", attr.atime),
            ("modify", attr.mtime),
            ("change", attr.ctime),
        ] {
            println!("{label}: {}", utc(time));
        }
        if let Some(usage) = &usage {
            println!(" below: {}", quota::describe(usage));
        }
        Ok(())
    }

    pub(super) async fn df(&self, path: &OsString, json: bool) -> anyhow::Result<()> {
        let attr = self.find(path).await?;
        let totals = self.client.statfs(&self.credentials, attr.ino).await?;
        let inodes = totals.total_inodes.saturating_sub(totals.free_inodes);
        let used = totals.total_bytes.saturating_sub(totals.free_bytes);
        if json {
            println!(
                "{}",
                json!({
                    "total_bytes": totals.total_bytes,
                    "used_bytes": used,
                    "free_bytes": totals.free_bytes,
                    "available_bytes": totals.available_bytes,
                    "inodes": inodes,
                    "free_inodes": totals.free_inodes,
                })
            );
        } else {
            println!(
                "{} of {} used, {} free, {} can be written now, {} (bytes of files; each is \
                 stored as often as it has replicas)",
                units::human(used),
                units::human(totals.total_bytes),
                units::human(totals.free_bytes),
                units::human(totals.available_bytes),
                count(inodes, "inode")
            );
        }
        Ok(())
    }

    pub(super) async fn locations(&self, path: &OsString, json: bool) -> anyhow::Result<()> {
        let attr = self.find(path).await?;
        let (locations, complete) = self
            .locations_of(attr.ino)
            .await
            .with_context(|| path.to_string_lossy().into_owned())?;
        if !json && !locations.is_empty() {
            println!(
                "{:>14} {:>14}  {:<16}  DATANODES",
                "OFFSET", "BYTES", "BLOCK"
            );
        }
        for it in locations {
            if json {
                println!(
                    "{}",
                    json!({ "offset": it.offset, "length_bytes": it.length_bytes,
                            "block": it.block, "datanodes": it.datanodes })
                );
            } else {
                let datanodes = it.datanodes.join(" ");
                println!(
                    "{:>14} {:>14}  {:<16}  {datanodes}",
                    it.offset, it.length_bytes, it.block
                );
            }
        }
        if !complete {
            self.could_not(&anyhow!(
                "the rest is not shown: it is more than the namenode tells at once"
            ));
        }
        Ok(())
    }

    /// Where the replicas of a file are; consecutive pieces of it in one block are joined. Also whether these
    /// are all, since the namenode reports a limited number of pieces.
    pub(super) async fn locations_of(
        &self,
        ino: InodeId,
    ) -> Result<(Vec<Location>, bool), ClientError> {
        let text = self
            .client
            .getxattr(&self.credentials, ino, locations::ATTRIBUTE.as_bytes())
            .await?;
        let (all, is_complete) = locations::parse(&String::from_utf8_lossy(&text));
        let mut locations: Vec<Location> = Vec::new();
        for location in all {
            match locations.last_mut() {
                Some(last) if last.goes_on_with(&location) => {
                    last.length_bytes += location.length_bytes;
                }
                _ => locations.push(location),
            }
        }
        Ok((locations, is_complete))
    }
}

/// A number of bytes, exact or human-readable.
pub(super) fn size(bytes: u64, human: bool) -> String {
    if human {
        units::human(bytes)
    } else {
        bytes.to_string()
    }
}

fn show(out: &mut impl Write, args: &LsArgs, name: &[u8], attr: &Attr) -> anyhow::Result<()> {
    if args.json {
        writeln!(out, "{}", names::json_line(&attributes(name, attr)))?;
        return Ok(());
    }
    if args.long {
        write!(
            out,
            "{}{} {:>3} {:>6} {:>6} {:>14} {} ",
            letter(attr.kind),
            permissions(attr.permission_bits()),
            attr.nlink,
            attr.uid,
            attr.gid,
            // The size of a directory is its number of entries.
            size(
                attr.size_bytes,
                args.human_readable && attr.kind != FileKind::Directory
            ),
            utc(attr.mtime)
        )?;
    }
    out.write_all(&names::printed(name))?;
    writeln!(out)?;
    Ok(())
}

fn attributes(path: &[u8], attr: &Attr) -> serde_json::Value {
    let mut object = json!({
        "inode": attr.ino.0,
        "kind": kind(attr.kind),
        "mode": format!("{:04o}", attr.permission_bits()),
        "links": attr.nlink,
        "uid": attr.uid,
        "gid": attr.gid,
        "size_bytes": attr.size_bytes,
        "allocated_bytes": attr.allocated_bytes,
        "atime_ns": attr.atime.0,
        "mtime_ns": attr.mtime.0,
        "ctime_ns": attr.ctime.0,
    });
    names::insert(&mut object, "path", path);
    object
}

fn kind(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Regular => "file",
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        FileKind::Fifo => "fifo",
        FileKind::Socket => "socket",
        FileKind::CharDevice => "character device",
        FileKind::BlockDevice => "block device",
    }
}

fn letter(kind: FileKind) -> char {
    match kind {
        FileKind::Regular => '-',
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
        FileKind::CharDevice => 'c',
        FileKind::BlockDevice => 'b',
    }
}

/// `rwxr-xr-x`, with the letters of ls(1) for the special bits.
fn permissions(mode: u16) -> String {
    let special = [(0o4000, 's', 'S'), (0o2000, 's', 'S'), (0o1000, 't', 'T')];
    let mut text = String::with_capacity(9);
    for (class, (bit, with_x, without_x)) in special.into_iter().enumerate() {
        let bits = mode >> (6 - 3 * class);
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & bit != 0) {
            (true, true) => with_x,
            (false, true) => without_x,
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// `2026-11-21T02:37:00Z` (civil calendar from days, as in RFC 3339).
pub(super) fn utc(time: Timestamp) -> String {
    // Times before 1970 are shown as its beginning.
    units::utc(Duration::from_nanos(u64::try_from(time.0).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_look_as_in_ls() {
        assert_eq!(permissions(0o755), "rwxr-xr-x");
        assert_eq!(permissions(0o4711), "rws--x--x");
        assert_eq!(permissions(0o2644), "rw-r-Sr--");
        assert_eq!(permissions(0o1777), "rwxrwxrwt");
        assert_eq!(permissions(0o1000), "--------T");
    }

    #[test]
    fn times_are_utc() {
        assert_eq!(
            utc(Timestamp(1_700_000_000_000_000_000)),
            "2023-11-14T22:13:20Z"
        );
    }
}
