//! Replica files that datanodes on this host lend for a while: which datanodes are asked, and until
//! when an answer can be used.

use std::time::{Duration, Instant};

use harvestfs_protocol::ids::{BlockId, NodeId};
use harvestfs_protocol::short_circuit::{LOAN, LOANS_MAX};
use rustc_hash::FxHashMap;

/// Pauses before a datanode that closed the connection, or one that has no socket on this host, is tried again.
const ENDED_PAUSE: Duration = Duration::from_secs(1);
const NO_SOCKET_PAUSE: Duration = Duration::from_secs(600);
/// How long a block whose file is not lent is read over the network: it will be lent once it is sealed.
const NOT_LENT_PAUSE: Duration = Duration::from_secs(2);
/// A file is no longer used when its loan ends within this, so that a read that has begun has time to finish.
const LOAN_MARGIN: Duration = Duration::from_secs(5);

/// Whether datanodes are on this host. `L` is the connection to one that is.
pub(crate) struct Lenders<L> {
    nodes: FxHashMap<NodeId, Access<L>>,
}

enum Access<L> {
    /// Not to be tried before this.
    Closed {
        until: Instant,
    },
    Open(L),
}

/// How to read a datanode's replicas.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Way<L> {
    /// Through the files that the datanode lends.
    Lender(L),
    /// Over the network.
    Network,
    /// The caller must ask whether the datanode is on this host; other readers use the network meanwhile.
    Ask,
}

impl<L> Default for Lenders<L> {
    fn default() -> Self {
        Self {
            nodes: FxHashMap::default(),
        }
    }
}

impl<L: Clone> Lenders<L> {
    /// Returns how to read a datanode's replicas now.
    pub(crate) fn way(&mut self, node: NodeId, now: Instant) -> Way<L> {
        match self.nodes.get(&node) {
            Some(Access::Open(lender)) => return Way::Lender(lender.clone()),
            Some(Access::Closed { until }) if now < *until => return Way::Network,
            Some(Access::Closed { .. }) | None => {}
        }
        self.closed(node, now + ENDED_PAUSE);
        Way::Ask
    }

    /// Notes that a datanode is on this host and connected.
    pub(crate) fn opened(&mut self, node: NodeId, lender: L) {
        assert!(
            self.nodes.contains_key(&node),
            "{node} lends its files, and was not asked"
        );
        self.nodes.insert(node, Access::Open(lender));
    }

    /// Notes that a datanode is not on this host, or lends nothing.
    pub(crate) fn has_no_socket(&mut self, node: NodeId, now: Instant) {
        self.closed(node, now + NO_SOCKET_PAUSE);
    }

    /// Notes that the connection to a datanode has ended, unless it has been replaced by another one.
    pub(crate) fn ended(&mut self, node: NodeId, now: Instant, is_meant: impl FnOnce(&L) -> bool) {
        if let Some(Access::Open(lender)) = self.nodes.get(&node)
            && is_meant(lender)
        {
            self.closed(node, now + ENDED_PAUSE);
        }
    }

    /// Returns all datanodes that lend.
    pub(crate) fn open(&self) -> Vec<L> {
        let open = self.nodes.values().filter_map(|access| match access {
            Access::Open(lender) => Some(lender.clone()),
            Access::Closed { .. } => None,
        });
        open.collect()
    }

    fn closed(&mut self, node: NodeId, until: Instant) {
        self.nodes.insert(node, Access::Closed { until });
    }
}

/// The answers of one datanode. `F` is a file.
pub(crate) struct Loans<F> {
    answers: FxHashMap<BlockId, Answer<F>>,
}

struct Answer<F> {
    /// `None` if the block's file is not lent.
    file: Option<F>,
    until: Instant,
}

impl<F> Default for Loans<F> {
    fn default() -> Self {
        Self {
            answers: FxHashMap::default(),
        }
    }
}

impl<F: Clone> Loans<F> {
    /// Returns the answer about a block, if it can be used now. The inner option is `None` when its file is not lent.
    pub(crate) fn get(&self, block: BlockId, now: Instant) -> Option<Option<F>> {
        let answer = self.answers.get(&block)?;
        (now < answer.until).then(|| answer.file.clone())
    }

    /// Notes the answer to a request that was sent at `asked_at`; the loan may have begun then.
    pub(crate) fn answered(&mut self, block: BlockId, file: Option<F>, asked_at: Instant) {
        let valid_for = match &file {
            Some(_) => LOAN - LOAN_MARGIN,
            None => NOT_LENT_PAUSE,
        };
        if self.answers.len() >= LOANS_MAX {
            self.expire(asked_at);
        }
        if self.answers.len() < LOANS_MAX {
            let until = asked_at + valid_for;
            self.answers.insert(block, Answer { file, until });
        }
        // Every answer may hold a file open.
        assert!(
            self.answers.len() <= LOANS_MAX,
            "{} files are lent, more than {LOANS_MAX}",
            self.answers.len()
        );
    }

    /// Drops the files that are no longer lent.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.answers.retain(|_, answer| now < answer.until);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::testing::some_time;

    const NODE: NodeId = NodeId(1);

    #[test]
    fn one_caller_asks_and_the_others_use_the_network_until_it_is_known() {
        let now = some_time();
        let mut lenders = Lenders::default();
        assert_eq!(lenders.way(NODE, now), Way::Ask);
        assert_eq!(lenders.way(NODE, now), Way::Network);
        // The caller that asked was cancelled.
        assert_eq!(lenders.way(NODE, now + ENDED_PAUSE), Way::Ask);
        lenders.opened(NODE, "first");
        assert_eq!(lenders.way(NODE, now), Way::Lender("first"));
        assert_eq!(lenders.open(), ["first"]);
        // A late notification about an earlier connection.
        lenders.ended(NODE, now, |lender| *lender == "earlier");
        assert_eq!(lenders.way(NODE, now), Way::Lender("first"));
        lenders.ended(NODE, now, |lender| *lender == "first");
        assert_eq!(lenders.way(NODE, now), Way::Network);
        assert!(lenders.open().is_empty());
        assert_eq!(lenders.way(NODE, now + ENDED_PAUSE), Way::Ask);
        lenders.has_no_socket(NODE, now);
        let almost = now + NO_SOCKET_PAUSE - Duration::from_millis(1);
        assert_eq!(lenders.way(NODE, almost), Way::Network);
        assert_eq!(lenders.way(NODE, now + NO_SOCKET_PAUSE), Way::Ask);
    }

    /// The datanode counts a removed replica's space as used for exactly as long as a loan lasts.
    #[test]
    fn no_file_is_used_when_its_loan_may_have_ended() {
        let asked_at = some_time();
        let file = Rc::new(());
        let mut loans = Loans::default();
        loans.answered(BlockId(1), Some(Rc::clone(&file)), asked_at);
        loans.answered(BlockId(2), None, asked_at);
        assert_eq!(loans.get(BlockId(3), asked_at), None);
        assert_eq!(loans.get(BlockId(2), asked_at), Some(None));
        assert_eq!(loans.get(BlockId(2), asked_at + NOT_LENT_PAUSE), None);
        let end = asked_at + LOAN - LOAN_MARGIN;
        let just_before = end - Duration::from_millis(1);
        assert!(matches!(loans.get(BlockId(1), just_before), Some(Some(_))));
        assert_eq!(loans.get(BlockId(1), end), None);
        assert_eq!(Rc::strong_count(&file), 2);
        loans.expire(end);
        assert_eq!(Rc::strong_count(&file), 1, "it is closed");
    }

    #[test]
    fn no_more_files_are_kept_than_a_datanode_lends() {
        let now = some_time();
        let mut loans = Loans::default();
        for block in 0..2 * LOANS_MAX as u64 {
            loans.answered(BlockId(block), Some(()), now);
        }
        assert_eq!(loans.answers.len(), LOANS_MAX);
        let later = now + LOAN;
        loans.answered(BlockId(9_999), Some(()), later);
        assert_eq!(loans.answers.len(), 1);
        assert_eq!(loans.get(BlockId(9_999), later), Some(Some(())));
    }
}
