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

# Every fuzz target on its seeds.
fuzz:
    cargo test -p harvestfs-fuzz

# Everything, as before a change is accepted; about 40 minutes.
all:
    .ci/run
