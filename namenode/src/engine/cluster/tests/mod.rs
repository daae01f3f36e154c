//! Tests of the cluster engine.
