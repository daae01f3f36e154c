//! Requests of operators about the history of the primary tenants, and their additions to it.
//!
//! Times are in whole seconds since 1970. CPU shares are in thousandths of all cores of a tenant's average
//! server.

use serde::{Deserialize, Serialize};

/// Requests about history. They wait only for each other: an analysis in progress delays them by seconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HistoryRequest {
    /// Adds records, in order; at most [`crate::limits::HISTORY_RECORDS_PER_REQUEST_MAX`] with at most
    /// [`crate::limits::HISTORY_SAMPLES_PER_REQUEST_MAX`] samples together. Records that exist already are not
    /// added again. Reply: [`HistoryReply::Imported`], once they are on stable storage, or
    /// [`HistoryReply::Refused`].
    Import(Vec<HistoryRecord>),
    /// The tenants in order, at most [`crate::limits::TENANTS_PER_REPLY_MAX`]. Reply:
    /// [`HistoryReply::Tenants`].
    Tenants {
        /// The last tenant of the previous page.
        after: Option<TenantName>,
    },
    /// Summarises the history. Reply: [`HistoryReply::Overview`].
    Overview,
    /// Analyses now and uses the result. Reply: [`HistoryReply::Overview`], once that is done.
    Analyse,
}

/// A primary tenant.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TenantName {
    /// The environment.
    pub environment: String,
    /// The machine function.
    pub machine_function: String,
}

/// A piece of history.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HistoryRecord {
    /// A tenant owns a server from some time on, until another tenant does.
    Owner {
        /// The server.
        server: String,
        /// Its owner.
        tenant: TenantName,
        /// When ownership begins.
        from_s: u32,
    },
    /// A server was reimaged. It must have an owner.
    Reimage {
        /// The server.
        server: String,
        /// When it was reimaged.
        at_s: u32,
    },
    /// CPU utilisation of a tenant's average server.
    Utilisation {
        /// The tenant.
        tenant: TenantName,
        /// When the first sample begins.
        start_s: u32,
        /// Time between samples in seconds, at least 1.
        period_s: u32,
        /// Samples in 0.01 % of all cores; [`MISSING_SAMPLE`] where one is missing.
        samples: Vec<u16>,
    },
}

/// The value that marks a missing sample.
pub const MISSING_SAMPLE: u16 = u16::MAX;

/// Replies to [`HistoryRequest`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HistoryReply {
    /// To `Import`.
    Imported(ImportCounts),
    /// To `Import`: this record was refused; the records before it were added.
    Refused {
        /// Its place in the request, from 0.
        record: u32,
        /// Why.
        reason: String,
    },
    /// To `Tenants`.
    Tenants {
        /// In order.
        tenants: Vec<TenantHistory>,
        /// Whether more tenants follow.
        more: bool,
    },
    /// To `Overview` and `Analyse`.
    Overview(HistoryOverview),
}

/// The result of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportCounts {
    /// New owners, reimages and two-minute slots of tenants.
    pub new: u64,
    /// Owners and reimages that were known already, and series that changed nothing.
    pub known: u64,
    /// Samples and reimages that are older than the retention.
    pub too_old: u64,
}

/// The history of a tenant, summarised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantHistory {
    /// The tenant.
    pub tenant: TenantName,
    /// Servers that it owns now.
    pub servers: u32,
    /// Reimages of its servers in the last three years.
    pub reimages: u32,
    /// Servers times months of 30 days in the last three years.
    pub server_months: u64,
    /// Estimated reimages of a thousand of its servers in a month, from now on.
    pub reimages_per_1000_server_months: u64,
    /// Mean CPU utilisation in the last month, as of the last analysis; none without samples.
    pub average_cpu_permille: Option<u16>,
    /// The CPU utilisation that was exceeded in only one hundredth of the last month.
    pub peak_cpu_permille: Option<u16>,
    /// The pattern; none when there are too few samples.
    pub pattern: Option<TenantPattern>,
    /// The utilisation class: an index into [`HistoryOverview::classes`].
    pub class: Option<u32>,
    /// Share of the last month (in half-hours) that has a sample, in thousandths.
    pub coverage_permille: u16,
}

/// How a tenant's CPU utilisation varies over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TenantPattern {
    /// It follows the hours of the day or the days of the week.
    Periodic,
    /// It is roughly the same at all times.
    Constant,
    /// Neither.
    Unpredictable,
}

impl TenantPattern {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Periodic, Self::Constant, Self::Unpredictable];

    /// Its name in metrics and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Periodic => "periodic",
            Self::Constant => "constant",
            Self::Unpredictable => "unpredictable",
        }
    }
}

/// A utilisation class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryClass {
    /// The pattern of its tenants.
    pub pattern: TenantPattern,
    /// Mean of their averages.
    pub average_cpu_permille: u16,
    /// Mean of their peaks.
    pub peak_cpu_permille: u16,
    /// Number of its tenants.
    pub tenants: u32,
}

/// A summary of the history.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HistoryOverview {
    /// Tenants.
    pub tenants: u64,
    /// Servers.
    pub servers: u64,
    /// Reimages.
    pub reimages: u64,
    /// Pairs of tenants that tend to be reimaged together, as of the last analysis.
    pub pairs: u64,
    /// Estimated memory use in bytes.
    pub memory_bytes: u64,
    /// Size of its files in bytes.
    pub disk_bytes: u64,
    /// Two-minute slots recorded since the namenode started.
    pub slots_recorded: u64,
    /// Slots lost since then because recording fell behind.
    pub slots_lost: u64,
    /// When it was last analysed.
    pub analysed_at_s: Option<u32>,
    /// Duration of that analysis in milliseconds.
    pub analysis_ms: u64,
    /// Utilisation classes as of that analysis.
    pub classes: Vec<HistoryClass>,
    /// The most recent problems since the namenode started, such as damaged files or a full disk.
    pub problems: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::{AdminReply, AdminRequest};
    use crate::codec::encode_frame;
    use crate::limits::{
        HISTORY_RECORDS_PER_REQUEST_MAX, HISTORY_SAMPLES_PER_REQUEST_MAX, LABEL_BYTES_MAX,
        TENANTS_PER_REPLY_MAX,
    };
    use crate::rpc::{Reply, Request};

    #[test]
    fn the_largest_messages_fit_into_frames() {
        let label = "x".repeat(LABEL_BYTES_MAX);
        let tenant = TenantName {
            environment: label.clone(),
            machine_function: label.clone(),
        };
        let owner = HistoryRecord::Owner {
            server: label,
            tenant: tenant.clone(),
            from_s: u32::MAX,
        };
        let mut records = vec![owner; HISTORY_RECORDS_PER_REQUEST_MAX];
        records[0] = HistoryRecord::Utilisation {
            tenant: tenant.clone(),
            start_s: u32::MAX,
            period_s: u32::MAX,
            samples: vec![MISSING_SAMPLE; HISTORY_SAMPLES_PER_REQUEST_MAX],
        };
        let import = Request::Admin(AdminRequest::History(HistoryRequest::Import(records)));
        assert!(encode_frame(&mut Vec::new(), &import, 0).is_ok());

        let tenant = TenantHistory {
            tenant,
            servers: u32::MAX,
            reimages: u32::MAX,
            server_months: u64::MAX,
            reimages_per_1000_server_months: u64::MAX,
            average_cpu_permille: Some(u16::MAX),
            peak_cpu_permille: Some(u16::MAX),
            pattern: Some(TenantPattern::Unpredictable),
            class: Some(u32::MAX),
            coverage_permille: u16::MAX,
        };
        let page = HistoryReply::Tenants {
            tenants: vec![tenant; TENANTS_PER_REPLY_MAX],
            more: true,
        };
        let page = Reply::Admin(AdminReply::History(page));
        assert!(encode_frame(&mut Vec::new(), &page, 0).is_ok());
    }
}
