//! The daily analysis of history, which is the input of placement.

use std::collections::BTreeMap;

use crate::classes::{Class, classes};
use crate::coincidence::Coincidence;
use crate::history::{History, SLOT_S, TenantId};
use crate::hours::WeekHours;
use crate::profile::{Pattern, TenantKey, TenantProfile};
use crate::reimages::{Estimator, Months, Pair, rates, together};
use crate::spectrum::{Shape, Spectra};

/// The result of analysing the history of all tenants.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Analysis {
    /// Time of the analysis, in seconds since 1970.
    pub at_s: u32,
    /// Every tenant, including those of which nothing is known yet.
    pub tenants: BTreeMap<TenantKey, TenantAnalysis>,
    /// Utilisation classes; their members are positions in [`Analysis::tenants`].
    pub classes: Vec<Class>,
    /// Tenants that are reimaged together, those most at risk first; see [`together`].
    pub pairs: Vec<(TenantKey, TenantKey, Pair)>,
    /// How reimages coincide, in time and within tenants.
    pub coincidence: Coincidence,
}

/// The result of analysing the history of a tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct TenantAnalysis {
    /// What placement needs.
    pub profile: TenantProfile,
    /// Whether the pattern was determined; without enough samples, a tenant counts as unpredictable.
    pub pattern_known: bool,
    /// Its class: an index into [`Analysis::classes`].
    pub class: Option<usize>,
    /// Number of servers that it owns now.
    pub servers: u32,
    /// Reimages of its servers in the last three years.
    pub reimages: u32,
    /// Server-months in the last three years.
    pub server_months: f64,
    /// Share of the last month (in half-hours) that has a sample, 0 to 1.
    pub coverage: f64,
}

impl Analysis {
    /// Returns what placement needs. A tenant without a known pattern has too few samples to count as never busy: it
    /// counts as at least as busy as the average server of the tenants with a known pattern, in any hour.
    #[must_use]
    pub fn profiles(&self) -> BTreeMap<TenantKey, TenantProfile> {
        let known = || self.tenants.values().filter(|it| it.pattern_known);
        let servers: f64 = known().map(|it| f64::from(it.servers)).sum();
        let mean = |value: fn(&TenantProfile) -> f64| {
            let each = known().map(|it| f64::from(it.servers) * value(&it.profile));
            let sum: f64 = each.sum();
            if servers > 0.0 { sum / servers } else { 0.0 }
        };
        let peak = mean(|it| it.peak_cpu_share);
        let busy_share = mean(|it| it.busy_share);
        let profile = |(key, tenant): (&TenantKey, &TenantAnalysis)| {
            let mut profile = tenant.profile;
            if !tenant.pattern_known {
                profile.peak_cpu_share = profile.peak_cpu_share.max(peak);
                profile.busy_share = profile.busy_share.max(busy_share);
                if profile.busy_share > 0.0 {
                    profile.busy_hours = WeekHours::ALL;
                }
            }
            (key.clone(), profile)
        };
        self.tenants.iter().map(profile).collect()
    }
}

/// Analyses a history as of a time (in seconds since 1970). `cancelled` is called between tenants; `None` once it
/// returns true. Takes a few milliseconds for each tenant.
pub fn analyse(history: &History, now_s: u32, cancelled: impl Fn() -> bool) -> Option<Analysis> {
    let mut order: Vec<(&TenantKey, TenantId)> =
        history.tenants().map(|(id, key)| (key, id)).collect();
    order.sort();
    let mut spectra = Spectra::default();
    let mut shapes: Vec<Option<Shape>> = Vec::with_capacity(order.len());
    for (_, id) in &order {
        if cancelled() {
            return None;
        }
        shapes.push(spectra.shape(SLOT_S, history.month(*id, now_s)));
    }
    let months = Months::count(history, now_s);
    let rates = rates(&months, &Estimator::default());
    let mut servers = vec![0u32; order.len()];
    for owner in history.servers().iter().filter_map(|server| server.owner()) {
        servers[owner.0 as usize] += 1;
    }
    if cancelled() {
        return None;
    }
    let classes = classes(&shapes);
    let mut class_of = vec![None; order.len()];
    for (number, class) in classes.iter().enumerate() {
        for &member in &class.members {
            class_of[member] = Some(number);
        }
    }
    let month_start_s = u64::from(History::month_start_s(now_s));
    let tenants = order.iter().zip(shapes).zip(class_of);
    let tenants = tenants.map(|(((key, id), shape), class)| {
        let months = &months[id.0 as usize];
        let pattern = shape.as_ref().and_then(|shape| shape.pattern);
        let tenant = TenantAnalysis {
            profile: TenantProfile {
                reimages_per_server_month: rates[id.0 as usize],
                peak_cpu_share: shape.as_ref().map_or(0.0, |shape| shape.peak),
                average_cpu_share: shape.as_ref().map_or(0.0, |shape| shape.average),
                busy_share: shape.as_ref().map_or(0.0, |shape| shape.busy_share),
                busy_hours: WeekHours::busy(month_start_s, SLOT_S, history.month(*id, now_s)),
                pattern: pattern.unwrap_or(Pattern::Unpredictable),
            },
            pattern_known: pattern.is_some(),
            class,
            servers: servers[id.0 as usize],
            reimages: months.reimages.iter().sum(),
            server_months: months.server_months.iter().sum(),
            coverage: shape.as_ref().map_or(0.0, |shape| shape.coverage),
        };
        ((*key).clone(), tenant)
    });
    let tenants = tenants.collect();
    let mut keys = vec![None; order.len()];
    for (key, id) in &order {
        keys[id.0 as usize] = Some(*key);
    }
    let key = |id: TenantId| keys[id.0 as usize].cloned();
    let pairs = together(history, now_s).into_iter();
    let pairs = pairs.filter_map(|pair| Some((key(pair.first)?, key(pair.second)?, pair)));
    Some(Analysis {
        at_s: now_s,
        tenants,
        classes,
        pairs: pairs.collect(),
        coincidence: Coincidence::of(history, now_s),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{Level, SLOTS_PER_DAY};

    #[test]
    fn every_tenant_has_a_profile() {
        const NOW: u32 = 20_500 * 86_400;
        let key = |name: &str| TenantKey {
            environment: "e".to_owned(),
            machine_function: name.to_owned(),
        };
        let mut history = History::default();
        // Numbers and names are in different orders.
        history.owns("s1", &key("z"), NOW - 100 * 86_400).unwrap();
        history.owns("s2", &key("a"), NOW - 100 * 86_400).unwrap();
        history.tenant(&key("m")).unwrap();
        history.reimaged("s1", NOW - 10).unwrap();
        let z = history.find_tenant(&key("z")).unwrap();
        for slot in 0..20 * SLOTS_PER_DAY as u32 {
            history.set_level(z, NOW / SLOT_S - 1 - slot, Level(100));
        }
        let analysis = analyse(&history, NOW, || false).unwrap();
        assert_eq!(analyse(&history, NOW, || true), None);
        let [a, m, z] = ["a", "m", "z"].map(|name| &analysis.tenants[&key(name)]);
        assert_eq!(
            (z.servers, z.reimages, z.class, z.pattern_known),
            (1, 1, Some(0), true)
        );
        assert_eq!(z.profile.pattern, Pattern::Constant);
        assert!((z.profile.average_cpu_share - 0.4).abs() < 1e-6 && z.coverage > 0.6);
        assert_eq!((a.servers, a.reimages, a.pattern_known), (1, 0, false));
        assert_eq!(a.profile.pattern, Pattern::Unpredictable);
        assert!(z.profile.reimages_per_server_month > a.profile.reimages_per_server_month);
        assert_eq!((m.servers, m.server_months), (0, 0.0));
        assert_eq!(analysis.classes[0].members, [2]);
        assert_eq!(analysis.profiles().len(), 3);
        assert_eq!(
            analyse(&History::default(), 0, || false),
            Some(Analysis::default())
        );
    }

    #[test]
    fn what_is_not_known_counts_as_no_less_busy_than_what_is() {
        const NOW: u32 = 20_500 * 86_400;
        let key = |name: &str| TenantKey {
            environment: "e".to_owned(),
            machine_function: name.to_owned(),
        };
        let mut history = History::default();
        for (name, servers) in [
            ("busy", 1),
            ("calm", 3),
            ("hour", 1),
            ("hot-hour", 1),
            ("none", 1),
        ] {
            for number in 0..servers {
                let server = format!("{name}-{number}");
                history
                    .owns(&server, &key(name), NOW - 100 * 86_400)
                    .unwrap();
            }
        }
        let day = SLOTS_PER_DAY as u32;
        for (name, slots, level) in [
            ("busy", 20 * day, 200),
            ("calm", 20 * day, 50),
            ("hour", 3_600 / SLOT_S, 50),
            ("hot-hour", 3_600 / SLOT_S, 250),
        ] {
            let tenant = history.find_tenant(&key(name)).unwrap();
            for slot in 0..slots {
                history.set_level(tenant, NOW / SLOT_S - 1 - slot, Level(level));
            }
        }
        let analysis = analyse(&history, NOW, || false).unwrap();
        let profiles = analysis.profiles();
        let names = ["busy", "calm", "hour", "hot-hour", "none"];
        let [busy, calm, hour, hot, none] = names.map(|name| profiles[&key(name)]);
        // Tenants with enough samples keep their own values.
        assert_eq!(busy, analysis.tenants[&key("busy")].profile);
        assert_eq!(calm, analysis.tenants[&key("calm")].profile);
        assert_eq!((busy.busy_share, calm.busy_share), (1.0, 0.0));
        for unknown in [hour, none] {
            assert_eq!(
                (unknown.busy_share, unknown.busy_hours),
                (0.25, WeekHours::ALL)
            );
            assert!((unknown.peak_cpu_share - (0.8 + 3.0 * 0.2) / 4.0).abs() < 1e-3);
        }
        // The samples seen are worse than the average.
        assert_eq!((hot.busy_share, hot.busy_hours), (1.0, WeekHours::ALL));
        assert!((hot.peak_cpu_share - 1.0).abs() < 1e-3);
        // The analysis itself reports what was seen.
        assert_eq!(analysis.tenants[&key("none")].profile.busy_share, 0.0);
    }

    #[test]
    fn where_nothing_is_known_everything_counts_as_what_was_seen_of_it() {
        let mut history = History::default();
        let key = TenantKey {
            environment: "e".to_owned(),
            machine_function: "f".to_owned(),
        };
        history.owns("s", &key, 0).unwrap();
        let analysis = analyse(&history, 86_400, || false).unwrap();
        let profile = analysis.profiles()[&key];
        assert_eq!(profile, analysis.tenants[&key].profile);
        assert_eq!(
            (profile.busy_share, profile.busy_hours),
            (0.0, WeekHours::NONE)
        );
    }
}
