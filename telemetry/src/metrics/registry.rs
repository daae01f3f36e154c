//! The metric handles of one process, and their rendering as text.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter,
    IntCounterVec, Opts, TextEncoder,
};

use super::{BUILD_INFO, Kind, LATENCY_BOUNDS_S, Metric, Part, START_TIME_SECONDS};

/// The content type of [`Registry::render`], for the header of an answer.
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// The metrics of one process.
pub struct Registry {
    part: Part,
    inner: prometheus::Registry,
    families: Mutex<BTreeMap<&'static str, Family>>,
}

/// A metric with all values of its labels.
#[derive(Clone)]
enum Family {
    WholeCounter(IntCounterVec),
    Counter(CounterVec),
    Gauge(GaugeVec),
    Latency(HistogramVec),
}

impl Registry {
    /// Creates the metrics of a process that is `part`, of release `version`.
    #[must_use]
    pub fn new(part: Part, version: &str) -> Self {
        let registry = Self {
            part,
            inner: prometheus::Registry::new(),
            families: Mutex::default(),
        };
        registry
            .gauge(&BUILD_INFO, &[part.name(), version])
            .set(1.0);
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let started_s = since_1970.map_or(0.0, |since| since.as_secs_f64());
        registry.gauge(&START_TIME_SECONDS, &[]).set(started_s);
        registry
    }

    /// Returns the handle of a counter for these label values; the same handle for the same values.
    ///
    /// # Panics
    /// This method and the others panic when the metric is of another kind or part, or has other labels.
    pub fn counter(&self, metric: &Metric, labels: &[&str]) -> IntCounter {
        match self.family(metric) {
            Family::WholeCounter(family) => family.with_label_values(labels),
            _ => panic!("{} is no counter of whole numbers", metric.name),
        }
    }

    /// Returns the handle of a counter with fractions.
    ///
    /// # Panics
    /// As [`Registry::counter`].
    pub fn fraction_counter(&self, metric: &Metric, labels: &[&str]) -> Counter {
        match self.family(metric) {
            Family::Counter(family) => family.with_label_values(labels),
            _ => panic!("{} is no counter of fractions", metric.name),
        }
    }

    /// Returns the handle of a gauge.
    ///
    /// # Panics
    /// As [`Registry::counter`].
    pub fn gauge(&self, metric: &Metric, labels: &[&str]) -> Gauge {
        match self.family(metric) {
            Family::Gauge(family) => family.with_label_values(labels),
            _ => panic!("{} is no gauge", metric.name),
        }
    }

    /// Stops exporting a gauge for all values of its labels, until one is set again.
    ///
    /// # Panics
    /// As [`Registry::counter`].
    pub fn forget_gauges(&self, metric: &Metric) {
        match self.family(metric) {
            Family::Gauge(family) => family.reset(),
            _ => panic!("{} is no gauge", metric.name),
        }
    }

    /// Returns the handle of a histogram of latencies.
    ///
    /// # Panics
    /// As [`Registry::counter`].
    pub fn latency(&self, metric: &Metric, labels: &[&str]) -> Histogram {
        match self.family(metric) {
            Family::Latency(family) => family.with_label_values(labels),
            _ => panic!("{} is no histogram", metric.name),
        }
    }

    /// Returns all metrics in the text format of Prometheus ([`CONTENT_TYPE`]).
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        if let Err(error) = TextEncoder::new().encode_utf8(&self.inner.gather(), &mut text) {
            // Only a family without values or of an unknown kind can be refused, and there is none.
            tracing::error!(%error, "the metrics cannot be written");
        }
        text
    }

    /// Returns the names of the metrics that have handles, in order.
    #[must_use]
    pub fn names(&self) -> Vec<&'static str> {
        self.families.lock().keys().copied().collect()
    }

    fn family(&self, metric: &Metric) -> Family {
        assert!(
            metric.part == self.part || metric.part == Part::Every,
            "{} is no metric of the {}",
            metric.name,
            self.part.name()
        );
        self.families
            .lock()
            .entry(metric.name)
            .or_insert_with(|| self.register(metric))
            .clone()
    }

    fn register(&self, metric: &Metric) -> Family {
        // A test checks that the names and labels of the table are valid and unique.
        const PROOF: &str = "the table is valid";
        let options = Opts::new(metric.name, metric.meaning);
        let labels = metric.labels;
        let (family, collector): (Family, Box<dyn Collector>) = match metric.kind {
            Kind::WholeCounter => {
                let it = IntCounterVec::new(options, labels).expect(PROOF);
                (Family::WholeCounter(it.clone()), Box::new(it))
            }
            Kind::Counter => {
                let it = CounterVec::new(options, labels).expect(PROOF);
                (Family::Counter(it.clone()), Box::new(it))
            }
            Kind::Gauge => {
                let it = GaugeVec::new(options, labels).expect(PROOF);
                (Family::Gauge(it.clone()), Box::new(it))
            }
            Kind::Latency => {
                let options = HistogramOpts::from(options).buckets(LATENCY_BOUNDS_S.to_vec());
                let it = HistogramVec::new(options, labels).expect(PROOF);
                (Family::Latency(it.clone()), Box::new(it))
            }
        };
        self.inner.register(collector).expect(PROOF);
        family
    }
}

/// Raises a counter to what an engine has counted since the start; never lowers it.
pub fn raise_to(counter: &IntCounter, count: u64) {
    counter.inc_by(count.saturating_sub(counter.get()));
}

#[cfg(test)]
mod tests {
    use super::super::{TABLE, documentation};
    use super::*;

    #[test]
    fn every_metric_of_the_table_can_be_registered_and_is_told() {
        for part in Part::ALL {
            let registry = Registry::new(part, "1.2.3");
            let mine = |metric: &&Metric| metric.part == part;
            for metric in TABLE.iter().filter(mine) {
                let labels: Vec<&str> = metric.labels.iter().map(|_| "x").collect();
                match metric.kind {
                    Kind::WholeCounter => registry.counter(metric, &labels).inc(),
                    Kind::Counter => registry.fraction_counter(metric, &labels).inc_by(0.5),
                    Kind::Gauge => registry.gauge(metric, &labels).set(2.0),
                    Kind::Latency => registry.latency(metric, &labels).observe(0.003),
                }
                assert!(registry.names().contains(&metric.name));
            }
            let text = registry.render();
            for metric in TABLE.iter().filter(mine) {
                assert!(text.contains(&format!("# TYPE {} ", metric.name)), "{text}");
                assert!(documentation().contains(metric.name));
            }
            assert!(text.contains("version=\"1.2.3\"} 1"), "{text}");
        }
    }

    #[test]
    fn a_handle_is_the_same_for_the_same_labels() {
        let registry = Registry::new(Part::Datanode, "1");
        let metric = &super::super::DATANODE_DENIALS_TOTAL;
        registry.counter(metric, &["read"]).inc();
        registry.counter(metric, &["read"]).inc();
        registry.counter(metric, &["write"]).inc();
        assert_eq!(registry.counter(metric, &["read"]).get(), 2);
        raise_to(&registry.counter(metric, &["read"]), 7);
        raise_to(&registry.counter(metric, &["read"]), 5);
        assert_eq!(registry.counter(metric, &["read"]).get(), 7);
    }
}
