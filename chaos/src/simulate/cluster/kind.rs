//! Kinds of faults.

use super::part::Part;

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultKind {
    /// A machine stops, and starts again a moment later.
    Crash,
    /// Nothing on a machine runs for a while; its clocks go on.
    Hang,
    /// A machine sleeps for a while, and only the clock since its start goes on.
    Suspend,
    /// Nothing gets from a machine to some others, or from them to it, or both.
    Partition,
    /// Datagrams from and to a machine are lost.
    Loss,
    /// Datagrams from and to a machine take longer, and overtake each other.
    Delay,
    /// Datagrams from and to a machine come twice.
    Duplicate,
    /// A machine loses its power, and what its disk had not stored.
    PowerLoss,
    /// All machines do at the same time, or all but datanodes.
    Blackout,
    /// A sync of a server's disk fails, and what it was to write is lost.
    FailedSync,
    /// Some operations of a disk fail.
    DiskError,
    /// Nothing more fits on a disk.
    DiskFull,
    /// One bit of a replica changes.
    Rot,
    /// A datanode comes back with an empty disk.
    Reimage,
    /// Operations of a server's disk take long.
    SlowDisk,
    /// The owner of a server needs it.
    Busy,
    /// The clocks of all machines go faster or slower from then on, each by its own rate.
    Drift,
    /// The wall clock of a machine is wrong for a while.
    Jump,
    /// The namenode's directory is put back to an older copy, and the newest one back in its place later.
    Rollback,
    /// A copy of the namenode's directory is started beside it, and a datanode follows that; of several namenodes, a copy of
    /// that of one.
    Double,
    /// Of several namenodes, this one is asked to lead.
    Transfer,
    /// All other namenodes lose their power at the same time.
    Outage,
    /// Some machines and this namenode reach each other only, and the other namenodes and the rest do.
    Split,
    /// The directory of a namenode is put back to an older copy for good, and it is taken into the group again.
    Forget,
    /// The directory of a namenode is lost, and it is taken into the group again with an empty one.
    Wipe,
    /// An operator has a namenode leave the group, and takes it in again with an empty directory.
    Leave,
}

impl FaultKind {
    /// All of them.
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

    /// The name that users give.
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

    /// Whether it can happen where there are several namenodes, or one.
    #[must_use]
    pub fn is_for_group(self, is_group: bool) -> bool {
        match self {
            // Of a group, an older copy never leads: see `Forget`.
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

    /// Whether operations of a disk fail.
    pub(super) fn is_of_disk(self) -> bool {
        matches!(self, Self::FailedSync | Self::DiskError | Self::DiskFull)
    }

    /// Whether nothing runs on a machine meanwhile that was not started anew.
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

    /// Whether it can happen to a machine. What a disk has lost for good, it loses on the `weak` datanode only: each
    /// block has a replica on another one, as soon as it is acknowledged.
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
