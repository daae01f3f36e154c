//! What the harness has done to a mount and to the namenode: it decides which promises count.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::border::Order;

/// One mount, as faults left it.
#[derive(Debug, Default)]
struct MountState {
    /// It is mounted: a program may use it.
    ready: AtomicBool,
    kills: AtomicU64,
    disturbances: AtomicU64,
    /// Faults other than kills that go on.
    ongoing: AtomicU64,
}

impl MountState {
    /// Whether a program may use it.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    /// It is mounted.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::SeqCst);
    }

    /// It is about to be killed. Comes first, so that nothing that the kill interrupts counts as
    /// acknowledged.
    pub fn killed(&self) {
        self.ready.store(false, Ordering::SeqCst);
        self.kills.fetch_add(1, Ordering::SeqCst);
        self.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// A fault begins or ends: it hangs, or is cut off.
    pub fn disturbed(&self, begins: bool) {
        self.disturbances.fetch_add(1, Ordering::SeqCst);
        if begins {
            self.ongoing.fetch_add(1, Ordering::SeqCst);
        } else {
            let less = |count: u64| count.checked_sub(1);
            // The healing ends what may not have begun.
            let _ = self
                .ongoing
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// How often it was killed.
    pub fn kills(&self) -> u64 {
        self.kills.load(Ordering::SeqCst)
    }

    /// How often it was disturbed; none while it is.
    pub fn undisturbed(&self) -> Option<u64> {
        let disturbances = self.disturbances.load(Ordering::SeqCst);
        (self.ongoing.load(Ordering::SeqCst) == 0).then_some(disturbances)
    }
}

/// Times in which nothing that is acknowledged counts: the namenode runs on an older copy, and does not
/// know it before a datanode has registered.
#[derive(Debug, Default)]
pub(crate) struct Doubt(AtomicU64);

impl Doubt {
    /// Such a time begins or ends.
    pub fn turn(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// How many began and ended before; none during one.
    pub fn since(&self) -> Option<u64> {
        let turns = self.0.load(Ordering::SeqCst);
        turns.is_multiple_of(2).then_some(turns)
    }
}

/// All mounts and the namenode, as programs know them.
#[derive(Debug)]
pub(crate) struct Shared {
    mounts: Vec<MountState>,
    doubt: Doubt,
}

/// How a mount and the namenode have been since an operation began; it counts only if nothing of it
/// has changed when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Era {
    kills: u64,
    doubt: u64,
}

impl Shared {
    /// Of so many mounts, of which none may be used yet.
    pub fn new(mounts: usize) -> Self {
        Self {
            mounts: (0..mounts).map(|_| MountState::default()).collect(),
            doubt: Doubt::default(),
        }
    }

    /// The harness has done something, or is about to.
    pub fn obey(&self, order: Order) {
        let with = |mount: usize, act: &dyn Fn(&MountState)| {
            self.mounts.get(mount).into_iter().for_each(act);
        };
        match order {
            Order::Ready { mount } => with(mount, &MountState::set_ready),
            Order::Killed { mount } => with(mount, &MountState::killed),
            Order::Disturbed { mount, begins } => with(mount, &|it| it.disturbed(begins)),
            Order::Doubt => self.doubt.turn(),
            Order::Stop | Order::Compare => {}
        }
    }

    /// None while the mount or the namenode cannot be relied upon.
    pub fn era(&self, mount: usize) -> Option<Era> {
        let state = self.mounts.get(mount)?;
        let kills = state.kills();
        let doubt = self.doubt.since()?;
        state.is_ready().then_some(Era { kills, doubt })
    }

    /// How often a mount was disturbed; none while it is.
    pub fn undisturbed(&self, mount: usize) -> Option<u64> {
        self.mounts.get(mount)?.undisturbed()
    }
}
