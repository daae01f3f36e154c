//! History: trace files, and the namenode's files of history.

use std::io::Cursor;
use std::path::Path;

use harvestfs_telemetry::history::History;
use harvestfs_telemetry::history::records::Damage;
use harvestfs_telemetry::traces::{
    IndexEntry, Ownership, Records, ReimageEvent, Rows, SeriesReader, Tenant, TraceError,
};

/// The input is a file, plain or compressed, that is read as every kind of trace file. Each error must name the file
/// and a line.
pub fn trace_files(input: &[u8]) {
    let rows = || Rows::new(Path::new("trace.csv"), Cursor::new(input.to_vec()));
    let errors = [
        rows().and_then(SeriesReader::new).and_then(|reader| {
            reader.into_iter().try_for_each(|series| {
                let series = series?;
                assert!(series.period_s > 0 && (0.0..=1.0).contains(&series.coverage()));
                let shares = (0..series.len()).filter_map(|index| series.share(index));
                assert!(shares.into_iter().all(|share| (0.0..=1.0).contains(&share)));
                Ok(())
            })
        }),
        rows().and_then(Records::<Tenant>::new).and_then(all),
        rows().and_then(Records::<Ownership>::new).and_then(all),
        rows().and_then(Records::<ReimageEvent>::new).and_then(all),
        rows().and_then(Records::<IndexEntry>::new).and_then(all),
    ];
    for error in errors.into_iter().filter_map(Result::err) {
        assert!(error.line().is_some_and(|line| line > 0));
        assert!(error.to_string().starts_with("trace.csv:"));
    }
}

fn all<R: harvestfs_telemetry::traces::Record>(mut records: Records<R>) -> Result<(), TraceError> {
    records.try_for_each(|record| record.map(drop))
}

/// The first part is a file of servers, the second the file of a day, both without their headers. The resulting
/// history is written, and must be read back identically and without damage.
pub fn history_files(input: &[u8]) {
    let [servers, day] = crate::parts::<2>(input);
    const DAY: u32 = 20_000;
    let mut history = History::default();
    history.read_servers(servers);
    history.read_day(DAY, day);
    let written = |history: &History| -> (Vec<u8>, Vec<u8>) {
        let servers = history.server_records().flatten().collect();
        (servers, history.day_records(DAY).flatten().collect())
    };
    let (servers, day) = written(&history);
    let mut again = History::default();
    // In the order of the first history, so that tenants get the same numbers.
    assert_eq!(again.read_day(DAY, &day), Damage::default());
    assert_eq!(again.read_servers(&servers), Damage::default());
    assert_eq!(written(&again), (servers, day));
}
