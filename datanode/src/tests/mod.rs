//! Datanodes on loopback with a fake namenode.

mod background;
mod busy;
mod late;
mod link;
mod namenodes;
mod pipeline;
mod reading;
mod security;
mod short_circuit;
