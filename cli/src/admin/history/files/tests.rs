use super::*;

struct Given(tempfile::TempDir);

impl Given {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

const ENDS: u32 = 1_700_000_000;

fn read(paths: &[PathBuf], ends_s: Option<u32>) -> anyhow::Result<Vec<(HistoryRecord, u64)>> {
    let files = Files::open(paths, ends_s)?;
    let mut all = Vec::new();
    for path in files.paths() {
        for line in files.records(path)? {
            all.push(line?);
        }
    }
    Ok(all)
}

fn error(paths: &[PathBuf], ends_s: Option<u32>) -> String {
    format!("{:#}", read(paths, ends_s).unwrap_err())
}

const TENANTS: &str = "tenant,env,env_kind,class,first_month,end_month,size_at_start,\
    cpu_source,cpu_series,cpu_window,cpu_shift_slots\n\
    7,2,dev,periodic,0,36,17,some,s1,d01-01,1\n";

#[test]
fn own_formats() {
    let given = Given::new();
    // In the wrong order: owners come first all the same.
    let paths = [
        given.file(
            "u.csv",
            "series,period_s,start_unix_s,values\nprod/index/a,60,1000,50,,20000\n",
        ),
        given.file("r.csv", "at_s,server\n7,s1\n"),
        given.file(
            "o.csv",
            "from_s,server,environment,machine_function\n5,s1,prod,index\n",
        ),
    ];
    let records = read(&paths, None).unwrap();
    let tenant = |function: &str| TenantName {
        environment: "prod".into(),
        machine_function: function.into(),
    };
    let owner = HistoryRecord::Owner {
        server: "s1".into(),
        tenant: tenant("index"),
        from_s: 5,
    };
    let reimage = HistoryRecord::Reimage {
        server: "s1".into(),
        at_s: 7,
    };
    let utilisation = HistoryRecord::Utilisation {
        tenant: tenant("index/a"),
        start_s: 1000,
        period_s: 60,
        samples: vec![50, MISSING_SAMPLE, 10_000],
    };
    assert_eq!(records, [(owner, 2), (reimage, 2), (utilisation, 2)]);
}

#[test]
fn synthetic_formats() {
    let given = Given::new();
    let values: Vec<String> = (0..288).map(|value| value.to_string()).collect();
    let paths = [
        given.file(
            "r.csv",
            "t_s,server,tenant,kind,burst\n93311999,3,7,disk,0\n",
        ),
        given.file(
            "cpu_some.csv",
            &format!("series,values\ns0,1\ns1,{}\n", values.join(",")),
        ),
        given.file("s.csv", "server,rack,from_s,tenant\n3,1,0,7\n"),
        given.file("t.csv", TENANTS),
    ];
    let records = read(&paths, Some(ENDS)).unwrap();
    let tenant = TenantName {
        environment: "environment-2".into(),
        machine_function: "function-7".into(),
    };
    let begin_s = ENDS - SYNTHETIC_S as u32;
    let owner = HistoryRecord::Owner {
        server: "server-3".into(),
        tenant: tenant.clone(),
        from_s: begin_s,
    };
    let reimage = HistoryRecord::Reimage {
        server: "server-3".into(),
        at_s: ENDS - 1,
    };
    let samples: Vec<u16> = [287].into_iter().chain(0..287).collect();
    let utilisation = HistoryRecord::Utilisation {
        tenant,
        start_s: ENDS - 86_400,
        period_s: 300,
        samples,
    };
    assert_eq!(records, [(owner, 2), (reimage, 2), (utilisation, 3)]);

    let undated = error(&paths, None);
    assert!(
        undated.contains("its times have no date; say with --ends when they end"),
        "{undated}"
    );
    let alone = error(&paths[2..3], Some(ENDS));
    assert!(alone.contains("s.csv:2: the file of tenants"), "{alone}");
    let other = given.file("s2.csv", "server,rack,from_s,tenant\n3,1,0,8\n");
    let unknown = error(&[other, paths[3].clone()], Some(ENDS));
    assert!(
        unknown.contains("s2.csv:2: expected a tenant of the file of tenants, found 8"),
        "{unknown}"
    );
    let twice = error(&[paths[3].clone(), paths[3].clone()], None);
    assert!(twice.contains("a second file of tenants"), "{twice}");
}

#[test]
fn errors_name_file_and_line() {
    let given = Given::new();
    let cases = [
        (
            "a.csv",
            "what,is,this\n",
            "a.csv:1: expected the first line of a file of history",
        ),
        (
            "b.csv",
            "at_s,server\n1,s\nx,s\n",
            "b.csv:3: expected a time in seconds since 1970, found \"x\"",
        ),
        (
            "c.csv",
            "from_s,server,environment,machine_function\n1,s,e\n",
            "c.csv:2: expected 4 fields",
        ),
        (
            "d.csv",
            "series,values\nindex,1\n",
            "d.csv:2: expected a series called ENVIRONMENT/MACHINE_FUNCTION, found \"index\"",
        ),
        (
            "e.csv",
            "series,values\na/b,1\n",
            "e.csv:2: the series has no start; say with --ends when it ends",
        ),
        (
            "f.csv",
            "series,start_unix_s,values\na/b,-5,1\n",
            "f.csv:2: expected a start between 1970 and 2106",
        ),
    ];
    for (name, content, expected) in cases {
        let said = error(&[given.file(name, content)], None);
        assert!(said.contains(expected), "{said}");
    }
    let doubled = format!("{TENANTS}7,2,dev,periodic,0,36,17,some,s1,d01-01,1\n");
    let said = error(&[given.file("t.csv", &doubled)], None);
    assert!(
        said.contains("t.csv:3: expected each tenant once, found \"7\""),
        "{said}"
    );
}

#[test]
fn long_series_come_in_pieces() {
    let series = Series::new("a/b", 60, (0..70_000).map(|_| Some(1.0)));
    let tenant = TenantName {
        environment: "a".into(),
        machine_function: "b".into(),
    };
    let starts: Vec<_> = pieces(&series, &tenant, 10, 1)
        .unwrap()
        .into_iter()
        .map(|(record, _)| match record {
            HistoryRecord::Utilisation {
                start_s, samples, ..
            } => (start_s, samples.len()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        starts,
        [
            (10, 32_768),
            (10 + 32_768 * 60, 32_768),
            (10 + 65_536 * 60, 4_464)
        ]
    );
    let refused = pieces(&series, &tenant, u32::MAX - 60, 1).unwrap_err();
    assert!(refused.to_string().contains("2106"), "{refused}");
}
