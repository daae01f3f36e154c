//! `harvestfs admin safe-to-reimage --plan`: plans the days on which servers are reimaged together.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use harvestfs_protocol::outlook::count;
use harvestfs_protocol::placement::{
    ExpectedLosses, PlacementReply, PlacementRequest, WaveObstacle, WaveOutlook,
};
use serde::{Deserialize, Serialize};

use super::link::{self, AdminLink};
use super::placement;
use crate::units;

/// Days of a plan.
const DAYS_MAX: usize = 1_000;

/// How a plan is judged.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// A TOML file of days, each with a `name` and `servers`: what is reimaged on each day.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["servers", "hold", "release"])]
    plan: Option<PathBuf>,
    /// With --plan: how many blocks a day may lose on average until it is repaired.
    #[arg(long, value_name = "BLOCKS", default_value_t = 0.01, requires = "plan", value_parser = losses)]
    lost_max: f64,
    /// With --plan: how long the repair of a day may take.
    #[arg(long, value_name = "TIME", default_value = "1d", requires = "plan", value_parser = placement::duration)]
    repaired_within: Duration,
}

fn losses(text: &str) -> Result<f64, String> {
    let number = text.parse().ok();
    number
        .filter(|number: &f64| number.is_finite() && *number >= 0.0)
        .ok_or_else(|| format!("`{text}` is not a number of blocks such as 0.01"))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Plan {
    days: Vec<Day>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Day {
    name: String,
    servers: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Judged {
    day: String,
    servers: Vec<String>,
    may_go_on: bool,
    reasons: Vec<String>,
    outlook: WaveOutlook,
}

impl Plan {
    fn load(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
        let plan: Self =
            toml::from_str(&text).with_context(|| format!("{shown} is not understood"))?;
        plan.check().with_context(|| shown.to_string())?;
        Ok(plan)
    }

    fn check(&self) -> anyhow::Result<()> {
        ensure!(!self.days.is_empty(), "there is no day in the plan");
        ensure!(self.days.len() <= DAYS_MAX, "more than {DAYS_MAX} days");
        let mut days: BTreeMap<&str, &str> = BTreeMap::new();
        for day in &self.days {
            let name = &day.name;
            ensure!(!day.servers.is_empty(), "day {name} has no servers");
            for server in &day.servers {
                if let Some(other) = days.insert(server, name) {
                    bail!("server {server} is on day {other} and on day {name}");
                }
            }
        }
        Ok(())
    }
}

fn reason(obstacle: WaveObstacle) -> String {
    match obstacle {
        WaveObstacle::Lost(blocks) => format!("{} would be lost", count(blocks, "block")),
        WaveObstacle::LastReplica(blocks) => {
            format!(
                "{} would be left with the last replica",
                count(blocks, "block")
            )
        }
        WaveObstacle::NoSpace(bytes) => {
            format!("{} more must be free for repair", units::human(bytes))
        }
        WaveObstacle::TooSlow => "the budgets of repair are too small".to_owned(),
        WaveObstacle::Risk(ExpectedLosses(lost)) => {
            format!("{lost:.1e} blocks may be lost on average")
        }
        WaveObstacle::NoHistory => {
            "history was not analysed yet: harvestfs admin history analyse".to_owned()
        }
    }
}

impl PlanArgs {
    /// Judges the plan, if there is one; returns whether there is.
    ///
    /// # Errors
    /// When the plan makes no sense, the cluster cannot be reached, or a day may not go on.
    pub async fn judge(&self, link: &AdminLink, json: bool) -> anyhow::Result<bool> {
        let Some(path) = &self.plan else {
            return Ok(false);
        };
        let plan = Plan::load(path)?;
        let mut judged = Vec::with_capacity(plan.days.len());
        for day in plan.days {
            let request = PlacementRequest::Wave {
                servers: day.servers.clone(),
            };
            let answer = placement::ask(link, request).await;
            let PlacementReply::Wave(outlook) =
                answer.with_context(|| format!("day {}", day.name))?
            else {
                return Err(link::unexpected());
            };
            judged.push(self.judged(day, outlook));
        }
        if json {
            println!("{}", serde_json::to_string_pretty(&judged)?);
        } else {
            print(&judged);
        }
        let refused = judged.iter().filter(|day| !day.may_go_on).count() as u64;
        if refused > 0 {
            bail!("{} must not go on as planned", count(refused, "day"));
        }
        Ok(true)
    }

    fn judged(&self, day: Day, outlook: WaveOutlook) -> Judged {
        let obstacles = outlook.obstacles(self.repaired_within.as_secs(), self.lost_max);
        Judged {
            day: day.name,
            servers: day.servers,
            may_go_on: obstacles.is_empty(),
            reasons: obstacles.into_iter().map(reason).collect(),
            outlook,
        }
    }
}

fn print(days: &[Judged]) {
    println!(
        "{:<16} {:>7} {:>9} {:>10} {:>12} {:>13}  VERDICT",
        "DAY", "SERVERS", "REPLICAS", "TO COPY", "REPAIRED IN", "LOST AT MOST"
    );
    for day in days {
        let outlook = &day.outlook;
        let repaired = outlook.repair_s.map_or_else(
            || "never".to_owned(),
            |s| humantime::format_duration(Duration::from_secs(s)).to_string(),
        );
        let lost = outlook
            .lost
            .map_or_else(|| "unknown".to_owned(), |it| format!("{:.1e}", it.0));
        let verdict = if day.may_go_on {
            "may go on".to_owned()
        } else {
            format!("must not go on: {}", day.reasons.join("; "))
        };
        println!(
            "{:<16} {:>7} {:>9} {:>10} {:>12} {:>13}  {verdict}",
            day.day,
            day.servers.len(),
            outlook.impact.replicas,
            units::human(outlook.used_bytes),
            repaired,
            lost,
        );
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::placement::ReimageImpact;

    use super::*;

    fn plan(text: &str) -> anyhow::Result<Plan> {
        let plan: Plan = toml::from_str(text)?;
        plan.check()?;
        Ok(plan)
    }

    #[test]
    fn plans_that_make_no_sense_are_named() {
        let day = |name: &str, servers: &str| {
            format!("[[days]]\nname = \"{name}\"\nservers = [{servers}]\n")
        };
        let good = format!("{}{}", day("a", "\"dn1\", \"dn2\""), day("b", "\"dn3\""));
        assert_eq!(plan(&good).unwrap().days.len(), 2);
        let error = |text: &str| format!("{:#}", plan(text).unwrap_err());
        let twice = format!("{}{}", day("a", "\"dn1\""), day("b", "\"dn1\""));
        assert!(error(&twice).contains("server dn1 is on day a and on day b"));
        assert!(error(&day("a", "")).contains("day a has no servers"));
        assert!(error("days = []").contains("no day"));
        assert!(error("[[days]]\nname = \"a\"\nserver = []").contains("unknown field"));
        assert!(losses("-1").is_err() && losses("NaN").is_err() && losses("1e-3").is_ok());
    }

    #[test]
    fn each_reason_is_given() {
        let outlook = WaveOutlook {
            impact: ReimageImpact {
                replicas: 10,
                ..ReimageImpact::default()
            },
            servers_left: 3,
            used_bytes: 5,
            free_elsewhere_bytes: 5,
            repair_s: Some(86_400),
            lost: Some(ExpectedLosses(0.001)),
        };
        let obstacles = |outlook: &WaveOutlook| outlook.obstacles(86_400, 0.001);
        assert_eq!(obstacles(&outlook), []);
        let bad = WaveOutlook {
            impact: ReimageImpact {
                lost: 1,
                exposed: 2,
                ..ReimageImpact::default()
            },
            used_bytes: 7,
            repair_s: Some(86_401),
            lost: Some(ExpectedLosses(f64::NAN)),
            ..outlook.clone()
        };
        let reasons: Vec<String> = obstacles(&bad).into_iter().map(reason).collect();
        assert_eq!(reasons[0], "1 block would be lost");
        assert_eq!(reasons[1], "2 blocks would be left with the last replica");
        assert_eq!(reasons[2], "2 B more must be free for repair");
        assert_eq!(reasons.len(), 5);
        let unknown = WaveOutlook {
            repair_s: None,
            lost: None,
            ..outlook
        };
        let unknown = obstacles(&unknown);
        assert_eq!(unknown, [WaveObstacle::TooSlow, WaveObstacle::NoHistory]);
    }
}
