//! A synthetic datacentre as history.

use std::path::Path;

use harvestfs_telemetry::history::History;
use harvestfs_telemetry::profile::TenantKey;
use harvestfs_telemetry::reimages::MONTH_S;
use harvestfs_telemetry::traces::{Ownership, Records, ReimageEvent, Tenant, TraceError};

/// The beginning of the synthetic seconds, late enough that preceding months are not cut off at 1970.
pub const BEGIN_S: u32 = 40 * MONTH_S;

/// The tenant with a number.
pub fn key(tenants: &[Tenant], tenant: u32) -> TenantKey {
    TenantKey {
        environment: tenants[tenant as usize].environment.to_string(),
        machine_function: tenant.to_string(),
    }
}

/// The tenants of a datacentre.
pub fn tenants(directory: &Path, number: u32) -> Result<Vec<Tenant>, TraceError> {
    Records::open(&directory.join(format!("synthetic/dc{number}_tenants.csv.gz")))?.collect()
}

/// Owners and reimages of a datacentre.
pub fn load(directory: &Path, number: u32) -> Result<History, TraceError> {
    let file = |kind: &str| directory.join(format!("synthetic/dc{number}_{kind}.csv.gz"));
    let tenants = tenants(directory, number)?;
    let mut history = History::default();
    for ownership in Records::<Ownership>::open(&file("servers"))? {
        let ownership = ownership?;
        let from_s = BEGIN_S + ownership.from_s as u32;
        let (server, key) = (
            ownership.server.to_string(),
            key(&tenants, ownership.tenant),
        );
        history
            .owns(&server, &key, from_s)
            .expect("the data is sound");
    }
    for reimage in Records::<ReimageEvent>::open(&file("reimages"))? {
        let reimage = reimage?;
        let at_s = BEGIN_S + reimage.at_s as u32;
        history
            .reimaged(&reimage.server.to_string(), at_s)
            .expect("the data is sound");
    }
    Ok(history)
}
