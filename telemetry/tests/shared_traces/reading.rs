//! Every trace file reads to its end.

use harvestfs_telemetry::traces::{
    IndexEntry, Ownership, Records, ReimageEvent, SeriesReader, Tenant, window,
};

#[test]
fn all_series_read() {
    let Some(traces) = crate::traces() else {
        return;
    };
    let files = [
        ("cpu_bitbrains_rnd", 500, 26_496),
        ("cpu_jumpstarter", 60, 12_960),
        ("cpu_planetlab_days", 11_746, 288),
        ("cpu_cluster_aggregates", 3, 0),
    ];
    for (name, count, samples) in files {
        let reader = SeriesReader::open(&traces.join(format!("{name}.csv.gz"))).unwrap();
        let mut read = 0;
        for series in reader {
            let series = series.unwrap();
            assert!(
                samples == 0 || series.len() == samples,
                "{name}: {}",
                series.name
            );
            read += 1;
        }
        assert_eq!(read, count, "{name}");
    }
    let index = Records::<IndexEntry>::open(&traces.join("cpu_index.csv.gz")).unwrap();
    let mut entries = 0;
    for entry in index {
        let entry = entry.unwrap();
        assert_eq!(
            window(&entry.window).unwrap().len(),
            entry.days as usize * 288
        );
        assert!(entry.pattern.is_some() || entry.coverage < 0.8, "{entry:?}");
        entries += 1;
    }
    assert_eq!(entries, 1563);
}

#[test]
fn all_synthetic_datacentres_read() {
    let Some(traces) = crate::traces() else {
        return;
    };
    let tenants = [472, 763, 394, 875, 572, 515, 1083, 337, 643, 650];
    for (number, tenant_count) in tenants.into_iter().enumerate() {
        let file = |kind| traces.join(format!("synthetic/dc{number}_{kind}.csv.gz"));
        let tenants: Vec<Tenant> = Records::open(&file("tenants"))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap();
        assert_eq!(tenants.len(), tenant_count);
        let servers = Records::<Ownership>::open(&file("servers")).unwrap();
        assert!(
            servers
                .map(Result::unwrap)
                .all(|s| (s.tenant as usize) < tenant_count)
        );
        let reimages = Records::<ReimageEvent>::open(&file("reimages")).unwrap();
        assert!(
            reimages
                .map(Result::unwrap)
                .all(|r| r.at_s < 36 * 30 * 86_400)
        );
    }
}
