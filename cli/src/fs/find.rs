//! `harvestfs fs` commands that examine existing files: `du`, `find`, `test`.

use std::ffi::OsString;
use std::fmt;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use glob::Pattern;
use harvestfs_client::ClientError;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::types::{Attr, FileKind};

use super::{Files, below, list, names};

/// `harvestfs fs find`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs fs find /photos --name '*.jpg'\n  \
    harvestfs fs find / --type d")]
pub(super) struct FindArgs {
    /// Paths in the cluster.
    #[arg(default_value = "/")]
    paths: Vec<OsString>,
    /// Only entries whose name matches this pattern, with `*`, `?` and `[...]` as in a shell.
    #[arg(long, value_name = "PATTERN")]
    name: Option<Pattern>,
    /// Only files (f), directories (d) or symlinks (l).
    #[arg(long = "type", value_name = "KIND")]
    kind: Option<Kind>,
}

/// `--type`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    F,
    D,
    L,
}

impl Kind {
    fn is(self, kind: FileKind) -> bool {
        match self {
            Self::F => kind == FileKind::Regular,
            Self::D => kind == FileKind::Directory,
            Self::L => kind == FileKind::Symlink,
        }
    }
}

/// `harvestfs fs test`
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs fs test -e /done               exit status 0 if it is there, 2 if that cannot be told")]
pub(super) struct TestArgs {
    #[command(flatten)]
    what: What,
    /// Path in the cluster.
    path: OsString,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct What {
    /// It exists.
    #[arg(short = 'e')]
    exists: bool,
    /// It is a file.
    #[arg(short = 'f')]
    file: bool,
    /// It is a directory.
    #[arg(short = 'd')]
    directory: bool,
    /// It is a file that is not empty.
    #[arg(short = 's')]
    has_content: bool,
    /// It is a file that is empty.
    #[arg(short = 'z')]
    empty: bool,
}

impl What {
    fn holds(&self, attr: &Attr) -> bool {
        let is_file = attr.kind == FileKind::Regular;
        self.exists
            || self.file && is_file
            || self.directory && attr.kind == FileKind::Directory
            || self.has_content && is_file && attr.size_bytes > 0
            || self.empty && is_file && attr.size_bytes == 0
    }
}

/// `fs test` answers no: exit status 1 and no message.
#[derive(Debug)]
pub(crate) struct DoesNotHold;

impl fmt::Display for DoesNotHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it does not hold")
    }
}

impl std::error::Error for DoesNotHold {}

/// `fs test` has no answer: exit status 2, as that of test(1), and the reason is printed.
#[derive(Debug)]
pub(crate) struct CannotTell;

impl fmt::Display for CannotTell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cannot tell")
    }
}

impl Files {
    pub(super) async fn test(&self, args: &TestArgs) -> anyhow::Result<()> {
        let found = self
            .client
            .resolve(&self.credentials, args.path.as_bytes())
            .await;
        match found {
            Ok(attr) if args.what.holds(&attr) => Ok(()),
            Ok(_) | Err(ClientError::Fs(FsError::NotFound | FsError::NotADirectory)) => {
                bail!(DoesNotHold)
            }
            Err(error) => Err(error).with_context(|| args.path.to_string_lossy().into_owned()),
        }
    }

    pub(super) async fn find_below(&self, args: &FindArgs) -> anyhow::Result<()> {
        let mut out = crate::output::stdout();
        for path in &args.paths {
            let attr = self.find(path).await?;
            let mut walk = self.listing(path, attr.ino);
            while let Some(entry) = walk.next().await? {
                let full = below(path.as_bytes(), &entry.path);
                if args.kind.is_some_and(|kind| !kind.is(entry.attr.kind)) {
                    continue;
                }
                let mut backwards = full.rsplit(|&byte| byte == b'/');
                let name = backwards.next().expect("the last part, which may be empty");
                let name = String::from_utf8_lossy(name);
                if args.name.as_ref().is_some_and(|it| !it.matches(&name)) {
                    continue;
                }
                out.write_all(&names::printed(&full))?;
                out.write_all(b"\n")?;
            }
        }
        Ok(())
    }

    /// The space below each path, which the namenode keeps for every directory.
    pub(super) async fn du(
        &self,
        paths: &[OsString],
        summarize: bool,
        human: bool,
    ) -> anyhow::Result<()> {
        let mut out = crate::output::stdout();
        for path in paths {
            let shown = || path.to_string_lossy().into_owned();
            let attr = self.find(path).await?;
            let Some(used_bytes) = self.used_bytes_at(path.as_bytes(), &attr).await? else {
                continue;
            };
            if attr.kind == FileKind::Directory && !summarize {
                let mut entries = self.client.entries(&self.credentials, attr.ino);
                while let Some((name, attr)) = entries.next().await.with_context(shown)? {
                    let full = below(path.as_bytes(), name.as_bytes());
                    let Some(used_bytes) = self.used_bytes_at(&full, &attr).await? else {
                        continue;
                    };
                    write!(out, "{:>14}  ", list::size(used_bytes, human))?;
                    out.write_all(&names::printed(&full))?;
                    out.write_all(b"\n")?;
                }
            }
            let used = list::size(used_bytes, human);
            writeln!(out, "{used:>14}  {}", path.to_string_lossy())?;
        }
        Ok(())
    }

    /// As [`Files::used_bytes`]. `None`, with a message, for a directory that may not be listed.
    async fn used_bytes_at(&self, path: &[u8], attr: &Attr) -> anyhow::Result<Option<u64>> {
        match self.used_bytes(attr).await {
            Err(error @ ClientError::Fs(FsError::PermissionDenied)) => {
                self.cannot_list(path, &error);
                Ok(None)
            }
            used_bytes => {
                let shown = || String::from_utf8_lossy(path).into_owned();
                used_bytes.map(Some).with_context(shown)
            }
        }
    }

    pub(super) async fn used_bytes(&self, attr: &Attr) -> Result<u64, ClientError> {
        match attr.kind {
            FileKind::Directory => {
                let usage = self.client.usage(&self.credentials, attr.ino).await?;
                Ok(usage.used_bytes)
            }
            _ => Ok(attr.allocated_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_distinguished() {
        for (kind, fits) in [
            (Kind::F, FileKind::Regular),
            (Kind::D, FileKind::Directory),
            (Kind::L, FileKind::Symlink),
        ] {
            for other in [
                FileKind::Regular,
                FileKind::Directory,
                FileKind::Symlink,
                FileKind::Fifo,
            ] {
                assert_eq!(kind.is(other), other == fits, "{kind:?} {other:?}");
            }
        }
    }
}
