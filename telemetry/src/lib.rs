//! The primary tenants, seen from outside: how busy they are, and when their servers are reimaged.
//!
//! - [`analysis`]: what is made of history once a day;
//! - [`classes`]: tenants whose CPU use is alike;
//! - [`coincidence`]: at which hours servers are reimaged, and how many of a tenant at once;
//! - [`gate`]: whether a server is to be left to its owner now;
//! - [`primary`]: samples of what a primary uses;
//! - [`profile`]: what history says of a tenant, the input of placement.
//! - [`metrics`]: what each part tells Prometheus;
//! - [`history`]: a month of CPU use, and years of reimages, in memory and on disk.
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
