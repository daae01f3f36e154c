//! The namenodes that are known: those of the configuration, and what namenodes themselves say.
//!
//! The ones of the configuration stay known whatever is said: after a loss, the group may be made anew on
//! one of their addresses. Whoever answers has to show a certificate of a namenode of this cluster.

use std::net::SocketAddr;

use harvestfs_protocol::limits::NAMENODES_TOLD_MAX;

/// Where namenodes listen.
#[derive(Debug)]
pub(crate) struct Namenodes {
    configured: Vec<SocketAddr>,
    /// The members of the group, as the one that leads said last, and those that others say lead.
    told: Vec<SocketAddr>,
}

/// Whether two addresses are of the same socket, in whichever family one of them is written.
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    (one.ip().to_canonical(), one.port()) == (other.ip().to_canonical(), other.port())
}

impl Namenodes {
    /// Those of the configuration.
    pub(crate) fn new(configured: Vec<SocketAddr>) -> Self {
        Self {
            configured,
            told: Vec::new(),
        }
    }

    /// All, each once.
    pub(crate) fn all(&self) -> Vec<SocketAddr> {
        let mut all = self.configured.clone();
        let told = self.told.iter();
        all.extend(told.filter(|&&it| !self.is_configured(it)));
        all
    }

    /// Whether there are others than one.
    pub(crate) fn are_several(&self) -> bool {
        self.configured.len() > 1 || self.told.iter().any(|&it| !self.is_configured(it))
    }

    /// The one that leads says who the members are.
    pub(crate) fn told(&mut self, mut members: Vec<SocketAddr>) {
        members.truncate(NAMENODES_TOLD_MAX);
        self.told = members;
    }

    /// One says that another one leads. Gives that as it is known here; none when too many are.
    pub(crate) fn hinted(&mut self, leader: SocketAddr) -> Option<SocketAddr> {
        let known = self.all().into_iter().find(|it| is_same(*it, leader));
        if known.is_none() && self.told.len() < NAMENODES_TOLD_MAX {
            self.told.push(leader);
            return Some(leader);
        }
        known
    }

    fn is_configured(&self, addr: SocketAddr) -> bool {
        self.configured.iter().any(|it| is_same(*it, addr))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[test]
    fn those_of_the_configuration_stay_and_others_are_as_the_leader_says() {
        let mut namenodes = Namenodes::new(vec![addr(1)]);
        assert!(!namenodes.are_several());
        let mapped: SocketAddr = "[::ffff:127.0.0.1]:1".parse().unwrap();
        namenodes.told(vec![mapped]);
        assert!(!namenodes.are_several(), "it is the same one");
        assert_eq!(namenodes.hinted(mapped), Some(addr(1)));
        namenodes.told(vec![addr(1), addr(2), addr(3)]);
        assert_eq!(namenodes.all(), [addr(1), addr(2), addr(3)]);
        assert_eq!(namenodes.hinted(addr(4)), Some(addr(4)));
        namenodes.told(vec![addr(3), addr(5)]);
        assert_eq!(namenodes.all(), [addr(1), addr(3), addr(5)]);
        assert!(namenodes.are_several());
    }

    #[test]
    fn no_more_are_remembered_than_a_group_can_have() {
        let mut namenodes = Namenodes::new(vec![addr(1)]);
        for port in 2..100 {
            let is_known = namenodes.hinted(addr(port)).is_some();
            assert_eq!(is_known, usize::from(port) <= NAMENODES_TOLD_MAX + 1);
        }
        namenodes.told((1..100).map(addr).collect());
        assert_eq!(namenodes.all().len(), NAMENODES_TOLD_MAX);
    }
}
