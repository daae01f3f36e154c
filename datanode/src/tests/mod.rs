//! Datanodes on loopback with a fake namenode.

mod background;
mod link;
mod pipeline;
mod reading;
mod security;
