//! How many servers, or tasks on them, are lost together, and how many backups this requires ("Web-scale Job
//! Scheduling", Cirne and Frachtenberg, JSSPP'12, section 4).

mod admission;
mod blocks;
mod losses;

pub use admission::{
    Admitted, Cluster, Denied, FailureRates, Packing, RackSpec, SetupError, TaskGroup,
};
pub use blocks::{BlockReplica, BlockRisk, REPAIRED_WITHIN_S};
pub use losses::{Domain, Losses, Probability};
