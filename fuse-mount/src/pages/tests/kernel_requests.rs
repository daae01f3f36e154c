//! The state of pages, requests and threads in the model of Linux's page cache.

use super::*;

#[derive(Default)]
pub(super) struct Page {
    /// Where the zeros begin; `None` if the page is not up to date.
    pub(super) zeros_from: Option<u64>,
    pub(super) locked: bool,
    /// Removed when it is unlocked.
    pub(super) doomed: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Read {
        first: u64,
        end: u64,
        ahead: bool,
    },
    GetAttr,
    /// An answer with attributes that the kernel accepts in any case.
    Chmod,
    /// From the file's start.
    Write {
        end: u64,
    },
    /// From where the kernel believed the end to be; bypassing its pages, which it drops before and after.
    Append {
        from: u64,
        end: u64,
    },
    /// `open` with `O_TRUNC`.
    Truncate,
}

#[derive(Clone, Debug)]
pub(super) enum Stage {
    /// The kernel has made the request.
    Asked,
    /// The mount has received it, and looked at the file, which ended here.
    Arrived { end: u64 },
    /// A notification first.
    Fencing { end: u64 },
    /// The answer is about to be sent; `None` if the request is refused.
    Decided(Option<u64>),
    /// The thread is about to run.
    Answered(Option<u64>),
}

pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) thread: u32,
    /// The connection's version of attributes at the time of the request.
    pub(super) version: u64,
    pub(super) read: PageRead,
    pub(super) stage: Stage,
    /// The latest time of the next step.
    pub(super) until: Option<Instant>,
}

pub(super) enum Drop {
    Spawned,
    /// The latest time at which the kernel begins, and the page from which it drops.
    Begun(Instant, u64),
    /// The pages below are dropped.
    At(u64),
}

#[derive(Clone, Copy)]
pub(super) enum Thread {
    Idle,
    /// Reads a page, in the kernel.
    Reading(u64),
    Waits,
}
