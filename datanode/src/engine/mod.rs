//! What the datanode decides. Nothing here does I/O, looks at a clock or at a source of chance: events
//! come in as calls, with the time and chance where they matter, and what is to be done comes out.

pub mod budget;
pub mod busy;
pub mod disk;
pub mod link;
pub mod quota;
pub mod removal;
pub mod repair;
pub mod scrub;
pub mod write;
