//! Kinds of faults.

use super::part::Part;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// A machine crashes, and starts again a moment later.
    Crash,
    /// Nothing on a machine runs for a while; its clocks continue.
    Hang,
    /// A machine is suspended for a while; only its clock since boot and its wall clock continue.
    Suspend,
    /// No datagram gets from a machine to some others, or from them to it, or both.
    Partition,
    /// Datagrams from and to a machine are lost.
    Loss,
    /// Datagrams from and to a machine take longer, and overtake each other.
    Delay,
    /// Datagrams from and to a machine arrive twice.
    Duplicate,
    /// A machine loses power, and with it what its disk had not made durable.
    PowerLoss,
    /// All machines lose power at the same time, or all but the datanodes.
    Blackout,
    /// A sync of a server's disk fails, and what it should have written is lost.
    FailedSync,
    /// Some operations of a disk fail.
    DiskError,
    /// A disk is full.
    DiskFull,
    /// One bit of a replica changes.
    Rot,
    /// A datanode comes back with an empty disk.
    Reimage,
    /// Operations of a server's disk take long.
    SlowDisk,
    /// A server is busy: its owner needs it.
    Busy,
    /// The clocks of all machines run faster or slower from then on, each at its own rate.
    Drift,
    /// The wall clock of a machine is wrong for a while.
    Jump,
    /// The namenode's directory is replaced by an older copy; later the newest one is put back.
    Rollback,
    /// A copy of the namenode's directory is started beside it, and a datanode follows the copy. In a group, the copy
    /// is one of a member's directory, and must serve nobody.
    Double,
    /// A namenode of a group is asked to lead.
    Transfer,
    /// All other namenodes lose their power at the same time.
    Outage,
    /// The network splits in two: this namenode and some machines, and the other namenodes and the remaining machines.
    Split,
    /// The directory of a namenode is permanently replaced by an older copy, and it is added to the group again.
    Forget,
    /// The directory of a namenode is lost, and it is added to the group again with an empty one.
    Wipe,
    /// An operator removes a namenode from the group, and adds it again with an empty directory.
    Leave,
}

impl FaultKind {
    /// All kinds of faults.
    pub const ALL: [Self; 26] = [
        Self::Crash,
        Self::Hang,
        Self::Suspend,
        Self::Partition,
        Self::Loss,
        Self::Delay,
        Self::Duplicate,
        Self::PowerLoss,
        Self::Blackout,
        Self::FailedSync,
        Self::DiskError,
        Self::DiskFull,
        Self::Rot,
        Self::Reimage,
        Self::SlowDisk,
        Self::Busy,
        Self::Drift,
        Self::Jump,
        Self::Rollback,
        Self::Double,
        Self::Transfer,
        Self::Outage,
        Self::Split,
        Self::Forget,
        Self::Wipe,
        Self::Leave,
    ];

    /// The name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Crash => "crash",
            Self::Hang => "hang",
            Self::Suspend => "suspend",
            Self::Partition => "partition",
            Self::Loss => "loss",
            Self::Delay => "delay",
            Self::Duplicate => "duplicate",
            Self::PowerLoss => "power-loss",
            Self::Blackout => "blackout",
            Self::FailedSync => "failed-sync",
            Self::DiskError => "disk-error",
            Self::DiskFull => "disk-full",
            Self::Rot => "rot",
            Self::Reimage => "reimage",
            Self::SlowDisk => "slow-disk",
            Self::Busy => "busy",
            Self::Drift => "drift",
            Self::Jump => "jump",
            Self::Rollback => "rollback",
            Self::Double => "double",
            Self::Transfer => "transfer",
            Self::Outage => "outage",
            Self::Split => "split",
            Self::Forget => "forget",
            Self::Wipe => "wipe",
            Self::Leave => "leave",
        }
    }

    /// Whether it can happen to a group of namenodes (`is_group`), or to a single one.
    #[must_use]
    pub fn is_for_group(self, is_group: bool) -> bool {
        match self {
            // In a group, an older copy never leads: see `Forget`.
            Self::Rollback => !is_group,
            Self::Transfer
            | Self::Outage
            | Self::Split
            | Self::Forget
            | Self::Wipe
            | Self::Leave => is_group,
            Self::Crash
            | Self::Hang
            | Self::Suspend
            | Self::Partition
            | Self::Loss
            | Self::Delay
            | Self::Duplicate
            | Self::PowerLoss
            | Self::Blackout
            | Self::FailedSync
            | Self::DiskError
            | Self::DiskFull
            | Self::Rot
            | Self::Reimage
            | Self::SlowDisk
            | Self::Busy
            | Self::Drift
            | Self::Jump
            | Self::Double => true,
        }
    }

    /// Whether it makes operations of a disk fail.
    pub(super) fn is_of_disk(self) -> bool {
        matches!(self, Self::FailedSync | Self::DiskError | Self::DiskFull)
    }

    /// Whether it ends everything that runs on the machine, so that only what is started again runs afterwards.
    pub(super) fn is_down(self) -> bool {
        matches!(
            self,
            Self::Crash
                | Self::PowerLoss
                | Self::Blackout
                | Self::Outage
                | Self::Reimage
                | Self::Wipe
        )
    }

    /// Whether it can happen to a machine. Only the disk of the `weak` datanode loses data permanently: each
    /// block has a replica on another one as soon as it is acknowledged.
    pub(super) fn is_for(self, part: Part, weak: Part) -> bool {
        match self {
            Self::Crash
            | Self::Hang
            | Self::Suspend
            | Self::Partition
            | Self::Loss
            | Self::Delay
            | Self::Duplicate
            | Self::PowerLoss
            | Self::Blackout
            | Self::Drift
            | Self::Jump => true,
            Self::Rollback
            | Self::Transfer
            | Self::Outage
            | Self::Split
            | Self::Forget
            | Self::Wipe
            | Self::Leave => part.is_namenode(),
            Self::Busy => matches!(part, Part::Datanode(_)),
            Self::FailedSync | Self::SlowDisk | Self::Double => {
                matches!(part, Part::Namenode(_) | Part::Datanode(_))
            }
            Self::DiskError | Self::DiskFull => part == weak || part.is_namenode(),
            Self::Rot | Self::Reimage => part == weak,
        }
    }
}
