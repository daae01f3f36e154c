//! The distribution of losses in a tree of failure domains.

/// A probability.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Probability(f64);

impl Probability {
    /// The probability of an impossible event.
    pub const NEVER: Self = Self(0.0);

    /// Creates a probability; none unless it is from 0 to 1.
    #[must_use]
    pub fn new(probability: f64) -> Option<Self> {
        (0.0..=1.0)
            .contains(&probability)
            .then_some(Self(probability))
    }

    /// Returns the probability as a number from 0 to 1.
    #[must_use]
    pub fn get(self) -> f64 {
        self.0
    }
}

/// A failure domain: an environment, a rack, a server.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Domain {
    /// The probability that it fails while the domain around it does not.
    pub fails: Probability,
    /// What is lost with it, in addition to what is lost with its parts: tasks or replicas on a server.
    pub losses: u32,
    /// The domains in it. They fail independently of each other.
    pub parts: Vec<Domain>,
}

/// The probability of each number of losses.
#[derive(Clone, Debug, PartialEq)]
pub struct Losses {
    probabilities: Vec<f64>,
}

impl Losses {
    /// Certainly no losses.
    fn none() -> Self {
        Self {
            probabilities: vec![1.0],
        }
    }

    /// Returns the distribution for a domain and everything in it: exact except for rounding.
    #[must_use]
    pub fn of(domain: &Domain) -> Self {
        let mut losses = Self::of_parts(&domain.parts);
        let all = losses.most() + domain.losses as usize;
        losses.probabilities.resize(all + 1, 0.0);
        let stays = 1.0 - domain.fails.get();
        for probability in &mut losses.probabilities {
            *probability *= stays;
        }
        losses.probabilities[all] += domain.fails.get();
        losses.checked()
    }

    fn checked(self) -> Self {
        let least = self.probabilities.iter().copied().fold(1.0, f64::min);
        assert!(least >= 0.0, "a number of losses has probability {least}");
        let sum: f64 = self.probabilities.iter().sum();
        assert!(
            (sum - 1.0).abs() < 1e-6,
            "probabilities of losses add up to {sum}: what is missing would seem safe"
        );
        self
    }

    fn of_parts(parts: &[Domain]) -> Self {
        let mut sum = Self::none();
        let mut rest = parts;
        while let Some(first) = rest.first() {
            let alike = rest.iter().take_while(|it| *it == first).count();
            let one = Self::of(first);
            // Whole groups of servers are identical, so the distribution of their sum is binomial.
            let many = if first.parts.is_empty() {
                binomial(alike, first.losses as usize, first.fails.get())
            } else {
                (1..alike).fold(one.clone(), |sum, _| sum.plus(&one))
            };
            sum = sum.plus(&many);
            rest = &rest[alike..];
        }
        sum
    }

    /// Returns the distribution of the sum of both, which are independent: their convolution.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let (long, short) = if self.most() >= other.most() {
            (self, other)
        } else {
            (other, self)
        };
        let mut sum = vec![0.0; long.most() + short.most() + 1];
        for (more, of_short) in short.probabilities.iter().enumerate() {
            if *of_short > 0.0 {
                let target = &mut sum[more..=more + long.most()];
                for (target, of_long) in target.iter_mut().zip(&long.probabilities) {
                    *target += of_short * of_long;
                }
            }
        }
        Self { probabilities: sum }.checked()
    }

    /// Returns the most that can be lost.
    #[must_use]
    pub fn most(&self) -> usize {
        self.probabilities.len() - 1
    }

    /// Returns the probability that exactly this many are lost.
    #[must_use]
    pub fn exactly(&self, count: usize) -> f64 {
        self.probabilities.get(count).copied().unwrap_or(0.0)
    }

    /// Returns the probability that more than this many are lost.
    #[must_use]
    pub fn more_than(&self, count: usize) -> f64 {
        let tail = self.probabilities.iter().skip(count + 1);
        // Sums from the smallest value on: 1 minus the rest would lose the precision of small probabilities.
        tail.rev().sum()
    }
}

/// Returns the distribution for `count` identical parts, each of which fails with a probability and then loses
/// `each`.
fn binomial(count: usize, each: usize, fails: f64) -> Losses {
    let mut probabilities = vec![0.0; count * each + 1];
    if fails >= 1.0 {
        probabilities[count * each] = 1.0;
        return Losses { probabilities };
    }
    // Relative to the most probable count instead of starting from none: the probability that none of many is lost
    // may be less than the smallest positive number, and then everything would be 0.
    let odds = fails / (1.0 - fails);
    let likeliest = (((count + 1) as f64 * fails) as usize).min(count);
    let mut relative = vec![1.0; count + 1];
    for lost in likeliest..count {
        relative[lost + 1] = relative[lost] * odds * (count - lost) as f64 / (lost + 1) as f64;
    }
    for lost in (0..likeliest).rev() {
        relative[lost] = relative[lost + 1] * (lost + 1) as f64 / (odds * (count - lost) as f64);
    }
    let all: f64 = relative.iter().sum();
    for (lost, relative) in relative.into_iter().enumerate() {
        probabilities[lost * each] += relative / all;
    }
    Losses { probabilities }
}
