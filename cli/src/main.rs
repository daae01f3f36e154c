//! The `harvestfs` command.

fn main() {}
