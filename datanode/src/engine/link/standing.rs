//! How this datanode stands with its namenodes: whether the one that leads has accepted it.

use super::LinkId;

/// What each namenode has, and whether it is the one obeyed. A namenode that stands by, or is in
/// recovery, is told everything too, but nothing comes of that, unless it is the only one.
#[derive(Debug)]
pub struct Standing {
    links: Vec<Link>,
}

#[derive(Clone, Debug, Default)]
struct Link {
    is_there: bool,
    /// It was obeyed when it was last heard.
    leads: bool,
    /// It has given keys that sign tokens. They are good while the connection is lost, too.
    has_given_keys: bool,
    /// It has all that is here, by reports on the connection there is.
    is_reported: bool,
}

impl Standing {
    /// With at most so many links at a time.
    pub fn new(links_max: usize) -> Self {
        Self {
            links: vec![Link::default(); links_max],
        }
    }

    /// There is a link to a namenode from now on.
    pub fn begin(&mut self, LinkId(link): LinkId) {
        self.links[link] = Link {
            is_there: true,
            ..Link::default()
        };
    }

    /// There is none any more.
    pub fn end(&mut self, LinkId(link): LinkId) {
        self.links[link] = Link::default();
    }

    /// A namenode says something, and is obeyed (`leads`) or not.
    pub fn heard(&mut self, LinkId(link): LinkId, leads: bool) {
        self.links[link].leads = leads;
    }

    /// The keys of a namenode are accepted.
    pub fn gave_keys(&mut self, LinkId(link): LinkId) {
        self.links[link].has_given_keys = true;
    }

    /// A namenode has all that is here.
    pub fn reported(&mut self, LinkId(link): LinkId) {
        self.links[link].is_reported = true;
    }

    /// The connection is lost; the namenode may be another one when there is one again.
    pub fn lost(&mut self, LinkId(link): LinkId) {
        self.links[link].leads = false;
        self.links[link].is_reported = false;
    }

    /// Whether the keys of the namenode that leads are accepted. Until then, a token that nobody
    /// else signed may be a good one.
    pub fn has_keys_of_leader(&self) -> bool {
        self.counting().any(|it| it.has_given_keys)
    }

    /// Whether the namenode that leads knows this datanode and its replicas.
    pub fn is_known(&self) -> bool {
        self.counting().any(|it| it.is_reported)
    }

    /// Whether there is one namenode.
    pub fn has_only_one(&self) -> bool {
        self.links.iter().filter(|it| it.is_there).count() == 1
    }

    /// Whether one is obeyed, as far as is heard.
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
        // The other one begins to lead, and knows everything already.
        standing.lost(TWO);
        standing.heard(ONE, true);
        assert!(standing.has_keys_of_leader() && standing.is_known());
        // The first one leaves, and its link is one to a third one.
        standing.heard(TWO, false);
        standing.end(ONE);
        assert!(!standing.has_leader() && standing.has_keys_of_leader());
        standing.begin(ONE);
        assert!(!standing.has_keys_of_leader() && !standing.is_known());
    }
}
