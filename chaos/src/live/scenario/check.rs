//! Checks that a scenario can be carried out as it is written.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use harvestfs_placement::PolicyKind;
use harvestfs_protocol::settings::SettingsError;
use toml::Spanned;

use super::raw::RawScenario;
use super::{ClusterSpec, Pattern, Scenario, Server, Variant};

/// The most servers: each is a process.
const SERVERS_MAX: usize = 500;
/// The accepted numbers of namenodes: one more than an odd number survives no more failures.
const NAMENODES: [usize; 3] = [1, 3, 5];
/// The most mounts: each is a process, and its programs remember the contents of their files.
const MOUNTS_MAX: usize = 16;
/// A day.
const SECONDS_MAX: f64 = 86_400.0;

/// The path and the text of the scenario file, for errors with their positions.
pub(super) struct Checker<'a> {
    pub path: &'a Path,
    pub text: &'a str,
}

impl Checker<'_> {
    pub fn at(&self, span: Range<usize>, message: impl Into<String>) -> SettingsError {
        SettingsError::at(self.path, self.text, span.start, message)
    }

    pub fn ms(&self, name: &str, seconds: &Spanned<f64>) -> Result<u64, SettingsError> {
        let value = *seconds.get_ref();
        if (0.0..=SECONDS_MAX).contains(&value) {
            return Ok((value * 1e3).round() as u64);
        }
        let message = format!("`{name} = {value}`: accepted are 0 to {SECONDS_MAX} seconds");
        Err(self.at(seconds.span(), message))
    }

    pub fn within<T: PartialOrd + fmt::Display + Copy>(
        &self,
        name: &str,
        value: &Spanned<T>,
        range: std::ops::RangeInclusive<T>,
    ) -> Result<T, SettingsError> {
        let number = *value.get_ref();
        if range.contains(&number) {
            return Ok(number);
        }
        let (from, to) = (range.start(), range.end());
        let message = format!("`{name} = {number}`: accepted are {from} to {to}");
        Err(self.at(value.span(), message))
    }

    fn namenodes(&self, count: &Spanned<usize>) -> Result<usize, SettingsError> {
        let number = *count.get_ref();
        if NAMENODES.contains(&number) {
            return Ok(number);
        }
        let message = format!("`namenodes = {number}`: accepted are 1, 3 and 5");
        Err(self.at(count.span(), message))
    }

    fn policy(&self, name: &Spanned<String>) -> Result<PolicyKind, SettingsError> {
        let parsed = name.get_ref().parse::<PolicyKind>();
        parsed.map_err(|error| self.at(name.span(), error.to_string()))
    }

    pub fn check(&self, raw: RawScenario) -> Result<Scenario, SettingsError> {
        let servers = self.servers(&raw)?;
        let cluster = &raw.cluster;
        let duration_ms = self.ms("duration_s", &raw.duration_s)?;
        let replication_max = u8::try_from(servers.len()).unwrap_or(u8::MAX).min(8);
        let spec = ClusterSpec {
            namenodes: self.namenodes(&cluster.namenodes)?,
            replication: self.within("replication", &cluster.replication, 1..=replication_max)?,
            block_mib: self.within("block_mib", &cluster.block_mib, 1..=256)?,
            quota_mib: self.within("quota_mib", &cluster.quota_mib, 16..=1 << 20)?,
            repairs_per_hour: cluster.repairs_per_hour,
            day_ms: self.ms("day_s", &cluster.day_s)?.max(1_000),
            priority: cluster.priority,
            trace: self.trace(&raw, servers.len(), duration_ms)?,
            servers,
        };
        let mut faults = Vec::new();
        for fault in &raw.fault {
            faults.push(self.fault(fault, &spec, raw.mounts.count, duration_ms)?);
        }
        let mut variants = Vec::new();
        for variant in &raw.variant {
            variants.push(Variant {
                name: variant.name.clone(),
                policy: self.policy(&variant.policy)?,
                denial: variant.denial,
                may_lose: variant.may_lose,
            });
        }
        if variants.is_empty() {
            let policy = match &cluster.policy {
                Some(policy) => self.policy(policy)?,
                None => PolicyKind::default(),
            };
            variants.push(Variant {
                name: policy.to_string(),
                policy,
                denial: true,
                may_lose: false,
            });
        } else if let Some(policy) = &cluster.policy {
            let message = "each [[variant]] names its policy; leave `policy` out here";
            return Err(self.at(policy.span(), message));
        }
        if !(1..=1_000).contains(&raw.clients.count) || raw.clients.file_kib_max == 0 {
            return Err(self.at(
                0..0,
                "[clients]: count is 1 to 1000, file_kib_max at least 1",
            ));
        }
        if raw.mounts.count > MOUNTS_MAX
            || raw.mounts.file_kib_max == 0
            || raw.mounts.files_max == 0
        {
            let message = format!(
                "[mounts]: count is 0 to {MOUNTS_MAX}, files_max and file_kib_max at least 1"
            );
            return Err(self.at(0..0, message));
        }
        let programs = &raw.mounts.programs;
        let repeated = (1..programs.len()).any(|at| programs[..at].contains(&programs[at]));
        if programs.is_empty() || repeated {
            let message = "[mounts]: programs are some of files, log, sqlite and git, each once";
            return Err(self.at(0..0, message));
        }
        Ok(Scenario {
            name: raw.name,
            finds: raw.finds,
            seed: raw.seed,
            duration_ms,
            heal_ms: self.ms("heal_s", &raw.heal_s)?,
            cluster: spec,
            clients: raw.clients,
            mounts: raw.mounts,
            faults,
            variants,
        })
    }

    fn servers(&self, raw: &RawScenario) -> Result<Vec<Server>, SettingsError> {
        let mut servers: Vec<Server> = Vec::new();
        let mut add = |tenant: usize, environment: &str, function: &str, pattern| {
            let number = servers.len() + 1;
            let rack = match &raw.cluster.racks {
                Some(racks) => servers.len() % (*racks.get_ref()).max(1) + 1,
                None => number,
            };
            servers.push(Server {
                name: format!("datanode-{number}"),
                rack: format!("rack-{rack}"),
                environment: environment.to_owned(),
                machine_function: function.to_owned(),
                tenant,
                pattern,
            });
        };
        match &raw.cluster.servers {
            Some(count) if raw.tenant.is_empty() => {
                for index in 0..self.within("servers", count, 1..=SERVERS_MAX)? {
                    let number = index + 1;
                    let environment = format!("environment-{number}");
                    let function = format!("function-{number}");
                    add(index, &environment, &function, Pattern::Idle);
                }
            }
            Some(count) => {
                let message = "the servers are those of [[tenant]]; leave `servers` out here";
                return Err(self.at(count.span(), message));
            }
            None => {
                for (tenant, raw) in raw.tenant.iter().enumerate() {
                    let span = raw.span();
                    let raw = raw.get_ref();
                    if !(1..=SERVERS_MAX).contains(&raw.servers) {
                        let message = format!("a tenant has 1 to {SERVERS_MAX} servers");
                        return Err(self.at(span, message));
                    }
                    for _ in 0..raw.servers {
                        let pattern = *raw.pattern.get_ref();
                        add(tenant, &raw.environment, &raw.machine_function, pattern);
                    }
                }
            }
        }
        if servers.is_empty() || servers.len() > SERVERS_MAX {
            let message = format!(
                "a cluster has 1 to {SERVERS_MAX} servers: say `servers = N` in [cluster], or \
                 list [[tenant]]s"
            );
            return Err(self.at(0..0, message));
        }
        Ok(servers)
    }
}
