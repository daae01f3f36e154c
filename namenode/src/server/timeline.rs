//! What datanodes know of the namenode's timeline, and what happens when they know more than the namenode. The code
//! is pure.

use std::collections::BTreeMap;

use harvestfs_protocol::admin::{AheadNode, RecoveryStatus};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::timeline::{Epoch, Position};
use rustc_hash::FxHashSet;

use crate::journal::Lsn;

/// Seconds from 1970 to 2020, the origin of epoch numbers.
const ORIGIN_UNIX_S: u64 = 1_577_836_800;

/// How far a clock may be ahead, in seconds: another namenode's, or this one's relative to the last epoch that it
/// knows.
const CLOCK_AHEAD_MAX_S: u32 = 10 * 365 * 86_400;
/// The last number with which a cluster may begin, shortly before 2060. Later epochs need numbers, too.
const FIRST_NUMBER_MAX: u32 = 4 * CLOCK_AHEAD_MAX_S;
/// Seconds of a year, for messages.
const YEAR_S: u64 = 31_556_952;

/// The approximate year of a time.
fn year(unix_s: u64) -> u64 {
    match unix_s.checked_sub(ORIGIN_UNIX_S) {
        Some(since_s) => 2020 + since_s / YEAR_S,
        None => 1970 + unix_s / YEAR_S,
    }
}

/// A clock's time as an epoch number; `None` before the first number.
fn by_clock(unix_now_s: u64) -> Option<u32> {
    let seconds = unix_now_s.checked_sub(ORIGIN_UNIX_S)?;
    Some(u32::try_from(seconds).unwrap_or(u32::MAX))
}

/// The number of an epoch that begins now, after the epochs with these numbers.
///
/// # Errors
/// [`FsError::Internal`]: the clock cannot be right. Numbers never go back, so one start with a clock in the far
/// future would leave no numbers for later epochs. A clock that is behind does no harm.
pub(crate) fn next_number(
    unix_now_s: u64,
    before: impl IntoIterator<Item = u32>,
) -> Result<u32, FsError> {
    let last = before.into_iter().max();
    let now = by_clock(unix_now_s);
    let is_plausible = match (last, now) {
        (Some(last), Some(now)) => now <= last.saturating_add(CLOCK_AHEAD_MAX_S),
        (Some(_), None) => true,
        (None, now) => now.is_some_and(|now| now <= FIRST_NUMBER_MAX),
    };
    if !is_plausible {
        let known = match last {
            Some(last) => {
                let began = year(ORIGIN_UNIX_S + u64::from(last));
                format!("its last epoch began in {began}")
            }
            None => "no cluster begins then".to_owned(),
        };
        return Err(FsError::Internal(format!(
            "the clock of this namenode says the year {}, and {known}: set the clock",
            year(unix_now_s)
        )));
    }
    let after_last = last.map_or(0, |last| last.saturating_add(1));
    // A clock beyond the last number yields none.
    let now = now.filter(|now| *now <= Epoch::NUMBER_MAX).unwrap_or(0);
    let number = now.max(after_last);
    if number > Epoch::NUMBER_MAX {
        let why = format!("no number is left for an epoch that follows {last:?}");
        return Err(FsError::Internal(why));
    }
    Ok(number)
}

/// Refuses a position that no namenode of this cluster can have had: an epoch far in the future leaves no numbers for
/// later ones. The limit also counts from what the cluster has already reached, `last_number`, since a clock may have
/// been wrong.
pub(crate) fn check_obeyed(
    unix_now_s: u64,
    last_number: Option<u32>,
    obeyed: Option<Position>,
) -> Result<(), FsError> {
    // The clock of this namenode may be the one that is wrong.
    let believed = last_number.map_or(u32::MAX, |last| last.saturating_add(CLOCK_AHEAD_MAX_S));
    let reached = by_clock(unix_now_s).unwrap_or(0).min(believed);
    let latest = last_number
        .map_or(reached, |last| reached.max(last.saturating_add(1)))
        .saturating_add(CLOCK_AHEAD_MAX_S)
        .min(Epoch::NUMBER_MAX);
    match obeyed {
        Some(obeyed) if obeyed.epoch.number > latest => Err(FsError::InvalidArgument(format!(
            "the datanode obeyed {obeyed}, more than ten years after the clock of this namenode and all that it \
             knows: what it keeps of that is damaged"
        ))),
        _ => Ok(()),
    }
}

/// How to treat a datanode that registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The namenode knows all that the datanode has obeyed.
    Behind,
    /// The datanode knows more, up to this position: the namenode was restored from a copy, and recovers.
    Recover(Position),
    /// The datanode obeys another running namenode, which started after this one. This one continues without the
    /// datanode.
    Refuse(Position),
}

/// Which datanodes know more than the namenode.
#[derive(Debug)]
pub(crate) struct Timeline {
    /// The current epoch.
    epoch: Epoch,
    /// The last record at the start; while a backup waits for an operator, the backup's last record.
    restored: Lsn,
    /// The last record that this timeline may have in common with those that know more. What follows it was written
    /// here, after this start or an earlier one.
    shared: Option<Lsn>,
    /// What existed at the start came from a backup, and no operator has accepted that since.
    is_from_backup: bool,
    recovering: bool,
    /// Datanodes that registered and know no other timeline.
    following: FxHashSet<NodeId>,
    ahead: BTreeMap<NodeId, AheadNode>,
    refused: BTreeMap<String, AheadNode>,
}

impl Timeline {
    pub(crate) fn new(epoch: Epoch, restored: Lsn, is_from_backup: bool) -> Self {
        Self {
            epoch,
            restored,
            shared: None,
            is_from_backup,
            // Whatever datanodes know: a new client would change things before the first of them registers.
            recovering: is_from_backup,
            following: FxHashSet::default(),
            ahead: BTreeMap::new(),
            refused: BTreeMap::new(),
        }
    }

    /// Notes that this namenode leads from here on: which datanodes follow it is not known yet.
    pub(crate) fn takes_over(&mut self) {
        self.following.clear();
    }

    /// Judges what a datanode has obeyed; `settled` is whether this timeline has been at that position, or has given
    /// it up.
    pub(crate) fn judge(&self, obeyed: Option<Position>, settled: bool) -> Verdict {
        let settled = settled || planted::is(Bug::OverlooksNewerDatanodes);
        let Some(obeyed) = obeyed.filter(|_| !settled) else {
            return Verdict::Behind;
        };
        // A restored copy starts after the records that it lacks were written. Only while datanodes follow this
        // namenode may the other one be the copy.
        let other_is_later = obeyed.epoch.number > self.epoch.number;
        if other_is_later && !self.recovering && !self.following.is_empty() {
            Verdict::Refuse(obeyed)
        } else {
            Verdict::Recover(obeyed)
        }
    }

    /// Notes that a timeline that has more than this one shares no record after `lsn` with it.
    pub(crate) fn shares_up_to(&mut self, lsn: Lsn) {
        self.shared = Some(self.shared.map_or(lsn, |it| it.min(lsn)));
    }

    /// Notes that a datanode was registered. Returns true if recovery begins with it.
    pub(crate) fn registered(&mut self, node: NodeId, name: &str, verdict: Verdict) -> bool {
        self.refused.remove(name);
        match verdict {
            Verdict::Recover(obeyed) => {
                self.following.remove(&node);
                self.ahead.insert(node, ahead(name, obeyed));
                !std::mem::replace(&mut self.recovering, true)
            }
            Verdict::Refuse(obeyed) => {
                panic!(
                    "the datanode {name} is to be refused, since it obeyed {obeyed}, and was registered"
                )
            }
            Verdict::Behind => {
                // It may have been reimaged, so that what it knew is lost; but then it was lost already.
                if !self.recovering {
                    self.following.insert(node);
                }
                false
            }
        }
    }

    /// Notes that a datanode was refused. Returns the reason for it.
    pub(crate) fn refused(&mut self, name: &str, obeyed: Position) -> FsError {
        self.refused.insert(name.to_owned(), ahead(name, obeyed));
        FsError::Recovery(format!(
            "this datanode obeyed {obeyed} of another namenode, which started after this one \
             (epoch {}): two namenodes run, and one of them must be stopped",
            self.epoch
        ))
    }

    /// The current epoch of the namenode.
    pub(crate) fn epoch(&self) -> Epoch {
        self.epoch
    }

    pub(crate) fn is_recovering(&self) -> bool {
        self.recovering
    }

    /// Whether it waits for an operator because it came from a backup.
    pub(crate) fn is_from_backup(&self) -> bool {
        self.is_from_backup
    }

    /// Fails with the reason if nothing may be changed.
    pub(crate) fn check_serving(&self) -> Result<(), FsError> {
        let Some(status) = self.recovery() else {
            return Ok(());
        };
        Err(FsError::Recovery(describe(&status)))
    }

    /// What is lacking, during recovery.
    pub(crate) fn recovery(&self) -> Option<RecoveryStatus> {
        self.recovering.then(|| RecoveryStatus {
            restored_record: self
                .shared
                .map_or(self.restored, |it| it.min(self.restored)),
            is_from_backup: self.is_from_backup,
            ahead: self.ahead.values().cloned().collect(),
        })
    }

    /// Datanodes that obey another namenode.
    pub(crate) fn refused_nodes(&self) -> Vec<AheadNode> {
        self.refused.values().cloned().collect()
    }

    /// The numbers of all epochs of other timelines that datanodes reported.
    pub(crate) fn foreign_numbers(&self) -> impl Iterator<Item = u32> {
        let nodes = self.ahead.values().chain(self.refused.values());
        nodes.map(|node| node.obeyed.epoch.number)
    }

    /// Begins a new epoch; `gives_up` is whether it abandons what other timelines wrote.
    pub(crate) fn entered(&mut self, epoch: Epoch, gives_up: bool) {
        self.epoch = epoch;
        if gives_up {
            self.recovering = false;
            self.is_from_backup = false;
            self.shared = None;
            let nodes = std::mem::take(&mut self.ahead);
            self.following.extend(nodes.into_keys());
            // They may register now.
            self.refused.clear();
        }
    }

    /// Whether there is anything to give up: what other timelines wrote.
    pub(crate) fn is_behind(&self) -> bool {
        self.recovering || !self.refused.is_empty()
    }
}

fn ahead(name: &str, obeyed: Position) -> AheadNode {
    AheadNode {
        name: name.to_owned(),
        obeyed,
    }
}

/// The recovery in one sentence.
fn describe(status: &RecoveryStatus) -> String {
    format!(
        "the namenode is in recovery and changes nothing: it {}; put the newest copy of its directory \
         back, or give up what is missing with `harvestfs admin recover --accept-loss`",
        status.describe()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const EPOCH: Epoch = Epoch { number: 10, id: 1 };

    fn position(number: u32, record: u64) -> Option<Position> {
        let epoch = Epoch { number, id: 2 };
        Some(Position { epoch, record })
    }

    #[test]
    fn numbers_grow_under_any_clock_that_may_be_right() {
        assert_eq!(next_number(ORIGIN_UNIX_S + 7, []), Ok(7));
        assert_eq!(next_number(ORIGIN_UNIX_S + 7, [3, 9, 4]), Ok(10));
        assert_eq!(next_number(0, [3]), Ok(4));
        let last = 1_000;
        for ahead in [1, CLOCK_AHEAD_MAX_S] {
            let now_s = ORIGIN_UNIX_S + u64::from(last + ahead);
            assert_eq!(next_number(now_s, [last]), Ok(last + ahead));
        }
        // Also where one was far ahead already.
        for last in [Epoch::NUMBER_MAX - 2, Epoch::NUMBER_MAX - 1] {
            for now in [7, Epoch::NUMBER_MAX + 7] {
                let now_s = ORIGIN_UNIX_S + u64::from(now);
                assert_eq!(next_number(now_s, [last]), Ok(last + 1));
            }
        }
        for last in [Epoch::NUMBER_MAX, u32::MAX] {
            let refused = next_number(ORIGIN_UNIX_S + 7, [last]);
            assert!(matches!(refused, Err(FsError::Internal(_))));
        }
    }

    /// Numbers never go back: one epoch by such a clock would be the last.
    #[test]
    fn no_epoch_begins_by_a_clock_of_the_far_future() {
        let (in_2027, in_2099) = (220_898_664, ORIGIN_UNIX_S + 79 * YEAR_S);
        for now_s in [in_2099, u64::from(u32::MAX), u64::MAX] {
            let refused = next_number(now_s, [in_2027]);
            assert!(matches!(refused, Err(FsError::Internal(_))), "{now_s}");
            assert!(next_number(now_s, []).is_err(), "{now_s}");
        }
        let why = next_number(in_2099, [in_2027]).unwrap_err().to_string();
        assert!(why.contains("2099") && why.contains("2027"), "{why}");
    }

    #[test]
    fn a_cluster_does_not_begin_before_numbers_do() {
        let refused = next_number(ORIGIN_UNIX_S - 1, []).unwrap_err();
        assert!(refused.to_string().contains("2019"), "{refused}");
        assert!(next_number(0, []).is_err());
        let last_s = ORIGIN_UNIX_S + u64::from(FIRST_NUMBER_MAX);
        assert_eq!(next_number(last_s, []), Ok(FIRST_NUMBER_MAX));
        assert!(next_number(last_s + 1, []).is_err());
    }

    /// What a namenode reaches by a clock that is ahead, one that was put back from a copy takes over from datanodes.
    #[test]
    fn an_epoch_that_can_begin_is_not_of_the_far_future() {
        let last = 1_000;
        let ahead_s = ORIGIN_UNIX_S + u64::from(last + CLOCK_AHEAD_MAX_S);
        let number = next_number(ahead_s, [last]).unwrap();
        let now_s = ORIGIN_UNIX_S + u64::from(last) + 5;
        assert_eq!(check_obeyed(now_s, Some(last), position(number, 1)), Ok(()));
    }

    /// A clock that no epoch would begin by excuses nothing.
    #[test]
    fn what_a_datanode_obeyed_is_not_judged_by_a_clock_of_the_far_future() {
        let check_obeyed = |number| check_obeyed(u64::MAX, Some(7), position(number, 1));
        assert_eq!(check_obeyed(7 + 2 * CLOCK_AHEAD_MAX_S), Ok(()));
        assert!(check_obeyed(8 + 2 * CLOCK_AHEAD_MAX_S).is_err());
    }

    #[test]
    fn an_epoch_of_the_far_future_is_refused() {
        let now_s = ORIGIN_UNIX_S + 1_000;
        let check_obeyed = |now_s, obeyed| check_obeyed(now_s, Some(7), obeyed);
        assert_eq!(check_obeyed(now_s, None), Ok(()));
        assert_eq!(
            check_obeyed(now_s, position(1_000 + CLOCK_AHEAD_MAX_S, 1)),
            Ok(())
        );
        for number in [1_001 + CLOCK_AHEAD_MAX_S, Epoch::NUMBER_MAX, u32::MAX] {
            let refused = check_obeyed(now_s, position(number, 1));
            assert!(matches!(refused, Err(FsError::InvalidArgument(_))));
        }
    }

    /// One namenode's clock was far ahead while it led: the others know that, as does the same one when its clock is
    /// right.
    #[test]
    fn an_epoch_that_the_cluster_has_had_is_not_of_the_far_future() {
        let now_s = ORIGIN_UNIX_S + 1_000;
        let reached = 1_000 + 2 * CLOCK_AHEAD_MAX_S;
        for number in [reached - 1, reached, reached + 1] {
            assert!(check_obeyed(now_s, Some(7), position(number, 1)).is_err());
            assert_eq!(
                check_obeyed(now_s, Some(reached), position(number, 1)),
                Ok(())
            );
        }
        let refused = check_obeyed(now_s, Some(reached), position(u32::MAX, 1));
        assert!(refused.is_err());
    }

    #[test]
    fn what_comes_from_a_backup_waits_for_an_operator_whatever_datanodes_know() {
        let mut timeline = Timeline::new(EPOCH, 40, true);
        assert!(timeline.is_recovering() && timeline.is_behind());
        assert!(matches!(
            timeline.check_serving(),
            Err(FsError::Recovery(_))
        ));
        assert!(!timeline.registered(NodeId(1), "dn-1", timeline.judge(position(9, 40), true)));
        // The epoch that begins when it leads changes nothing of that.
        timeline.entered(Epoch { number: 12, id: 7 }, false);
        assert_eq!(timeline.recovery().unwrap().ahead, []);
        assert!(timeline.is_from_backup());
        // A namenode that started later is no reason to continue without a datanode.
        let verdict = timeline.judge(position(99, 50), false);
        assert!(matches!(verdict, Verdict::Recover(_)));
        timeline.registered(NodeId(2), "dn-2", verdict);
        assert_eq!(timeline.recovery().unwrap().missing_records(), 10);
        // It shares with that timeline no more than this.
        timeline.shares_up_to(38);
        timeline.shares_up_to(39);
        assert_eq!(timeline.recovery().unwrap().missing_records(), 12);
        timeline.entered(Epoch { number: 100, id: 8 }, true);
        assert_eq!(timeline.recovery(), None);
        assert!(!timeline.is_from_backup() && !timeline.is_behind());
    }

    #[test]
    fn a_namenode_recovers_when_a_datanode_knows_more() {
        let mut timeline = Timeline::new(EPOCH, 40, false);
        assert_eq!(timeline.judge(None, false), Verdict::Behind);
        assert_eq!(timeline.judge(position(9, 1), true), Verdict::Behind);
        assert!(!timeline.registered(NodeId(1), "a", Verdict::Behind));
        assert_eq!(timeline.check_serving(), Ok(()));
        let verdict = timeline.judge(position(9, 50), false);
        assert_eq!(verdict, Verdict::Recover(position(9, 50).unwrap()));
        assert!(timeline.registered(NodeId(2), "b", verdict));
        assert!(!timeline.registered(NodeId(3), "c", Verdict::Recover(position(9, 45).unwrap())));
        let status = timeline.recovery().unwrap();
        assert_eq!((status.missing_records(), status.ahead.len()), (10, 2));
        let refusal = timeline.check_serving().unwrap_err().to_string();
        assert!(refusal.contains("10 records") && refusal.contains("b, c"));
        timeline.entered(Epoch { number: 11, id: 3 }, true);
        assert_eq!(timeline.check_serving(), Ok(()));
        assert_eq!(timeline.recovery(), None);
    }

    #[test]
    fn a_later_namenode_takes_datanodes_but_not_the_service() {
        let mut timeline = Timeline::new(EPOCH, 40, false);
        // No datanode follows yet: the clock may be wrong.
        let obeyed = position(11, 50).unwrap();
        assert_eq!(
            timeline.judge(Some(obeyed), false),
            Verdict::Recover(obeyed)
        );
        timeline.registered(NodeId(1), "a", Verdict::Behind);
        assert_eq!(timeline.judge(Some(obeyed), false), Verdict::Refuse(obeyed));
        timeline.refused("b", obeyed);
        assert!(!timeline.is_recovering());
        assert_eq!(timeline.refused_nodes().len(), 1);
        assert_eq!(timeline.foreign_numbers().collect::<Vec<_>>(), [11]);
        assert!(timeline.is_behind());
        // It comes back and follows again.
        timeline.registered(NodeId(2), "b", Verdict::Behind);
        assert_eq!(timeline.refused_nodes(), []);
        assert!(!timeline.is_behind());
        // Or an operator gives up what the other one wrote.
        timeline.refused("b", obeyed);
        timeline.entered(Epoch { number: 12, id: 3 }, true);
        assert_eq!(timeline.refused_nodes(), []);
    }
}
