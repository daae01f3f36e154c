//! The primary tenants as observed from outside: how busy they are, and when their servers are reimaged.
//!
//! - [`analysis`]: the daily analysis of history;
//! - [`classes`]: classes of tenants with similar CPU utilisation;
//! - [`coincidence`]: the hours at which servers are reimaged, and how many of a tenant's servers together;
//! - [`gate`]: whether a server is to be left to its owner at the moment;
//! - [`primary`]: samples of a primary tenant's resource usage;
//! - [`profile`]: a tenant's history in the form that placement needs.
//! - [`metrics`]: the Prometheus metrics of each part;
//! - [`history`]: a month of CPU utilisation, and years of reimages, in memory and on disk.
//! - [`reimages`]: reimage rates, and tenants that are reimaged together.
//! - [`spectrum`]: the pattern, average and peak of a series.
//! - [`traces`]: readers of recorded utilisation and reimages.

#![forbid(unsafe_code)]

pub mod analysis;
pub mod classes;
pub mod coincidence;
pub mod gate;
pub mod history;
pub mod hours;
pub mod metrics;
pub mod primary;
pub mod profile;
pub mod reimages;
pub mod scaling;
pub mod spectrum;
pub mod traces;
