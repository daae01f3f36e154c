//! Logs go to standard error, since standard output is for results: one line for each event, as text
//! or as JSON. Events of a request carry its id ([`RequestId`]).

use std::env::{self, VarError};
use std::fmt::{self, Debug};
use std::io::IsTerminal;
use std::sync::OnceLock;
use std::time::SystemTime;

use clap::ValueEnum;
use harvestfs_protocol::request_id::RequestId;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::cluster::GLOBAL_OPTIONS;

/// What sets the detail.
const DETAIL_VARIABLE: &str = "HARVESTFS_LOG";
/// What sets the format where no flag does.
const FORMAT_VARIABLE: &str = "HARVESTFS_LOG_FORMAT";

/// The format that was chosen, for processes that this one starts.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// How events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs: an object for each event, with `timestamp`, `level`, `target`, `fields` and, if
    /// there is one, `request`.
    Json,
}

/// `--log-format`
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct LogArgs {
    /// How events are written to standard error: `text` or `json` [default: text]
    /// [env: HARVESTFS_LOG_FORMAT].
    #[arg(
        long,
        value_name = "FORMAT",
        global = true,
        help_heading = GLOBAL_OPTIONS,
        hide_short_help = true,
        env = FORMAT_VARIABLE,
        value_enum,
        default_value_t,
        // Otherwise each of these would add a paragraph to the help of every command.
        hide_possible_values = true,
        hide_default_value = true,
        hide_env = true
    )]
    log_format: LogFormat,
}

/// Starts logging; `HARVESTFS_LOG` sets the detail, `info` by default.
pub fn start(args: LogArgs) {
    let asked = match env::var(DETAIL_VARIABLE) {
        Ok(text) => EnvFilter::try_new(text)
            .map(Some)
            .map_err(|error| error.to_string()),
        Err(VarError::NotPresent) => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    let usual = || EnvFilter::new("info,quinn=warn,fuser=warn,openraft=error");
    let (filter, refused) = match asked {
        Ok(asked) => (asked.unwrap_or_else(usual), None),
        Err(refused) => (usual(), Some(refused)),
    };
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        // A full disk must not end the process: the library would print that it cannot log, and panic.
        .log_internal_errors(false)
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Text => lines.fmt_fields(WithRequest::default()).init(),
        LogFormat::Json => lines.event_format(JsonLines).init(),
    }
    FORMAT.get_or_init(|| args.log_format);
    if let Some(refused) = refused {
        tracing::warn!("{DETAIL_VARIABLE} is not understood, and the usual is logged: {refused}");
    }
}

/// The variable that has a process log as this one does.
pub fn environment() -> (&'static str, &'static str) {
    match FORMAT.get() {
        Some(LogFormat::Json) => (FORMAT_VARIABLE, "json"),
        Some(LogFormat::Text) | None => (FORMAT_VARIABLE, "text"),
    }
}

/// Fields of an event, and the request it belongs to.
#[derive(Default)]
struct WithRequest(DefaultFields);

impl<'a> FormatFields<'a> for WithRequest {
    fn format_fields<R: RecordFields>(&self, mut writer: Writer<'a>, fields: R) -> fmt::Result {
        self.0.format_fields(writer.by_ref(), fields)?;
        match RequestId::current() {
            RequestId::NONE => Ok(()),
            request => write!(writer, " request={request}"),
        }
    }
}

/// An event as one line of JSON.
struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields(Map::new());
        event.record(&mut fields);
        let mut line = Map::new();
        let timestamp = humantime::format_rfc3339_micros(SystemTime::now());
        line.insert("timestamp".into(), timestamp.to_string().into());
        line.insert("level".into(), event.metadata().level().as_str().into());
        line.insert("target".into(), event.metadata().target().into());
        line.insert("fields".into(), Value::Object(fields.0));
        let request = RequestId::current();
        if request.is_some() {
            line.insert("request".into(), request.to_string().into());
        }
        writeln!(writer, "{}", Value::Object(line))
    }
}

/// Fields by name.
struct Fields(Map<String, Value>);

impl Fields {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.add(field, format!("{value:?}"));
    }
}
