//! Locations of the bytes of a file, as the namenode reports them.

/// The extended attribute with the locations, one line for each extent.
pub const ATTRIBUTE: &str = "user.harvestfs.locations";
/// The last line when the file has more extents than fit.
pub const CUT_OFF: &str = "...";

/// An extent of a file that is not a hole.
pub struct Location {
    pub offset: u64,
    pub length_bytes: u64,
    pub block: String,
    /// The datanodes that have a replica of it.
    pub datanodes: Vec<String>,
}

impl Location {
    /// Parses a line: offset, length, block, datanodes.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let location = Self {
            offset: words.next()?.parse().ok()?,
            length_bytes: words.next()?.parse().ok()?,
            block: words.next()?.to_owned(),
            datanodes: words.map(str::to_owned).collect(),
        };
        location.offset.checked_add(location.length_bytes)?;
        Some(location)
    }

    /// Offset in the file at which it ends.
    pub fn end(&self) -> u64 {
        self.offset + self.length_bytes
    }

    /// Whether it has at least that many replicas. It may permanently have more: small files share a block, which has
    /// as many replicas as the most demanding of them requires.
    pub fn has_replicas(&self, wanted: u8) -> bool {
        self.datanodes.len() >= usize::from(wanted)
    }

    /// Whether `next` continues where this one ends, in the same block.
    pub fn goes_on_with(&self, next: &Self) -> bool {
        self.block == next.block && self.datanodes == next.datanodes && self.end() == next.offset
    }
}

/// What is known about the replicas of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Replicas {
    /// Some of its bytes have too few replicas.
    Missing,
    /// All of its bytes have enough replicas.
    Enough,
    /// This many bytes at its start have enough replicas; nothing is known about the rest.
    EnoughInFirst(u64),
}

/// Checks whether the extents that [`parse`] returned have enough replicas.
pub fn replicas(locations: &[Location], is_complete: bool, wanted: u8) -> Replicas {
    if !locations.iter().all(|it| it.has_replicas(wanted)) {
        return Replicas::Missing;
    }
    if is_complete {
        return Replicas::Enough;
    }
    Replicas::EnoughInFirst(locations.last().map_or(0, Location::end))
}

/// Parses the attribute. Returns the extents, and whether they cover the whole file.
pub fn parse(text: &str) -> (Vec<Location>, bool) {
    let locations = text.lines().filter_map(Location::parse).collect();
    (locations, text.lines().next_back() != Some(CUT_OFF))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_follows_in_the_same_block_is_one_place() {
        let text = ["0 10 b1 x y", "10 5 b1 x y", "15 5 b2 x y", "30 5 b2 x y"];
        let places: Vec<Location> = text.iter().filter_map(|it| Location::parse(it)).collect();
        let joins: Vec<bool> = places
            .windows(2)
            .map(|two| two[0].goes_on_with(&two[1]))
            .collect();
        assert_eq!(joins, [true, false, false]);
        assert!(Location::parse("...").is_none());
    }

    #[test]
    fn more_replicas_than_wanted_are_enough() {
        let place = Location::parse("0 10 b1 x y").unwrap();
        let enough = [1, 2, 3].map(|wanted| place.has_replicas(wanted));
        assert_eq!(enough, [true, true, false]);
    }

    #[test]
    fn what_is_not_shown_is_not_taken_for_replicated() {
        let judged = |text, wanted| {
            let (locations, is_complete) = parse(text);
            replicas(&locations, is_complete, wanted)
        };
        let all = "0 10 b1 x y\n20 5 b2 x y\n";
        let cut = format!("{all}{CUT_OFF}\n");
        assert_eq!(judged(all, 2), Replicas::Enough);
        assert_eq!(judged(&cut, 2), Replicas::EnoughInFirst(25));
        assert_eq!(judged(all, 3), Replicas::Missing);
        assert_eq!(judged(&cut, 3), Replicas::Missing);
        assert_eq!(judged("", 3), Replicas::Enough);
    }
}
