//! Bugs that are planted to see whether the simulator finds them.
//!
//! Only with the feature `planted-bugs`, which nothing but a test has; without it, [`is`] is never true, and costs nothing. Bugs
//! are planted for one thread, which is what a simulation runs on.

/// A bug, in the words of what the part that has it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// The namenode answers before the record is durable.
    AnswersBeforeDurable,
    /// The namenode does not notify other sessions of a change.
    SendsNoInvalidation,
    /// The namenode does not wait until other sessions have acknowledged a notice.
    DoesNotWaitForInvalidation,
    /// The namenode has replicas removed before the record is durable that frees their block.
    RemovesBeforeDurable,
    /// The namenode takes what it has written to the journal for durable.
    SkipsJournalSync,
    /// The namenode does not sync the directory of the journal.
    SkipsJournalDirectorySync,
    /// The namenode goes on after a sync of the journal failed.
    IgnoresFailedJournalSync,
    /// The namenode removes files without a name that another session has open.
    FreesHeldFiles,
    /// The namenode keeps what a file had beyond the length to which it was cut.
    KeepsWhatIsCut,
    /// The namenode relies on replicas that are doubted, or that no report has confirmed, when it removes others.
    ReliesOnUnconfirmedReplicas,
    /// The namenode does not find out that datanodes know more than it.
    OverlooksNewerDatanodes,
    /// The namenode does not remember what it answered to a mutation, and carries it out again.
    ForgetsAnswers,
    /// The namenode removes what is in the trash before its time.
    PurgesTrashEarly,
    /// The namenode lets directories exceed their quotas.
    IgnoresQuotas,
    /// The namenode answers what it found done when it began to lead without waiting for those that may show what was before.
    AnswersFoundChangesAtOnce,
    /// The client uses an answer before it obeys the notice that came before it.
    ObeysNoticesLate,
    /// The client caches what an answer says about something that a notice named meanwhile.
    CachesOvertakenAnswers,
    /// The client believes its cache when its lease has run out.
    BelievesExpiredLease,
    /// The client counts its lease from when an answer came.
    ExtendsLeaseByAnswer,
    /// The client counts its lease as if its clock went as fast as the namenode's.
    IgnoresClockDrift,
    /// The client does not repeat what a namenode that ended had not made durable.
    ForgetsUnconfirmed,
    /// The client shows extended attributes from its cache to everybody.
    IgnoresCachedModes,
    /// The client leaves out of a snapshot what it has closed and not committed.
    SnapshotsCommitted,
    /// The client's `fsync` asks neither the datanodes' disks nor the journal.
    SyncsInMemory,
    /// The mount tells a larger size while an append leaves zeros in pages.
    TellsSizeOverZeros,
    /// The mount answers each read that ends early.
    AnswersShortReads,
    /// The mount does not have the kernel drop pages.
    KeepsOldPages,
    /// The mount does not know that the kernel has pages of a file that it created.
    KeepsPagesOfCreated,
    /// The datanode acknowledges what it has not synced.
    SkipsReplicaSync,
    /// The datanode does not sync the directory into which a sealed replica was moved.
    SkipsSealedDirectorySync,
    /// Checksums of replicas are not compared.
    IgnoresChecksums,
    /// A member that has just started votes, though it may have promised a leader not to.
    VotesAtOnce,
    /// A member keeps its vote in memory only.
    ForgetsVote,
    /// A member does not sync the file with its vote and the members.
    SkipsMemberFileSync,
    /// A leader answers by itself also when others may have elected another one.
    AnswersWithoutLease,
    /// A namenode answers keepalives whether it leads or not.
    AnswersKeepAlivesUnasked,
    /// A leader takes for committed what its own disk has.
    AnswersWhatIsDurableHere,
    /// A leader takes it for an acknowledgement when a member does not answer.
    CountsSilentMembers,
    /// A member acknowledges entries before they are durable.
    AcknowledgesBeforeDurable,
    /// A member keeps what it had applied and another leader replaced.
    KeepsWhatWasReplaced,
    /// A leader that starts again goes on in its term.
    LeadsAgainInItsTerm,
    /// A leader does not propose again what was refused while it had no lease.
    ForgetsRefusedRecords,
    /// A leader answers by itself also when it has asked another one to lead.
    AnswersWhileHandingOver,
    /// A member that was elected serves before it has all that was committed.
    LeadsBeforeItHasAll,
    /// A member that has forgotten what it said is trusted.
    TrustsForgetfulMembers,
    /// A member does not notice that its directory is a copy.
    TrustsCopies,
    /// A snapshot of another member is set in place before it is durable.
    InstallsSnapshotUnsynced,
    /// A member forgets the terms of entries that are in its journal, and that a snapshot covers.
    ForgetsTermsEarly,
    /// A new leader relies on what it was told before datanodes knew of it.
    TrustsReportsOfBefore,
    /// A datanode obeys a namenode of an epoch before the one that it obeyed.
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

/// This thread has the bug from now on, or none.
#[cfg(feature = "planted-bugs")]
pub fn plant(bug: Option<Bug>) {
    PLANTED.set(bug);
    MET.set(0);
}

/// How often this thread came to where its bug makes a difference, since it was planted.
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

/// Whether this thread has the bug: no.
#[cfg(not(feature = "planted-bugs"))]
#[must_use]
#[inline]
pub const fn is(_: Bug) -> bool {
    false
}
