//! What the harness has done to mounts and to the namenode, which decides which promises count.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::border::Order;

/// The state of one mount.
#[derive(Debug, Default)]
struct MountState {
    /// It is mounted, and programs may use it.
    ready: AtomicBool,
    kills: AtomicU64,
    disturbances: AtomicU64,
    /// The number of faults in progress, other than kills.
    ongoing: AtomicU64,
}

impl MountState {
    /// Whether programs may use it.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    /// Notes that it is mounted.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::SeqCst);
    }

    /// Notes that it is about to be killed. This must precede the kill, so that nothing that the kill interrupts counts
    /// as acknowledged.
    pub fn killed(&self) {
        self.ready.store(false, Ordering::SeqCst);
        self.kills.fetch_add(1, Ordering::SeqCst);
        self.disturbances.fetch_add(1, Ordering::SeqCst);
    }

    /// Notes that a fault begins or ends, such as a hang or a partition.
    pub fn disturbed(&self, begins: bool) {
        self.disturbances.fetch_add(1, Ordering::SeqCst);
        if begins {
            self.ongoing.fetch_add(1, Ordering::SeqCst);
        } else {
            let less = |count: u64| count.checked_sub(1);
            // Healing also ends faults that never began.
            let _ = self
                .ongoing
                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
        }
    }

    /// How often it was killed.
    pub fn kills(&self) -> u64 {
        self.kills.load(Ordering::SeqCst)
    }

    /// How often it was disturbed; `None` while it is.
    pub fn undisturbed(&self) -> Option<u64> {
        let disturbances = self.disturbances.load(Ordering::SeqCst);
        (self.ongoing.load(Ordering::SeqCst) == 0).then_some(disturbances)
    }
}

/// Periods in which acknowledgements do not count: the namenode runs on an older copy, and cannot
/// know it before a datanode has registered.
#[derive(Debug, Default)]
pub(crate) struct Doubt(AtomicU64);

impl Doubt {
    /// Notes that such a period begins or ends.
    pub fn turn(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    /// How many periods have begun or ended so far; `None` during one.
    pub fn since(&self) -> Option<u64> {
        let turns = self.0.load(Ordering::SeqCst);
        turns.is_multiple_of(2).then_some(turns)
    }
}

/// The state of all mounts and of the namenode, as known to programs.
#[derive(Debug)]
pub(crate) struct Shared {
    mounts: Vec<MountState>,
    doubt: Doubt,
}

/// The state of a mount and of the namenode when an operation begins. The operation counts only if the state
/// is the same when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Era {
    kills: u64,
    doubt: u64,
}

impl Shared {
    /// Creates the state of a number of mounts, none of which may be used yet.
    pub fn new(mounts: usize) -> Self {
        Self {
            mounts: (0..mounts).map(|_| MountState::default()).collect(),
            doubt: Doubt::default(),
        }
    }

    /// Notes what the harness has done, or is about to do.
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

    /// The present era of a mount; `None` while the mount or the namenode cannot be relied upon.
    pub fn era(&self, mount: usize) -> Option<Era> {
        let state = self.mounts.get(mount)?;
        let kills = state.kills();
        let doubt = self.doubt.since()?;
        state.is_ready().then_some(Era { kills, doubt })
    }

    /// How often a mount was disturbed; `None` while it is.
    pub fn undisturbed(&self, mount: usize) -> Option<u64> {
        self.mounts.get(mount)?.undisturbed()
    }
}
