//! Spare CPU cycles: which servers a job's tasks go to, and what owners get back when they need it.
//!
//! The algorithms of "History-Based Harvesting of Spare Cycles and Storage in Large-Scale Datacenters"
//! (Zhang et al., OSDI'16, sections 4.1 and 5.3). All of them are pure: no I/O, no clock, and chance
//! comes from a generator that the caller gives.
//!
//! - [`controller`]: what a resource manager is told, so that it keeps to what owners leave;
//! - [`dag`]: the stages of a job, and how much of it can run at the same time;
//! - [`job`]: short, medium and long jobs, and the thresholds between them;
//! - [`offer`]: how much of a server is offered to jobs, without flapping;
//! - [`reserve`]: what owners keep, and which containers go when they need it;
//! - [`safety`]: what is lost together, and admission of jobs that are to survive it;
//! - [`select`]: Algorithm 1, which utilisation classes a job is sent to;
//! - [`simulate`]: a month of jobs in a datacentre;
//! - [`sizing`]: how many volunteers a job should use beside dedicated nodes.

#![forbid(unsafe_code)]

pub mod controller;
pub mod dag;
pub mod job;
pub mod offer;
pub mod reserve;
pub mod safety;
pub mod select;
pub mod simulate;
pub mod sizing;
