//! `harvestfs fs`: files without a mount.

mod attributes;
mod failures;
mod find;
mod list;
mod listing;
mod local;
mod mode;
pub(crate) mod names;
mod quota;
mod show;
mod snapshot;
mod source;
mod transfer;
mod trash;
mod tree;
mod unfinished;

use std::cell::{Cell, RefCell};
use std::ffi::OsString;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use harvestfs_client::{Client, ClientError};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::request_id::RequestId;
use harvestfs_protocol::types::{Attr, Credentials, FileKind};

use self::attributes::Owner;
pub(crate) use self::failures::Incomplete;
pub(crate) use self::find::{CannotTell, DoesNotHold};
use self::mode::ModeChange;
pub(crate) use self::transfer::progress;
use self::tree::Removal;
use self::unfinished::Half;
use crate::cluster::{self, ClusterArgs};
use crate::process;
pub(crate) use crate::signals::Interrupted;
use crate::signals::Interruption;
use crate::units::{self, Size};

/// `harvestfs fs`
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs fs put -r photos /              copy a directory into the cluster\n  \
    harvestfs fs ls -lh /photos\n  \
    harvestfs fs find /photos --name '*.jpg'\n  \
    harvestfs fs get -r /photos .             copy it back\n  \
    harvestfs fs rm -r /photos                to the trash: `harvestfs fs trash ls`\n\n\
    Paths begin at the root of the cluster, whether or not they start with a slash.")]
pub struct FsArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(subcommand)]
    command: FsCommand,
}

#[derive(Debug, Subcommand)]
enum FsCommand {
    /// List a directory.
    #[command(disable_help_flag = true)]
    Ls(list::LsArgs),
    /// Show the attributes of a file or directory.
    #[command(after_help = "Examples:\n  \
        harvestfs fs stat /notes.txt\n  \
        harvestfs fs stat --usage /photos         how much is below it")]
    Stat {
        /// Path in the cluster.
        path: OsString,
        /// Show also what is below a directory, and its quotas.
        #[arg(long)]
        usage: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Print files.
    #[command(after_help = "Example:\n  \
        harvestfs fs cat /notes.txt")]
    Cat {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
    },
    /// Print the end of a file.
    Tail(show::TailArgs),
    /// Copy files from this machine into the cluster.
    #[command(after_help = "Examples:\n  \
        harvestfs fs put notes.txt /notes.txt\n  \
        harvestfs fs put -r photos music /        two directories, with everything below\n  \
        harvestfs fs put -f - /log                standard input, in the place of what is there")]
    Put {
        /// Files and, with -r, directories; `-` is standard input.
        #[arg(required = true)]
        sources: Vec<PathBuf>,
        /// Path in the cluster: an existing directory, or the new name.
        destination: OsString,
        /// Copy directories with everything below.
        #[arg(short, long)]
        recursive: bool,
        /// Replace each file that is there, once all of the new one is stored: who may write to the directory
        /// may, and in a sticky one only who owns either. Hard links keep the old one.
        #[arg(short, long)]
        force: bool,
    },
    /// Copy files from the cluster to this machine.
    #[command(after_help = "Examples:\n  \
        harvestfs fs get /notes.txt .\n  \
        harvestfs fs get -r /photos /tmp")]
    Get {
        /// Paths in the cluster.
        #[arg(required = true)]
        sources: Vec<OsString>,
        /// An existing directory, or the new name.
        destination: PathBuf,
        /// Copy directories with everything below.
        #[arg(short, long)]
        recursive: bool,
        /// Replace files that are there.
        #[arg(short, long)]
        force: bool,
    },
    /// Copy within the cluster; the copy shares the data.
    #[command(after_help = "Examples:\n  \
        harvestfs fs cp /data.bin /data.before\n  \
        harvestfs fs cp -r /photos /shared        to /shared/photos, if /shared is a directory")]
    Cp {
        /// Path in the cluster.
        source: OsString,
        /// Path in the cluster: an existing directory, or the new name.
        destination: OsString,
        /// Copy directories with everything below.
        #[arg(short, long)]
        recursive: bool,
        /// Replace each file that is there, once all of the new one is stored: who may write to the directory
        /// may, and in a sticky one only who owns either. Hard links keep the old one.
        #[arg(short, long)]
        force: bool,
    },
    /// Rename or move.
    #[command(after_help = "Examples:\n  \
        harvestfs fs mv /draft.txt /final.txt\n  \
        harvestfs fs mv /photos /shared           to /shared/photos, if /shared is a directory")]
    Mv {
        /// Path in the cluster.
        source: OsString,
        /// Path in the cluster: an existing directory, or the new name.
        destination: OsString,
    },
    /// Remove, to the trash by default.
    #[command(after_help = "Examples:\n  \
        harvestfs fs rm -r /photos                `harvestfs fs trash restore` brings it back\n  \
        harvestfs fs rm -r --skip-trash /scratch  for good, snapshots must be gone before")]
    Rm {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Remove directories with everything below. Without it, no directory is removed.
        #[arg(short, long)]
        recursive: bool,
        /// Say nothing of what does not exist.
        #[arg(short, long)]
        force: bool,
        /// Remove for good, except where a directory keeps what is removed from it.
        #[arg(long)]
        skip_trash: bool,
    },
    /// Show, restore or purge what was removed to the trash.
    #[command(subcommand)]
    Trash(trash::TrashCommand),
    /// Keep a directory as it is now; show, compare or remove what was kept.
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Make directories.
    #[command(after_help = "Examples:\n  \
        harvestfs fs mkdir /photos\n  \
        harvestfs fs mkdir -p /photos/2026/summer")]
    Mkdir {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Make the directories above too, and accept existing ones.
        #[arg(short, long)]
        parents: bool,
    },
    /// Set the times of files to now; make those that do not exist.
    #[command(after_help = "Example:\n  \
        harvestfs fs touch /done")]
    Touch {
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
    },
    /// Change permissions.
    #[command(after_help = "Examples:\n  \
        harvestfs fs chmod 640 /notes.txt\n  \
        harvestfs fs chmod -R go-w /photos")]
    Chmod {
        /// As for chmod(1): `750`, `u+x,go-w`. Without a class, `+w` and `-w` leave the bits of the umask alone,
        /// and `=rw` does not set them.
        #[arg(allow_hyphen_values = true)]
        mode: ModeChange,
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Everything below as well.
        #[arg(short = 'R', long)]
        recursive: bool,
    },
    /// Change owners and groups. Names are those of this machine.
    #[command(after_help = "Examples:\n  \
        harvestfs fs chown root:root /notes.txt\n  \
        harvestfs fs chown -R :1000 /photos       the group, by its number")]
    Chown {
        /// `USER`, `USER:GROUP` or `:GROUP`, as names or numbers.
        owner: Owner,
        /// Paths in the cluster.
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Everything below as well.
        #[arg(short = 'R', long)]
        recursive: bool,
    },
    /// Change how many replicas the blocks of files have. Of a directory: of what is made in it from now on.
    Setrep(attributes::SetrepArgs),
    /// Print the paths of everything below directories.
    Find(find::FindArgs),
    /// Test what a path is: exit status 0 if it is that, 1 if not, 2 if that cannot be told.
    #[command(arg_required_else_help = true)]
    Test(find::TestArgs),
    /// Show how many bytes there are in and below directories (of files, one copy).
    #[command(disable_help_flag = true)]
    #[command(after_help = "Examples:\n  \
        harvestfs fs du -h /photos\n  \
        harvestfs fs du -sh /photos /shared")]
    Du {
        /// Paths in the cluster.
        #[arg(default_value = "/")]
        paths: Vec<OsString>,
        /// Only the sum of each path, not what is in it.
        #[arg(short, long)]
        summarize: bool,
        /// Sizes in KiB, MiB and so on.
        #[arg(short, long)]
        human_readable: bool,
        /// Print help.
        #[arg(long, action = clap::ArgAction::Help)]
        help: (),
    },
    /// Show what is below a directory and its quotas, or set these.
    Quota(quota::QuotaArgs),
    /// Show how much space there is, as far as quotas leave it.
    #[command(after_help = "Examples:\n  \
        harvestfs fs df\n  \
        harvestfs fs df /photos                   within its quota")]
    Df {
        /// Path in the cluster.
        #[arg(default_value = "/")]
        path: OsString,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show where the replicas of a file's blocks are.
    #[command(after_help = "Example:\n  \
        harvestfs fs locations /notes.txt")]
    Locations {
        /// Path in the cluster.
        path: OsString,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Get the space back that mostly unused blocks take: what files still use of them is copied into
    /// new blocks. Mounts do this in the background.
    #[command(after_help = "Example:\n  \
        harvestfs fs compact --rate 16MiB")]
    Compact {
        /// Most bytes to copy per second.
        #[arg(long, default_value = "64MiB", value_name = "SIZE")]
        rate: Size,
    },
}

/// Runs `harvestfs fs`.
///
/// # Errors
/// When the operation fails. That of `fs test` is [`DoesNotHold`] or [`CannotTell`].
pub fn run(args: &FsArgs) -> anyhow::Result<()> {
    match execute(args) {
        Err(error) if matches!(args.command, FsCommand::Test(_)) && !error.is::<DoesNotHold>() => {
            Err(error.context(CannotTell))
        }
        done => done,
    }
}

fn execute(args: &FsArgs) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let done = runtime.block_on(RequestId::random().scope(async {
        let mut interruption = Interruption::watch().context("cannot wait for signals")?;
        let access = args.cluster.access("client")?;
        let cluster = access.identity.cluster();
        let client = interruption.unless(args.cluster.connect(access)).await?;
        let files = Files {
            cluster,
            client,
            credentials: cluster::own_credentials()?,
            umask: process::umask(),
            is_incomplete: Cell::new(false),
            half: RefCell::default(),
            made: RefCell::default(),
        };
        let result = interruption.unless(files.execute(&args.command)).await;
        let finished = files.finish(&result).await;
        // Written data must be stored even if something else failed.
        let closed = files.client.close().await.context("cannot end the session");
        // Checked last: `Incomplete` prints nothing, so it must not hide another error.
        let done = result.and(finished).and(closed);
        done.and_then(|()| files.all_is_done())
    }));
    // One of its threads may block on a pipe, a terminal or a disk; its result is no longer needed, so do not wait.
    runtime.shutdown_background();
    done
}

/// A session, and on whose behalf.
struct Files {
    /// What tells its mounts from those of others.
    cluster: String,
    client: Client,
    credentials: Credentials,
    /// The bits that new files and directories do not have.
    umask: u16,
    /// Whether something could not be done, which was said.
    is_incomplete: Cell<bool>,
    /// What is being made in the cluster, until it is whole.
    half: RefCell<Option<Half>>,
    /// Directories that were made for a copy, with the modes that they get at the end.
    made: RefCell<Vec<(InodeId, u16)>>,
}

impl Files {
    async fn execute(&self, command: &FsCommand) -> anyhow::Result<()> {
        match command {
            FsCommand::Ls(args) => self.ls(args).await,
            FsCommand::Stat { path, usage, json } => self.stat(path, *usage, *json).await,
            FsCommand::Cat { paths } => {
                for path in paths {
                    self.or_next(self.cat(path).await)?;
                }
                Ok(())
            }
            FsCommand::Tail(args) => self.tail(args).await,
            FsCommand::Put {
                sources,
                destination,
                recursive,
                force,
            } => self.put(sources, destination, *recursive, *force).await,
            FsCommand::Get {
                sources,
                destination,
                recursive,
                force,
            } => self.get(sources, destination, *recursive, *force).await,
            FsCommand::Cp {
                source,
                destination,
                recursive,
                force,
            } => self.cp(source, destination, *recursive, *force).await,
            FsCommand::Mv {
                source,
                destination,
            } => self.mv(source, destination).await,
            FsCommand::Rm {
                paths,
                recursive,
                force,
                skip_trash,
            } => {
                let how = Removal {
                    recursive: *recursive,
                    force: *force,
                    skip_trash: *skip_trash,
                };
                for path in paths {
                    self.or_next(self.rm(path, how).await)?;
                }
                Ok(())
            }
            FsCommand::Trash(command) => self.trash(command).await,
            FsCommand::Snapshot(command) => self.snapshot(command).await,
            FsCommand::Mkdir { paths, parents } => {
                for path in paths {
                    self.or_next(self.mkdir(path, *parents).await)?;
                }
                Ok(())
            }
            FsCommand::Touch { paths } => {
                for path in paths {
                    self.or_next(self.touch(path).await)?;
                }
                Ok(())
            }
            FsCommand::Chmod {
                mode,
                paths,
                recursive,
            } => {
                for path in paths {
                    self.or_next(self.chmod(mode, path, *recursive).await)?;
                }
                Ok(())
            }
            FsCommand::Chown {
                owner,
                paths,
                recursive,
            } => {
                for path in paths {
                    self.or_next(self.chown(*owner, path, *recursive).await)?;
                }
                Ok(())
            }
            FsCommand::Setrep(args) => self.setrep(args).await,
            FsCommand::Find(args) => self.find_below(args).await,
            FsCommand::Test(args) => self.test(args).await,
            FsCommand::Du {
                paths,
                summarize,
                human_readable,
                ..
            } => self.du(paths, *summarize, *human_readable).await,
            FsCommand::Quota(args) => self.quota(args).await,
            FsCommand::Df { path, json } => self.df(path, *json).await,
            FsCommand::Locations { path, json } => self.locations(path, *json).await,
            FsCommand::Compact { rate } => self.compact(*rate).await,
        }
    }

    async fn compact(&self, rate: Size) -> anyhow::Result<()> {
        let done = match self.client.compact(rate.0).await {
            Err(ClientError::Fs(FsError::Busy { .. })) => {
                bail!("a mount or another command is compacting; try again in some minutes")
            }
            result => result?,
        };
        println!(
            "{} of files in mostly unused blocks, {} of them moved ({} copied)",
            count(done.found_pieces, "piece"),
            done.moved_pieces,
            units::human(done.copied_bytes)
        );
        Ok(())
    }

    /// The inode at a path, symlinks followed.
    async fn find(&self, path: &OsString) -> anyhow::Result<Attr> {
        self.client
            .resolve(&self.credentials, path.as_bytes())
            .await
            .with_context(|| path.to_string_lossy().into_owned())
    }

    async fn parent_of(&self, path: &OsString) -> anyhow::Result<(InodeId, Name)> {
        let (parent, name) = self
            .client
            .resolve_parent(&self.credentials, path.as_bytes())
            .await
            .with_context(|| path.to_string_lossy().into_owned())?;
        Ok((parent.ino, name))
    }

    /// Where `source` goes: into `destination` if that is a directory, else under its name.
    async fn place_for(&self, source: &OsString, destination: &OsString) -> anyhow::Result<Target> {
        let found = self
            .client
            .resolve(&self.credentials, destination.as_bytes())
            .await;
        match found {
            Ok(attr) if attr.kind == FileKind::Directory => {
                let name = last_component(source.as_bytes())?;
                Ok(Target {
                    parent: attr.ino,
                    path: below(destination.as_bytes(), name.as_bytes()),
                    name,
                })
            }
            Ok(_) | Err(ClientError::Fs(FsError::NotFound)) => {
                let (parent, name) = self.parent_of(destination).await?;
                Ok(Target {
                    parent,
                    name,
                    path: destination.as_bytes().to_vec(),
                })
            }
            Err(error) => Err(error).with_context(|| destination.to_string_lossy().into_owned()),
        }
    }
}

/// What is made in the cluster.
#[derive(Clone, Debug)]
struct Target {
    /// The directory that it is made in.
    parent: InodeId,
    /// Its name there.
    name: Name,
    /// The whole path, for messages.
    path: Vec<u8>,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&String::from_utf8_lossy(&self.path))
    }
}

/// The path of what is `entry` below `path`, as that was written, as by find(1); the path itself if that is empty.
fn below(path: &[u8], entry: &[u8]) -> Vec<u8> {
    let between: &[u8] = if entry.is_empty() || path.ends_with(b"/") {
        b""
    } else {
        b"/"
    };
    [path, between, entry].concat()
}

/// The name that a path ends with.
fn last_component(path: &[u8]) -> anyhow::Result<Name> {
    let last = path
        .split(|&byte| byte == b'/')
        .rfind(|component| !component.is_empty())
        .unwrap_or_default();
    Name::new(last).with_context(|| format!("`{}`", String::from_utf8_lossy(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_below_others_have_one_slash_between() {
        assert_eq!(below(b"/tree/", b""), b"/tree/");
        assert_eq!(below(b"tree", b""), b"tree");
        assert_eq!(below(b"/", b""), b"/");
        assert_eq!(below(b"tree/", b"a/b"), b"tree/a/b");
        assert_eq!(below(b"/", b"f"), b"/f");
    }

    #[test]
    fn a_path_ends_with_its_last_component() {
        assert_eq!(last_component(b"/a/b/").unwrap().as_bytes(), b"b");
        assert_eq!(last_component(b"b").unwrap().as_bytes(), b"b");
        assert!(last_component(b"/").is_err());
        assert!(last_component(b"a/..").is_err());
    }
}
