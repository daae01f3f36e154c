//! Which namenode is obeyed: never one that knows less than a namenode obeyed before.

use harvestfs_protocol::planted::{self, Bug};
use harvestfs_protocol::timeline::{Authority, Epoch, Position};

use super::LinkId;

/// Why a namenode is not obeyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The namenode itself reports that it has no authority: it is a standby or in recovery.
    #[error("the namenode is in recovery: it lacks what this datanode, or another one, obeyed")]
    Recovering,
    /// The namenode's epoch precedes the obeyed one, or is a rival with the same number.
    #[error(
        "the namenode is at {}, but this datanode obeyed {obeyed} of another one, which started \
         later: two namenodes run, or an old copy was put back",
        authority.position
    )]
    Older {
        /// What was obeyed.
        obeyed: Position,
        /// What the namenode claims.
        authority: Authority,
    },
}

impl Refusal {
    /// Whether the connection to such a namenode is to be closed. One in recovery may learn what is here, so that its
    /// clients can read.
    pub fn ends_connection(&self) -> bool {
        match self {
            Self::Recovering => false,
            Self::Older { .. } => true,
        }
    }
}

/// The position that was obeyed, in memory and on the disks.
#[derive(Debug)]
pub struct Obedience {
    obeyed: Option<Position>,
    written: Option<Position>,
    /// Whether a namenode has confirmed it since the start; otherwise it is only from a disk, which may belong to
    /// another cluster.
    is_heard: bool,
    /// By link: whether the namenode is in recovery or a standby.
    recovering: Vec<bool>,
}

/// Whether a datanode that obeyed one position may go on to obey another one.
fn is_through(before: Position, after: Position) -> bool {
    if before.epoch == after.epoch {
        before.record <= after.record
    } else {
        before.epoch.number < after.epoch.number
    }
}

/// The judgement of a namenode's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The position that is obeyed now, or why the namenode is not obeyed.
    pub result: Result<Position, Refusal>,
    /// A new epoch is obeyed, or the namenode has gone into recovery.
    pub is_news: bool,
}

impl Obedience {
    /// Starts with the position on the disks, and at most so many links at a time.
    pub fn new(obeyed: Option<Position>, links_max: usize) -> Self {
        Self {
            obeyed,
            written: obeyed,
            is_heard: false,
            recovering: vec![false; links_max],
        }
    }

    /// The position of the namenode that was obeyed last.
    pub fn obeyed(&self) -> Option<Position> {
        self.obeyed
    }

    /// The same, as recorded on the disks.
    pub fn written(&self) -> Option<Position> {
        self.written
    }

    /// Takes note of the position obeyed before the start, according to a volume that was opened after others.
    /// Namenodes that know less are no longer obeyed.
    pub fn found(&mut self, obeyed: Position) {
        if self.obeyed.is_none_or(|before| is_through(before, obeyed)) {
            self.obeyed = Some(obeyed);
        }
    }

    /// As [`Self::found`], according to volumes that were there from the start: nothing has to be written for it, and
    /// volumes of another cluster, which are still there, must not get it.
    pub fn recalled(&mut self, obeyed: Position) {
        if self.obeyed.is_none_or(|before| is_through(before, obeyed)) {
            self.obeyed = Some(obeyed);
            self.written = Some(obeyed);
        }
    }

    /// Whether a command given in this epoch is still valid: no later epoch has been obeyed since.
    pub fn holds(&self, epoch: Epoch) -> bool {
        self.obeyed.is_some_and(|it| it.epoch == epoch)
    }

    /// Judges the namenode on a link by the authority that it claims.
    pub fn judge(&mut self, LinkId(link): LinkId, authority: &Authority) -> Judgement {
        let was_recovering = std::mem::replace(&mut self.recovering[link], authority.recovering);
        let result = self.after(authority);
        let is_news = match result {
            Ok(obeyed) => self.obeyed.map(|it| it.epoch) != Some(obeyed.epoch),
            Err(_) => authority.recovering && !was_recovering,
        };
        if let Ok(obeyed) = result {
            assert!(
                self.obeyed.is_none_or(|before| is_through(before, obeyed)),
                "{obeyed} is obeyed after {:?}: {authority:?}",
                self.obeyed
            );
            self.obeyed = Some(obeyed);
            self.is_heard = true;
        }
        Judgement { result, is_news }
    }

    /// Returns the position to obey after this claim.
    fn after(&self, authority: &Authority) -> Result<Position, Refusal> {
        if authority.recovering {
            return Err(Refusal::Recovering);
        }
        let position = authority.position;
        match self.obeyed {
            Some(obeyed) if obeyed.epoch == position.epoch => Ok(Position {
                record: obeyed.record.max(position.record),
                ..obeyed
            }),
            Some(obeyed)
                if obeyed.epoch.number >= position.epoch.number
                    && !planted::is(Bug::ObeysOlderEpochs) =>
            {
                Err(Refusal::Older {
                    obeyed,
                    authority: *authority,
                })
            }
            Some(_) | None => Ok(position),
        }
    }

    /// The position that has to be written, if the disks do not have it.
    pub fn to_write(&self) -> Option<Position> {
        self.obeyed.filter(|_| self.obeyed != self.written)
    }

    /// The position that should be on all disks, even if one of them already has it.
    pub fn to_spread(&self) -> Option<Position> {
        self.obeyed.filter(|_| self.is_heard)
    }

    /// Records that a disk has this position now.
    pub fn wrote(&mut self, position: Position) {
        // Otherwise this datanode, after a restart, would refuse the namenode that it obeys now.
        assert!(
            self.obeyed
                .is_some_and(|obeyed| is_through(position, obeyed)),
            "{position} is written, and {:?} was obeyed",
            self.obeyed
        );
        self.written = Some(position);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: LinkId = LinkId(0);
    const TWO: LinkId = LinkId(1);

    fn at(number: u32, id: u64, record: u64) -> Authority {
        Authority {
            position: Position {
                epoch: Epoch { number, id },
                record,
            },
            recovering: false,
        }
    }

    #[test]
    fn none_is_obeyed_that_is_older_or_beside() {
        let mut obedience = Obedience::new(None, 1);
        for (authority, is_obeyed) in [
            (at(5, 1, 10), true),
            (at(5, 1, 20), true),
            // Replies may overtake each other.
            (at(5, 1, 15), true),
            (at(5, 2, 99), false),
            (at(4, 1, 99), false),
            (at(6, 2, 3), true),
            (at(5, 1, 30), false),
        ] {
            let recovering = Authority {
                recovering: true,
                ..authority
            };
            let judgement = obedience.judge(ONE, &recovering);
            assert_eq!(judgement.result, Err(Refusal::Recovering));
            let before = obedience.obeyed();
            let judgement = obedience.judge(ONE, &authority);
            assert_eq!(judgement.result.is_ok(), is_obeyed, "{authority:?}");
            if !is_obeyed {
                assert_eq!(obedience.obeyed(), before);
            }
        }
        let end = at(6, 2, 3).position;
        assert_eq!(obedience.obeyed(), Some(end));
        let mut again = Obedience::new(Some(at(5, 1, 20).position), 1);
        assert!(again.judge(ONE, &at(5, 1, 15)).result.is_ok());
        assert_eq!(again.obeyed(), Some(at(5, 1, 20).position));
        assert_eq!(again.to_write(), None);
    }

    /// At the start, it is not known yet which disks belong to another cluster.
    #[test]
    fn what_only_a_disk_says_is_not_put_on_others() {
        let position = at(5, 1, 20).position;
        let mut obedience = Obedience::new(Some(position), 1);
        assert!(obedience.judge(ONE, &at(4, 1, 99)).result.is_err());
        assert_eq!(obedience.to_spread(), None);
        assert!(obedience.judge(ONE, &at(5, 1, 15)).result.is_ok());
        assert_eq!(obedience.to_write(), None);
        assert_eq!(obedience.to_spread(), Some(position));
    }

    /// The other volumes may not have had this position.
    #[test]
    fn what_a_volume_says_that_is_opened_later_counts_if_it_knows_more() {
        let position = |number, id, record| at(number, id, record).position;
        let mut obedience = Obedience::new(None, 1);
        for (found, obeyed) in [
            (position(5, 1, 10), position(5, 1, 10)),
            (position(5, 1, 9), position(5, 1, 10)),
            (position(4, 1, 99), position(5, 1, 10)),
            (position(5, 2, 99), position(5, 1, 10)),
            (position(6, 2, 3), position(6, 2, 3)),
        ] {
            obedience.found(found);
            assert_eq!(obedience.obeyed(), Some(obeyed));
        }
        assert!(obedience.judge(ONE, &at(5, 1, 11)).result.is_err());
        assert!(obedience.judge(ONE, &at(6, 2, 4)).result.is_ok());
    }

    #[test]
    fn a_new_epoch_and_the_beginning_of_a_recovery_are_news() {
        let mut obedience = Obedience::new(None, 1);
        let recovering = Authority {
            recovering: true,
            ..at(5, 1, 1)
        };
        let news = [
            (at(5, 1, 1), true),
            (at(5, 1, 2), false),
            (recovering, true),
            (recovering, false),
            (at(5, 1, 3), false),
            (recovering, true),
            (at(6, 1, 1), true),
            (at(5, 1, 4), false),
        ];
        for (authority, is_news) in news {
            assert_eq!(
                obedience.judge(ONE, &authority).is_news,
                is_news,
                "{authority:?}"
            );
        }
    }

    #[test]
    fn of_several_the_one_with_the_highest_epoch_is_obeyed() {
        let mut obedience = Obedience::new(None, 2);
        let standby = |authority| Authority {
            recovering: true,
            ..authority
        };
        let heard = [
            (ONE, at(5, 1, 10), true, true),
            (TWO, standby(at(5, 1, 9)), false, true),
            // A standby is not news each time the other namenode is heard from.
            (ONE, at(5, 1, 11), true, false),
            (TWO, standby(at(5, 1, 11)), false, false),
            (TWO, at(6, 2, 12), true, true),
            (ONE, at(5, 1, 12), false, false),
            (ONE, standby(at(6, 2, 13)), false, true),
            (TWO, at(6, 2, 13), true, false),
        ];
        for (link, authority, is_obeyed, is_news) in heard {
            let judgement = obedience.judge(link, &authority);
            assert_eq!(judgement.result.is_ok(), is_obeyed, "{authority:?}");
            assert_eq!(judgement.is_news, is_news, "{authority:?}");
            let later = obedience.obeyed().unwrap().epoch;
            assert!(obedience.holds(later));
            let earlier = at(4, 1, 0).position.epoch;
            assert!(!obedience.holds(earlier));
        }
        assert_eq!(obedience.obeyed(), Some(at(6, 2, 13).position));
    }
}
