//! HarvestFS datanode.
mod store;
#[cfg(test)]
mod testing;
