#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| harvestfs_fuzz::checkpoint_files(input));
