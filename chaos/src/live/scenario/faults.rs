//! Checks the faults of a scenario and the parts that they affect.

use std::ops::Range;

use harvestfs_protocol::settings::SettingsError;
use toml::Spanned;

use super::check::Checker;
use super::raw::RawFault;
use super::{ClusterSpec, Fault, Kind, Server, Targets};
use crate::live::mounted;

impl Checker<'_> {
    pub fn fault(
        &self,
        raw: &Spanned<RawFault>,
        cluster: &ClusterSpec,
        mounts: usize,
        duration_ms: u64,
    ) -> Result<Fault, SettingsError> {
        let span = raw.span();
        let raw = raw.get_ref();
        let name = raw.kind.get_ref();
        let known = Kind::ALL.into_iter().find(|kind| kind.name() == name);
        let Some(kind) = known else {
            let accepted = Kind::ALL.map(Kind::name).join(", ");
            let message = format!("unknown fault `{name}`; accepted: {accepted}");
            return Err(self.at(raw.kind.span(), message));
        };
        let targets = self.targets(kind, raw, span.clone(), cluster, mounts)?;
        let optional = |name: &str, value: &Option<Spanned<f64>>| match value {
            Some(value) => self.ms(name, value),
            None => Ok(0),
        };
        let for_ms = match &raw.for_s {
            Some(value) if !kind.lasts() => {
                let message = format!("`{name}` happens at once; leave `for_s` out");
                return Err(self.at(value.span(), message));
            }
            Some(value) => self.ms("for_s", value)?,
            None if matches!(kind, Kind::BitRot | Kind::Reimage) => 0,
            None => {
                return Err(self.at(span, format!("how long does `{name}` last? Add `for_s`")));
            }
        };
        let amount = self.amount(kind, raw, &span)?;
        let repeat = match &raw.repeat {
            Some(repeat) => self.within("repeat", repeat, 1..=10_000)?,
            None => 1,
        };
        let fault = Fault {
            kind,
            targets,
            at_ms: self.ms("at_s", &raw.at_s)?,
            jitter_ms: optional("jitter_s", &raw.jitter_s)?,
            for_ms,
            rolling_ms: optional("rolling_s", &raw.rolling_s)?,
            repeat,
            every_ms: optional("every_s", &raw.every_s)?,
            amount,
        };
        if fault.repeat > 1 && fault.every_ms == 0 {
            return Err(self.at(span, "`repeat` needs `every_s`"));
        }
        let count = match &fault.targets {
            Targets::Namenode | Targets::Mount(_) => 1,
            Targets::Servers(servers) => servers.len(),
            Targets::Random(count) | Targets::RandomMounts(count) => *count,
        };
        let last_ms = fault.at_ms
            + fault.jitter_ms
            + u64::from(fault.repeat - 1) * fault.every_ms
            + (count as u64).saturating_sub(1) * fault.rolling_ms;
        if last_ms > duration_ms {
            let message = format!(
                "it may happen as late as {:.1} s, but the scenario ends after {:.1} s",
                last_ms as f64 / 1e3,
                duration_ms as f64 / 1e3
            );
            return Err(self.at(raw.at_s.span(), message));
        }
        let last_end_ms = last_ms + fault.for_ms;
        if kind.tests_at_its_end()
            && last_end_ms >= duration_ms
            && let Some(for_s) = &raw.for_s
        {
            let message = format!(
                "`{name}` may end as late as {:.1} s, and shows something only if that is before \
                 the scenario ends, after {:.1} s",
                last_end_ms as f64 / 1e3,
                duration_ms as f64 / 1e3
            );
            return Err(self.at(for_s.span(), message));
        }
        Ok(fault)
    }

    fn amount(
        &self,
        kind: Kind,
        raw: &RawFault,
        span: &Range<usize>,
    ) -> Result<u32, SettingsError> {
        let wanted = kind.amount();
        let given = [
            ("blocks", &raw.blocks),
            ("loss_percent", &raw.loss_percent),
            ("delay_ms", &raw.delay_ms),
        ];
        for (key, value) in given {
            if let Some(value) = value
                && wanted.as_ref().is_none_or(|it| it.key != key)
            {
                let message = format!("`{key}` says nothing about `{}`", kind.name());
                return Err(self.at(value.span(), message));
            }
        }
        let Some(wanted) = wanted else {
            return Ok(0);
        };
        let given = given.into_iter().find(|(key, _)| *key == wanted.key);
        match (given.and_then(|(_, value)| value.as_ref()), wanted.default) {
            (Some(value), _) => self.within(wanted.key, value, wanted.range),
            (None, Some(default)) => Ok(default),
            (None, None) => {
                let message = format!("how much? Add `{}` to `{}`", wanted.key, kind.name());
                Err(self.at(span.clone(), message))
            }
        }
    }

    fn part(
        &self,
        kind: Kind,
        part: &Spanned<String>,
        namenodes: usize,
        mounts: usize,
    ) -> Result<Targets, SettingsError> {
        let name = part.get_ref();
        let mut all = 0..mounts;
        let mount = all.find(|&mount| *name == mounted::name(mount));
        let message = match mount {
            Some(mount) if kind.hits_mounts() => return Ok(Targets::Mount(mount)),
            Some(_) => format!("`{}` hits servers, not mounts", kind.name()),
            None if name == "namenode" && kind.hits_namenode(namenodes) => {
                return Ok(Targets::Namenode);
            }
            None if name == "namenode" && matches!(kind, Kind::Rollback | Kind::Double) => {
                format!(
                    "`{}` hits an only namenode, and there are {namenodes}",
                    kind.name()
                )
            }
            None if name == "namenode" && kind.needs_network() => {
                format!(
                    "`{}` hits one of several namenodes: add `namenodes = 3` to [cluster]",
                    kind.name()
                )
            }
            None if name == "namenode" || !kind.hits_mounts() => {
                format!("`{}` hits servers, not parts", kind.name())
            }
            None => format!(
                "no part is named `{name}`; accepted: namenode, and mount-1 to mount-{mounts}"
            ),
        };
        Err(self.at(part.span(), message))
    }

    fn targets(
        &self,
        kind: Kind,
        raw: &RawFault,
        span: Range<usize>,
        cluster: &ClusterSpec,
        mounts: usize,
    ) -> Result<Targets, SettingsError> {
        let given = [
            raw.servers.is_some(),
            raw.tenant.is_some(),
            raw.environment.is_some(),
            raw.random.is_some(),
            raw.mounts.is_some(),
            raw.part.is_some(),
        ];
        if given.iter().filter(|&&given| given).count() != 1 {
            let message = "name whom it hits with exactly one of `servers`, `tenant`, \
                           `environment`, `random`, `mounts` or `part`";
            return Err(self.at(span, message));
        }
        let is_namenode = |part: &Spanned<String>| part.get_ref() == "namenode";
        let hits_namenode_alone = matches!(kind, Kind::Rollback | Kind::Double);
        if hits_namenode_alone && !raw.part.as_ref().is_some_and(is_namenode) {
            let message = format!(
                "`{}` hits the namenode: say `part = \"namenode\"`",
                kind.name()
            );
            return Err(self.at(span, message));
        }
        if let Some(part) = &raw.part {
            return self.part(kind, part, cluster.namenodes, mounts);
        }
        let servers = &cluster.servers;
        if let Some(count) = &raw.mounts {
            if !kind.hits_mounts() {
                let message = format!("`{}` hits servers, not mounts", kind.name());
                return Err(self.at(count.span(), message));
            }
            if mounts == 0 {
                return Err(self.at(count.span(), "there is no mount: add [mounts]"));
            }
            let count = self.within("mounts", count, 1..=mounts)?;
            return Ok(Targets::RandomMounts(count));
        }
        if let Some(count) = &raw.random {
            let count = self.within("random", count, 1..=servers.len())?;
            return Ok(Targets::Random(count));
        }
        let all = |wanted: &dyn Fn(&Server) -> bool| -> Vec<usize> {
            (0..servers.len())
                .filter(|&it| wanted(&servers[it]))
                .collect()
        };
        let (found, name) = match (&raw.servers, &raw.tenant, &raw.environment) {
            (Some(names), _, _) => {
                let mut found = Vec::new();
                for name in names {
                    let position = servers.iter().position(|it| it.name == *name.get_ref());
                    let Some(position) = position else {
                        let message = format!(
                            "there is no server `{}`; accepted: datanode-1 to datanode-{}",
                            name.get_ref(),
                            servers.len()
                        );
                        return Err(self.at(name.span(), message));
                    };
                    found.push(position);
                }
                if found.is_empty() {
                    return Err(self.at(span, "`servers` is empty"));
                }
                return Ok(Targets::Servers(found));
            }
            (_, Some(tenant), _) => {
                let is = |it: &Server| {
                    format!("{}/{}", it.environment, it.machine_function) == *tenant.get_ref()
                };
                (all(&is), tenant)
            }
            (_, _, Some(environment)) => (
                all(&|it| it.environment == *environment.get_ref()),
                environment,
            ),
            (None, None, None) => (Vec::new(), &raw.kind),
        };
        if found.is_empty() {
            let mut known: Vec<String> = servers
                .iter()
                .map(|it| match raw.tenant {
                    Some(_) => format!("{}/{}", it.environment, it.machine_function),
                    None => it.environment.clone(),
                })
                .collect();
            known.dedup();
            let message = format!(
                "no server belongs to `{}`; accepted: {}",
                name.get_ref(),
                known.join(", ")
            );
            return Err(self.at(name.span(), message));
        }
        Ok(Targets::Servers(found))
    }
}
