//! The known namenodes: those of the configuration, and those that namenodes report.
//!
//! Configured namenodes stay known whatever is reported: after a loss, the group may be recreated on one of
//! their addresses. Every namenode that answers has to present a certificate of a namenode of this cluster.

use std::net::SocketAddr;

use harvestfs_protocol::limits::NAMENODES_TOLD_MAX;

/// The addresses of namenodes.
#[derive(Debug)]
pub(crate) struct Namenodes {
    configured: Vec<SocketAddr>,
    /// The members of the group as the leader last reported them, and those that others reported as leader.
    told: Vec<SocketAddr>,
}

/// Whether two addresses denote the same socket, whichever address family they are written in.
fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    (one.ip().to_canonical(), one.port()) == (other.ip().to_canonical(), other.port())
}

impl Namenodes {
    /// Starts with the configured namenodes.
    pub(crate) fn new(configured: Vec<SocketAddr>) -> Self {
        Self {
            configured,
            told: Vec::new(),
        }
    }

    /// Returns all known addresses, each once.
    pub(crate) fn all(&self) -> Vec<SocketAddr> {
        let mut all = self.configured.clone();
        let told = self.told.iter();
        all.extend(told.filter(|&&it| !self.is_configured(it)));
        all
    }

    /// Whether there is more than one namenode.
    pub(crate) fn are_several(&self) -> bool {
        self.configured.len() > 1 || self.told.iter().any(|&it| !self.is_configured(it))
    }

    /// Notes the members that the leader reports.
    pub(crate) fn told(&mut self, mut members: Vec<SocketAddr>) {
        members.truncate(NAMENODES_TOLD_MAX);
        self.told = members;
    }

    /// Notes the leader that another namenode reports. Returns its known address; `None` when too many are known.
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
