//! The namenodes to which there are links: always those of the configuration, and those that namenodes report as
//! members of their group. So a datanode keeps working when all namenodes in its configuration have been replaced.

use std::net::SocketAddr;

use harvestfs_protocol::limits::NAMENODES_TOLD_MAX;

use super::LinkId;

/// The namenodes, by link. Those of the configuration are the first.
#[derive(Debug)]
pub struct Members {
    links: Vec<Option<Member>>,
    configured: usize,
}

#[derive(Clone, Debug)]
struct Member {
    addr: SocketAddr,
    /// The address at which the other namenodes know it, as it reports itself.
    called: Option<SocketAddr>,
    /// The obeyed namenode does not list it as a member.
    has_left: bool,
    /// Its link is to end, and has not ended yet.
    is_ending: bool,
}

/// A change that follows from a namenode's report on its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Start a link to this namenode.
    Begin(LinkId, SocketAddr),
    /// End this link.
    End(LinkId),
    /// The configuration names a namenode that has left.
    Left(LinkId),
    /// There are too many links to start one to this namenode.
    TooMany(SocketAddr),
}

fn canonical(addr: SocketAddr) -> SocketAddr {
    SocketAddr::new(addr.ip().to_canonical(), addr.port())
}

impl Member {
    fn new(addr: SocketAddr) -> Self {
        Self {
            addr: canonical(addr),
            called: None,
            has_left: false,
            is_ending: false,
        }
    }

    fn is(&self, addr: SocketAddr) -> bool {
        self.addr == addr || self.called == Some(addr)
    }

    fn is_same(&self, other: &Self) -> bool {
        self.is(other.addr) || other.called.is_some_and(|it| self.is(it))
    }
}

impl Members {
    /// The namenodes of the configuration, each with its link.
    pub fn new(configured: &[SocketAddr]) -> Self {
        let members = configured.iter().map(|&addr| Some(Member::new(addr)));
        let told = std::iter::repeat_n(None, NAMENODES_TOLD_MAX);
        Self {
            links: members.chain(told).collect(),
            configured: configured.len(),
        }
    }

    /// The maximum number of links at a time.
    pub fn links_max(&self) -> usize {
        self.links.len()
    }

    /// Whether there are links to several namenodes.
    pub fn are_several(&self) -> bool {
        self.links.iter().flatten().count() > 1
    }

    /// Whether the obeyed namenode does not list this one as a member.
    pub fn has_left(&self, LinkId(link): LinkId) -> bool {
        self.links[link].as_ref().is_some_and(|it| it.has_left)
    }

    /// Handles a namenode's report of its own address (`this`) and of all members. The report `counts` if the namenode
    /// is obeyed, or if none is: then it may be the only one that knows the others. A namenode missing from the report
    /// of one that is not obeyed may still be a member.
    pub fn told(
        &mut self,
        LinkId(by): LinkId,
        this: SocketAddr,
        all: &[SocketAddr],
        is_obeyed: bool,
        counts: bool,
    ) -> Vec<Change> {
        if let Some(member) = &mut self.links[by] {
            member.called = Some(canonical(this));
        }
        let mut changes = self.end_doubles();
        if counts {
            changes.extend(all.iter().filter_map(|addr| self.begin(*addr)));
        }
        if is_obeyed {
            let all: Vec<SocketAddr> = all.iter().copied().map(canonical).collect();
            changes.extend(self.leave(&all));
        }
        changes
    }

    /// Handles the hint of a namenode that refuses this datanode: the address of the leader.
    pub fn hinted(&mut self, leader: SocketAddr) -> Option<Change> {
        self.begin(leader)
    }

    /// Takes note that a link that was to end has ended: its index may be reused for another namenode.
    pub fn ended(&mut self, LinkId(link): LinkId) {
        let was = self.links[link].take();
        assert!(
            was.as_ref().is_some_and(|it| it.is_ending),
            "a link ended that was not to: {was:?}"
        );
    }

    /// Ends redundant links: with two links to one namenode, each would make it forget the other.
    fn end_doubles(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for link in self.configured..self.links.len() {
            let (before, rest) = self.links.split_at_mut(link);
            let Some(member) = rest[0].as_mut().filter(|it| !it.is_ending) else {
                continue;
            };
            let mut others = before.iter().flatten().filter(|it| !it.is_ending);
            if others.any(|it| it.is_same(member)) {
                member.is_ending = true;
                changes.push(Change::End(LinkId(link)));
            }
        }
        changes
    }

    fn begin(&mut self, addr: SocketAddr) -> Option<Change> {
        // A namenode whose link is ending gets a new link once that has ended and it is reported again.
        let named = canonical(addr);
        if self.links.iter().flatten().any(|it| it.is(named)) {
            return None;
        }
        let Some(link) = self.links.iter().position(Option::is_none) else {
            return Some(Change::TooMany(addr));
        };
        self.links[link] = Some(Member::new(addr));
        Some(Change::Begin(LinkId(link), addr))
    }

    fn leave(&mut self, all: &[SocketAddr]) -> Vec<Change> {
        let mut changes = Vec::new();
        for (link, member) in self.links.iter_mut().enumerate() {
            let Some(member) = member else {
                continue;
            };
            let had_left = member.has_left;
            member.has_left = !all.iter().any(|it| member.is(*it));
            if !member.has_left {
                continue;
            }
            if link < self.configured {
                if !had_left {
                    changes.push(Change::Left(LinkId(link)));
                }
            } else if !member.is_ending {
                member.is_ending = true;
                changes.push(Change::End(LinkId(link)));
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: LinkId = LinkId(0);
    const OTHER: LinkId = LinkId(1);
    const NEW: LinkId = LinkId(2);

    fn addr(port: u16) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port))
    }

    fn addrs(ports: &[u16]) -> Vec<SocketAddr> {
        ports.iter().copied().map(addr).collect()
    }

    fn obeyed(members: &mut Members, by: LinkId, this: u16, all: &[u16]) -> Vec<Change> {
        members.told(by, addr(this), &addrs(all), true, true)
    }

    #[test]
    fn those_that_come_are_linked_and_those_that_go_are_not() {
        let mut members = Members::new(&addrs(&[1, 2]));
        assert_eq!(obeyed(&mut members, LEADER, 1, &[1, 2]), []);
        let begun = obeyed(&mut members, LEADER, 1, &[1, 2, 3]);
        assert_eq!(begun, [Change::Begin(NEW, addr(3))]);
        assert_eq!(obeyed(&mut members, LEADER, 1, &[1, 2, 3]), []);
        // The new namenode leads, and one of the configuration has left: it may return.
        let left = obeyed(&mut members, NEW, 3, &[2, 3]);
        assert_eq!(left, [Change::Left(LEADER)]);
        assert!(members.has_left(LEADER) && !members.has_left(OTHER));
        assert_eq!(obeyed(&mut members, NEW, 3, &[2, 3]), []);
        assert_eq!(obeyed(&mut members, NEW, 3, &[1, 2, 3]), []);
        assert!(!members.has_left(LEADER));
        // The new namenode itself leaves.
        assert_eq!(obeyed(&mut members, OTHER, 2, &[1, 2]), [Change::End(NEW)]);
        assert_eq!(obeyed(&mut members, OTHER, 2, &[1, 2, 3]), []);
        members.ended(NEW);
        let again = obeyed(&mut members, OTHER, 2, &[1, 2, 3]);
        assert_eq!(again, [Change::Begin(NEW, addr(3))]);
    }

    #[test]
    fn one_that_is_not_obeyed_names_others_only_while_none_is() {
        let mut members = Members::new(&addrs(&[1]));
        assert!(!members.are_several());
        let old = addrs(&[1, 7]);
        assert_eq!(members.told(LEADER, addr(1), &old, false, false), []);
        let begun = members.told(LEADER, addr(1), &old, false, true);
        assert_eq!(begun, [Change::Begin(OTHER, addr(7))]);
        assert!(members.are_several());
        assert_eq!(members.told(OTHER, addr(7), &addrs(&[7]), false, true), []);
        assert!(!members.has_left(LEADER));
    }

    #[test]
    fn one_with_two_addresses_gets_one_link() {
        let mut members = Members::new(&addrs(&[1, 2]));
        // The second one is not heard from, and the first one knows it by another address.
        let begun = obeyed(&mut members, LEADER, 11, &[11, 12]);
        assert_eq!(begun, [Change::Begin(NEW, addr(12)), Change::Left(OTHER)]);
        let both = members.told(OTHER, addr(12), &addrs(&[11, 12]), false, false);
        assert_eq!(both, [Change::End(NEW)]);
        assert_eq!(obeyed(&mut members, LEADER, 11, &[11, 12]), []);
        assert!(!members.has_left(OTHER));
        members.ended(NEW);
        assert_eq!(obeyed(&mut members, LEADER, 11, &[11, 12]), []);
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:12".parse().unwrap();
        assert_eq!(
            members.told(LEADER, addr(11), &[addr(11), mapped], true, true),
            []
        );
    }

    #[test]
    fn there_are_no_more_links_than_there_may_be() {
        let mut members = Members::new(&addrs(&[1]));
        let ports: Vec<u16> = (1..100).collect();
        let changes = obeyed(&mut members, LEADER, 1, &ports);
        let begun = changes.iter().filter(|it| matches!(it, Change::Begin(..)));
        assert_eq!(begun.count(), NAMENODES_TOLD_MAX);
        assert!(changes.contains(&Change::TooMany(addr(99))));
        assert_eq!(members.links_max(), 1 + NAMENODES_TOLD_MAX);
    }
}
