//! What is known of the primary tenants, seen from outside: how busy they are and when their
//! servers are reimaged.
//!
//! Placement by history needs it, and so does the busy gate of the datanode. With the `stock`
//! policy nothing of it is needed: it looks at racks and free space only, which heartbeats carry.
//! So this crate has no item yet; samplers, utilisation history and reimage history are added
//! together with the policies that use them.
