//! The page cache: reads, writes and shared mappings of regular files (`fs/fuse/file.c`, `mm/filemap.c`).

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use fuser::{Errno as FuseErrno, FileHandle, WriteFlags};
use harvestfs_fuse_mount::reply::{Reply, Written};
use harvestfs_fuse_mount::{Header, Read, Write};
use harvestfs_protocol::ids::InodeId;
use rand::RngExt;
use rustix::io::Errno;

use super::{Fd, Inode, Kernel, PAGE_BYTES, State, Thread};

/// The most pages that one request reads or writes.
const REQUEST_PAGES_MAX: u64 = 256;

/// A page of a file.
#[derive(Clone, Debug)]
pub struct Page {
    data: Vec<u8>,
    up_to_date: bool,
    pub locked: bool,
    /// It has to be written back.
    pub dirty: bool,
    /// The file was truncated here while the page was locked: the rest becomes zeros when it is unlocked, and
    /// with 0 the page is removed.
    cut: Option<usize>,
}

impl Page {
    fn locked() -> Self {
        Self {
            data: vec![0; PAGE_BYTES as usize],
            up_to_date: false,
            locked: true,
            dirty: false,
            cut: None,
        }
    }
}

/// The header of requests by the kernel itself.
const KERNEL: Header = Header {
    uid: 0,
    gid: 0,
    pid: 0,
};

/// Pages that are being read for a thread that may not wait for all of them.
struct ReadPages {
    kernel: Arc<Kernel>,
    ino: InodeId,
    first: u64,
    end: u64,
    /// The version of attributes when the request was sent.
    asked_at: u64,
}

impl Reply<Vec<Bytes>> for ReadPages {
    fn answer(self, answer: Result<Vec<Bytes>, FuseErrno>) {
        self.kernel.pages_read(&self, answer.ok());
    }
}

impl Kernel {
    /// `fuse_readpages_end`, and the end of `fuse_do_readfolio`.
    fn pages_read(&self, read: &ReadPages, answer: Option<Vec<Bytes>>) {
        let mut state = self.state.lock();
        let from = read.first * PAGE_BYTES;
        let data = answer.map(|pieces| pieces.concat());
        if let Some(data) = &data
            && (data.len() as u64) < read.end * PAGE_BYTES - from
        {
            state.short_read(read.ino, from + data.len() as u64, read.asked_at);
        }
        if let Some(inode) = state.inodes.get_mut(&read.ino) {
            for number in read.first..read.end {
                let page = inode.pages.get_mut(&number).expect("it is locked");
                if let Some(data) = &data {
                    let skip = ((number - read.first) * PAGE_BYTES) as usize;
                    let rest = data.get(skip..).unwrap_or_default();
                    let length = rest.len().min(PAGE_BYTES as usize);
                    page.data[..length].copy_from_slice(&rest[..length]);
                    page.data[length..].fill(0);
                    page.up_to_date = true;
                }
                inode.unlock(number);
            }
        }
        drop(state);
        self.unlocked.notify_waiters();
    }

    /// Waits until `look` finds something. It is called again whenever a page is unlocked.
    async fn when_unlocked<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let unlocked = self.unlocked.notified();
            tokio::pin!(unlocked);
            unlocked.as_mut().enable();
            let found = look(&mut self.state.lock());
            if let Some(found) = found {
                return found;
            }
            unlocked.await;
        }
    }

    /// `invalidate_inode_pages2`.
    pub(super) async fn invalidate_pages(self: &Arc<Self>, ino: InodeId) {
        self.invalidate_range(ino, 0..u64::MAX).await;
    }

    /// `invalidate_inode_pages2_range`, by numbers of pages: waits for those that are locked, and writes back
    /// those that are dirty.
    pub(super) async fn invalidate_range(self: &Arc<Self>, ino: InodeId, pages: Range<u64>) {
        let mut from = pages.start;
        loop {
            let next = self.when_unlocked(|state| {
                let inode = state.inodes.get_mut(&ino);
                let Some(inode) = inode else {
                    return Some(None);
                };
                let Some((&number, page)) = inode.pages.range(from..pages.end).next() else {
                    return Some(None);
                };
                if page.locked {
                    return None;
                }
                if !page.dirty {
                    inode.pages.remove(&number);
                }
                Some(Some((number, inode.pages.contains_key(&number))))
            });
            let Some((number, is_dirty)) = next.await else {
                return;
            };
            if is_dirty {
                self.write_back_page(ino, number).await;
            } else {
                from = number + 1;
            }
        }
    }

    /// Writes back the part of a dirty page that is below the size of the file (`fuse_writepages`).
    async fn write_back_page(self: &Arc<Self>, ino: InodeId, number: u64) {
        let request = self.when_unlocked(|state| {
            let inode = state.inodes.get_mut(&ino);
            let Some(inode) = inode else {
                return Some(None);
            };
            let (size, handle) = (inode.size, inode.write_handles.last().copied());
            let Some(page) = inode.pages.get_mut(&number).filter(|page| page.dirty) else {
                return Some(None);
            };
            if page.locked {
                return None;
            }
            page.dirty = false;
            let length = size.saturating_sub(number * PAGE_BYTES).min(PAGE_BYTES);
            if length == 0 {
                return Some(None);
            }
            page.locked = true;
            Some(Some((handle, page.data[..length as usize].to_vec())))
        });
        let Some((handle, data)) = request.await else {
            return;
        };
        let write = Write {
            ino,
            offset: number * PAGE_BYTES,
            flags: WriteFlags::FUSE_WRITE_CACHE,
            append: false,
            direct: false,
            synced: false,
        };
        let handle = handle.unwrap_or(FileHandle(0));
        let written = self
            .ask::<Written>(|adapter, to| adapter.write(KERNEL, handle, write, &data, to))
            .await;
        {
            let mut state = self.state.lock();
            if let Some(inode) = state.inodes.get_mut(&ino) {
                inode.failed = inode.failed.or(written.err());
                inode.unlock(number);
            }
            state.invalidate_attr(ino);
        }
        self.unlocked.notify_waiters();
    }

    /// Writes back all dirty pages of a file (`filemap_write_and_wait`).
    pub(super) async fn write_back(self: &Arc<Self>, ino: InodeId) -> Result<(), Errno> {
        let dirty: Vec<u64> = {
            let state = self.state.lock();
            let pages = state.inodes.get(&ino).map(|inode| inode.pages.iter());
            let dirty = pages.into_iter().flatten();
            dirty.filter(|it| it.1.dirty).map(|it| *it.0).collect()
        };
        for number in dirty {
            self.write_back_page(ino, number).await;
        }
        // Waits for pages that other tasks write back, too.
        self.when_unlocked(|state| {
            let inode = state.inodes.get(&ino);
            let is_locked = inode.is_some_and(|inode| inode.pages.values().any(|it| it.locked));
            (!is_locked).then_some(())
        })
        .await;
        let mut state = self.state.lock();
        match state.inodes.get_mut(&ino).and_then(|it| it.failed.take()) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    pub(super) async fn flush_all(self: &Arc<Self>) {
        let dirty: Vec<(InodeId, u64)> = {
            let state = self.state.lock();
            let inodes = state.inodes.iter();
            inodes
                .flat_map(|(ino, inode)| {
                    inode
                        .pages
                        .iter()
                        .map(|(number, page)| (*ino, *number, page.dirty))
                })
                .filter(|it| it.2)
                .map(|(ino, number, _)| (ino, number))
                .collect()
        };
        for (ino, number) in dirty {
            self.write_back_page(ino, number).await;
        }
    }
}

impl State {
    /// `fuse_short_read`.
    fn short_read(&mut self, ino: InodeId, end: u64, asked_at: u64) {
        let Some(inode) = self.inodes.get_mut(&ino) else {
            return;
        };
        if asked_at >= inode.attr_version && end < inode.size && !inode.size_is_unstable {
            self.attr_version += 1;
            inode.attr_version = self.attr_version;
            inode.size = end;
        }
    }

    /// Adds missing pages from `first` on, locked, to be read ahead (`page_cache_ra_unbounded`), and returns their end;
    /// `None` if the first one exists or there is nothing to read.
    fn begin_read_ahead(&mut self, ino: InodeId, first: u64) -> Option<u64> {
        let ahead = self.rng.random_range(1..=REQUEST_PAGES_MAX / 8);
        let inode = self.inodes.get_mut(&ino)?;
        let last = inode.size.div_ceil(PAGE_BYTES).min(first + ahead);
        let end = (first..last)
            .take_while(|number| !inode.pages.contains_key(number))
            .count() as u64
            + first;
        for number in first..end {
            inode.pages.insert(number, Page::locked());
        }
        (end > first).then_some(end)
    }
}

impl Inode {
    /// `truncate_pagecache`: removes pages beyond the size, and zeroes the rest of the last page.
    pub(super) fn truncate_pages(&mut self) {
        let size = self.size;
        self.pages.retain(|number, page| {
            let from = number * PAGE_BYTES;
            if from + PAGE_BYTES <= size {
                return true;
            }
            let cut = size.saturating_sub(from) as usize;
            page.dirty &= cut > 0;
            if page.locked {
                page.cut = page.cut.min(Some(cut)).or(Some(cut));
            } else {
                page.data[cut..].fill(0);
            }
            page.locked || cut > 0
        });
    }

    /// Unlocks a page.
    fn unlock(&mut self, number: u64) {
        let Some(page) = self.pages.get_mut(&number) else {
            return;
        };
        page.locked = false;
        if let Some(cut) = page.cut.take() {
            page.data[cut..].fill(0);
            if cut == 0 {
                self.pages.remove(&number);
            }
        }
    }
}

/// The result of a look at a page.
enum Look {
    /// The page is up to date; these bytes were copied.
    Copied(Vec<u8>),
    /// The file ends here.
    End,
    /// The page has to be read, with read-ahead up to this page.
    Ahead(u64),
    /// The page has to be read alone, and is locked for that.
    Alone,
}

impl Thread {
    /// `fuse_file_read_iter`.
    pub async fn read(&self, fd: &Fd, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        if !fd.may_read() {
            return Err(Errno::BADF);
        }
        if fd.is_direct() {
            return self.read_direct(fd, offset, length).await;
        }
        if offset + length as u64 > self.kernel.size(fd.ino) {
            self.update_attributes(fd.ino).await?;
        }
        let mut read = Vec::new();
        while read.len() < length {
            let at = offset + read.len() as u64;
            match self.read_page(fd, at, length - read.len()).await {
                Ok(data) if data.is_empty() => break,
                Ok(data) => read.extend(data),
                Err(error) if read.is_empty() => return Err(error),
                Err(_) => break,
            }
        }
        Ok(read)
    }

    /// `fuse_direct_io`.
    async fn read_direct(&self, fd: &Fd, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        self.kernel.write_back(fd.ino).await?;
        let read = Read {
            ino: fd.ino,
            offset,
            size: length as u32,
            paged: false,
        };
        let (header, handle) = (self.header(), fd.handle);
        let answer = self
            .kernel
            .ask::<Vec<Bytes>>(|adapter, to| adapter.read(header, handle, read, to));
        Ok(answer.await?.concat())
    }

    /// `filemap_read`, of one page. The result is empty at the end of the file.
    async fn read_page(&self, fd: &Fd, at: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let (kernel, number) = (&self.kernel, at / PAGE_BYTES);
        loop {
            let look = kernel.when_unlocked(|state| {
                let Some(inode) = state.inodes.get_mut(&fd.ino).filter(|it| at < it.size) else {
                    return Some(Look::End);
                };
                let size = inode.size;
                match inode.pages.get_mut(&number) {
                    Some(page) if page.up_to_date => {
                        let skip = (at % PAGE_BYTES) as usize;
                        let end = (size - number * PAGE_BYTES).min(PAGE_BYTES) as usize;
                        let end = end.min(skip + length);
                        Some(Look::Copied(page.data[skip..end].to_vec()))
                    }
                    Some(page) if page.locked => None,
                    Some(page) => {
                        page.locked = true;
                        Some(Look::Alone)
                    }
                    None => state.begin_read_ahead(fd.ino, number).map(Look::Ahead),
                }
            });
            match look.await {
                Look::Copied(data) => return Ok(data),
                Look::End => return Ok(Vec::new()),
                Look::Ahead(end) => self.request_pages(fd, number, end).await,
                Look::Alone => self.read_alone(fd, number).await?,
            }
        }
    }

    fn pages_request(&self, fd: &Fd, first: u64, end: u64) -> (ReadPages, Read) {
        let pages = ReadPages {
            kernel: Arc::clone(&self.kernel),
            ino: fd.ino,
            first,
            end,
            asked_at: self.kernel.state.lock().attr_version,
        };
        let read = Read {
            ino: fd.ino,
            offset: first * PAGE_BYTES,
            size: ((end - first) * PAGE_BYTES) as u32,
            paged: true,
        };
        (pages, read)
    }

    /// `fuse_readahead`: threads that wait for the pages notice when they are unlocked.
    async fn request_pages(&self, fd: &Fd, first: u64, end: u64) {
        let (pages, read) = self.pages_request(fd, first, end);
        self.kernel.pause().await;
        let adapter = self.kernel.adapter();
        adapter.read(self.header(), fd.handle, read, pages);
    }

    /// `fuse_read_folio`.
    async fn read_alone(&self, fd: &Fd, number: u64) -> Result<(), Errno> {
        let (pages, read) = self.pages_request(fd, number, number + 1);
        let (header, handle) = (self.header(), fd.handle);
        let answer = self
            .kernel
            .ask::<Vec<Bytes>>(|adapter, to| adapter.read(header, handle, read, to))
            .await;
        self.kernel
            .pages_read(&pages, answer.as_ref().ok().cloned());
        answer.map(|_| ())
    }

    /// `fuse_file_write_iter`. A file that was opened for appending is written at its end.
    pub async fn write(&self, fd: &Fd, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        if !fd.may_write() {
            return Err(Errno::BADF);
        }
        let lock = self.kernel.inode_lock(fd.ino)?;
        let _locked = lock.write().await;
        if fd.is_direct() {
            return self.write_direct(fd, data).await;
        }
        let end = offset + data.len() as u64;
        {
            let mut state = self.kernel.state.lock();
            if let Some(inode) = state.inodes.get_mut(&fd.ino) {
                inode.size_is_unstable = end > inode.size;
            }
        }
        let mut written = 0;
        let mut result = Ok(());
        while written < data.len() && result.is_ok() {
            let at = offset + written as u64;
            match self.write_pages(fd, at, &data[written..]).await {
                Ok(bytes) => written += bytes,
                Err(error) => result = Err(error),
            }
        }
        let mut state = self.kernel.state.lock();
        state.written(fd.ino, offset + written as u64, written);
        if let Some(inode) = state.inodes.get_mut(&fd.ino) {
            inode.size_is_unstable = false;
        }
        match result {
            Err(error) if written == 0 => Err(error),
            _ => Ok(written),
        }
    }

    /// `fuse_direct_write_iter` of a file whose appends the mount places.
    async fn write_direct(&self, fd: &Fd, data: &[u8]) -> Result<usize, Errno> {
        self.kernel.write_back(fd.ino).await?;
        let offset = self.kernel.size(fd.ino);
        let end = (offset + data.len() as u64).div_ceil(PAGE_BYTES);
        let pages = offset / PAGE_BYTES..end;
        self.kernel.invalidate_range(fd.ino, pages.clone()).await;
        let bytes = self.send_write(fd, offset, data).await?;
        // Pages that were read in the meantime end at the former end of the file.
        self.kernel.invalidate_range(fd.ino, pages).await;
        let mut state = self.kernel.state.lock();
        state.written(fd.ino, offset + bytes as u64, bytes);
        Ok(bytes)
    }

    async fn send_write(&self, fd: &Fd, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        let write = Write {
            ino: fd.ino,
            offset,
            flags: WriteFlags::empty(),
            append: fd.appends(),
            direct: false,
            synced: false,
        };
        let (header, handle) = (self.header(), fd.handle);
        let Written(bytes) = self
            .kernel
            .ask(|adapter, to| adapter.write(header, handle, write, data, to))
            .await?;
        Ok(bytes as usize)
    }

    /// `fuse_fill_write_pages` and `fuse_send_write_pages`: one request, up to and including the first page that is not
    /// up to date and is written only in part, which stays locked until the answer.
    async fn write_pages(&self, fd: &Fd, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        let (mut filled, mut locked) = (0, None);
        while filled < data.len() && locked.is_none() {
            let at = offset + filled as u64;
            let (number, skip) = (at / PAGE_BYTES, (at % PAGE_BYTES) as usize);
            if number - offset / PAGE_BYTES == REQUEST_PAGES_MAX {
                break;
            }
            let rest = &data[filled..];
            let length = rest.len().min(PAGE_BYTES as usize - skip);
            let is_done = self.kernel.when_unlocked(|state| {
                let inode = state.inodes.get_mut(&fd.ino)?;
                let page = inode.pages.entry(number).or_insert_with(|| Page {
                    locked: false,
                    ..Page::locked()
                });
                if page.locked {
                    return None;
                }
                page.data[skip..skip + length].copy_from_slice(&rest[..length]);
                page.up_to_date |= length == PAGE_BYTES as usize;
                page.locked = !page.up_to_date;
                Some(page.up_to_date)
            });
            if !is_done.await {
                locked = Some(number);
            }
            filled += length;
        }
        let sent = self.send_write(fd, offset, &data[..filled]).await;
        {
            let mut state = self.kernel.state.lock();
            let inode = state.inodes.get_mut(&fd.ino);
            if let Some(inode) = inode {
                if sent.is_err() {
                    let end = (offset + filled as u64).div_ceil(PAGE_BYTES);
                    for (_, page) in inode.pages.range_mut(offset / PAGE_BYTES..end) {
                        page.up_to_date = false;
                    }
                }
                if let Some(number) = locked {
                    inode.unlock(number);
                }
            }
        }
        self.kernel.unlocked.notify_waiters();
        sent
    }

    /// A write through a shared mapping, within one page and the size of the file
    /// (`fuse_page_mkwrite`). Returns how many bytes are below the size.
    pub async fn write_mapped(&self, fd: &Fd, offset: u64, data: &[u8]) -> Result<usize, Errno> {
        loop {
            let there = self.read_page(fd, offset, data.len()).await?;
            if there.is_empty() {
                return Ok(0);
            }
            let number = offset / PAGE_BYTES;
            let written = self.kernel.when_unlocked(|state| {
                let inode = state.inodes.get_mut(&fd.ino);
                let page = inode.and_then(|inode| inode.pages.get_mut(&number));
                match page {
                    Some(page) if page.locked => None,
                    Some(page) if page.up_to_date => {
                        let skip = (offset % PAGE_BYTES) as usize;
                        let length = there.len();
                        page.data[skip..skip + length].copy_from_slice(&data[..length]);
                        page.dirty = true;
                        Some(Some(length))
                    }
                    // The page was dropped in the meantime: the access is repeated.
                    _ => Some(None),
                }
            });
            if let Some(written) = written.await {
                return Ok(written);
            }
        }
    }
}

impl State {
    /// `fuse_write_update_attr`.
    fn written(&mut self, ino: InodeId, end: u64, bytes: usize) {
        self.bump(ino);
        if let Some(inode) = self.inodes.get_mut(&ino)
            && bytes > 0
        {
            inode.size = inode.size.max(end);
        }
        self.invalidate_attr(ino);
    }
}
