# Short loops for work on the code; needs https://just.systems (`cargo install just`). Everything that must hold
# before a change is accepted is `.ci/run`.

# Lists the recipes.
default:
    @just --list

# Compiles one crate with its tests and shows what clippy has against it, such as `just check namenode`.
check crate:
    cargo clippy -p harvestfs-{{ crate }} --all-targets -- -D warnings

# Unit tests of one crate whose names contain a word.
unit crate word="":
    cargo test -p harvestfs-{{ crate }} --lib -- {{ word }}

# Unit tests of all crates, not those with a binary of their own (`*/tests`). Many wait for clocks and disks, not for a core;
# random histories are shorter than in .ci/run.
test:
    HARVESTFS_MODEL_STEPS=500 cargo test --workspace --lib --bin harvestfs -- --test-threads 16

# One suite with real processes and mounts, such as `just suite semantics holes`; needs /dev/fuse.
suite name word="":
    cargo test --workspace --test {{ name }} -- {{ word }}

# Properties of all crates with inputs that nobody has drawn before, such as `just properties 10000`; a failure prints the
# smallest input that it found.
properties cases="4096":
    PROPTEST_CASES={{ cases }} cargo test --release --workspace --lib --test '*' --exclude harvestfs-tests --exclude harvestfs-chaos

# Every fuzz target on its seeds.
fuzz:
    cargo test -p harvestfs-fuzz

# A rolling upgrade to a build with a later version, under load through mounts; needs /dev/fuse. The second build is in
# a directory of its own, and takes minutes the first time.
upgrade:
    cargo build --locked --workspace --bin harvestfs --features harvestfs-cli/next-version --target-dir target/next
    HARVESTFS_TESTS_NEXT="$PWD/target/next/debug/harvestfs" cargo test --workspace --features harvestfs-tests/two-builds --test upgrade -- --nocapture --test-threads 1

# Everything, as before a change is accepted; about 45 minutes.
all:
    .ci/run
