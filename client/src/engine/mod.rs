//! What the client decides. Nothing here does I/O, looks at a clock or at a source of chance: events
//! come in as calls, with the time where it matters, and what is to be done comes out.

pub(crate) mod cache;
pub(crate) mod read;
pub(crate) mod session;
pub(crate) mod write;
