//! The standing of this datanode with its namenodes: whether the leader has accepted it.

use super::LinkId;

/// The state of each link, and whether its namenode is the obeyed one. A namenode that is a standby or in recovery
/// receives all reports too, but they have no effect, unless it is the only namenode.
#[derive(Debug)]
pub struct Standing {
    links: Vec<Link>,
}

#[derive(Clone, Debug, Default)]
struct Link {
    is_there: bool,
    /// The namenode was obeyed when it was last heard from.
    leads: bool,
    /// The namenode has sent keys that sign tokens. They remain valid while the connection is lost.
    has_given_keys: bool,
    /// The namenode knows everything that is here, from reports on the current connection.
    is_reported: bool,
}

impl Standing {
    /// No links at first, and at most so many at a time.
    pub fn new(links_max: usize) -> Self {
        Self {
            links: vec![Link::default(); links_max],
        }
    }

    /// Notes that there is a link to a namenode from now on.
    pub fn begin(&mut self, LinkId(link): LinkId) {
        self.links[link] = Link {
            is_there: true,
            ..Link::default()
        };
    }

    /// Notes that the link has ended.
    pub fn end(&mut self, LinkId(link): LinkId) {
        self.links[link] = Link::default();
    }

    /// Notes that a namenode was heard from, and is obeyed (`leads`) or not.
    pub fn heard(&mut self, LinkId(link): LinkId, leads: bool) {
        self.links[link].leads = leads;
    }

    /// Notes that the keys of a namenode are accepted.
    pub fn gave_keys(&mut self, LinkId(link): LinkId) {
        self.links[link].has_given_keys = true;
    }

    /// Notes that a namenode knows everything that is here.
    pub fn reported(&mut self, LinkId(link): LinkId) {
        self.links[link].is_reported = true;
    }

    /// Notes that the connection is lost; on the next connection, the namenode may be another one.
    pub fn lost(&mut self, LinkId(link): LinkId) {
        self.links[link].leads = false;
        self.links[link].is_reported = false;
    }

    /// Whether the leader's keys are accepted. Until then, a token with an unknown signature may be valid.
    pub fn has_keys_of_leader(&self) -> bool {
        self.counting().any(|it| it.has_given_keys)
    }

    /// Whether the leader knows this datanode and its replicas.
    pub fn is_known(&self) -> bool {
        self.counting().any(|it| it.is_reported)
    }

    /// Whether there is exactly one namenode.
    pub fn has_only_one(&self) -> bool {
        self.links.iter().filter(|it| it.is_there).count() == 1
    }

    /// Whether a namenode is obeyed, as far as this datanode knows.
    pub fn has_leader(&self) -> bool {
        self.links.iter().any(|it| it.leads)
    }

    fn counting(&self) -> impl Iterator<Item = &Link> {
        let is_only = self.has_only_one();
        let there = self.links.iter().filter(|it| it.is_there);
        there.filter(move |it| it.leads || is_only)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: LinkId = LinkId(0);
    const TWO: LinkId = LinkId(1);

    #[test]
    fn the_only_namenode_knows_it_though_it_is_in_recovery() {
        let mut standing = Standing::new(2);
        standing.begin(ONE);
        assert!(!standing.has_keys_of_leader());
        standing.heard(ONE, false);
        standing.gave_keys(ONE);
        assert!(standing.has_keys_of_leader() && !standing.is_known());
        standing.reported(ONE);
        assert!(standing.is_known());
        standing.lost(ONE);
        assert!(standing.has_keys_of_leader() && !standing.is_known());
    }

    #[test]
    fn of_several_the_one_that_leads_counts() {
        let mut standing = Standing::new(2);
        standing.begin(ONE);
        standing.begin(TWO);
        standing.heard(ONE, false);
        standing.gave_keys(ONE);
        standing.reported(ONE);
        assert!(!standing.has_keys_of_leader() && !standing.is_known());
        standing.heard(TWO, true);
        assert!(!standing.has_keys_of_leader() && !standing.is_known());
        standing.gave_keys(TWO);
        assert!(standing.has_keys_of_leader() && !standing.is_known());
        // The other namenode becomes leader, and already knows everything.
        standing.lost(TWO);
        standing.heard(ONE, true);
        assert!(standing.has_keys_of_leader() && standing.is_known());
        // The first namenode leaves, and its link is reused for a third one.
        standing.heard(TWO, false);
        standing.end(ONE);
        assert!(!standing.has_leader() && standing.has_keys_of_leader());
        standing.begin(ONE);
        assert!(!standing.has_keys_of_leader() && !standing.is_known());
    }
}
