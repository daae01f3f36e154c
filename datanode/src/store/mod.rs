//! The block store.
mod buffer;
mod layout;
