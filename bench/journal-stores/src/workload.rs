//! Keys and values that all measurements share.

use crate::store::{Op, VALUE_BYTES};

/// A well-mixed number for `n` (SplitMix64); different for different `n`.
pub fn mix(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The value that belongs to `seed`; it does not compress.
pub fn value(seed: u64) -> [u8; VALUE_BYTES] {
    let mut value = [0; VALUE_BYTES];
    for (word, n) in value.chunks_exact_mut(8).zip(0u64..) {
        word.copy_from_slice(&mix(seed.wrapping_add(n << 40)).to_le_bytes());
    }
    value
}

/// The operation that stores record number `n`: keys are in random order, as inode numbers or hashes would be.
pub fn put(n: u64) -> Op {
    Op::Put(mix(n), value(n))
}
