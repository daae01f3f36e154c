//! Bugs that are planted to test whether the simulator finds them.
//!
//! They exist only with the feature `planted-bugs`, which only a test enables; without it, [`is`] is never true, and
//! costs nothing. Bugs are planted for one thread, which is what a simulation runs on.

/// A bug, described by the behaviour of the part that has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The namenode answers before its record is durable.
    AnswersBeforeDurable,
    /// The namenode does not notify other sessions of a change.
    SendsNoInvalidation,
    /// The namenode does not wait until other sessions have acknowledged a notice.
    DoesNotWaitForInvalidation,
    /// The namenode has replicas removed before the record that frees their block is durable.
    RemovesBeforeDurable,
    /// The namenode considers everything durable that it has written to the journal.
    SkipsJournalSync,
    /// The namenode does not sync the directory of the journal.
    SkipsJournalDirectorySync,
    /// The namenode continues after a failed sync of the journal.
    IgnoresFailedJournalSync,
    /// The namenode removes unnamed files that another session has open.
    FreesHeldFiles,
    /// The namenode keeps a file's content beyond the length to which it was truncated.
    KeepsWhatIsCut,
    /// The namenode relies on doubtful replicas, or on ones that no report has confirmed, when it removes others.
    ReliesOnUnconfirmedReplicas,
    /// The namenode does not notice that datanodes know more than it does.
    OverlooksNewerDatanodes,
    /// The namenode does not remember its answer to a mutation, and executes it again.
    ForgetsAnswers,
    /// The namenode empties the trash too early.
    PurgesTrashEarly,
    /// The namenode lets directories exceed their quotas.
    IgnoresQuotas,
    /// A new leader answers a repeated mutation that was executed before it led without waiting for sessions that may
    /// still show the earlier state.
    AnswersFoundChangesAtOnce,
    /// The client uses an answer before it obeys the notice that arrived before it.
    ObeysNoticesLate,
    /// The client caches what an answer says about something that a notice has named meanwhile.
    CachesOvertakenAnswers,
    /// The client believes its cache after its lease has expired.
    BelievesExpiredLease,
    /// The client counts its lease from when an answer arrived.
    ExtendsLeaseByAnswer,
    /// The client counts its lease as if its clock ran at the same rate as the namenode's.
    IgnoresClockDrift,
    /// The client does not replay what a namenode had not made durable before it ended.
    ForgetsUnconfirmed,
    /// The client shows cached extended attributes to everybody.
    IgnoresCachedModes,
    /// The client omits from a snapshot what it has closed and not committed.
    SnapshotsCommitted,
    /// The client's `fsync` reaches neither the datanodes' disks nor the journal.
    SyncsInMemory,
    /// The mount reports a larger size while an append leaves zeros in pages.
    TellsSizeOverZeros,
    /// The mount returns every short read to the kernel.
    AnswersShortReads,
    /// The mount does not make the kernel drop pages.
    KeepsOldPages,
    /// The mount forgets that the kernel has pages of a file that it created.
    KeepsPagesOfCreated,
    /// The datanode acknowledges data that it has not synced.
    SkipsReplicaSync,
    /// The datanode does not sync the directory into which a sealed replica was moved.
    SkipsSealedDirectorySync,
    /// Checksums of replicas are not compared.
    IgnoresChecksums,
    /// A member votes as soon as it has started, although it may have promised a leader not to.
    VotesAtOnce,
    /// A member keeps its vote in memory only.
    ForgetsVote,
    /// A member does not sync the file that contains its vote and the members.
    SkipsMemberFileSync,
    /// A leader answers on its own even when others may have elected another leader.
    AnswersWithoutLease,
    /// A namenode answers keepalives whether or not it leads.
    AnswersKeepAlivesUnasked,
    /// A leader considers committed what is on its own disk.
    AnswersWhatIsDurableHere,
    /// A leader counts members that do not answer as having acknowledged.
    CountsSilentMembers,
    /// A member acknowledges entries before they are durable.
    AcknowledgesBeforeDurable,
    /// A member keeps entries that it had applied and that another leader replaced.
    KeepsWhatWasReplaced,
    /// A leader that restarts continues in its term.
    LeadsAgainInItsTerm,
    /// A leader does not propose again what was refused while it had no lease.
    ForgetsRefusedRecords,
    /// A leader answers on its own even after it has asked another member to lead.
    AnswersWhileHandingOver,
    /// A newly elected member serves before it has everything that was committed.
    LeadsBeforeItHasAll,
    /// A member that has forgotten its promises is trusted.
    TrustsForgetfulMembers,
    /// A member does not notice that its directory is a copy.
    TrustsCopies,
    /// A snapshot of another member is installed before it is durable.
    InstallsSnapshotUnsynced,
    /// A member forgets the terms of entries that are still in its journal, and that a snapshot covers.
    ForgetsTermsEarly,
    /// A new leader relies on reports that datanodes sent before they knew that it leads.
    TrustsReportsOfBefore,
    /// A datanode obeys a namenode of an earlier epoch than the one that it obeyed.
    ObeysOlderEpochs,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 50] = [
        Self::AnswersBeforeDurable,
        Self::SendsNoInvalidation,
        Self::DoesNotWaitForInvalidation,
        Self::RemovesBeforeDurable,
        Self::SkipsJournalSync,
        Self::SkipsJournalDirectorySync,
        Self::IgnoresFailedJournalSync,
        Self::FreesHeldFiles,
        Self::KeepsWhatIsCut,
        Self::ReliesOnUnconfirmedReplicas,
        Self::OverlooksNewerDatanodes,
        Self::ForgetsAnswers,
        Self::PurgesTrashEarly,
        Self::IgnoresQuotas,
        Self::AnswersFoundChangesAtOnce,
        Self::ObeysNoticesLate,
        Self::CachesOvertakenAnswers,
        Self::BelievesExpiredLease,
        Self::ExtendsLeaseByAnswer,
        Self::IgnoresClockDrift,
        Self::ForgetsUnconfirmed,
        Self::IgnoresCachedModes,
        Self::SnapshotsCommitted,
        Self::SyncsInMemory,
        Self::TellsSizeOverZeros,
        Self::AnswersShortReads,
        Self::KeepsOldPages,
        Self::KeepsPagesOfCreated,
        Self::SkipsReplicaSync,
        Self::SkipsSealedDirectorySync,
        Self::IgnoresChecksums,
        Self::VotesAtOnce,
        Self::ForgetsVote,
        Self::SkipsMemberFileSync,
        Self::AnswersWithoutLease,
        Self::AnswersKeepAlivesUnasked,
        Self::AnswersWhatIsDurableHere,
        Self::CountsSilentMembers,
        Self::AcknowledgesBeforeDurable,
        Self::KeepsWhatWasReplaced,
        Self::LeadsAgainInItsTerm,
        Self::ForgetsRefusedRecords,
        Self::AnswersWhileHandingOver,
        Self::LeadsBeforeItHasAll,
        Self::TrustsForgetfulMembers,
        Self::TrustsCopies,
        Self::InstallsSnapshotUnsynced,
        Self::ForgetsTermsEarly,
        Self::TrustsReportsOfBefore,
        Self::ObeysOlderEpochs,
    ];
}

#[cfg(feature = "planted-bugs")]
thread_local! {
    static PLANTED: std::cell::Cell<Option<Bug>> = const { std::cell::Cell::new(None) };
    static MET: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Plants a bug in this thread, or none.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
    MET.set(0);
}

/// How often this thread has reached a point where its bug makes a difference, since it was planted.
#[cfg(feature = "planted-bugs")]
#[must_use]
pub fn met() -> u64 {
    MET.get()
}

/// Whether this thread has the bug.
#[cfg(feature = "planted-bugs")]
#[must_use]
pub fn is(bug: Bug) -> bool {
    let is_planted = PLANTED.get() == Some(bug);
    if is_planted {
        MET.set(MET.get() + 1);
    }
    is_planted
}

/// Whether this thread has the bug: never.
#[cfg(not(feature = "planted-bugs"))]
#[must_use]
#[inline]
pub const fn is(_: Bug) -> bool {
    false
}
