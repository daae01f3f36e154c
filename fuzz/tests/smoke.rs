//! Runs every target on its seeds, and on small mutations of them, without a fuzzer.

use std::path::Path;

use harvestfs_fuzz::{TARGETS, seeds};

#[test]
fn every_target_takes_its_seeds_whole_cut_and_changed() {
    // Some targets constantly write and sync files: on a disk, this takes minutes.
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        tempfile::env::override_temp_dir(memory).expect("nothing has asked for a directory yet");
    }
    for (name, target) in TARGETS {
        target(&[]);
        for (number, seed) in seeds::of(name).into_iter().enumerate() {
            println!("{name}, seed {number}");
            target(&seed);
            for step in 1..=16 {
                let position = seed.len() * step / 17;
                target(&seed[..position]);
                let mut changed = seed.clone();
                if let Some(byte) = changed.get_mut(position) {
                    *byte ^= 1 << (step % 8);
                }
                target(&changed);
            }
        }
    }
}
