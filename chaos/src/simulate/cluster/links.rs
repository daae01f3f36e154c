//! Faults of the network between machines, and of their clocks.

use std::time::Duration;

use rand::RngExt;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

use super::Link;
use super::journal::Journal;
use super::kind::FaultKind;
use super::part::Part;
use super::world::World;

/// The largest drift of a clock from virtual time, in millionths. Leases allow for a hundredth between two clocks
/// (`LEASE_BELIEVED` in `protocol/src/limits.rs`).
const DRIFT_MAX_PPM: i64 = 4_500;

/// Nothing arrives.
pub const CUT: Link = Link {
    loss_percent: 0.0,
    twice_percent: 0.0,
    jitter: Duration::ZERO,
    cut: true,
};

/// Sets the links from a machine to all others and back.
pub fn set_all(part: Part, link: Link, world: &World) {
    for other in world.parts() {
        world.set_link(part, other, link);
        world.set_link(other, part, link);
    }
}

/// Sets the links from a machine, to it, or both, for all others or for some of them.
pub fn change(link: Link, part: Part, parts: &[Part], world: &World, rng: &mut SmallRng) {
    let (from, to) = [(true, true), (true, false), (false, true)]
        .choose(rng)
        .copied()
        .unwrap_or((true, true));
    let some_only = rng.random_range(0..2) == 0;
    for &other in parts {
        if some_only && rng.random_range(0..2) == 0 {
            continue;
        }
        if from {
            world.set_link(part, other, link);
        }
        if to {
            world.set_link(other, part, link);
        }
    }
}

/// Splits the network in two: a namenode and some machines, and the other namenodes and the remaining machines.
pub fn split(namenode: Part, parts: &[Part], world: &World, rng: &mut SmallRng) {
    let is_with = |part: &Part| *part == namenode || !part.is_namenode() && rng.random();
    let (with, without): (Vec<Part>, Vec<Part>) = parts.iter().copied().partition(is_with);
    for one in &with {
        for other in &without {
            world.set_link(*one, *other, CUT);
            world.set_link(*other, *one, CUT);
        }
    }
}

/// Changes the rates of the clocks of all machines.
pub fn drift(number: u32, world: &mut World, journal: &Journal, rng: &mut SmallRng) {
    for part in world.parts() {
        let ppm = match rng.random_range(0..3) {
            0 => -DRIFT_MAX_PPM,
            1 => DRIFT_MAX_PPM,
            _ => rng.random_range(-DRIFT_MAX_PPM..=DRIFT_MAX_PPM),
        };
        let name = FaultKind::Drift.name();
        journal.note(
            &part.to_string(),
            format_args!("fault {number}: {name} of {ppm} millionths"),
        );
        world.host(part).set_drift(ppm);
    }
}
