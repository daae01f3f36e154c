//! Decides which members answer and yet store nothing of what the leader sends, since their disks hang. The code is
//! pure.

use std::collections::BTreeMap;

use harvestfs_protocol::group::GroupStatus;

use crate::consensus::MemberId;
use crate::journal::Lsn;

/// A member is stuck if it has lacked records for this long and acknowledged none.
const STUCK_MS: u64 = 3_000;

/// What the leader has observed of the members that lack records. A hung disk goes unnoticed while there is nothing to
/// store on it, and so does that of the leader itself, which hands over.
#[derive(Default)]
pub(super) struct Stuck {
    /// The last record that each has acknowledged, and since when that is its last.
    lacking: BTreeMap<MemberId, (Lsn, u64)>,
}

impl Stuck {
    /// Takes a sample; call it a few times a second.
    pub(super) fn sample(&mut self, now_ms: u64, status: &GroupStatus) {
        let before = std::mem::take(&mut self.lacking);
        for member in &status.members {
            let acknowledged = member.acknowledged.filter(|lsn| *lsn < status.last);
            let Some(last) = acknowledged.filter(|_| member.id != status.this) else {
                continue;
            };
            let id = MemberId(member.id);
            let since_ms = match before.get(&id) {
                Some((was_last, since_ms)) if *was_last == last => *since_ms,
                _ => now_ms,
            };
            self.lacking.insert(id, (last, since_ms));
        }
    }

    /// The members that are stuck, and the last record that each has acknowledged: as long as it is its last.
    pub(super) fn members(&self, now_ms: u64) -> BTreeMap<MemberId, Lsn> {
        let lacking = self.lacking.iter();
        let stuck =
            lacking.filter(|(_, (_, since_ms))| now_ms.saturating_sub(*since_ms) >= STUCK_MS);
        stuck.map(|(id, (last, _))| (*id, *last)).collect()
    }
}
