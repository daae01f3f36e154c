//! Recorded series in place of the primaries.

use std::path::Path;
use std::time::{Duration, Instant};

use harvestfs_protocol::settings::SettingsError;
use harvestfs_telemetry::primary::TraceReplay;
use harvestfs_telemetry::traces::{Series, SeriesReader};

use super::Pattern;
use super::check::Checker;
use super::raw::RawScenario;

/// The recorded load of the primaries.
#[derive(Clone, Debug)]
pub struct Trace {
    /// One series per server, in order; with fewer series than servers, servers share them.
    replays: Vec<TraceReplay>,
    began: Instant,
    /// The time between two samples in the replay, in seconds.
    step_s: f64,
}

impl Trace {
    /// The share of the CPU that a server's primary uses, 0 to 1, at a time since the start of the run.
    #[must_use]
    pub fn share(&self, server: usize, at: Duration) -> f64 {
        // There is at least one.
        self.replays[server % self.replays.len()].share(self.began + at)
    }

    /// The time between two samples in the replay, in seconds.
    #[must_use]
    pub fn step_s(&self) -> f64 {
        self.step_s
    }
}

impl Checker<'_> {
    /// Reads the trace that a scenario names, as far as its servers need it.
    pub fn trace(
        &self,
        raw: &RawScenario,
        servers: usize,
        duration_ms: u64,
    ) -> Result<Option<Trace>, SettingsError> {
        let Some(file) = &raw.cluster.trace else {
            return match &raw.cluster.trace_speed {
                Some(speed) => Err(self.at(speed.span(), "`trace_speed` is of which `trace`?")),
                None => Ok(None),
            };
        };
        let tenants = raw.tenant.iter().map(toml::Spanned::get_ref);
        let mut patterns = tenants.map(|tenant| &tenant.pattern);
        if let Some(pattern) = patterns.find(|it| *it.get_ref() != Pattern::Idle) {
            let message = "`trace` says what the primaries do; leave `pattern` out";
            return Err(self.at(pattern.span(), message));
        }
        let fail = |message: String| self.at(file.span(), format!("`trace`: {message}"));
        let speed = raw
            .cluster
            .trace_speed
            .as_ref()
            .map_or(1.0, |it| *it.get_ref());
        let beside = self.path.parent().unwrap_or(Path::new(""));
        let path = beside.join(file.get_ref());
        let began = Instant::now();
        let mut trace = Trace {
            replays: Vec::new(),
            began,
            step_s: 0.0,
        };
        let reader = SeriesReader::open(&path).map_err(|error| fail(error.to_string()))?;
        for (number, series) in reader.take(servers).enumerate() {
            let series: Series = series.map_err(|error| fail(error.to_string()))?;
            trace.step_s = f64::from(series.period_s) / speed;
            let lasts_s = series.len() as f64 * trace.step_s;
            let wanted_s = duration_ms as f64 / 1e3;
            let replay = TraceReplay::new(&series, speed, began, Duration::ZERO);
            // The header is line 1.
            let at = format!("{}:{}", path.display(), number + 2);
            trace
                .replays
                .push(replay.map_err(|error| fail(format!("{at}: {error}")))?);
            if lasts_s < wanted_s {
                return Err(fail(format!(
                    "{at}: the series `{}` ends after {lasts_s:.1} s of {wanted_s:.1} s; replay it \
                     more slowly (`trace_speed`)",
                    series.name
                )));
            }
        }
        if trace.replays.is_empty() {
            return Err(fail(format!("{} holds no series", path.display())));
        }
        Ok(Some(trace))
    }
}
