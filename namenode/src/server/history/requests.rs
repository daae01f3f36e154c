//! Operators' queries about history, and what they import into it.

use std::ops::Bound;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::history::{
    HistoryClass, HistoryOverview, HistoryRecord, HistoryReply, ImportCounts, MISSING_SAMPLE,
    TenantHistory, TenantName, TenantPattern,
};
use harvestfs_protocol::limits::{
    HISTORY_RECORDS_PER_REQUEST_MAX, HISTORY_SAMPLES_PER_REQUEST_MAX, LABEL_BYTES_MAX,
    TENANTS_PER_REPLY_MAX,
};
use harvestfs_telemetry::analysis::TenantAnalysis;
use harvestfs_telemetry::history::records::{ServerRecord, append};
use harvestfs_telemetry::history::{HistoryError, Level, NAME_BYTES_MAX, Recorded, Slot};
use harvestfs_telemetry::profile::{Pattern, TenantKey};
use harvestfs_telemetry::reimages::{Estimator, Months, rates};

use super::worker::Historic;

const _: () = assert!(NAME_BYTES_MAX == LABEL_BYTES_MAX);

/// What an import has to write to the files.
#[derive(Default)]
struct Additions {
    counts: ImportCounts,
    servers: Vec<u8>,
    spans: Vec<(u32, Vec<(Slot, Level)>)>,
}

impl Historic {
    pub(super) fn import(
        &mut self,
        records: Vec<HistoryRecord>,
        now_s: u32,
    ) -> Result<HistoryReply, FsError> {
        let samples = records.iter().map(|record| match record {
            HistoryRecord::Utilisation { samples, .. } => samples.len(),
            _ => 0,
        });
        if records.len() > HISTORY_RECORDS_PER_REQUEST_MAX
            || samples.sum::<usize>() > HISTORY_SAMPLES_PER_REQUEST_MAX
        {
            return Err(FsError::InvalidArgument(format!(
                "at most {HISTORY_RECORDS_PER_REQUEST_MAX} records with \
                 {HISTORY_SAMPLES_PER_REQUEST_MAX} samples are accepted in one request"
            )));
        }
        let mut additions = Additions::default();
        let mut refused = None;
        for (number, record) in (0..).zip(records) {
            if let Err(error) = self.import_record(record, now_s, &mut additions) {
                refused = Some((number, error));
                break;
            }
        }
        self.store.append_servers(&additions.servers, &self.history);
        self.store.append_spans(&additions.spans, &self.history);
        Ok(match refused {
            None => HistoryReply::Imported(additions.counts),
            Some((record, error)) => HistoryReply::Refused {
                record,
                reason: error.to_string(),
            },
        })
    }

    fn import_record(
        &mut self,
        record: HistoryRecord,
        now_s: u32,
        additions: &mut Additions,
    ) -> Result<(), HistoryError> {
        let not_yet = |at_s| match at_s > now_s {
            true => Err(HistoryError::InTheFuture { at_s }),
            false => Ok(()),
        };
        match record {
            HistoryRecord::Owner {
                server,
                tenant,
                from_s,
            } => {
                not_yet(from_s)?;
                let tenant = key(tenant);
                let recorded = self.history.owns(&server, &tenant, from_s)?;
                if additions.counts_as_new(recorded) {
                    let record = ServerRecord::Owns {
                        server,
                        tenant,
                        from_s,
                    };
                    append(&mut additions.servers, &record);
                }
            }
            HistoryRecord::Reimage { server, at_s } => {
                not_yet(at_s)?;
                let recorded = self.history.reimaged(&server, at_s)?;
                if additions.counts_as_new(recorded) {
                    let at_s = vec![at_s];
                    append(
                        &mut additions.servers,
                        &ServerRecord::Reimaged { server, at_s },
                    );
                }
            }
            HistoryRecord::Utilisation {
                tenant,
                start_s,
                period_s,
                samples,
            } => {
                let tenant = self.history.tenant(&key(tenant))?;
                let shares: Vec<Option<f32>> = samples
                    .into_iter()
                    .map(|sample| (sample != MISSING_SAMPLE).then(|| f32::from(sample) / 10_000.0))
                    .collect();
                let history = &mut self.history;
                let imported = history.import_series(tenant, start_s, period_s, &shares, now_s);
                let (changed, too_old) = imported?;
                additions.counts.new += changed.len() as u64;
                additions.counts.too_old += too_old as u64;
                // Of a series that is too old as a whole nothing was known.
                let is_known = changed.is_empty() && (too_old == 0 || too_old < shares.len());
                additions.counts.known += u64::from(is_known);
                additions.spans.push((tenant.0, changed));
            }
        }
        Ok(())
    }

    /// Returns one page. Servers, reimages and rates are current; figures about CPU use are from the last analysis.
    pub(super) fn tenants(&self, after: Option<TenantName>, now_s: u32) -> HistoryReply {
        let months = Months::count(&self.history, now_s);
        let rates = rates(&months, &Estimator::default());
        let mut servers = vec![0u32; months.len()];
        for owner in self.history.servers().iter().filter_map(|s| s.owner()) {
            servers[owner.0 as usize] += 1;
        }
        let all: std::collections::BTreeMap<_, _> =
            self.history.tenants().map(|(id, key)| (key, id)).collect();
        let after = after.map(key);
        let from = after.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
        let mut rest = all.range::<TenantKey, _>((from, Bound::Unbounded));
        let page = rest.by_ref().take(TENANTS_PER_REPLY_MAX).map(|(key, id)| {
            let index = id.0 as usize;
            let analysis = self.analysis.as_ref();
            let found = analysis.and_then(|analysis| analysis.tenants.get(*key));
            let seen = found.filter(|tenant| tenant.coverage > 0.0);
            let share =
                |pick: fn(&TenantAnalysis) -> f64| seen.map(|tenant| permille(pick(tenant)));
            TenantHistory {
                tenant: tenant_name(key),
                servers: servers[index],
                reimages: months[index].reimages.iter().sum(),
                server_months: months[index].server_months.iter().sum::<f64>().round() as u64,
                reimages_per_1000_server_months: (rates[index] * 1_000.0).round() as u64,
                average_cpu_permille: share(|tenant| tenant.profile.average_cpu_share),
                peak_cpu_permille: share(|tenant| tenant.profile.peak_cpu_share),
                pattern: found
                    .filter(|tenant| tenant.pattern_known)
                    .map(|tenant| pattern(tenant.profile.pattern)),
                class: found.and_then(|tenant| u32::try_from(tenant.class?).ok()),
                coverage_permille: found.map_or(0, |tenant| permille(tenant.coverage)),
            }
        });
        let tenants = page.collect();
        HistoryReply::Tenants {
            tenants,
            more: rest.next().is_some(),
        }
    }

    pub(super) fn overview(&self, slots_lost: u64) -> HistoryOverview {
        let analysis = self.analysis.as_ref();
        let classes = analysis.map_or(&[][..], |analysis| &analysis.classes);
        let classes = classes.iter().map(|class| HistoryClass {
            pattern: pattern(class.pattern),
            average_cpu_permille: permille(class.average_cpu_share),
            peak_cpu_permille: permille(class.peak_cpu_share),
            tenants: class.members.len() as u32,
        });
        HistoryOverview {
            tenants: self.history.tenants().len() as u64,
            servers: self.history.servers().len() as u64,
            reimages: self.history.reimages() as u64,
            pairs: analysis.map_or(0, |analysis| analysis.pairs.len() as u64),
            memory_bytes: self.history.memory_bytes() as u64,
            disk_bytes: self.store.disk_bytes(),
            slots_recorded: self.slots_recorded,
            slots_lost,
            analysed_at_s: analysis.map(|analysis| analysis.at_s),
            analysis_ms: self.analysis_ms,
            classes: classes.collect(),
            problems: self.store.problems().to_vec(),
        }
    }
}

impl Additions {
    fn counts_as_new(&mut self, recorded: Recorded) -> bool {
        let count = match recorded {
            Recorded::New => &mut self.counts.new,
            Recorded::Known => &mut self.counts.known,
            Recorded::TooOld => &mut self.counts.too_old,
        };
        *count += 1;
        recorded == Recorded::New
    }
}

fn key(name: TenantName) -> TenantKey {
    TenantKey {
        environment: name.environment,
        machine_function: name.machine_function,
    }
}

pub(in crate::server) fn tenant_name(key: &TenantKey) -> TenantName {
    TenantName {
        environment: key.environment.clone(),
        machine_function: key.machine_function.clone(),
    }
}

pub(in crate::server) fn pattern(pattern: Pattern) -> TenantPattern {
    match pattern {
        Pattern::Periodic => TenantPattern::Periodic,
        Pattern::Constant => TenantPattern::Constant,
        Pattern::Unpredictable => TenantPattern::Unpredictable,
    }
}

pub(in crate::server) fn permille(share: f64) -> u16 {
    // Between 0 and 1000, by the clamp.
    (share.clamp(0.0, 1.0) * 1_000.0).round() as u16
}
