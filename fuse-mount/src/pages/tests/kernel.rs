//! A model of how Linux handles the pages and the size of one file (fs/fuse/{file,inode,dir}.c), with requests that
//! take any time to reach the mount, and answers that take effect later. Random histories of reads, writes and changes
//! by other mounts, with one check: an offset that the kernel filled with zeros is never below its size, not even for
//! a moment.

use std::collections::{BTreeMap, VecDeque};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::kernel_requests::{Drop, Kind, Page, Request, Stage, Thread};
use super::*;
use crate::pages::in_flight::PAGE_BYTES;

const PAGES_MAX: u64 = 5;
const THREADS: u32 = 3;
/// The mount acts on a decision within this time.
const MOUNT_STEP_MAX: Duration = Duration::from_millis(4);
const SEEDS: u64 = 20_000;
/// Number of steps shown of a failing history.
const TRACED: usize = 60;
/// A thread that was answered runs within this time.
const RUNS_WITHIN: Duration = Duration::from_millis(200);

struct Model {
    rng: SmallRng,
    now: Instant,
    pages: Pages,
    /// The file's actual size, as the mount sees it.
    true_size: u64,
    size: u64,
    version: u64,
    inode_version: u64,
    unstable: u32,
    inode_locked: bool,
    cached: BTreeMap<u64, Page>,
    requests: Vec<Request>,
    threads: Vec<Thread>,
    notices: VecDeque<bool>,
    drop: Option<Drop>,
    /// How many steps out of 6 are changes of the file by others.
    changes: u32,
    reads: u64,
    interrupted: u64,
    /// The most recent events, to investigate a failure.
    trace: VecDeque<String>,
}

impl Model {
    fn new(seed: u64) -> Self {
        Self {
            rng: SmallRng::seed_from_u64(seed),
            now: Instant::now(),
            pages: open(20),
            true_size: 20,
            size: 20,
            version: 1,
            inode_version: 1,
            unstable: 0,
            inode_locked: false,
            cached: BTreeMap::new(),
            requests: Vec::new(),
            threads: vec![Thread::Idle; THREADS as usize],
            notices: VecDeque::new(),
            drop: None,
            changes: 1 + (seed % 6) as u32,
            reads: 0,
            interrupted: 0,
            trace: VecDeque::new(),
        }
    }

    fn note(&mut self, what: std::fmt::Arguments) {
        if self.trace.len() == TRACED {
            self.trace.pop_front();
        }
        let (size, version) = (self.size, self.inode_version);
        self.trace.push_back(format!(
            "{what} [size {size}, version {version}, true size {}]",
            self.true_size
        ));
    }

    fn bump(&mut self) {
        self.version += 1;
        self.inode_version = self.version;
    }

    /// `truncate_pagecache`. A page that is being written is dropped as a whole here; the kernel would fill
    /// its end with zeros.
    fn truncate_pages(&mut self) {
        let size = self.size;
        for (number, page) in &mut self.cached {
            if number * PAGE_BYTES >= size {
                page.doomed = true;
            } else if (number + 1) * PAGE_BYTES > size {
                if page.locked {
                    page.doomed = true;
                } else {
                    page.zeros_from = page.zeros_from.map(|from| from.min(size));
                }
            }
        }
        self.remove_doomed();
    }

    /// `invalidate_inode_pages2`.
    fn invalidate_pages(&mut self) {
        for page in self.cached.values_mut() {
            page.doomed = true;
        }
        self.remove_doomed();
    }

    fn remove_doomed(&mut self) {
        self.check();
        self.cached.retain(|_, page| page.locked || !page.doomed);
    }

    fn check(&self) {
        for (number, page) in &self.cached {
            if let Some(zeros_from) = page.zeros_from {
                let visible = self.size.min((number + 1) * PAGE_BYTES);
                let from = zeros_from.max(number * PAGE_BYTES);
                assert!(
                    from >= visible,
                    "zeros from {from} to {visible} can be read:\n{}",
                    self.trace
                        .iter()
                        .map(|line| format!("  {line}\n"))
                        .collect::<String>()
                );
            }
        }
    }

    fn ask(&mut self, kind: Kind, thread: u32) {
        self.note(format_args!("{thread} asks: {kind:?}"));
        let range = match kind {
            Kind::Read { first, end, .. } => first * PAGE_BYTES..end * PAGE_BYTES,
            _ => 0..0,
        };
        self.requests.push(Request {
            kind,
            thread,
            version: self.version,
            read: self.pages.read(range, thread),
            stage: Stage::Asked,
            until: None,
        });
    }

    fn run_thread(&mut self, index: usize) {
        let thread = index as u32 + 1;
        match self.threads[index] {
            Thread::Waits => {}
            Thread::Reading(number) => self.read_page(index, number),
            Thread::Idle => match self.rng.random_range(0..10) {
                0..6 => {
                    let number = self.rng.random_range(0..PAGES_MAX);
                    if number * PAGE_BYTES < self.size {
                        self.reads += 1;
                        self.threads[index] = Thread::Reading(number);
                    }
                }
                6 => self.wait_for(index, Kind::GetAttr),
                7 if !self.inode_locked => {
                    self.inode_locked = true;
                    self.wait_for(index, Kind::Chmod);
                }
                8 if !self.inode_locked => {
                    let end = self.rng.random_range(1..=PAGES_MAX * PAGE_BYTES);
                    let mut written = self.cached.range_mut(..end.div_ceil(PAGE_BYTES));
                    if written.all(|(_, page)| !page.locked) {
                        self.write_pages(end);
                        self.inode_locked = true;
                        self.wait_for(index, Kind::Write { end });
                    }
                }
                9 if thread > 1 && !self.inode_locked => {
                    let from = self.size;
                    let end = from + self.rng.random_range(1..PAGE_BYTES);
                    if end <= PAGES_MAX * PAGE_BYTES && self.drop_range(from, end) {
                        self.inode_locked = true;
                        self.wait_for(index, Kind::Append { from, end });
                    }
                }
                9 if thread == 1 && self.rng.random_range(0..4) == 0 => {
                    self.wait_for(index, Kind::Truncate)
                }
                _ => {}
            },
        }
    }

    fn wait_for(&mut self, index: usize, kind: Kind) {
        self.ask(kind, index as u32 + 1);
        self.threads[index] = Thread::Waits;
    }

    /// `fuse_fill_write_pages`: the pages stay locked until it is answered.
    fn write_pages(&mut self, end: u64) {
        self.unstable += u32::from(end > self.size);
        for number in 0..end.div_ceil(PAGE_BYTES) {
            let page = self.cached.entry(number).or_default();
            page.locked = true;
            let is_whole = (number + 1) * PAGE_BYTES <= end;
            if is_whole || page.zeros_from.is_some() {
                page.zeros_from = page.zeros_from.max(Some(end));
            }
        }
    }

    /// `invalidate_inode_pages2_range`, unless it would wait for a page that is locked.
    fn drop_range(&mut self, from: u64, end: u64) -> bool {
        let pages = from / PAGE_BYTES..end.div_ceil(PAGE_BYTES);
        let mut dropped = self.cached.range(pages.clone());
        let may = dropped.all(|(_, page)| !page.locked);
        if may {
            self.cached.retain(|number, _| !pages.contains(number));
        }
        may
    }

    /// `filemap_get_pages`.
    fn read_page(&mut self, index: usize, number: u64) {
        let thread = index as u32 + 1;
        if number * PAGE_BYTES >= self.size {
            self.threads[index] = Thread::Idle;
            return;
        }
        match self.cached.get_mut(&number) {
            Some(page) if page.zeros_from.is_some() => self.threads[index] = Thread::Idle,
            Some(page) if page.locked => {}
            Some(page) => {
                page.locked = true;
                let read = Kind::Read {
                    first: number,
                    end: number + 1,
                    ahead: false,
                };
                self.wait_for(index, read);
            }
            None => {
                let last = self.size.div_ceil(PAGE_BYTES);
                let absent = (number..last).take_while(|it| !self.cached.contains_key(it));
                let end = number + absent.count() as u64;
                for it in number..end {
                    self.cached.entry(it).or_default().locked = true;
                }
                let read = Kind::Read {
                    first: number,
                    end,
                    ahead: true,
                };
                self.ask(read, thread);
            }
        }
    }

    /// Another mount changed the file.
    fn change_elsewhere(&mut self) {
        self.true_size = self.rng.random_range(0..=PAGES_MAX * PAGE_BYTES);
        self.note(format_args!("another mount changes the file"));
        self.notices.push_back(false);
    }

    /// One step of `Shared::forget_inode`.
    fn notify(&mut self) {
        match self.notices.front_mut() {
            Some(begun) if !*begun => *begun = self.pages.begin_notice(self.now),
            Some(_) => {
                self.notices.pop_front();
                self.note(format_args!("notice"));
                self.bump();
                self.pages.end_notice();
                self.want_drop();
            }
            None => {}
        }
    }

    fn want_drop(&mut self) {
        if self.pages.want_drop() {
            self.drop = Some(Drop::Spawned);
        }
    }

    fn want_zeros_dropped(&mut self) {
        if self.pages.want_zeros_dropped() {
            self.drop = Some(Drop::Spawned);
        }
    }

    /// One step of `Notices::drop_pages`, and of the kernel's side of it.
    fn drop_pages(&mut self) {
        self.drop = match self.drop.take() {
            None => None,
            Some(Drop::Spawned) => Some(match self.pages.begin_drop(self.now) {
                Some(from) => Drop::Begun(self.now + DROP_BEGINS_MAX - MS, from / PAGE_BYTES),
                None => Drop::Spawned,
            }),
            Some(Drop::Begun(_, from)) => {
                self.bump();
                self.note(format_args!("drop"));
                Some(Drop::At(from))
            }
            Some(Drop::At(from)) => match self.cached.range(from..).next() {
                None if self.pages.end_drop() => Some(Drop::Spawned),
                None => None,
                Some((_, page)) if page.locked => Some(Drop::At(from)),
                Some((&number, _)) => {
                    self.cached.remove(&number);
                    Some(Drop::At(number + 1))
                }
            },
        };
    }

    /// Takes the next step of a request. Returns whether the request is complete.
    fn step(&mut self, index: usize) -> bool {
        let request = &self.requests[index];
        let (kind, thread, read) = (request.kind, request.thread, request.read.clone());
        let waiter = Waiter {
            thread,
            locks_inode: kind != Kind::Truncate,
        };
        let next = match request.stage.clone() {
            Stage::Asked => {
                match kind {
                    Kind::Read { .. } => {}
                    Kind::Write { end } => self.true_size = self.true_size.max(end),
                    Kind::Append { from, end } => self.true_size += end - from,
                    Kind::Truncate => self.true_size = 0,
                    Kind::GetAttr | Kind::Chmod => {}
                }
                if matches!(kind, Kind::GetAttr | Kind::Chmod | Kind::Truncate) {
                    self.pages.heard_from(thread);
                }
                let range = read.range.clone();
                self.requests[index].read = self.pages.read(range, thread);
                Stage::Arrived {
                    end: self.true_size.max(read.range.start),
                }
            }
            Stage::Arrived { end } => match kind {
                Kind::Read { .. } if end >= read.range.end => Stage::Decided(Some(end)),
                Kind::Read { .. } => match self.pages.short_read(&read, end, self.now) {
                    ShortRead::Answer => Stage::Decided(Some(end)),
                    ShortRead::Refuse => Stage::Decided(None),
                    ShortRead::FenceAndRefuse => Stage::Fencing { end },
                    ShortRead::Wait => return false,
                },
                Kind::GetAttr | Kind::Chmod if self.pages.may_tell(end, self.now) => {
                    self.pages.tell(end);
                    if kind == Kind::Chmod {
                        self.pages.impose(end, waiter, self.now);
                    }
                    Stage::Decided(Some(end))
                }
                Kind::GetAttr | Kind::Chmod => {
                    if self.pages.needs_drop(end) {
                        self.want_zeros_dropped();
                    }
                    return false;
                }
                Kind::Write { end } => {
                    if !self.pages.write(end, CachedWrite::Kept, thread, self.now) {
                        return false;
                    }
                    Stage::Decided(Some(end))
                }
                Kind::Append { from, end } => {
                    let from = from / PAGE_BYTES * PAGE_BYTES;
                    let cached = CachedWrite::Dropped { from };
                    if !self.pages.write(end, cached, thread, self.now) {
                        if self.pages.needs_drop(from) {
                            self.want_zeros_dropped();
                        }
                        return false;
                    }
                    Stage::Decided(Some(end))
                }
                Kind::Truncate => {
                    self.pages.resize(0, waiter, self.now);
                    Stage::Decided(Some(0))
                }
            },
            Stage::Fencing { end } => {
                self.bump();
                self.pages.refused(&read, end, self.now);
                Stage::Decided(None)
            }
            Stage::Decided(answer) if matches!(kind, Kind::Read { ahead: true, .. }) => {
                self.finish(index, answer);
                return true;
            }
            Stage::Decided(answer) => Stage::Answered(answer),
            Stage::Answered(answer) => {
                if let Kind::Append { from, end } = kind
                    && !self.drop_range(from, end)
                {
                    self.hurry_reads(from, end);
                    return false;
                }
                self.finish(index, answer);
                return true;
            }
        };
        self.note(format_args!("{kind:?} of {thread}: {next:?}"));
        let request = &mut self.requests[index];
        request.until = match next {
            Stage::Fencing { .. } | Stage::Decided(_) => Some(self.now + MOUNT_STEP_MAX),
            Stage::Answered(_) => Some(self.now + RUNS_WITHIN),
            Stage::Asked | Stage::Arrived { .. } => None,
        };
        request.stage = next;
        false
    }

    /// A thread waits for pages that are read: those reads reach the mount in time.
    fn hurry_reads(&mut self, from: u64, end: u64) {
        for request in &mut self.requests {
            let range = &request.read.range;
            if matches!(request.kind, Kind::Read { .. }) && range.start < end && range.end > from {
                request.until.get_or_insert(self.now);
            }
        }
    }

    /// The kernel receives an answer.
    fn finish(&mut self, index: usize, answer: Option<u64>) {
        let request = self.requests.swap_remove(index);
        self.note(format_args!(
            "{:?} of {} of version {} ends: {answer:?}",
            request.kind, request.thread, request.version
        ));
        let is_current = request.version >= self.inode_version && self.unstable == 0;
        match (request.kind, answer) {
            (Kind::Read { first, end, .. }, answer) => {
                if let Some(found) = answer
                    && found < end * PAGE_BYTES
                {
                    // `fuse_short_read`: before the pages are unlocked.
                    if is_current && found < self.size {
                        self.bump();
                        self.size = found;
                    }
                }
                for number in first..end {
                    let page = self.cached.get_mut(&number).expect("it is locked");
                    page.locked = false;
                    let page_end = (number + 1) * PAGE_BYTES;
                    page.zeros_from = answer.map(|found| found.min(page_end));
                }
            }
            (Kind::GetAttr, Some(size)) if is_current => {
                self.bump();
                self.set_size(size);
            }
            (Kind::Chmod, Some(size)) => {
                self.inode_locked = false;
                self.bump();
                if self.set_size(size) {
                    self.invalidate_pages();
                }
            }
            (Kind::Write { end }, _) => {
                self.inode_locked = false;
                self.bump();
                if end > self.size {
                    self.size = end;
                }
                self.unstable = 0;
                for (_, page) in self.cached.range_mut(..end.div_ceil(PAGE_BYTES)) {
                    page.locked = false;
                }
            }
            (Kind::Append { end, .. }, _) => {
                self.inode_locked = false;
                self.bump();
                self.size = self.size.max(end);
            }
            (Kind::Truncate, _) => {
                self.bump();
                self.set_size(0);
            }
            (Kind::GetAttr | Kind::Chmod, _) => {}
        }
        self.remove_doomed();
        if !matches!(request.kind, Kind::Read { ahead: true, .. }) {
            let is_read = matches!(request.kind, Kind::Read { .. });
            self.interrupted += u64::from(is_read && answer.is_none());
            self.threads[request.thread as usize - 1] = Thread::Idle;
        }
    }

    /// Whether it changed.
    fn set_size(&mut self, size: u64) -> bool {
        let changed = self.size != size;
        self.size = size;
        if changed {
            self.truncate_pages();
        }
        changed
    }

    /// Advances the time; events that are due by then happen first.
    fn advance(&mut self, by: Duration) {
        let to = self.now + by;
        while let Some((due, index)) = (0..self.requests.len())
            .filter_map(|index| Some((self.requests[index].until?, index)))
            .min()
            && due <= to
        {
            self.drop_in_time(due);
            self.now = self.now.max(due);
            let kind = self.requests[index].kind;
            let is_over = self.step(index);
            // It waits for another one.
            if let Some(request) = self
                .requests
                .get_mut(index)
                .filter(|it| !is_over && it.kind == kind)
                && request.until.is_none_or(|until| until <= self.now)
            {
                request.until = Some(self.now + MS);
            }
            self.check();
        }
        self.drop_in_time(to);
        self.now = to;
    }

    fn drop_in_time(&mut self, to: Instant) {
        if let Some(Drop::Begun(until, _)) = self.drop
            && until <= to
        {
            self.now = self.now.max(until);
            self.drop_pages();
        }
    }

    fn random_step(&mut self, changes: bool) {
        match self.rng.random_range(0..100) {
            0..6 if changes && self.rng.random_range(0..6) < self.changes => {
                self.change_elsewhere();
            }
            6..18 => self.notify(),
            18..34 => self.drop_pages(),
            34..62 => {
                let index = self.rng.random_range(0..self.threads.len());
                self.run_thread(index);
            }
            62..92 if !self.requests.is_empty() => {
                let index = self.rng.random_range(0..self.requests.len());
                self.step(index);
            }
            92..97 => self.advance(MS),
            97 => self.advance(5 * MS),
            98 => self.advance(30 * MS),
            _ => self.advance(IN_FLIGHT_MAX),
        }
        self.check();
    }
}

#[test]
fn zeros_that_the_kernel_made_are_never_read() {
    let (mut reads, mut interrupted) = (0, 0);
    for seed in 0..SEEDS {
        let run = std::panic::catch_unwind(|| {
            let mut model = Model::new(seed);
            for step in 0..3_000 {
                model.random_step(step < 2_500);
            }
            (model.reads, model.interrupted)
        });
        let (some, refused) = run.unwrap_or_else(|_| panic!("seed {seed}"));
        reads += some;
        interrupted += refused;
    }
    println!("{reads} reads, {interrupted} of them interrupted");
    assert!(
        interrupted * 10 < reads,
        "{interrupted} of {reads} reads were interrupted"
    );
}
