//! The decisions of the client. Nothing here does I/O or consults a clock or a source of randomness:
//! events arrive as calls, with the time where it matters, and return what is to be done.

pub(crate) mod cache;
pub(crate) mod read;
pub(crate) mod session;
pub(crate) mod write;
