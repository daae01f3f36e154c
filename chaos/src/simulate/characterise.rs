//! Statistics that characterise a datacentre (the paper's figures 1 to 6).

use std::f64::consts::TAU;

use harvestfs_telemetry::profile::Pattern;
use harvestfs_telemetry::spectrum::Spectra;
use serde::Serialize;

use crate::datacentre::facts::{Facts, Monthly, measure, server_rates};
use crate::datacentre::{Datacentre, MONTHS, SLOT_S};

/// Slots that one point of a sample series covers: half an hour.
const SLOTS_PER_POINT: usize = (1_800 / SLOT_S) as usize;
/// Frequencies shown, in cycles per month.
const CYCLES_SHOWN: usize = 100;

/// A series in the time and frequency domains.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// CPU use of the average server in percent, by the hour of the month.
    pub by_hour: Vec<(f64, f64)>,
    /// Amplitude in percent, by cycles per month.
    pub by_frequency: Vec<(f64, f64)>,
}

/// The statistics of a datacentre.
#[derive(Clone, Debug, Serialize)]
pub struct Character {
    /// The datacentre.
    pub datacentre: String,
    /// The quantities that section 3.3 of the paper states.
    #[serde(flatten)]
    pub facts: Facts,
    /// Shares of the tenants that are periodic, constant and unpredictable (figure 2), as classified by the
    /// namenode's analysis of their first month.
    pub tenant_shares: [f64; 3],
    /// The same shares of the servers (figure 3).
    pub server_shares: [f64; 3],
    /// Share of the tenants for which the analysis agrees with the pattern that they were generated with.
    pub recognised_share: f64,
    /// Mean CPU use of all servers in the first month, 0 to 1.
    pub utilisation: f64,
    /// Reimages per month of each server, ascending (figure 4).
    #[serde(skip)]
    pub server_rates: Vec<f64>,
    /// Reimages per server and month of each tenant, ascending (figure 5).
    #[serde(skip)]
    pub tenant_rates: Vec<f64>,
    /// How often each tenant that existed throughout changed its group, ascending (figure 6).
    #[serde(skip)]
    pub group_changes: Vec<f64>,
    /// A periodic tenant (figure 1, a and b).
    #[serde(skip)]
    pub periodic: Sample,
    /// An unpredictable tenant (figure 1, c and d).
    #[serde(skip)]
    pub unpredictable: Sample,
}

/// Patterns in the order of the shares.
pub const PATTERNS: [Pattern; 3] = [Pattern::Periodic, Pattern::Constant, Pattern::Unpredictable];

/// Characterises a datacentre.
#[must_use]
pub fn characterise(datacentre: &Datacentre) -> Character {
    let mut spectra = Spectra::default();
    let (mut tenants, mut servers) = ([0.0; 3], [0.0; 3]);
    let (mut all_tenants, mut all_servers, mut recognised) = (0.0, 0.0, 0.0);
    let mut utilisation = 0.0;
    let mut samples = [Sample::default(), Sample::default(), Sample::default()];
    for tenant in datacentre.tenants.iter().filter(|it| it.first_month == 0) {
        let load = tenant.load.month(0);
        let Some(shape) = spectra.shape(SLOT_S as u32, load.iter().copied().map(Some)) else {
            continue;
        };
        let size = f64::from(tenant.size_at_start);
        all_tenants += 1.0;
        all_servers += size;
        utilisation += size * shape.average;
        let Some(number) = PATTERNS.iter().position(|it| Some(*it) == shape.pattern) else {
            continue;
        };
        recognised += f64::from(u8::from(tenant.pattern == PATTERNS[number]));
        tenants[number] += 1.0;
        servers[number] += size;
        if samples[number].by_hour.is_empty() {
            samples[number] = sample(&load);
        }
    }
    let [periodic, _, unpredictable] = samples;
    let monthly = Monthly::count(datacentre);
    let sorted = |mut values: Vec<f64>| {
        values.sort_by(f64::total_cmp);
        values
    };
    let rates = (0..datacentre.tenants.len()).filter_map(|it| monthly.rate(it, MONTHS));
    let changes = monthly.group_changes().into_iter().map(f64::from);
    Character {
        datacentre: datacentre.name.clone(),
        facts: measure(datacentre),
        tenant_shares: tenants.map(|count| count / f64::max(all_tenants, 1.0)),
        server_shares: servers.map(|count| count / f64::max(all_servers, 1.0)),
        recognised_share: recognised / f64::max(all_tenants, 1.0),
        utilisation: utilisation / f64::max(all_servers, 1.0),
        server_rates: server_rates(datacentre),
        tenant_rates: sorted(rates.collect()),
        group_changes: sorted(changes.collect()),
        periodic,
        unpredictable,
    }
}

/// Half-hour means of a month, and the amplitudes of its lowest frequencies.
fn sample(load: &[f32]) -> Sample {
    let means: Vec<f64> = load
        .chunks_exact(SLOTS_PER_POINT)
        .map(|chunk| chunk.iter().map(|&it| f64::from(it)).sum::<f64>() / chunk.len() as f64)
        .collect();
    let count = means.len() as f64;
    let strength = |cycles: usize| {
        let (mut real, mut imaginary) = (0.0, 0.0);
        for (point, mean) in means.iter().enumerate() {
            let angle = TAU * cycles as f64 * point as f64 / count;
            real += mean * angle.cos();
            imaginary += mean * angle.sin();
        }
        f64::hypot(real, imaginary) * 2.0 / count
    };
    let by_hour = means.iter().enumerate();
    Sample {
        by_hour: by_hour
            .map(|(at, mean)| (at as f64 / 2.0, 100.0 * mean))
            .collect(),
        by_frequency: (1..=CYCLES_SHOWN)
            .map(|cycles| (cycles as f64, 100.0 * strength(cycles)))
            .collect(),
    }
}
