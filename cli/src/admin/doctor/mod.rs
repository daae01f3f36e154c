//! `harvestfs admin doctor`: checks everything that an operator can fix, and explains how.

mod cluster;
mod group;
mod machine;

use anyhow::bail;
use harvestfs_protocol::outlook::count;
use serde::Serialize;

use super::link::AdminLink;
use super::no_leader::ADVICE;
use crate::cluster::ClusterArgs;

/// An area that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Area {
    Configuration,
    Certificates,
    Disks,
    Mounts,
    Namenode,
    Versions,
    Clocks,
    Datanodes,
    Quotas,
    Writes,
    Blocks,
}

impl Area {
    fn name(self) -> &'static str {
        match self {
            Self::Configuration => "configuration",
            Self::Certificates => "certificates",
            Self::Disks => "disks",
            Self::Mounts => "mounts",
            Self::Namenode => "namenode",
            Self::Versions => "versions",
            Self::Clocks => "clocks",
            Self::Datanodes => "datanodes",
            Self::Quotas => "quotas",
            Self::Writes => "writes",
            Self::Blocks => "blocks",
        }
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Severity {
    /// It still works, but is going to fail.
    Warning,
    /// Something does not work.
    Error,
}

/// A problem that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Finding {
    area: Area,
    severity: Severity,
    /// What is wrong.
    what: String,
    /// What to do.
    advice: String,
}

/// The areas that were checked, and the findings.
#[derive(Debug, Default, Serialize)]
struct Diagnosis {
    /// Areas that could be checked; the others need the namenode.
    checked: Vec<Area>,
    findings: Vec<Finding>,
}

impl Diagnosis {
    fn checked(&mut self, area: Area) {
        if !self.checked.contains(&area) {
            self.checked.push(area);
        }
    }

    fn error(&mut self, area: Area, what: impl Into<String>, advice: impl Into<String>) {
        self.add(area, Severity::Error, what.into(), advice.into());
    }

    fn warning(&mut self, area: Area, what: impl Into<String>, advice: impl Into<String>) {
        self.add(area, Severity::Warning, what.into(), advice.into());
    }

    fn add(&mut self, area: Area, severity: Severity, what: String, advice: String) {
        self.checked(area);
        self.findings.push(Finding {
            area,
            severity,
            what,
            advice,
        });
    }

    fn print(&self) {
        for finding in &self.findings {
            let severity = match finding.severity {
                Severity::Warning => "warning",
                Severity::Error => "ERROR",
            };
            println!("{severity}: {}: {}", finding.area.name(), finding.what);
            println!("    {}", finding.advice);
        }
        let well: Vec<_> = self
            .checked
            .iter()
            .filter(|area| self.findings.iter().all(|finding| finding.area != **area))
            .map(|area| area.name())
            .collect();
        if !well.is_empty() {
            println!("well: {}", well.join(", "));
        }
    }
}

/// Runs `harvestfs admin doctor`.
///
/// # Errors
/// When it found an error.
pub async fn run(args: &ClusterArgs, json: bool) -> anyhow::Result<()> {
    let mut diagnosis = Diagnosis::default();
    machine::examine(args, &mut diagnosis)?;
    let access = args.access("admin");
    let are_several = (access.as_ref()).is_ok_and(|it| it.config.namenodes.len() > 1);
    let link = match access {
        Ok(access) => AdminLink::connect(&access).await,
        Err(error) => Err(error),
    };
    match link {
        Ok(link) => {
            cluster::examine(&link, &mut diagnosis).await;
            link.close().await;
        }
        Err(error) if are_several => diagnosis.error(
            Area::Namenode,
            format!("none of them is reached: {error:#}"),
            format!("start them, at least most of them; if some run: {ADVICE}"),
        ),
        Err(error) => diagnosis.error(
            Area::Namenode,
            format!("{error:#}"),
            "start the namenode, or name the cluster with --data or --config",
        ),
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&diagnosis)?);
    } else {
        diagnosis.print();
    }
    let errors = diagnosis
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error)
        .count();
    if errors > 0 {
        bail!("{} found", count(errors as u64, "error"));
    }
    Ok(())
}
