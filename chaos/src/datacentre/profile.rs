//! The ten built-in datacentres, as parameters of the generator.
//!
//! Their differences follow what the paper says about its datacentres: DC-2, DC-5 and DC-8 are
//! reimaged substantially less; DC-0 and DC-2 have the least variation of load, DC-1 and DC-4 the
//! most; DC-3 is the one in which many servers are most often reimaged at the same time. All else is our choice.

/// The parameters of a datacentre. Rates are per server and month.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The name, `dc0` to `dc9`.
    pub name: &'static str,
    /// Decides everything that is random.
    pub seed: u64,
    /// Number of servers, before tenants are rounded up to the minimum size.
    pub servers: u32,
    /// Number of tenants at the start.
    pub tenants: u32,
    /// Share of servers whose tenant's load is periodic.
    pub periodic_share: f64,
    /// Share of servers whose tenant's load is unpredictable.
    pub unpredictable_share: f64,
    /// Reimages per server and month of the median tenant.
    pub median_rate: f64,
    /// Standard deviation of the logarithm of the rate between tenants.
    pub rate_sigma: f64,
    /// How fast the rate falls with the size of the tenant: the exponent of the size.
    pub size_slope: f64,
    /// Redeployments of a whole production environment per year.
    pub environment_redeploys_per_year: f64,
    /// Share of redeployments that roll from server to server over hours.
    pub rolling_share: f64,
    /// Share of tenants that redeploy slice by slice.
    pub sliced_share: f64,
    /// The largest tenant, as a share of all servers.
    pub tenant_share_max: f64,
    /// The median length of a redeployment that is not rolling, in minutes.
    pub burst_minutes: f64,
    /// Share of servers that change hands in a month.
    pub repurposed_share: f64,
}

const USUAL: Profile = Profile {
    name: "",
    seed: 0,
    servers: 0,
    tenants: 0,
    periodic_share: 0.40,
    unpredictable_share: 0.25,
    median_rate: 0.17,
    rate_sigma: 1.6,
    size_slope: 0.5,
    environment_redeploys_per_year: 0.15,
    rolling_share: 0.5,
    sliced_share: 0.5,
    tenant_share_max: 0.08,
    burst_minutes: 45.0,
    repurposed_share: 0.004,
};

/// The built-in datacentres.
pub const PROFILES: [Profile; 10] = [
    Profile {
        name: "dc0",
        seed: 1_000,
        servers: 6_000,
        tenants: 420,
        periodic_share: 0.25,
        unpredictable_share: 0.15,
        median_rate: 0.15,
        environment_redeploys_per_year: 0.08,
        ..USUAL
    },
    Profile {
        name: "dc1",
        seed: 1_001,
        servers: 9_000,
        tenants: 700,
        periodic_share: 0.48,
        unpredictable_share: 0.30,
        median_rate: 0.16,
        environment_redeploys_per_year: 0.12,
        ..USUAL
    },
    Profile {
        name: "dc2",
        seed: 1_002,
        servers: 5_000,
        tenants: 350,
        periodic_share: 0.30,
        unpredictable_share: 0.15,
        median_rate: 0.05,
        rate_sigma: 1.4,
        environment_redeploys_per_year: 0.08,
        ..USUAL
    },
    Profile {
        name: "dc3",
        seed: 1_003,
        servers: 12_000,
        tenants: 800,
        periodic_share: 0.42,
        median_rate: 0.16,
        size_slope: 0.4,
        environment_redeploys_per_year: 0.22,
        rolling_share: 0.05,
        tenant_share_max: 0.05,
        burst_minutes: 30.0,
        ..USUAL
    },
    Profile {
        name: "dc4",
        seed: 1_004,
        servers: 8_000,
        tenants: 520,
        periodic_share: 0.48,
        unpredictable_share: 0.30,
        median_rate: 0.15,
        environment_redeploys_per_year: 0.10,
        ..USUAL
    },
    Profile {
        name: "dc5",
        seed: 1_005,
        servers: 7_000,
        tenants: 450,
        median_rate: 0.06,
        rate_sigma: 1.4,
        environment_redeploys_per_year: 0.08,
        ..USUAL
    },
    Profile {
        name: "dc6",
        seed: 1_006,
        servers: 10_000,
        tenants: 1_000,
        periodic_share: 0.42,
        median_rate: 0.15,
        size_slope: 0.6,
        environment_redeploys_per_year: 0.10,
        ..USUAL
    },
    Profile {
        name: "dc7",
        seed: 1_007,
        servers: 4_000,
        tenants: 300,
        periodic_share: 0.38,
        sliced_share: 0.65,
        ..USUAL
    },
    Profile {
        name: "dc8",
        seed: 1_008,
        servers: 6_500,
        tenants: 600,
        median_rate: 0.025,
        rate_sigma: 1.3,
        environment_redeploys_per_year: 0.03,
        repurposed_share: 0.002,
        ..USUAL
    },
    Profile {
        name: "dc9",
        seed: 1_009,
        servers: 9_000,
        tenants: 600,
        periodic_share: 0.43,
        ..USUAL
    },
];

/// The profile with a name.
#[must_use]
pub fn profile(name: &str) -> Option<&'static Profile> {
    PROFILES.iter().find(|profile| profile.name == name)
}
