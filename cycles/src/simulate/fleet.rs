//! The servers of a datacentre, the load of their owners, and its classes.

use harvestfs_telemetry::classes::classes;
use harvestfs_telemetry::profile::Pattern;
use harvestfs_telemetry::scaling::Scaling;
use harvestfs_telemetry::spectrum::Spectra;

use crate::select::ClassHistory;

/// Number of cores of a server (the paper's testbed: 12).
pub const CORES: u32 = 12;

/// The load of a tenant's average server, as samples, each a share of all cores from 0 to 1.
#[derive(Clone, Debug)]
pub struct TenantLoad {
    /// What history contains: the previous month.
    pub before: Vec<f32>,
    /// What happens in the simulated month.
    pub now: Vec<f32>,
}

/// A datacentre.
#[derive(Clone, Debug)]
pub struct Datacentre {
    /// Its name.
    pub name: String,
    /// Seconds that a sample covers, at least 1.
    pub slot_s: u32,
    /// Its tenants; their series have the same length, at least 1.
    pub tenants: Vec<TenantLoad>,
    /// The tenant of each server: an index into `tenants`.
    pub owners: Vec<u32>,
}

/// The reason why a datacentre cannot be simulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FleetError {
    /// There is no server.
    #[error("the datacentre has no servers")]
    NoServer,
    /// A server's tenant does not exist.
    #[error("server {server} belongs to tenant {tenant}, of {tenants} tenants")]
    UnknownTenant {
        /// The server.
        server: usize,
        /// The tenant.
        tenant: u32,
        /// Number of tenants.
        tenants: usize,
    },
    /// Series are empty, or differ in length.
    #[error("tenant {0} has no load, or not as many samples as the others")]
    BadSeries(usize),
}

/// A datacentre with scaled load, and the classes of its tenants according to history.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub(super) name: String,
    pub(super) scaling: Scaling,
    pub(super) target: f64,
    pub(super) slot_ms: u64,
    /// CPU utilisation of each tenant, by slot.
    pub(super) loads: Vec<Vec<f32>>,
    /// The tenant of each server; servers are in order of their class.
    pub(super) owners: Vec<u32>,
    /// The class of each server.
    pub(super) class_of: Vec<u32>,
    pub(super) classes: Vec<ClassHistory>,
    /// Mean CPU utilisation by owners over all servers and slots, 0 to 1.
    pub(super) utilisation: f64,
}

impl Fleet {
    /// Scales the load such that its mean over all servers is `target` (0 to 1), and finds the classes.
    ///
    /// # Errors
    /// If the datacentre is invalid.
    pub fn new(datacentre: &Datacentre, scaling: Scaling, target: f64) -> Result<Self, FleetError> {
        let tenants = &datacentre.tenants;
        if datacentre.owners.is_empty() {
            return Err(FleetError::NoServer);
        }
        let mut servers = vec![0_u32; tenants.len()];
        for (server, &tenant) in datacentre.owners.iter().enumerate() {
            let of_tenant = servers.get_mut(tenant as usize);
            *of_tenant.ok_or(FleetError::UnknownTenant {
                server,
                tenant,
                tenants: tenants.len(),
            })? += 1;
        }
        let slots = tenants.first().map_or(0, |tenant| tenant.now.len());
        let bad = |it: &TenantLoad| it.now.len() != slots || slots == 0;
        if let Some(tenant) = tenants.iter().position(bad) {
            return Err(FleetError::BadSeries(tenant));
        }
        let weighted = tenants
            .iter()
            .map(|tenant| &tenant.now[..])
            .zip(servers.iter().copied());
        let strength = scaling.strength(weighted, target);
        let scale = |samples: &[f32]| -> Vec<f32> {
            let mut scaled = samples.to_vec();
            scaling.apply(&mut scaled, strength);
            scaled
        };
        let mut spectra = Spectra::default();
        let shapes: Vec<_> = tenants
            .iter()
            .zip(&servers)
            .map(|(tenant, &servers)| {
                let known = if servers > 0 {
                    scale(&tenant.before)
                } else {
                    Vec::new()
                };
                spectra.shape(datacentre.slot_s, known.into_iter().map(Some))
            })
            .collect();
        let found = classes(&shapes);
        let mut histories: Vec<ClassHistory> = found
            .iter()
            .map(|class| ClassHistory {
                pattern: class.pattern,
                average_cpu_share: class.average_cpu_share.clamp(0.0, 1.0),
                peak_cpu_share: class.peak_cpu_share.clamp(0.0, 1.0),
            })
            .collect();
        // Tenants about which too little is known form their own class, in which any load is possible.
        let mut class_of_tenant = vec![histories.len() as u32; tenants.len()];
        for (number, class) in found.iter().enumerate() {
            for &member in &class.members {
                class_of_tenant[member] = number as u32;
            }
        }
        histories.push(ClassHistory {
            pattern: Pattern::Unpredictable,
            average_cpu_share: 1.0,
            peak_cpu_share: 1.0,
        });
        let mut owners = datacentre.owners.clone();
        owners.sort_by_key(|&tenant| (class_of_tenant[tenant as usize], tenant));
        let class_of: Vec<u32> = owners
            .iter()
            .map(|&it| class_of_tenant[it as usize])
            .collect();
        assert!(
            class_of.is_sorted() && class_of.iter().all(|&it| (it as usize) < histories.len()),
            "servers are not in order of {} classes: {class_of:?}",
            histories.len()
        );
        let loads: Vec<Vec<f32>> = tenants.iter().map(|tenant| scale(&tenant.now)).collect();
        let mean = |samples: &Vec<f32>| {
            samples.iter().map(|&it| f64::from(it)).sum::<f64>() / slots as f64
        };
        assert_eq!(
            servers.iter().map(|&it| u64::from(it)).sum::<u64>(),
            owners.len() as u64,
            "servers of all tenants"
        );
        let of_servers = loads
            .iter()
            .zip(&servers)
            .map(|(load, &it)| mean(load) * f64::from(it));
        Ok(Self {
            name: datacentre.name.clone(),
            scaling,
            target,
            slot_ms: u64::from(datacentre.slot_s.max(1)) * 1_000,
            utilisation: of_servers.sum::<f64>() / owners.len() as f64,
            class_of,
            owners,
            loads,
            classes: histories,
        })
    }

    /// Returns the number of servers.
    #[must_use]
    pub fn servers(&self) -> usize {
        self.owners.len()
    }

    /// Returns the number of slots.
    pub(super) fn slots(&self) -> usize {
        self.loads.first().map_or(1, Vec::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_scalings_reach_the_mean_asked_for() {
        let load = |samples: &[f32]| TenantLoad {
            before: samples.to_vec(),
            now: samples.to_vec(),
        };
        let datacentre = Datacentre {
            name: "dc".into(),
            slot_s: 300,
            tenants: vec![load(&[0.1, 0.3, 0.5]), load(&[0.05, 0.06, 0.05])],
            owners: [[0].repeat(10), [1].repeat(30)].concat(),
        };
        for scaling in Scaling::ALL {
            for target in [0.1, 0.2, 0.5, 0.8] {
                let fleet = Fleet::new(&datacentre, scaling, target).unwrap();
                let reached = fleet.utilisation;
                assert!(
                    (reached - target).abs() < 0.01,
                    "{scaling} {target} {reached}"
                );
            }
        }
        let error =
            |datacentre: Datacentre| Fleet::new(&datacentre, Scaling::Root, 0.5).unwrap_err();
        let empty = Datacentre {
            owners: Vec::new(),
            ..datacentre.clone()
        };
        assert_eq!(error(empty), FleetError::NoServer);
        let unknown = Datacentre {
            owners: vec![0, 2],
            ..datacentre.clone()
        };
        assert!(matches!(
            error(unknown),
            FleetError::UnknownTenant { server: 1, .. }
        ));
        let short = vec![load(&[0.1]), load(&[])];
        let short = Datacentre {
            tenants: short,
            ..datacentre
        };
        assert_eq!(error(short), FleetError::BadSeries(1));
    }
}
