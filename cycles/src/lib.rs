//! Spare CPU cycles: which servers a job's tasks go to, and what owners get back when they need it.
//!
//! The algorithms of "History-Based Harvesting of Spare Cycles and Storage in Large-Scale Datacenters"
//! (Zhang et al., OSDI'16, sections 4.1 and 5.3). All of them are pure: no I/O, no clock, and chance
//! comes from a generator that the caller gives.
//!
//! - [`dag`]: the stages of a job, and how much of it can run at the same time;
//! - [`job`]: short, medium and long jobs, and the thresholds between them;
//! - [`reserve`]: what owners keep, and which containers go when they need it;
//! - [`safety`]: what is lost together, and admission of jobs that are to survive it;
//! - [`select`]: Algorithm 1, which utilisation classes a job is sent to;
//! - [`simulate`]: a month of jobs in a datacentre;
//! - [`sizing`]: how many volunteers a job should use beside dedicated nodes.

#![forbid(unsafe_code)]

pub mod dag;
pub mod job;
pub mod reserve;
pub mod safety;
pub mod select;
pub mod simulate;
pub mod sizing;
