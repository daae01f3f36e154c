//! Which servers are busy when.

use harvestfs_telemetry::profile::BUSY_ABOVE;
use rand::rngs::SmallRng;

use crate::random::{lognormal, stream};

/// One bit per sample of the month for each server, or for each tenant when its servers are alike.
pub(super) struct Busy {
    words: usize,
    bits: Vec<u64>,
    /// For each server, the index of the series of bits that applies to it.
    follows: Vec<u32>,
    samples: u64,
}

impl Busy {
    /// From the load of each tenant and the tenant of each server.
    pub(super) fn new(loads: &[Vec<f32>], owners: &[u32], server_spread: f64, seed: u64) -> Self {
        let samples = loads.first().map_or(0, Vec::len);
        let mut busy = Self {
            words: samples.div_ceil(64),
            bits: Vec::new(),
            follows: Vec::with_capacity(owners.len()),
            samples: samples as u64,
        };
        if server_spread > 0.0 {
            let mut rng: SmallRng = stream(seed, "how servers differ");
            for (number, &owner) in owners.iter().enumerate() {
                let factor = lognormal(&mut rng, 1.0, server_spread);
                busy.push(&loads[owner as usize], factor);
                busy.follows.push(number as u32);
            }
        } else {
            for load in loads {
                busy.push(load, 1.0);
            }
            busy.follows.extend(owners);
        }
        busy
    }

    fn push(&mut self, load: &[f32], factor: f64) {
        for chunk in load.chunks(64) {
            let word = chunk.iter().enumerate().fold(0, |word, (bit, &sample)| {
                word | (u64::from(f64::from(sample) * factor > BUSY_ABOVE) << bit)
            });
            self.bits.push(word);
        }
    }

    fn of(&self, server: u32) -> &[u64] {
        let first = self.follows[server as usize] as usize * self.words;
        &self.bits[first..first + self.words]
    }

    /// The number of samples in which all of these servers are busy; all samples when the list is empty.
    pub(super) fn all_busy(&self, servers: &[u32]) -> u64 {
        let Some((&first, rest)) = servers.split_first() else {
            return self.samples;
        };
        let mut count = 0;
        for (word, &bits) in self.of(first).iter().enumerate() {
            let all = rest.iter().fold(bits, |all, &it| all & self.of(it)[word]);
            count += u64::from(all.count_ones());
        }
        count
    }

    /// Share of the time that servers are busy, 0 to 1.
    pub(super) fn share(&self) -> f64 {
        let busy: u64 = (0..self.follows.len() as u32)
            .map(|server| self.all_busy(&[server]))
            .sum();
        busy as f64 / (self.follows.len() as f64 * self.samples as f64).max(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_when_all_are_busy() {
        let mut loads = vec![vec![0.1_f32; 100], vec![0.7; 100]];
        loads[0][70] = 0.9;
        loads[1][3] = 0.2;
        let busy = Busy::new(&loads, &[0, 1, 1], 0.0, 1);
        assert_eq!(busy.all_busy(&[0]), 1);
        assert_eq!(busy.all_busy(&[1, 2]), 99);
        assert_eq!(busy.all_busy(&[0, 2]), 1);
        assert!((busy.share() - 199.0 / 300.0).abs() < 1e-9);
    }
}
