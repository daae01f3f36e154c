//! The Prometheus metrics of each part: one table of metrics, and the registry that provides the handles.
//!
//! A part resolves its handles once, at its start; recording is then a few atomic additions. The state of an engine
//! is sampled at each scrape. Only this module uses the library directly.

mod registry;
mod table;

use std::fmt::Write;

pub use prometheus::{
    Counter, Gauge, Histogram, HistogramTimer as Timer, IntCounter as WholeCounter,
};

pub use registry::{CONTENT_TYPE, Registry, raise_to};
pub use table::*;

/// Upper bounds of the latency buckets in seconds: from memory accesses to more than anyone would wait.
const LATENCY_BOUNDS_S: [f64; 16] = [
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0,
    2.5, 10.0,
];

/// The process that exports a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All processes.
    Every,
    /// `harvestfs namenode`
    Namenode,
    /// `harvestfs datanode`
    Datanode,
    /// `harvestfs mount`
    Mount,
    /// `harvestfs chaos run`
    Chaos,
}

impl Part {
    /// All parts, in the order of the documentation.
    pub const ALL: [Part; 5] = [
        Part::Every,
        Part::Namenode,
        Part::Datanode,
        Part::Mount,
        Part::Chaos,
    ];

    /// Returns the part's name in labels and headings.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Part::Every => "every part",
            Part::Namenode => "namenode",
            Part::Datanode => "datanode",
            Part::Mount => "mount",
            Part::Chaos => "chaos",
        }
    }
}

/// The behaviour of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only increases, from 0 at the start of the process; a whole number.
    WholeCounter,
    /// Only increases, from 0 at the start of the process; may have fractions.
    Counter,
    /// Increases and decreases.
    Gauge,
    /// A histogram of latencies.
    Latency,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::WholeCounter | Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Latency => "histogram",
        }
    }
}

/// What users may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stability {
    /// Name, unit and labels stay the same until a release announces a change one release ahead.
    Stable,
    /// May change with any release, since it exposes the implementation.
    Internal,
}

impl Stability {
    fn name(self) -> &'static str {
        match self {
            Stability::Stable => "stable",
            Stability::Internal => "internal",
        }
    }
}

/// A row of the table of metrics.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// Its name in Prometheus.
    pub name: &'static str,
    /// The part that exports it.
    pub part: Part,
    /// Its behaviour.
    pub kind: Kind,
    /// Its unit: `s`, `bytes`, `ratio` (0 to 1), or what is counted.
    pub unit: &'static str,
    /// Names of its labels.
    pub labels: &'static [&'static str],
    /// What users may rely on.
    pub stability: Stability,
    /// Its meaning, in a sentence or two.
    pub meaning: &'static str,
}

/// Returns the content of `docs/METRICS.md`.
#[must_use]
pub fn documentation() -> String {
    let mut text = String::from(
        "# Metrics\n\n\
         Made from the table in `telemetry/src/metrics/table.rs`; a test checks that both agree. How Prometheus\n\
         reads them is in [OPERATIONS](OPERATIONS.md#metrics). Stable metrics keep their name, unit and labels;\n\
         internal ones may change with any release.\n",
    );
    for part in Part::ALL {
        let _ = write!(
            text,
            "\n## Of {}\n\n| metric | kind | unit | labels | stability | meaning |\n|---|---|---|---|---|---|\n",
            match part {
                Part::Every => "every part".to_owned(),
                Part::Chaos => "the harness (`harvestfs chaos run --metrics`)".to_owned(),
                _ => format!("the {}", part.name()),
            }
        );
        for metric in TABLE.iter().filter(|metric| metric.part == part) {
            let labels: Vec<String> = metric.labels.iter().map(|it| format!("`{it}`")).collect();
            let _ = writeln!(
                text,
                "| `{}` | {} | {} | {} | {} | {} |",
                metric.name,
                metric.kind.name(),
                metric.unit,
                labels.join(", "),
                metric.stability.name(),
                metric.meaning
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// `HARVESTFS_WRITE_DOCUMENTS=1 cargo test -p harvestfs-telemetry the_documentation` writes it.
    #[test]
    fn the_documentation_is_in_step() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/METRICS.md");
        if std::env::var_os("HARVESTFS_WRITE_DOCUMENTS").is_some() {
            std::fs::write(path, documentation()).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            written,
            documentation(),
            "write it with HARVESTFS_WRITE_DOCUMENTS=1"
        );
    }

    #[test]
    fn names_follow_the_rules_of_prometheus() {
        let mut names = HashSet::new();
        for metric in TABLE {
            let name = metric.name;
            assert!(names.insert(name), "{name} twice");
            let prefix = match metric.part {
                Part::Every => "harvestfs_".to_owned(),
                part => format!("harvestfs_{}_", part.name()),
            };
            assert!(name.starts_with(&prefix), "{name}");
            let counts_up = matches!(metric.kind, Kind::Counter | Kind::WholeCounter);
            assert_eq!(name.ends_with("_total"), counts_up, "{name}");
            let base = name.trim_end_matches("_total");
            match metric.unit {
                "s" => assert!(base.ends_with("_seconds"), "{name}"),
                "bytes" => assert!(base.ends_with("_bytes"), "{name}"),
                "ratio" => assert!(base.ends_with("_ratio"), "{name}"),
                _ => assert!(
                    !base.ends_with("_seconds") && !base.ends_with("_bytes"),
                    "{name}"
                ),
            }
            if metric.kind == Kind::Latency {
                assert_eq!(metric.unit, "s", "{name}");
            }
            assert!(metric.meaning.ends_with('.'), "{name}: a sentence");
        }
    }
}
