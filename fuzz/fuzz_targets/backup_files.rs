#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| harvestfs_fuzz::backup_files(input));
