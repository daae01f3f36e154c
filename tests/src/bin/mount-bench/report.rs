//! The samples and the tables made of them.

use std::fmt::Write as _;

use serde::Serialize;

use crate::cpu::Used;
use crate::rows::{Row, Unit};
use crate::suite::Plan;

/// The target that the others are compared with.
const REFERENCE: &str = "moosefs";
/// The target that the ratios are about.
const SUBJECT: &str = "harvestfs";
/// Rows for which the CPU seconds per GiB are shown.
const CPU_ROWS: [Row; 3] = [Row::SeqWrite, Row::SeqReadCold, Row::SeqReread];

/// One row, measured once.
#[derive(Debug, Clone, Serialize)]
pub struct Sample {
    /// Number of the run, from 1.
    pub run: u32,
    /// Label of the target.
    pub target: String,
    /// What was measured.
    pub row: Row,
    /// Unit of `value`.
    pub unit: Unit,
    /// The result; more is better.
    pub value: f64,
    /// Time that the work took.
    pub elapsed_s: f64,
    /// Operations done; 0 when only bytes count.
    pub operations: u64,
    /// Bytes of content read or written; 0 when only operations count.
    pub bytes: u64,
    /// Processor time meanwhile.
    pub cpu: Used,
}

/// Everything that one call of this program measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// When it ended, in seconds since 1970.
    ended_unix_s: u64,
    cpus: usize,
    kernel: String,
    size_bytes: u64,
    small_files: u64,
    random_reads_per_thread: u64,
    source_tree_files: Option<u64>,
    source_tree_bytes: Option<u64>,
    targets: Vec<String>,
    samples: Vec<Sample>,
}

/// Median and extremes of some values.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Summary {
    median: f64,
    min: f64,
    max: f64,
}

impl Summary {
    /// `None` when there are no values.
    fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let (min, max) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median = if values.len() % 2 == 1 {
            values[middle]
        } else {
            (values[middle - 1] + values[middle]) / 2.0
        };
        Some(Self { median, min, max })
    }
}

impl Report {
    /// Collects the samples with what is needed to understand them.
    pub fn new(ended_unix_s: u64, plan: &Plan, targets: Vec<String>, samples: Vec<Sample>) -> Self {
        let uname = rustix::system::uname();
        Self {
            ended_unix_s,
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
            kernel: uname.release().to_string_lossy().into_owned(),
            size_bytes: plan.size_bytes,
            small_files: plan.files,
            random_reads_per_thread: plan.random_reads_per_thread,
            source_tree_files: plan.tarball.as_ref().map(|tarball| tarball.files()),
            source_tree_bytes: plan.tarball.as_ref().map(|tarball| tarball.content_bytes()),
            targets,
            samples,
        }
    }

    /// The tables in Markdown.
    pub fn to_markdown(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{} CPUs, Linux {}; file of {} MiB, {} small files, {} random reads per thread{}; \
             median (smallest-largest)\n",
            self.cpus,
            self.kernel,
            self.size_bytes >> 20,
            self.small_files,
            self.random_reads_per_thread,
            match (self.source_tree_files, self.source_tree_bytes) {
                (Some(files), Some(bytes)) =>
                    format!(", source tree of {files} files, {} MiB", bytes >> 20),
                _ => String::new(),
            },
        );
        self.speed_table(&mut text);
        self.cpu_table(&mut text);
        text
    }

    fn speed_table(&self, text: &mut String) {
        let compared = self.is_target(SUBJECT) && self.is_target(REFERENCE);
        let mut header = vec!["work".to_owned(), "unit".to_owned()];
        header.extend(self.targets.iter().cloned());
        if compared {
            header.push(format!("{SUBJECT} / {REFERENCE}"));
            header.push("goal".to_owned());
        }
        let groups = self.groups();
        header.extend(groups.iter().map(|group| format!("{group} / {SUBJECT}")));
        table_row(text, &header);
        table_row(text, &vec!["---".to_owned(); header.len()]);
        for row in Row::ALL {
            if !self.samples.iter().any(|sample| sample.row == row) {
                continue;
            }
            let summary = |target: &str| self.summary(row, target, |sample| Some(sample.value));
            let mut cells = vec![row.title().to_owned(), row.unit().name().to_owned()];
            cells.extend(self.targets.iter().map(|target| cell(summary(target), 0)));
            let ratio = |subject: &str, reference: &str| {
                let medians = summary(subject).zip(summary(reference));
                let ratio = medians.map(|(subject, reference)| subject.median / reference.median);
                ratio.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"))
            };
            if compared {
                cells.push(ratio(SUBJECT, REFERENCE));
                cells.push(row.goal().map_or("-".to_owned(), |goal| goal.to_string()));
            }
            cells.extend(groups.iter().map(|group| ratio(group, SUBJECT)));
            table_row(text, &cells);
        }
    }

    /// HarvestFS with several namenodes, where it was measured with one, too.
    fn groups(&self) -> Vec<&String> {
        let is_group = |target: &&String| {
            let rest = target.strip_prefix(SUBJECT);
            rest.is_some_and(|rest| rest.starts_with('-'))
        };
        let groups = self.targets.iter().filter(is_group);
        groups.filter(|_| self.is_target(SUBJECT)).collect()
    }

    /// CPU seconds per GiB, as `processes / whole machine`.
    fn cpu_table(&self, text: &mut String) {
        if !self
            .samples
            .iter()
            .any(|sample| CPU_ROWS.contains(&sample.row))
        {
            return;
        }
        text.push('\n');
        let mut header = vec!["CPU seconds per GiB: own processes / whole machine".to_owned()];
        header.extend(self.targets.iter().cloned());
        table_row(text, &header);
        table_row(text, &vec!["---".to_owned(); header.len()]);
        for row in CPU_ROWS {
            if !self.samples.iter().any(|sample| sample.row == row) {
                continue;
            }
            let mut cells = vec![row.title().to_owned()];
            for target in &self.targets {
                let per_gib = |seconds: fn(&Used) -> f64| {
                    self.summary(row, target, |sample| {
                        let gib = sample.bytes as f64 / f64::from(1 << 30);
                        (gib > 0.0).then(|| seconds(&sample.cpu) / gib)
                    })
                };
                cells.push(format!(
                    "{} / {}",
                    cell(per_gib(|used| used.processes_s), 2),
                    cell(per_gib(|used| used.machine_s), 2)
                ));
            }
            table_row(text, &cells);
        }
    }

    fn is_target(&self, label: &str) -> bool {
        self.targets.iter().any(|target| target == label)
    }

    fn summary(
        &self,
        row: Row,
        target: &str,
        value: impl Fn(&Sample) -> Option<f64>,
    ) -> Option<Summary> {
        let values = self
            .samples
            .iter()
            .filter(|sample| sample.row == row && sample.target == target)
            .filter_map(value)
            .collect();
        Summary::of(values)
    }
}

fn cell(summary: Option<Summary>, decimals: usize) -> String {
    match summary {
        Some(Summary { median, min, max }) => {
            format!("{median:.decimals$} ({min:.decimals$}-{max:.decimals$})")
        }
        None => "-".to_owned(),
    }
}

fn table_row(text: &mut String, cells: &[String]) {
    text.push_str("| ");
    text.push_str(&cells.join(" | "));
    text.push_str(" |\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_median_and_extremes() {
        let summary = Summary::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((summary.median, summary.min, summary.max), (2.0, 1.0, 3.0));
        assert_eq!(Summary::of(vec![1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Summary::of(vec![]), None);
    }

    #[test]
    fn the_table_compares_the_medians() {
        let sample = |target: &str, value| Sample {
            run: 1,
            target: target.to_owned(),
            row: Row::SeqWrite,
            unit: Row::SeqWrite.unit(),
            value,
            elapsed_s: 1.0,
            operations: 0,
            bytes: 1 << 30,
            cpu: Used {
                processes_s: 1.5,
                machine_s: 2.0,
            },
        };
        let plan = Plan {
            rows: vec![Row::SeqWrite],
            size_bytes: 1 << 30,
            files: 8,
            random_reads_per_thread: 1,
            tarball: None,
        };
        let report = Report::new(
            0,
            &plan,
            ["moosefs", "harvestfs", "harvestfs-3"]
                .map(str::to_owned)
                .into(),
            vec![
                sample("moosefs", 100.0),
                sample("harvestfs", 450.0),
                sample("harvestfs-3", 360.0),
            ],
        );
        let text = report.to_markdown();
        assert!(
            text.contains("| 100 (100-100) | 450 (450-450) | 360 (360-360) | 4.50 | 4 | 0.80 |"),
            "{text}"
        );
        assert!(
            text.contains("1.50 (1.50-1.50) / 2.00 (2.00-2.00)"),
            "{text}"
        );
    }
}
