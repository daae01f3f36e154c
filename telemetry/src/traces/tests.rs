use std::io::{Cursor, Write};
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::profile::Pattern;

fn rows(text: impl AsRef<[u8]>) -> Result<Rows, TraceError> {
    Rows::new(Path::new("some.csv"), Cursor::new(text.as_ref().to_vec()))
}

fn series(text: &str) -> Result<Vec<Series>, TraceError> {
    SeriesReader::new(rows(text)?)?.collect()
}

fn gzip(text: &str) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packed.write_all(text.as_bytes()).unwrap();
    packed.finish().unwrap()
}

#[test]
fn a_series_has_gaps_and_values_over_100_percent() {
    let all = series("series,values\na,1234,,18200\nb,0\n").unwrap();
    let percents: Vec<_> = all[0].percents().collect();
    assert_eq!(percents, [Some(12.34), None, Some(182.0)]);
    assert_eq!(all[0].share(2), Some(1.0));
    assert_eq!(all[0].share(3), None);
    assert!((all[0].coverage() - 2.0 / 3.0).abs() < 1e-9);
    assert_eq!((all[1].name.as_str(), all[1].period_s), ("b", 300));
}

#[test]
fn the_columns_say_period_start_and_unit() {
    let all = series("series,period_s,start_unix_s,values\na,60,1000,1,2,3\nb,1,,4\n").unwrap();
    assert_eq!((all[0].period_s, all[0].start_unix_s), (60, Some(1000)));
    assert_eq!(all[0].slice(1..9).start_unix_s, Some(1060));
    assert_eq!(all[0].slice(1..9).len(), 2);
    assert_eq!(all[1].start_unix_s, None);

    let all = series("series,unit,values\na,pct_x100,50\nb,cores,50,200\n").unwrap();
    assert_eq!(all[0].percent(0), Some(0.5));
    assert_eq!(
        (all[1].percent(0), all[1].percent(1)),
        (Some(25.0), Some(100.0))
    );

    let all = series("date,node,slice,values\n20110303,n,s,24,,100\n").unwrap();
    assert_eq!(all[0].name, "20110303/n/s");
    assert_eq!(all[0].start_unix_s, Some(1_299_110_400));
    let percents: Vec<_> = all[0].percents().collect();
    assert_eq!(percents, [Some(24.0), None, Some(100.0)]);
}

#[test]
fn windows_have_names() {
    assert_eq!(window("2013-08"), Some(8928..17568));
    assert_eq!(window("2013-09").unwrap().len(), 29 * 288);
    assert_eq!(window("d01-30"), Some(0..8640));
    for wrong in ["", "d", "d00-03", "d05-04", "2013-10", "dx-y", "d1"] {
        assert_eq!(window(wrong), None);
    }
}

#[test]
fn compressed_and_plain_files_read_alike() {
    let text = "series,values\na,1,2\nb,3\n";
    let packed = SeriesReader::new(rows(gzip(text)).unwrap()).unwrap();
    let packed: Result<Vec<_>, _> = packed.collect();
    assert_eq!(packed.unwrap(), series(text).unwrap());
}

#[test]
fn find_reads_only_the_samples_that_are_asked_for() {
    let text = "series,values\na,broken\nb,3\nc,broken\n";
    let mut reader = SeriesReader::new(rows(text).unwrap()).unwrap();
    assert_eq!(reader.find("b").unwrap().unwrap().percent(0), Some(0.03));
    assert!(reader.find("b").unwrap().is_none());
}

#[test]
fn errors_name_file_line_and_what_was_expected() {
    let cases = [
        ("", "some.csv:1: expected a header line, found nothing"),
        (
            "a,b\n",
            "some.csv:1: expected the columns series,...,values or date,node,slice,values, found \"a,b\"",
        ),
        (
            "series,values\n\na,1\nb,x\n",
            "some.csv:4: expected a sample in 0.01 %, a whole number up to 65534, or nothing, found \"x\"",
        ),
        (
            "series,values\na,65535\n",
            "some.csv:2: expected a sample in 0.01 %, a whole number up to 65534, or nothing, found \"65535\"",
        ),
        (
            "series,values\na,-1\n",
            "some.csv:2: expected a sample in 0.01 %, a whole number up to 65534, or nothing, found \"-1\"",
        ),
        (
            "series,values\na\n",
            "some.csv:2: expected 1 named fields and samples, found \"a\"",
        ),
        (
            "series,period_s,values\na,0,1\n",
            "some.csv:2: expected a period in whole seconds, at least 1, found \"0\"",
        ),
        (
            "date,node,slice,values\n20111301,n,s,1\n",
            "some.csv:2: expected a date such as 20110303, found \"20111301\"",
        ),
        (
            "date,node,slice,values\n20111201,n,s,700\n",
            "some.csv:2: expected a sample from 0 to 655 %, or nothing, found \"700\"",
        ),
        (
            "series,unit,values\na,cores,nan\n",
            "some.csv:2: expected a sample, or nothing, found \"nan\"",
        ),
    ];
    for (text, expected) in cases {
        assert_eq!(series(text).unwrap_err().to_string(), expected);
    }
    let missing = Rows::open(Path::new("/nowhere/at/all.csv")).err().unwrap();
    assert!(
        missing
            .to_string()
            .starts_with("/nowhere/at/all.csv: cannot be opened: ")
    );
    assert_eq!(missing.line(), None);
}

#[test]
fn a_line_without_end_is_refused() {
    let mut text = b"series,values\na,".to_vec();
    text.resize(MAX_LINE_BYTES + 100, b'1');
    let error = SeriesReader::new(rows(&text).unwrap())
        .unwrap()
        .next()
        .unwrap()
        .unwrap_err();
    assert_eq!(error.line(), Some(2));
    assert!(
        error
            .to_string()
            .contains("expected at most 4194304 bytes in a line")
    );
}

#[test]
fn a_truncated_compressed_file_is_an_error() {
    let packed = gzip(&format!("series,values\n{}", "a,1,2,3\n".repeat(1000)));
    let half = SeriesReader::new(rows(&packed[..packed.len() / 2]).unwrap());
    let all: Result<Vec<_>, _> = half.and_then(Iterator::collect);
    assert!(matches!(all.unwrap_err(), TraceError::Read { .. }));
}

#[test]
fn a_reader_ends_after_an_error() {
    let mut reader = SeriesReader::new(rows("series,values\na,x\nb,1\n").unwrap()).unwrap();
    assert!(reader.next().unwrap().is_err());
    assert!(reader.next().is_none());
}

#[test]
fn records_of_a_datacentre() {
    let text = "tenant,env,env_kind,class,first_month,end_month,size_at_start,cpu_source,cpu_series,cpu_window,cpu_shift_slots\n\
                7,2,dev,periodic,0,36,17,bitbrains_rnd,bb279,2013-07,-15\n";
    let tenants: Vec<Tenant> = Records::new(rows(text).unwrap())
        .unwrap()
        .collect::<Result<_, _>>()
        .unwrap();
    assert_eq!(tenants[0].tenant, 7);
    assert_eq!(tenants[0].environment_kind, EnvironmentKind::Development);
    assert_eq!(tenants[0].pattern, Pattern::Periodic);
    assert_eq!(tenants[0].cpu_shift_samples, -15);

    let text = "t_s,server,tenant,kind,burst\n5,1,2,rolling,3\n6,1,2,fire,0\n";
    let mut reimages = Records::<ReimageEvent>::new(rows(text).unwrap()).unwrap();
    let first = reimages.next().unwrap().unwrap();
    assert_eq!((first.at_s, first.kind), (5, ReimageKind::Rolling));
    let error = reimages.next().unwrap().unwrap_err().to_string();
    assert_eq!(
        error,
        "some.csv:3: expected disk, test, burst, rolling, env or repurpose, found \"fire\""
    );

    let wrong = Records::<Ownership>::new(rows("server,rack\n").unwrap())
        .err()
        .unwrap();
    let expected =
        "some.csv:1: expected the columns server,rack,from_s,tenant, found \"server,rack\"";
    assert_eq!(wrong.to_string(), expected);
    let mut short =
        Records::<Ownership>::new(rows("server,rack,from_s,tenant\n1,2,3\n").unwrap()).unwrap();
    let error = short.next().unwrap().unwrap_err().to_string();
    assert_eq!(error, "some.csv:2: expected 4 fields, found \"3 fields\"");
}

proptest! {
    /// With any content of a file, a reader ends without a panic, and its results are sound.
    #[test]
    fn readers_take_anything(header in 0..6usize, body in proptest::collection::vec(any::<u8>(), 0..400), packed: bool) {
        let headers = [
            "series,values\n", "date,node,slice,values\n", "series,unit,period_s,start_unix_s,values\n",
            "server,rack,from_s,tenant\n", "t_s,server,tenant,kind,burst\n", "",
        ];
        let mut text = headers[header].as_bytes().to_vec();
        text.extend(&body);
        if packed {
            text = gzip(&String::from_utf8_lossy(&text));
        }
        read_all(&text);
    }

    /// The same for text that looks more like a trace.
    #[test]
    fn readers_take_any_digits(header in 0..3usize, body in "([0-9a-z.,-]{0,12},){0,9}[0-9]{0,6}\n?[,0-9]{0,20}") {
        let headers = ["series,values\n", "date,node,slice,values\n", "series,unit,period_s,start_unix_s,values\n"];
        read_all(format!("{}{body}", headers[header]).as_bytes());
    }

    /// What is written as samples is read as such.
    #[test]
    fn samples_come_back(samples in proptest::collection::vec(proptest::option::of(0..65534u16), 1..200)) {
        let text: Vec<String> = samples.iter().map(|s| s.map(|s| s.to_string()).unwrap_or_default()).collect();
        let read = series(&format!("series,values\nx,{}\n", text.join(","))).unwrap();
        let percents = samples.iter().map(|sample| sample.map(|sample| f32::from(sample) / 100.0));
        prop_assert!(read[0].percents().eq(percents.clone()));
        prop_assert_eq!(&Series::new("x", 300, percents), &read[0]);
    }
}

fn read_all(text: &[u8]) {
    let Ok(lines) = rows(text) else { return };
    if let Ok(reader) = SeriesReader::new(lines) {
        for series in reader.flatten() {
            assert!((0.0..=1.0).contains(&series.coverage()));
            assert!(series.period_s > 0);
        }
    }
    if let Ok(reader) = Records::<Ownership>::new(rows(text).unwrap()) {
        reader.for_each(drop);
    }
    if let Ok(reader) = Records::<ReimageEvent>::new(rows(text).unwrap()) {
        reader.for_each(drop);
    }
}
