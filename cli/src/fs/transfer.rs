//! `harvestfs fs put` and `get`: copy between this machine and the cluster.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File as LocalFile, Metadata};
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use harvestfs_client::{ClientError, File, OpenFlags};
use harvestfs_fuse_mount::mount_table::{self, MOUNT_TYPE};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, FileKind};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{fstat, major, minor};
use tokio::task::spawn_blocking;

use super::failures::OfItsPath;
use super::local::{Directory, FILE_BITS};
use super::source::{self, Source};
use super::{Files, Target, below, last_component};

/// Size of a read request in bytes: large enough that the client reads ahead.
pub const READ_BYTES: usize = 1 << 20;

/// How files are copied.
#[derive(Clone, Copy)]
struct Copying<'a> {
    /// Also copies directories, with everything below them.
    recursive: bool,
    /// Replaces existing files.
    replace: bool,
    progress: &'a ProgressBar,
}

/// An entry that is being copied into the cluster.
struct Copied {
    /// Its path on this machine, for messages.
    path: PathBuf,
    target: Target,
    /// The device of its parent directory: the cluster may be mounted anywhere below the source.
    device_above: Option<u64>,
}

impl Files {
    pub(super) async fn put(
        &self,
        sources: &[PathBuf],
        destination: &OsString,
        recursive: bool,
        replace: bool,
    ) -> anyhow::Result<()> {
        // Scanning a large tree takes long, and is needed only for a progress bar.
        let total_bytes = shows_progress().then(|| total_bytes_here(sources, recursive));
        let progress = progress(total_bytes.flatten());
        let how = Copying {
            recursive,
            replace,
            progress: &progress,
        };
        for source in sources {
            let cannot_copy = || format!("cannot copy {}", source.display());
            let name = name_of(source).with_context(cannot_copy)?;
            let target = self.place_for(&name, destination).await?;
            // The target in an existing directory would have a longer path.
            if sources.len() > 1 && target.path == destination.as_bytes() {
                bail!(
                    "{} is not a directory, so that only one source can go there",
                    destination.to_string_lossy()
                );
            }
            self.put_one(source, target, how)
                .await
                .with_context(cannot_copy)?;
        }
        progress.finish_and_clear();
        Ok(())
    }

    async fn put_one(&self, source: &Path, target: Target, how: Copying<'_>) -> anyhow::Result<()> {
        if source == Path::new("-") {
            let mode = 0o644 & !self.umask;
            return self.put_stream(io::stdin(), &target, mode, how).await;
        }
        self.put_entries(source, target, how).await
    }

    /// Copies what the user names and, if it is a directory, everything below it.
    async fn put_entries(
        &self,
        source: &Path,
        target: Target,
        how: Copying<'_>,
    ) -> anyhow::Result<()> {
        let mut found = Source::named(source)?;
        let mut copied = Copied {
            path: source.to_owned(),
            target,
            device_above: None,
        };
        let mut pending: Vec<(Rc<LocalFile>, Copied)> = Vec::new();
        loop {
            let Copied { path, target, .. } = &copied;
            match found {
                Source::Directory(directory, metadata) => {
                    if !how.recursive {
                        bail!("it is a directory; copy it with -r");
                    }
                    let device = Some(metadata.dev());
                    if device != copied.device_above {
                        self.refuse_into_itself(&directory, path, target).await?;
                    }
                    let mode = mode_of(&metadata) & !self.umask;
                    let parent = self.directory(target, mode).await?;
                    let directory = Rc::new(directory);
                    for name in source::names(&directory)? {
                        let entry = Copied {
                            path: path.join(OsStr::from_bytes(&name)),
                            target: Target {
                                parent,
                                name: Name::new(&name)?,
                                path: below(&target.path, &name),
                            },
                            device_above: device,
                        };
                        pending.push((directory.clone(), entry));
                    }
                }
                Source::Symlink(leads_to) => {
                    self.make_symlink(target, &leads_to, how.replace).await?;
                }
                Source::File(file, metadata) => {
                    let mode = mode_of(&metadata) & FILE_BITS & !self.umask;
                    self.put_stream(file, target, mode, how).await?;
                }
                Source::Other if path == source => {
                    bail!("it is neither file, directory nor symlink");
                }
                Source::Other => left_out(path),
            }
            let Some((above, next)) = pending.pop() else {
                return Ok(());
            };
            let name = OsStr::from_bytes(next.target.name.as_bytes());
            found =
                Source::within(&above, name).with_context(|| next.path.display().to_string())?;
            copied = next;
        }
    }

    /// Refuses to copy a directory into itself: the copies would be found there and copied again, forever.
    async fn refuse_into_itself(
        &self,
        directory: &LocalFile,
        path: &Path,
        target: &Target,
    ) -> anyhow::Result<()> {
        if let Some(ino) = self.seen_through_mount(directory)?
            && self.is_within(target.parent, ino).await?
        {
            let source = path.display();
            bail!("{source} would be copied into itself, to {target}");
        }
        Ok(())
    }

    async fn put_stream(
        &self,
        source: impl Read + AsFd + Send + 'static,
        target: &Target,
        mode: u16,
        how: Copying<'_>,
    ) -> anyhow::Result<()> {
        let copied = if how.replace {
            self.seen_through_mount(&source)?
        } else {
            None
        };
        self.make_file(target, mode, how.replace, copied, async |file| {
            write_all(file, source, how.progress).await
        })
        .await
    }

    /// The inode in the cluster of an open file on this machine, if the file is on a mount of the cluster.
    fn seen_through_mount(&self, file: &impl AsFd) -> anyhow::Result<Option<InodeId>> {
        let stat = fstat(file)?;
        let device = format!("{}:{}", major(stat.st_dev), minor(stat.st_dev));
        let source = mount_table::source_of(&self.cluster);
        let mounts = mount_table::mounts().context("cannot tell what is mounted")?;
        let is_ours = mounts
            .iter()
            .any(|it| it.device == device && it.kind == MOUNT_TYPE && it.source == source);
        Ok(is_ours.then_some(InodeId(stat.st_ino)))
    }

    pub(super) async fn get(
        &self,
        sources: &[OsString],
        destination: &Path,
        recursive: bool,
        replace: bool,
    ) -> anyhow::Result<()> {
        let into_directory = destination.is_dir();
        if sources.len() > 1 && !into_directory {
            bail!("{} is not a directory", destination.display());
        }
        let mut total_bytes = 0;
        let mut starts = Vec::new();
        for source in sources {
            match self.start_of(source, recursive).await {
                Ok((attr, bytes)) => {
                    total_bytes += bytes;
                    starts.push((source, attr));
                }
                failed => self.or_next(failed.map(drop))?,
            }
        }
        let progress = progress(Some(total_bytes));
        let how = Copying {
            recursive,
            replace,
            progress: &progress,
        };
        for (source, attr) in starts {
            let copied = if into_directory {
                match last_component(source.as_bytes()) {
                    Ok(name) => {
                        let target = destination.join(OsStr::from_bytes(name.as_bytes()));
                        self.get_one(source, &attr, &target, how).await
                    }
                    Err(error) => Err(error),
                }
            } else {
                self.get_as(source, &attr, destination, how).await
            };
            let context = || format!("cannot copy {}", source.to_string_lossy());
            self.or_next(copied.with_context(context))?;
        }
        progress.finish_and_clear();
        Ok(())
    }

    /// The start of a copy, and its length in bytes, which is counted only if a progress bar is shown.
    async fn start_of(&self, source: &OsString, recursive: bool) -> anyhow::Result<(Attr, u64)> {
        let attr = self.find(source).await?;
        let shown = || source.to_string_lossy().into_owned();
        if attr.kind != FileKind::Directory {
            let bytes = attr.size_bytes;
            return Ok((attr, bytes));
        }
        if !recursive {
            bail!(OfItsPath(format!(
                "{} is a directory; copy it with -r",
                shown()
            )));
        }
        if !shows_progress() {
            return Ok((attr, 0));
        }
        let bytes = match self.total_bytes_below(attr.ino).await {
            // This is reported when it would be copied.
            Err(error) if error.is_gone() => 0,
            below => below.with_context(shown)?,
        };
        Ok((attr, bytes))
    }

    async fn total_bytes_below(&self, directory: InodeId) -> Result<u64, ClientError> {
        let mut total_bytes = 0;
        let mut walk = self.client.walk(&self.credentials, directory);
        loop {
            match walk.next().await {
                Ok(Some(entry)) => total_bytes += entry.attr.size_bytes,
                Ok(None) => return Ok(total_bytes),
                // This is reported when it would be copied.
                Err(ClientError::Fs(FsError::PermissionDenied)) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Copies to a path that the user names, following symlinks like cp(1).
    async fn get_as(
        &self,
        source: &OsString,
        attr: &Attr,
        path: &Path,
        how: Copying<'_>,
    ) -> anyhow::Result<()> {
        let is_special = fs::metadata(path).is_ok_and(|there| !there.is_file());
        if attr.kind == FileKind::Regular && is_special {
            if !how.replace {
                bail!("{} exists; write to it with -f", path.display());
            }
            // A device or a pipe: it has no content to replace, and its mode is not ours to change.
            let mut special = LocalFile::options().write(true).open(path)?;
            return self.get_content(attr, &mut special, how).await;
        }
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        self.get_one(source, attr, &path, how).await
    }

    /// Copies a file, or everything at and below a directory. An existing symlink of the target's name is not followed.
    async fn get_one(
        &self,
        source: &OsString,
        attr: &Attr,
        target: &Path,
        how: Copying<'_>,
    ) -> anyhow::Result<()> {
        let in_target = || target.display().to_string();
        let above = Directory::above(target).with_context(in_target)?;
        if attr.kind != FileKind::Directory {
            let got = self.get_entry(attr, &above, target, how).await;
            return got.map(drop).with_context(in_target);
        }
        if let Some(ino) = self.seen_through_mount(&above)?
            && self.is_within(ino, attr.ino).await?
        {
            bail!("it would be copied into itself, to {}", target.display());
        }
        // The parent of the target, and the directories from the target to the current position of the walk.
        let mut within = vec![above];
        // Depth of a directory that could not be created. Its contents in the cluster are skipped.
        let mut unmade: Option<usize> = None;
        let mut walk = self.listing(source, attr.ino);
        while let Some(entry) = walk.next().await? {
            let path = if entry.path.is_empty() {
                target.to_owned()
            } else {
                target.join(OsStr::from_bytes(&entry.path))
            };
            // The walk visits a directory before its contents.
            let names = entry.path.split(|&byte| byte == b'/');
            let depth = names.filter(|name| !name.is_empty()).count();
            if unmade.is_some_and(|above| depth > above) {
                continue;
            }
            unmade = None;
            for mut left in within.drain(depth + 1..).rev() {
                left.finish().with_context(in_target)?;
            }
            let above = &within[depth];
            let got = self.get_entry(&entry.attr, above, &path, how).await;
            match got.with_context(|| format!("cannot copy to {}", path.display())) {
                Ok(directory) => within.extend(directory),
                // There is nothing to copy besides its contents.
                Err(error) if depth == 0 => return Err(error),
                failed => {
                    self.or_next(failed.map(drop))?;
                    if entry.attr.kind == FileKind::Directory {
                        unmade = Some(depth);
                    }
                }
            }
        }
        for mut left in within.into_iter().rev() {
            left.finish().with_context(in_target)?;
        }
        Ok(())
    }

    /// Creates the entry at `path` in its parent `above`. Returns the new directory if the entry is one.
    async fn get_entry(
        &self,
        attr: &Attr,
        above: &Directory,
        path: &Path,
        how: Copying<'_>,
    ) -> anyhow::Result<Option<Directory>> {
        let name = path.file_name().context("it does not end with a name")?;
        let mode = attr.permission_bits() & !self.umask;
        match attr.kind {
            FileKind::Directory => return Ok(Some(above.directory(name, mode)?)),
            FileKind::Symlink => {
                let target = self.client.readlink(&self.credentials, attr.ino).await?;
                above.symlink(name, &target, how.replace)?;
            }
            FileKind::Regular => {
                let mut local = above.file(name, how.replace)?;
                self.get_content(attr, local.content(), how).await?;
                local.finish(mode)?;
            }
            _ => left_out(path),
        }
        Ok(None)
    }

    async fn get_content(
        &self,
        attr: &Attr,
        local: &mut LocalFile,
        how: Copying<'_>,
    ) -> anyhow::Result<()> {
        let file = self
            .client
            .open(&self.credentials, attr.ino, OpenFlags::READ)
            .await?;
        let mut offset = 0;
        loop {
            let pieces = file.read_pieces(offset, READ_BYTES).await?;
            if pieces.is_empty() {
                return Ok(());
            }
            for piece in pieces {
                local.write_all(&piece)?;
                offset += piece.len() as u64;
                how.progress.inc(piece.len() as u64);
            }
        }
    }
}

/// Copies the whole source, and waits until it is on stable storage, since a command without a message has succeeded.
async fn write_all(
    file: &File,
    mut source: impl Read + Send + 'static,
    progress: &ProgressBar,
) -> anyhow::Result<()> {
    let mut offset = 0;
    loop {
        // On another thread, so that a signal is noticed while a pipe or a terminal blocks.
        let read = move || {
            let mut buffer = Vec::with_capacity(READ_BYTES);
            let mut part = source.by_ref().take(READ_BYTES as u64);
            part.read_to_end(&mut buffer).map(|_| (source, buffer))
        };
        let (rest, buffer) = spawn_blocking(read).await??;
        source = rest;
        if buffer.is_empty() {
            file.sync().await?;
            return Ok(());
        }
        let length = buffer.len() as u64;
        file.write(offset, Bytes::from(buffer)).await?;
        offset += length;
        progress.inc(length);
    }
}

/// A path that ends with the name that the copy of a source gets.
fn name_of(source: &Path) -> io::Result<OsString> {
    if source == Path::new("-") {
        return Ok("stdin".into());
    }
    match source.file_name() {
        Some(name) => Ok(name.to_owned()),
        // `.`, `..` and paths that end with these; only the root has no name.
        None => Ok(fs::canonicalize(source)?.into_os_string()),
    }
}

fn left_out(path: &Path) {
    tracing::warn!(path = %path.display(), "left out: neither file, directory nor symlink");
}

fn mode_of(metadata: &Metadata) -> u16 {
    (metadata.permissions().mode() & 0o7777) as u16
}

/// Total length in bytes of the sources; `None` when it cannot be determined in advance.
fn total_bytes_here(sources: &[PathBuf], recursive: bool) -> Option<u64> {
    let mut total_bytes = 0;
    let mut pending = sources.to_vec();
    while let Some(path) = pending.pop() {
        // What cannot be read is reported, with its name, when it is copied.
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            return None;
        };
        if metadata.is_file() {
            total_bytes += metadata.len();
        } else if metadata.is_dir() && recursive {
            pending.extend(
                fs::read_dir(&path)
                    .ok()?
                    .filter_map(|entry| Some(entry.ok()?.path())),
            );
        }
    }
    Some(total_bytes)
}

/// Whether a progress bar is visible.
fn shows_progress() -> bool {
    io::stderr().is_terminal()
}

/// A progress bar on standard error, hidden if that is not a terminal.
pub fn progress(total_bytes: Option<u64>) -> ProgressBar {
    if !shows_progress() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match total_bytes {
        Some(total_bytes) => (
            ProgressBar::new(total_bytes),
            "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ),
        None => (
            ProgressBar::new_spinner(),
            "{spinner} {bytes} {bytes_per_sec}",
        ),
    };
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_has_the_name_of_its_source() {
        let name = |source: &str| name_of(source.as_ref()).unwrap();
        assert_eq!(name("-"), "stdin");
        assert_eq!(name("./-"), "-");
        assert_eq!(name("photos/"), "photos");
        assert_eq!(name("photos/."), "photos");
        let here = std::env::current_dir().unwrap();
        assert_eq!(name("."), here.as_os_str());
        assert_eq!(name(".."), here.parent().unwrap().as_os_str());
        assert!(last_component(name("/").as_bytes()).is_err());
        assert!(name_of("no-such-directory/..".as_ref()).is_err());
    }
}
