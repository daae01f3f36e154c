//! The results of a scenario, as a table, JSON and one self-contained HTML page.

use std::fmt;

use serde::{Serialize, Serializer};

use super::ledger::Change;
use super::verify::Comparison;
use super::workload::Accesses;
use crate::report::{Axis, Lines, Series, Table};
use crate::simulate::cluster::replay::Given;

/// All runs of a scenario.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Name of the scenario.
    pub scenario: String,
    /// Which defects of the system the scenario would find.
    pub finds: String,
    /// The seed that decided everything.
    pub seed: u64,
    /// Number of servers.
    pub servers: usize,
    /// Replicas of each block.
    pub replication: u8,
    /// How long clients worked and faults happened, in milliseconds.
    pub duration_ms: u64,
    /// The plan, a line for each event.
    pub plan: Vec<String>,
    /// The runs that were completed.
    pub runs: Vec<RunReport>,
    /// Why the next run was not completed; `None` if all were.
    pub error: Option<String>,
}

/// One run.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// Its name.
    pub variant: String,
    /// The placement policy.
    pub policy: String,
    /// Whether busy servers denied accesses.
    pub denial: bool,
    /// Whether everything acknowledged was there and the cluster became whole in time.
    pub passed: bool,
    /// Blocks at the end.
    pub blocks: usize,
    /// Blocks in use for which `fsck` found no replica at the end; `None` if the namenode did not answer.
    pub lost_blocks: Option<u64>,
    /// The lost blocks, and when each lost its replicas.
    pub lost: Vec<Lost>,
    /// Unavailability in block-seconds: a block counts while all servers with a replica are down, hung, busy or cut
    /// off.
    pub unavailable_block_s: f64,
    /// Number of repairs, as counted by the namenode.
    pub repairs: u64,
    /// Replicas that were seen to appear later than the first ones of their block.
    pub repaired_replicas_seen: u64,
    /// Bytes of these replicas.
    pub repaired_bytes: u64,
    /// Replicas with a flipped bit that no datanode had found at the end.
    pub rotten_replicas: usize,
    /// Time from the end of all faults until all parts were up, `fsck` found nothing and all rot was found and
    /// repaired, in milliseconds; `None` if that never happened.
    pub time_to_whole_ms: Option<u64>,
    /// By how many percent a thread that computed for 20 ms out of every 200 ms was slower than before the
    /// cluster was started.
    pub slowdown_percent: Option<f64>,
    /// The clients' accesses.
    pub accesses: Accesses,
    /// The comparison of every acknowledged byte and name with the model.
    pub comparison: Comparison,
    /// The log of events.
    pub events: Vec<String>,
    /// The faults that began, as `harvestfs simulate cluster --replay` accepts them.
    pub faults: Vec<Given>,
    /// Samples of the cluster, about every second (for large clusters, every five seconds).
    pub samples: Vec<Sample>,
}

/// A lost block.
#[derive(Clone, Debug, Serialize)]
pub struct Lost {
    /// The block.
    pub block: Block,
    /// A file that it belongs to.
    pub path: Option<String>,
    /// The finding of `fsck`.
    pub finding: String,
    /// What happened to its replicas.
    pub replicas: Vec<Change>,
}

/// The id of a block, written as 16 hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block(pub u64);

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Block {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// One sample of the cluster.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// The time, in milliseconds from the start.
    pub at_ms: u64,
    /// Blocks all of whose replicas were on servers that could not be used.
    pub unavailable: usize,
    /// Blocks below their replication, as last reported by the namenode.
    pub under_replicated: u64,
    /// Lost blocks, as last reported by the namenode.
    pub lost: u64,
    /// Whether the namenode answered.
    pub namenode_answers: bool,
    /// Datanodes that it considered alive; 0 if it did not answer.
    pub alive: u64,
    /// Reads so far.
    pub reads: u64,
    /// Failed reads so far.
    pub failed_reads: u64,
    /// Failed writes, renames and removals so far.
    pub failed_changes: u64,
    /// Repairs so far.
    pub repairs: u64,
    /// Bytes repaired so far.
    pub repaired_bytes: u64,
}

/// The state of the cluster at the end of a run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    /// It became whole in time.
    pub is_whole: bool,
    /// Only lost blocks kept it from becoming whole.
    pub has_settled: bool,
    /// As in [`RunReport`].
    pub rotten_replicas: usize,
}

impl End {
    /// Whether a run passed. With `may_lose`, lost data is not a failure, but everything else that is wrong is. Lost
    /// blocks excuse a cluster that is not whole, but not other blocks that were not repaired.
    pub fn passes(self, comparison: &Comparison, may_lose: bool) -> bool {
        if !may_lose {
            return comparison.intact() && self.is_whole;
        }
        // A cluster that is whole has lost no block of a file.
        let is_as_it_may_be = if self.is_whole {
            comparison.lost.is_empty()
        } else {
            self.has_settled
        };
        comparison.wrong.is_empty()
            && comparison.unexpected.is_empty()
            && self.rotten_replicas == 0
            && is_as_it_may_be
    }
}

impl Report {
    /// Whether all runs were completed and passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.runs_passed()
    }

    /// Whether all completed runs passed.
    #[must_use]
    pub fn runs_passed(&self) -> bool {
        self.runs.iter().all(|run| run.passed)
    }

    /// The table for the terminal.
    #[must_use]
    pub fn table(&self) -> Table {
        let mut table = Table::new(&[
            "run",
            "policy",
            "denial",
            "blocks",
            "lost",
            "unavailable block s",
            "reads",
            "failed reads",
            "changes",
            "failed changes",
            "read p99 ms",
            "repairs",
            "repaired MiB",
            "whole after s",
            "primary slower %",
            "compared MiB",
            "during MiB",
            "wrong",
            "",
        ]);
        for run in &self.runs {
            let whole = run.time_to_whole_ms;
            let missing = run.comparison.lost.len() + run.comparison.wrong.len();
            table.row(&[
                run.variant.clone(),
                run.policy.clone(),
                if run.denial { "yes" } else { "no" }.to_owned(),
                run.blocks.to_string(),
                run.lost_blocks
                    .map_or("?".into(), |blocks| blocks.to_string()),
                format!("{:.1}", run.unavailable_block_s),
                run.accesses.reads.to_string(),
                run.accesses.failed_reads.to_string(),
                run.accesses.changes.to_string(),
                run.accesses.failed_changes.to_string(),
                format!("{:.0}", run.accesses.read_p99_ms),
                run.repairs.to_string(),
                mib(run.repaired_bytes),
                whole.map_or("never".into(), |ms| format!("{:.1}", ms as f64 / 1e3)),
                run.slowdown_percent
                    .map_or("-".into(), |percent| format!("{percent:.1}")),
                mib(run.comparison.bytes),
                mib(run.comparison.bytes_during),
                (missing + run.comparison.unexpected.len()).to_string(),
                if run.passed { "passed" } else { "FAILED" }.to_owned(),
            ]);
        }
        table
    }

    /// What the table omits: what the scenario would find, why blocks were lost, what was wrong, and which errors
    /// occurred.
    #[must_use]
    pub fn details(&self) -> String {
        let mut text = String::new();
        if !self.finds.is_empty() {
            text += &format!("It would find {}.\n", self.finds);
        }
        for run in &self.runs {
            for lost in run.lost.iter().take(LOST_NAMED_MAX) {
                text += &format!(
                    "{}: block {} is lost: {}\n",
                    run.variant,
                    lost.block,
                    why(lost)
                );
            }
            let more = run.lost.len().saturating_sub(LOST_NAMED_MAX);
            if more > 0 {
                text += &format!("{}: and {more} more lost blocks\n", run.variant);
            }
            if run.rotten_replicas > 0 {
                let count = run.rotten_replicas;
                text += &format!("{}: {count} rotten replicas were not found\n", run.variant);
            }
            let comparison = &run.comparison;
            for (what, list) in [
                ("lost", &comparison.lost),
                ("wrong", &comparison.wrong),
                ("unexpected", &comparison.unexpected),
            ] {
                for path in list.iter().take(LOST_NAMED_MAX) {
                    text += &format!("{}: {what}: {path}\n", run.variant);
                }
            }
            for (error, count) in &run.accesses.errors {
                text += &format!("{}: {count} times {error}\n", run.variant);
            }
        }
        if let Some(error) = &self.error {
            text += &format!("The next run did not come to its end: {error}\n");
        }
        text
    }

    /// Returns the report as JSON.
    ///
    /// # Errors
    /// Never, for the types that it contains.
    pub fn to_json(&self) -> serde_json::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// Returns the report as an HTML page with plots.
    #[must_use]
    pub fn to_html(&self) -> String {
        let mut page = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n\
             <title>{name}</title>\n<style>{STYLE}</style></head>\n<body><h1>{name}</h1>\n<p>Seed {}, {} servers, {} replicas. Run it again with \
             <code>--seed {}</code>.</p>\n<pre>{}</pre>\n",
            self.seed,
            self.servers,
            self.replication,
            self.seed,
            escaped(&self.table().to_string()),
            name = escaped(&self.scenario),
        );
        for (title, label, value) in PLOTS {
            page += &self.plot(title, label, *value).to_svg();
        }
        page += &format!(
            "<h2>Plan</h2>\n<pre>{}</pre>\n",
            escaped(&self.plan.join("\n"))
        );
        let details = self.details();
        if !details.is_empty() {
            page += &format!(
                "<h2>What it would find, losses and errors</h2>\n<pre>{}</pre>\n",
                escaped(&details)
            );
        }
        for run in &self.runs {
            page += &format!(
                "<h2>What happened: {}</h2>\n<pre>{}</pre>\n",
                escaped(&run.variant),
                escaped(&run.events.join("\n"))
            );
        }
        page + "</body></html>\n"
    }

    fn plot(&self, title: &str, label: &str, value: fn(&Sample) -> f64) -> Lines {
        let series: Vec<Series> = self
            .runs
            .iter()
            .map(|run| Series {
                name: run.variant.clone(),
                points: run
                    .samples
                    .iter()
                    .map(|sample| (sample.at_ms as f64 / 1e3, value(sample)))
                    .collect(),
                ranges: Vec::new(),
            })
            .collect();
        let points = || series.iter().flat_map(|it| &it.points);
        let highest = points().fold(0.0, |top: f64, point| top.max(point.1));
        let latest = points().fold(0.0, |top: f64, point| top.max(point.0));
        let axis = |label: &str, to: f64| Axis {
            label: label.to_owned(),
            logarithmic: false,
            from: 0.0,
            to: round_up(to.max(1.0)),
        };
        Lines {
            title: title.to_owned(),
            x: axis("seconds from the start", latest),
            y: axis(label, highest),
            series,
        }
    }
}

/// Plots are black on white in dark mode, too.
const STYLE: &str = "\
    :root{color-scheme:light dark}\
    body{font-family:sans-serif;line-height:1.4;max-width:64em;margin:auto;padding:1em}\
    pre{overflow:auto;border:1px solid #8888;border-radius:6px;padding:1em}\
    svg{width:100%;height:auto;background:#fff;border-radius:6px;margin:.5em 0}";

/// The most lost blocks and paths that are listed for a run.
const LOST_NAMED_MAX: usize = 20;

type Plot = (&'static str, &'static str, fn(&Sample) -> f64);

const PLOTS: &[Plot] = &[
    ("Blocks unavailable", "blocks", |it| it.unavailable as f64),
    ("Blocks lost", "blocks", |it| it.lost as f64),
    ("Blocks below their replication", "blocks", |it| {
        it.under_replicated as f64
    }),
    ("Failed reads", "reads so far", |it| it.failed_reads as f64),
    ("Repair traffic", "MiB so far", |it| {
        it.repaired_bytes as f64 / f64::from(1 << 20)
    }),
    ("Datanodes held for alive", "datanodes", |it| {
        it.alive as f64
    }),
];

fn why(lost: &Lost) -> String {
    if lost.replicas.is_empty() {
        return format!("no replica was ever seen ({})", lost.finding);
    }
    let change = |it: &Change| {
        let seconds = it.at_ms as f64 / 1e3;
        let fate = format!("{:?}", it.fate).to_lowercase();
        format!("datanode-{} {fate} at {seconds:.1} s", it.server + 1)
    };
    let changes: Vec<String> = lost.replicas.iter().map(change).collect();
    changes.join(", ")
}

/// The end of an axis with five steps, a round number.
fn round_up(value: f64) -> f64 {
    let magnitude = 10_f64.powf((value / 5.0).log10().floor());
    let ends = [1.0, 2.0, 5.0, 10.0].map(|step| 5.0 * step * magnitude);
    let enough = ends.into_iter().find(|&end| end >= value);
    // Only rounding errors can make the last one too small.
    enough.unwrap_or(value)
}

fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_may_lose_fails_for_everything_else() {
        let whole = End {
            is_whole: true,
            has_settled: false,
            rotten_replicas: 0,
        };
        let lossy = End {
            is_whole: false,
            has_settled: true,
            ..whole
        };
        let never_whole = End {
            has_settled: false,
            ..lossy
        };
        let rotten = End {
            rotten_replicas: 1,
            ..lossy
        };
        let found = |what: fn(&mut Comparison) -> &mut Vec<String>| {
            let mut comparison = Comparison::default();
            what(&mut comparison).push("/a".to_owned());
            comparison
        };
        let nothing = Comparison::default();
        let lost = found(|it| &mut it.lost);
        let wrong = found(|it| &mut it.wrong);
        let unexpected = found(|it| &mut it.unexpected);
        for (end, comparison, if_not, if_it_may_lose) in [
            (whole, &nothing, true, true),
            (whole, &lost, false, false),
            (whole, &wrong, false, false),
            (whole, &unexpected, false, false),
            (lossy, &nothing, false, true),
            (lossy, &lost, false, true),
            (lossy, &wrong, false, false),
            (lossy, &unexpected, false, false),
            (never_whole, &nothing, false, false),
            (never_whole, &lost, false, false),
            (rotten, &lost, false, false),
        ] {
            let passed = [false, true].map(|may_lose| end.passes(comparison, may_lose));
            assert_eq!(passed, [if_not, if_it_may_lose], "{end:?} {comparison:?}");
        }
    }

    #[test]
    fn what_did_not_come_to_its_end_has_not_passed_and_is_told() {
        let mut report = Report {
            scenario: "t".to_owned(),
            finds: String::new(),
            seed: 1,
            servers: 3,
            replication: 3,
            duration_ms: 1_000,
            plan: Vec::new(),
            runs: Vec::new(),
            error: None,
        };
        assert!(report.passed());
        report.error = Some("datanode-1 ended by itself".to_owned());
        assert!(!report.passed() && report.runs_passed());
        for text in [report.details(), report.to_html()] {
            assert!(text.contains("datanode-1 ended by itself"), "{text}");
        }
    }

    #[test]
    fn axes_end_at_round_numbers() {
        let ends = [1.0, 42.3, 50.0, 51.0, 240.0, 1_001.0].map(round_up);
        assert_eq!(ends, [1.0, 50.0, 50.0, 100.0, 250.0, 2_500.0]);
    }
}
