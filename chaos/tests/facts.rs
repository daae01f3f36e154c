//! Checks that the generated datacentres agree with what the paper states about its own (section 3; the list is in
//! docs/SIMULATION.md).

use harvestfs_chaos::datacentre::facts::{Facts, measure};
use harvestfs_chaos::datacentre::profile::PROFILES;
use harvestfs_chaos::datacentre::{Datacentre, MONTHS, generate};
use harvestfs_telemetry::profile::Pattern;

fn all() -> Vec<(Datacentre, Facts)> {
    PROFILES
        .iter()
        .map(|profile| {
            let datacentre = generate(profile).expect("the built-in profiles can be generated");
            let facts = measure(&datacentre);
            println!("{} {facts:?}", profile.name);
            (datacentre, facts)
        })
        .collect()
}

/// Share of the servers at the start, and of the tenants, with a pattern.
fn shares(datacentre: &Datacentre, pattern: Pattern) -> (f64, f64) {
    let at_start = || datacentre.tenants.iter().filter(|it| it.first_month == 0);
    let servers = |with: Option<Pattern>| -> u32 {
        at_start()
            .filter(|it| with.is_none_or(|pattern| it.pattern == pattern))
            .map(|it| it.size_at_start)
            .sum()
    };
    let tenants = at_start().filter(|it| it.pattern == pattern).count();
    (
        f64::from(servers(Some(pattern))) / f64::from(servers(None)),
        tenants as f64 / at_start().count() as f64,
    )
}

#[test]
fn the_datacentres_agree_with_the_paper() {
    let all = all();
    for (datacentre, facts) in &all {
        let name = &datacentre.name;
        // Facts 1, 2, 3 and 7.
        assert_eq!(facts.misses(), Vec::<&str>::new(), "{name}");
        // Fact 4: no near-vertical distribution.
        let [p10, p50, p90] = facts.tenant_rate_p10_p50_p90;
        assert!(
            p90 > 4.0 * p50 && p50 > 2.0 * p10,
            "{name}: {p10} {p50} {p90}"
        );
        // Fact 6: short-lived tenants.
        assert!(facts.short_lived_share > 0.05, "{name}");
        // Fact 8: reimages are correlated, about as much as in the one public log that shows it.
        assert!(
            (0.2..0.75).contains(&facts.batch_share),
            "{name}: {}",
            facts.batch_share
        );
        assert!(facts.most_in_4_hours > 50, "{name}");
        // A few hundred to a few thousand tenants, thousands of servers.
        assert!((300..2_000).contains(&facts.tenants), "{name}");
    }
    // Fact 5: three have substantially lower rates.
    for low in ["dc2", "dc5", "dc8"] {
        for (datacentre, facts) in &all {
            let name = datacentre.name.as_str();
            let low = all.iter().find(|(it, _)| it.name == low).unwrap();
            if !["dc2", "dc5", "dc8"].contains(&name) {
                assert!(low.1.rate_mean < 0.6 * facts.rate_mean, "{name}");
            }
        }
    }
}

#[test]
fn patterns_are_shared_out_as_in_the_paper() {
    let (mut servers, mut tenants, mut predictable) = (0.0, 0.0, 0.0);
    for (datacentre, _) in &all() {
        let (periodic_servers, periodic_tenants) = shares(datacentre, Pattern::Periodic);
        let (constant_servers, constant_tenants) = shares(datacentre, Pattern::Constant);
        assert!(periodic_servers < 0.55 && periodic_tenants < constant_tenants);
        servers += periodic_servers / 10.0;
        tenants += periodic_tenants / 10.0;
        predictable += (periodic_servers + constant_servers) / 10.0;
    }
    // Periodic: a small minority of the tenants, about 40 % of the servers; with the constant ones
    // about 75 % of the servers.
    assert!(tenants < 0.25, "{tenants}");
    assert!((0.35..0.45).contains(&servers), "{servers}");
    assert!((0.70..0.80).contains(&predictable), "{predictable}");
}

#[test]
fn the_same_profile_gives_the_same_datacentre_and_a_consistent_one() {
    let profile = &PROFILES[8];
    let (one, other) = (generate(profile).unwrap(), generate(profile).unwrap());
    assert_eq!(one.reimages, other.reimages);
    let mut last_s = 0;
    for reimage in &one.reimages {
        assert!(reimage.at_s >= last_s);
        last_s = reimage.at_s;
        let server = &one.servers[reimage.server as usize];
        let before_s = reimage.at_s.saturating_sub(1);
        let owners = [server.owner_at(reimage.at_s), server.owner_at(before_s)];
        assert!(owners.contains(&reimage.tenant));
    }
    assert!(last_s < u64::from(MONTHS) * 30 * 86_400);
    let mut keys: Vec<_> = one.tenants.iter().map(|tenant| &tenant.key).collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), one.tenants.len());
}
