//! Servers with room, drawn by weight.

/// Weights of the servers of one class; drawing a server and changing a weight take logarithmic time (a Fenwick
/// tree).
#[derive(Clone, Debug)]
pub(super) struct Urn {
    sums: Vec<u64>,
    weights: Vec<u32>,
    total: u64,
}

impl Urn {
    /// Creates an urn of this many servers without weight.
    pub(super) fn new(servers: usize) -> Self {
        Self {
            sums: vec![0; servers + 1],
            weights: vec![0; servers],
            total: 0,
        }
    }

    /// Returns the number of servers.
    pub(super) fn servers(&self) -> usize {
        self.weights.len()
    }

    /// Returns the sum of all weights.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Sets the weight of a server.
    pub(super) fn set(&mut self, server: usize, weight: u32) {
        let before = std::mem::replace(&mut self.weights[server], weight);
        if before == weight {
            return;
        }
        assert!(
            u64::from(before) <= self.total,
            "server {server} had {before} tickets of {}",
            self.total
        );
        self.total = self.total - u64::from(before) + u64::from(weight);
        let mut at = server + 1;
        while at < self.sums.len() {
            self.sums[at] = self.sums[at] + u64::from(weight) - u64::from(before);
            at += at & at.wrapping_neg();
        }
    }

    /// Returns the server that holds a ticket: each server has as many tickets as its weight, numbered in order from
    /// 0 and below [`Urn::total`].
    pub(super) fn holder(&self, ticket: u64) -> usize {
        let total = self.total;
        assert!(ticket < total, "ticket {ticket} of {total} is drawn");
        let (mut at, mut left) = (0, ticket);
        let mut step = self.sums.len().next_power_of_two() / 2;
        while step > 0 {
            let next = at + step;
            if next < self.sums.len() && self.sums[next] <= left {
                at = next;
                left -= self.sums[next];
            }
            step /= 2;
        }
        assert!(
            left < u64::from(self.weights[at]),
            "ticket {ticket} of {total} is number {left} of server {at}, which has {}",
            self.weights[at]
        );
        at
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_server_has_as_many_tickets_as_its_weight(
            servers in 1..40_usize,
            changes in prop::collection::vec((0..40_usize, 0..13_u32), 0..80),
        ) {
            let mut urn = Urn::new(servers);
            let mut weights = vec![0; servers];
            for (server, weight) in changes {
                if server < servers {
                    urn.set(server, weight);
                    weights[server] = weight;
                }
            }
            let holders: Vec<usize> = (0..urn.total()).map(|it| urn.holder(it)).collect();
            let each = weights.iter().enumerate();
            let expected: Vec<usize> =
                each.flat_map(|(server, &weight)| vec![server; weight as usize]).collect();
            prop_assert_eq!(holders, expected);
        }
    }
}
