//! What a scenario says: the cluster, its clients and what happens to them. Checked completely
//! before anything is started; errors name file and line.

use std::{
    fmt, fs,
    ops::Range,
    path::{Path, PathBuf},
};

use harvestfs_placement::PolicyKind;
use serde::Deserialize;
use toml::Spanned;

/// What is wrong with a scenario, and where.
#[derive(Debug)]
pub struct ScenarioError {
    path: PathBuf,
    line: Option<usize>,
    message: String,
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for ScenarioError {}

/// A checked scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Its name.
    pub name: String,
    /// The seed when none is given.
    pub seed: u64,
    /// How long clients work and faults happen, in milliseconds.
    pub duration_ms: u64,
    /// How long the cluster may take to become whole after that, in milliseconds.
    pub heal_ms: u64,
    /// The cluster.
    pub cluster: ClusterSpec,
    /// The clients.
    pub clients: ClientSpec,
    /// What happens.
    pub faults: Vec<Fault>,
    /// The runs, at least one.
    pub variants: Vec<Variant>,
}

/// The cluster.
#[derive(Clone, Debug)]
pub struct ClusterSpec {
    /// Its servers.
    pub servers: Vec<Server>,
    /// Replicas of each block.
    pub replication: u8,
    /// Largest block, in MiB.
    pub block_mib: u64,
    /// What a datanode may use, in MiB.
    pub quota_mib: u64,
    /// Repairs per hour and server.
    pub repairs_per_hour: u32,
    /// How long the day of periodic primaries takes, in milliseconds.
    pub day_ms: u64,
}

/// A server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Its name, `datanode-N`.
    pub name: String,
    /// Its rack.
    pub rack: String,
    /// Environment of its primary tenant.
    pub environment: String,
    /// Machine function of its primary tenant.
    pub machine_function: String,
    /// Number of its tenant, from 0.
    pub tenant: usize,
    /// How the primary's load changes.
    pub pattern: Pattern,
}

/// How the load of a primary tenant changes over time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// Nothing runs there.
    #[default]
    Idle,
    /// Days and nights.
    Periodic,
    /// Always the same.
    Constant,
    /// Bursts nobody foresees.
    Unpredictable,
}

/// The clients.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientSpec {
    /// How many.
    pub count: u16,
    /// Files of each, at most.
    pub files_max: usize,
    /// Largest file, in KiB.
    pub file_kib_max: u32,
    /// Of 100 operations, how many are reads; the others are mostly writes.
    pub read_percent: u32,
    /// Pause between two operations of a client, in milliseconds.
    pub pause_ms: u64,
    /// How long an access waits for busy servers, in milliseconds.
    pub busy_timeout_ms: u64,
    /// How long an access waits for parts that do not answer, in milliseconds.
    pub unreachable_timeout_ms: u64,
}

impl Default for ClientSpec {
    fn default() -> Self {
        Self {
            count: 2,
            files_max: 60,
            file_kib_max: 2_048,
            read_percent: 50,
            pause_ms: 50,
            busy_timeout_ms: 5_000,
            unreachable_timeout_ms: 20_000,
        }
    }
}

/// One run of the scenario.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Its name.
    pub name: String,
    /// Which servers replicas go to.
    pub policy: PolicyKind,
    /// Whether datanodes look at their primaries and deny accesses while these are busy.
    pub denial: bool,
    /// Whether losing acknowledged data is no failure of this run.
    pub may_lose: bool,
}

/// What is done to a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// The disk is emptied without notice and the server comes back.
    Reimage,
    /// SIGKILL, and a new start after a while.
    Kill,
    /// SIGSTOP, and SIGCONT after a while.
    Hang,
    /// The primary needs the server for a while.
    Busy,
    /// No space is left on the disk for a while.
    FullDisk,
    /// Bits flip in sealed blocks.
    BitRot,
    /// The server reaches only the others that are cut off with it, for a while.
    Partition,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Reimage,
        Self::Kill,
        Self::Hang,
        Self::Busy,
        Self::FullDisk,
        Self::BitRot,
        Self::Partition,
    ];

    /// As it is written in a scenario.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reimage => "reimage",
            Self::Kill => "kill",
            Self::Hang => "hang",
            Self::Busy => "busy",
            Self::FullDisk => "full-disk",
            Self::BitRot => "bit-rot",
            Self::Partition => "partition",
        }
    }

    fn lasts(self) -> bool {
        !matches!(self, Self::BitRot)
    }
}

/// Whom a fault hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Targets {
    /// The namenode.
    Namenode,
    /// Servers by number, in this order.
    Servers(Vec<usize>),
    /// So many, chosen by the seed.
    Random(usize),
}

/// Something that happens, perhaps several times.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What.
    pub kind: Kind,
    /// To whom.
    pub targets: Targets,
    /// When first, in milliseconds from the start.
    pub at_ms: u64,
    /// Added to it: up to so many milliseconds, as the seed decides.
    pub jitter_ms: u64,
    /// How long it lasts, in milliseconds.
    pub for_ms: u64,
    /// Time from one server to the next, in milliseconds.
    pub rolling_ms: u64,
    /// How often it happens.
    pub repeat: u32,
    /// Time between repetitions, in milliseconds.
    pub every_ms: u64,
    /// Blocks that rot on each server.
    pub blocks: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawScenario {
    name: String,
    #[serde(default)]
    seed: u64,
    duration_s: Spanned<f64>,
    #[serde(default = "default_heal_s")]
    heal_s: Spanned<f64>,
    cluster: RawCluster,
    #[serde(default)]
    tenant: Vec<Spanned<RawTenant>>,
    #[serde(default)]
    clients: ClientSpec,
    #[serde(default)]
    fault: Vec<Spanned<RawFault>>,
    #[serde(default)]
    variant: Vec<RawVariant>,
}

fn default_heal_s() -> Spanned<f64> {
    Spanned::new(0..0, 120.0)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCluster {
    servers: Option<Spanned<usize>>,
    #[serde(default = "default_replication")]
    replication: Spanned<u8>,
    #[serde(default = "default_block_mib")]
    block_mib: Spanned<u64>,
    #[serde(default = "default_quota_mib")]
    quota_mib: Spanned<u64>,
    #[serde(default = "default_repairs")]
    repairs_per_hour: u32,
    policy: Option<Spanned<String>>,
    #[serde(default = "default_day_s")]
    day_s: Spanned<f64>,
    racks: Option<Spanned<usize>>,
}

fn default_replication() -> Spanned<u8> {
    Spanned::new(0..0, 3)
}

fn default_block_mib() -> Spanned<u64> {
    Spanned::new(0..0, 1)
}

fn default_quota_mib() -> Spanned<u64> {
    Spanned::new(0..0, 1_024)
}

/// A live run lasts minutes: with the usual 30 it would never see a repair end.
fn default_repairs() -> u32 {
    20_000
}

fn default_day_s() -> Spanned<f64> {
    Spanned::new(0..0, 60.0)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTenant {
    environment: String,
    machine_function: String,
    servers: usize,
    #[serde(default)]
    pattern: Pattern,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawVariant {
    name: String,
    policy: Spanned<String>,
    #[serde(default = "yes")]
    denial: bool,
    #[serde(default)]
    may_lose: bool,
}

fn yes() -> bool {
    true
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawFault {
    kind: Spanned<String>,
    at_s: Spanned<f64>,
    jitter_s: Option<Spanned<f64>>,
    for_s: Option<Spanned<f64>>,
    rolling_s: Option<Spanned<f64>>,
    repeat: Option<Spanned<u32>>,
    every_s: Option<Spanned<f64>>,
    servers: Option<Vec<Spanned<String>>>,
    tenant: Option<Spanned<String>>,
    environment: Option<Spanned<String>>,
    random: Option<Spanned<usize>>,
    part: Option<Spanned<String>>,
    blocks: Option<Spanned<usize>>,
}

/// Most servers: each is a process.
const SERVERS_MAX: usize = 500;
/// A scenario file is written by people.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// A day.
const SECONDS_MAX: f64 = 86_400.0;

impl Scenario {
    /// Reads and checks a scenario.
    ///
    /// # Errors
    /// [`ScenarioError`] with file and line.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let fail = |message: String| ScenarioError {
            path: path.to_owned(),
            line: None,
            message,
        };
        let length = fs::metadata(path).map_err(|error| fail(error.to_string()))?;
        if length.len() > FILE_BYTES_MAX {
            return Err(fail("a scenario has at most 1 MiB".into()));
        }
        let text = fs::read_to_string(path).map_err(|error| fail(error.to_string()))?;
        Self::parse(path, &text)
    }

    /// Checks the text of a scenario; `path` is for errors.
    ///
    /// # Errors
    /// [`ScenarioError`] with file and line.
    pub fn parse(path: &Path, text: &str) -> Result<Self, ScenarioError> {
        let checker = Checker { path, text };
        let raw: RawScenario = toml::from_str(text).map_err(|error| {
            let message = error.message().to_owned();
            checker.at(error.span().unwrap_or(0..0), message)
        })?;
        checker.check(raw)
    }
}

/// Where in which file.
struct Checker<'a> {
    path: &'a Path,
    text: &'a str,
}

impl Checker<'_> {
    fn at(&self, span: Range<usize>, message: impl Into<String>) -> ScenarioError {
        let before = self.text.as_bytes().get(..span.start).unwrap_or_default();
        ScenarioError {
            path: self.path.to_owned(),
            line: Some(1 + before.iter().filter(|&&byte| byte == b'\n').count()),
            message: message.into(),
        }
    }

    fn ms(&self, name: &str, seconds: &Spanned<f64>) -> Result<u64, ScenarioError> {
        let value = *seconds.get_ref();
        if (0.0..=SECONDS_MAX).contains(&value) {
            return Ok((value * 1e3).round() as u64);
        }
        let message = format!("`{name} = {value}`: accepted are 0 to {SECONDS_MAX} seconds");
        Err(self.at(seconds.span(), message))
    }

    fn within<T: PartialOrd + fmt::Display + Copy>(
        &self,
        name: &str,
        value: &Spanned<T>,
        range: std::ops::RangeInclusive<T>,
    ) -> Result<T, ScenarioError> {
        let number = *value.get_ref();
        if range.contains(&number) {
            return Ok(number);
        }
        let (from, to) = (range.start(), range.end());
        let message = format!("`{name} = {number}`: accepted are {from} to {to}");
        Err(self.at(value.span(), message))
    }

    fn policy(&self, name: &Spanned<String>) -> Result<PolicyKind, ScenarioError> {
        let parsed = name.get_ref().parse::<PolicyKind>();
        parsed.map_err(|error| self.at(name.span(), error.to_string()))
    }

    fn check(&self, raw: RawScenario) -> Result<Scenario, ScenarioError> {
        let servers = self.servers(&raw)?;
        let cluster = &raw.cluster;
        let replication_max = u8::try_from(servers.len()).unwrap_or(u8::MAX).min(8);
        let spec = ClusterSpec {
            replication: self.within("replication", &cluster.replication, 1..=replication_max)?,
            block_mib: self.within("block_mib", &cluster.block_mib, 1..=256)?,
            quota_mib: self.within("quota_mib", &cluster.quota_mib, 16..=1 << 20)?,
            repairs_per_hour: cluster.repairs_per_hour,
            day_ms: self.ms("day_s", &cluster.day_s)?.max(1_000),
            servers,
        };
        let duration_ms = self.ms("duration_s", &raw.duration_s)?;
        let mut faults = Vec::new();
        for fault in &raw.fault {
            faults.push(self.fault(fault, &spec.servers, duration_ms)?);
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
        Ok(Scenario {
            name: raw.name,
            seed: raw.seed,
            duration_ms,
            heal_ms: self.ms("heal_s", &raw.heal_s)?,
            cluster: spec,
            clients: raw.clients,
            faults,
            variants,
        })
    }

    fn servers(&self, raw: &RawScenario) -> Result<Vec<Server>, ScenarioError> {
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
                        add(tenant, &raw.environment, &raw.machine_function, raw.pattern);
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

    fn fault(
        &self,
        raw: &Spanned<RawFault>,
        servers: &[Server],
        duration_ms: u64,
    ) -> Result<Fault, ScenarioError> {
        let span = raw.span();
        let raw = raw.get_ref();
        let name = raw.kind.get_ref();
        let known = Kind::ALL.into_iter().find(|kind| kind.name() == name);
        let Some(kind) = known else {
            let accepted = Kind::ALL.map(Kind::name).join(", ");
            let message = format!("unknown fault `{name}`; accepted: {accepted}");
            return Err(self.at(raw.kind.span(), message));
        };
        let targets = self.targets(kind, raw, span.clone(), servers)?;
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
        if let (Some(blocks), false) = (&raw.blocks, kind == Kind::BitRot) {
            return Err(self.at(blocks.span(), "`blocks` is for `bit-rot` only"));
        }
        let blocks = match &raw.blocks {
            Some(blocks) => self.within("blocks", blocks, 1..=10_000)?,
            None => 1,
        };
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
            blocks,
        };
        if fault.repeat > 1 && fault.every_ms == 0 {
            return Err(self.at(span, "`repeat` needs `every_s`"));
        }
        let count = match &fault.targets {
            Targets::Namenode => 1,
            Targets::Servers(servers) => servers.len(),
            Targets::Random(count) => *count,
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
        Ok(fault)
    }

    fn targets(
        &self,
        kind: Kind,
        raw: &RawFault,
        span: Range<usize>,
        servers: &[Server],
    ) -> Result<Targets, ScenarioError> {
        let given = [
            raw.servers.is_some(),
            raw.tenant.is_some(),
            raw.environment.is_some(),
            raw.random.is_some(),
            raw.part.is_some(),
        ];
        if given.iter().filter(|&&given| given).count() != 1 {
            let message = "name whom it hits with exactly one of `servers`, `tenant`, \
                           `environment`, `random` or `part`";
            return Err(self.at(span, message));
        }
        if let Some(part) = &raw.part {
            let possible = matches!(kind, Kind::Kill | Kind::Hang);
            if part.get_ref() == "namenode" && possible {
                return Ok(Targets::Namenode);
            }
            let message = if possible {
                format!("no part is named `{}`; accepted: namenode", part.get_ref())
            } else {
                format!("`{}` hits servers, not parts", kind.name())
            };
            return Err(self.at(part.span(), message));
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

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: &str = "name = \"t\"\nduration_s = 10\n[cluster]\nservers = 4\n";

    fn parse(more: &str) -> Result<Scenario, String> {
        let text = format!("{SMALL}{more}");
        Scenario::parse(Path::new("s.toml"), &text).map_err(|error| error.to_string())
    }

    fn error(more: &str) -> String {
        parse(more).expect_err(more)
    }

    #[test]
    fn errors_name_file_line_and_what_is_accepted() {
        assert_eq!(parse("").unwrap().cluster.servers.len(), 4);
        for (more, wanted) in [
            ("colour = 1\n", "s.toml:5: unknown field `colour`"),
            (
                "[[fault]]\nkind = \"flood\"\nat_s = 1\nrandom = 1\n",
                "s.toml:6: unknown fault `flood`; accepted: reimage, kill, hang, busy",
            ),
            (
                "[[fault]]\nkind = \"kill\"\nat_s = 1\nfor_s = 1\nservers = [\n\"datanode-9\"]\n",
                "s.toml:10: there is no server `datanode-9`; accepted: datanode-1 to datanode-4",
            ),
            (
                "[[fault]]\nkind = \"kill\"\nat_s = 11\nfor_s = 1\nrandom = 1\n",
                "s.toml:7: it may happen as late as 11.0 s",
            ),
            (
                "[[fault]]\nkind = \"reimage\"\nat_s = 1\nenvironment = \"x\"\n",
                "s.toml:8: no server belongs to `x`; accepted: environment-1, environment-2",
            ),
            (
                "[[fault]]\nkind = \"busy\"\nat_s = 1\nfor_s = 2\npart = \"namenode\"\n",
                "s.toml:9: `busy` hits servers",
            ),
            (
                "[[variant]]\nname = \"a\"\npolicy = \"hdfs\"\n",
                "s.toml:7: ",
            ),
            ("[clients]\ncount = \"many\"\n", "s.toml:6: invalid type"),
        ] {
            let said = error(more);
            assert!(said.starts_with(wanted), "{said}\nbut wanted {wanted}");
        }
        let text = "name = \"t\"\nseed = \"x\"\nduration_s = 1\n[cluster]\nservers = 1\n";
        let said = Scenario::parse(Path::new("s.toml"), text).unwrap_err();
        assert!(said.to_string().starts_with("s.toml:2: "), "{said}");
    }
}
