//! Spare CPU cycles: which servers a job's tasks are sent to, and what owners get back when they need it.
//!
//! The algorithms of "History-Based Harvesting of Spare Cycles and Storage in Large-Scale Datacenters" (Zhang et al.,
//! OSDI'16, sections 4.1 and 5.3). All of them are pure: no I/O, no clock, and randomness comes from a generator that
//! the caller provides.
//!
//! - [`controller`]: the instructions to a resource manager that keep jobs to what owners leave;
//! - [`dag`]: the stages of a job, and how much of it can run at the same time;
//! - [`job`]: short, medium and long jobs, and the thresholds between them;
//! - [`offer`]: how much of a server is offered to jobs, without flapping;
//! - [`reserve`]: the owners' reserve, and which containers are evicted when owners need it;
//! - [`safety`]: which failures coincide, and admission of jobs that must survive them;
//! - [`select`]: Algorithm 1, which chooses the utilisation classes for a job;
//! - [`simulate`]: a month of jobs in a datacentre;
//! - [`sizing`]: how many volunteers a job should use in addition to dedicated nodes.

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
