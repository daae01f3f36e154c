//! A small datacentre with tenants of all three patterns.

use harvestfs_cycles::simulate::{Datacentre, TenantLoad};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

const SLOTS_PER_DAY: usize = 288;

/// So many servers; a tenant has about fifteen of them.
pub fn datacentre(servers: usize) -> Datacentre {
    let mut rng = SmallRng::seed_from_u64(7);
    let tenants: Vec<TenantLoad> = (0..servers.div_ceil(15))
        .map(|number| {
            let level: f64 = rng.random_range(0.1..0.4);
            let peak_slot = rng.random_range(0..SLOTS_PER_DAY);
            let (mut episode, mut left) = (level, 0);
            let mut sample = |slot: usize| {
                let noise: f64 = rng.random_range(-0.01..0.01);
                let share = match number % 5 {
                    // 40 % of the servers are of periodic tenants, 40 % of constant ones.
                    0 | 1 => {
                        let turn = (slot + SLOTS_PER_DAY - peak_slot) as f64 / SLOTS_PER_DAY as f64;
                        level * (1.0 + 0.7 * (turn * std::f64::consts::TAU).cos())
                    }
                    2 | 3 => level,
                    _ => {
                        if left == 0 {
                            left = rng.random_range(12..200);
                            episode = rng.random_range(0.02..0.6);
                        }
                        left -= 1;
                        episode
                    }
                };
                (share + noise).clamp(0.0, 1.0) as f32
            };
            let both: Vec<f32> = (0..60 * SLOTS_PER_DAY).map(&mut sample).collect();
            let (before, now) = both.split_at(30 * SLOTS_PER_DAY);
            TenantLoad {
                before: before.to_vec(),
                now: now.to_vec(),
            }
        })
        .collect();
    Datacentre {
        name: "test".to_owned(),
        slot_s: 300,
        owners: (0..servers).map(|it| (it % tenants.len()) as u32).collect(),
        tenants,
    }
}
