//! Tests of what is refused, and with which error.

use std::time::Duration;

use super::*;

const SMALL: &str = "name = \"t\"\nduration_s = 10\n[cluster]\nservers = 4\n";

fn parse(more: &str) -> Result<Scenario, String> {
    let text = format!("{SMALL}{more}");
    Scenario::parse(Path::new("s.toml"), &text).map_err(|error| error.to_string())
}

fn error(more: &str) -> String {
    parse(more).expect_err(more)
}

#[test]
fn errors_name_file_line_and_what_is_accepted() {
    assert_eq!(parse("").unwrap().cluster.servers.len(), 4);
    for (more, wanted) in [
        ("colour = 1\n", "s.toml:5: unknown field `colour`"),
        (
            "[[fault]]\nkind = \"flood\"\nat_s = 1\nrandom = 1\n",
            "s.toml:6: unknown fault `flood`; accepted: reimage, kill, hang, suspend, busy",
        ),
        (
            "[[fault]]\nkind = \"kill\"\nat_s = 1\nfor_s = 1\nservers = [\n\"datanode-9\"]\n",
            "s.toml:10: there is no server `datanode-9`; accepted: datanode-1 to datanode-4",
        ),
        (
            "[[fault]]\nkind = \"kill\"\nat_s = 11\nfor_s = 1\nrandom = 1\n",
            "s.toml:7: it may happen as late as 11.0 s",
        ),
        (
            "[[fault]]\nkind = \"failed-sync\"\nat_s = 4\njitter_s = 2\nfor_s = 4\nrandom = 1\n",
            "s.toml:9: `failed-sync` may end as late as 10.0 s",
        ),
        (
            "[[fault]]\nkind = \"rollback\"\nat_s = 8\nfor_s = 3\npart = \"namenode\"\n",
            "s.toml:8: `rollback` may end as late as 11.0 s",
        ),
        (
            "[[fault]]\nkind = \"reimage\"\nat_s = 1\nenvironment = \"x\"\n",
            "s.toml:8: no server belongs to `x`; accepted: environment-1, environment-2",
        ),
        (
            "[[fault]]\nkind = \"busy\"\nat_s = 1\nfor_s = 2\npart = \"namenode\"\n",
            "s.toml:9: `busy` hits servers",
        ),
        (
            "[[fault]]\nkind = \"partition\"\nat_s = 1\nfor_s = 2\npart = \"namenode\"\n",
            "s.toml:9: `partition` hits one of several namenodes",
        ),
        (
            "namenodes = 3\n[[fault]]\nkind = \"rollback\"\nat_s = 1\nfor_s = 2\npart = \"namenode\"\n",
            "s.toml:10: `rollback` hits an only namenode, and there are 3",
        ),
        (
            "namenodes = 6\n",
            "s.toml:5: `namenodes = 6`: accepted are 1, 3 and 5",
        ),
        (
            "namenodes = 2\n",
            "s.toml:5: `namenodes = 2`: accepted are 1, 3 and 5",
        ),
        (
            "[[variant]]\nname = \"a\"\npolicy = \"hdfs\"\n",
            "s.toml:7: ",
        ),
        ("[clients]\ncount = \"many\"\n", "s.toml:6: invalid type"),
        (
            "[[fault]]\nkind = \"loss\"\nat_s = 1\nfor_s = 1\nrandom = 1\n",
            "s.toml:5: how much? Add `loss_percent`",
        ),
        (
            "[[fault]]\nkind = \"delay\"\nat_s = 1\nfor_s = 1\nrandom = 1\nblocks = 3\n",
            "s.toml:10: `blocks` says nothing about `delay`",
        ),
        (
            "[[fault]]\nkind = \"slow-disk\"\nat_s = 1\nfor_s = 1\nrandom = 1\ndelay_ms = 0\n",
            "s.toml:10: `delay_ms = 0`: accepted are 1 to 10000",
        ),
        (
            "[[fault]]\nkind = \"kill\"\nat_s = 1\nfor_s = 1\npart = \"mount-2\"\n[mounts]\ncount = 1\n",
            "s.toml:9: no part is named `mount-2`; accepted: namenode, and mount-1 to mount-1",
        ),
        (
            "[[fault]]\nkind = \"reimage\"\nat_s = 1\npart = \"mount-1\"\n[mounts]\ncount = 1\n",
            "s.toml:8: `reimage` hits servers, not mounts",
        ),
        (
            "[[fault]]\nkind = \"hang\"\nat_s = 1\nfor_s = 1\nmounts = 1\n",
            "s.toml:9: there is no mount: add [mounts]",
        ),
        (
            "[[fault]]\nkind = \"rollback\"\nat_s = 1\nfor_s = 1\nrandom = 1\n",
            "s.toml:5: `rollback` hits the namenode",
        ),
        (
            "[[fault]]\nkind = \"double\"\nat_s = 1\nfor_s = 1\nrandom = 1\n",
            "s.toml:5: `double` hits the namenode",
        ),
        (
            "[[fault]]\nkind = \"suspend\"\nat_s = 1\nfor_s = 1\npart = \"namenode\"\n",
            "s.toml:9: `suspend` hits one of several namenodes",
        ),
        (
            "[[fault]]\nkind = \"failed-sync\"\nat_s = 1\nfor_s = 1\nmounts = 1\n[mounts]\ncount = 1\n",
            "s.toml:9: `failed-sync` hits servers, not mounts",
        ),
        (
            "[mounts]\ncount = 17\n",
            "s.toml:1: [mounts]: count is 0 to 16",
        ),
        (
            "[mounts]\nprograms = [\"log\", \"log\"]\n",
            "s.toml:1: [mounts]: programs are some of files, log, sqlite and git",
        ),
        (
            "[mounts]\nprograms = [\"emacs\"]\n",
            "s.toml:6: unknown variant `emacs`",
        ),
        ("trace_speed = 2.0\n", "s.toml:5: `trace_speed` is of which"),
    ] {
        let said = error(more);
        assert!(said.starts_with(wanted), "{said}\nbut wanted {wanted}");
    }
    let text = "name = \"t\"\nseed = \"x\"\nduration_s = 1\n[cluster]\nservers = 1\n";
    let said = Scenario::parse(Path::new("s.toml"), text).unwrap_err();
    assert!(said.to_string().starts_with("s.toml:2: "), "{said}");
}

#[test]
fn what_is_tested_at_its_end_ends_in_time_and_all_else_may_last() {
    let fault = |kind: &str| {
        format!("[[fault]]\nkind = \"{kind}\"\nat_s = 8\nfor_s = 9\npart = \"namenode\"\n")
    };
    for kind in ["failed-sync", "rollback", "double"] {
        let said = error(&fault(kind));
        assert!(said.contains("may end as late as 17.0 s"), "{said}");
    }
    for kind in ["kill", "hang"] {
        assert!(parse(&fault(kind)).is_ok(), "{kind}");
    }
}

#[test]
fn a_trace_is_long_enough_or_its_line_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("cpu.csv");
    let scenario = |samples: &str, more: &str| {
        std::fs::write(
            &file,
            format!("series,period_s,values\na,5,1000,2000\n{samples}"),
        )
        .unwrap();
        let text = format!("{SMALL}trace = \"cpu.csv\"\n{more}");
        let scenario = Scenario::parse(&directory.path().join("s.toml"), &text);
        scenario.map_err(|error| error.to_string())
    };
    let trace = scenario("b,5,3000,,7000\n", "")
        .unwrap()
        .cluster
        .trace
        .unwrap();
    let share = |server, seconds| trace.share(server, Duration::from_secs(seconds));
    assert_eq!(
        [share(0, 0), share(0, 6)].map(|it| (it * 10.0).round()),
        [1.0, 2.0]
    );
    // Of four servers two share a series; a gap is filled.
    assert_eq!(
        [share(3, 6), share(3, 11)].map(|it| (it * 10.0).round()),
        [3.0, 7.0]
    );
    for (samples, more, wanted) in [
        (
            "b,5,3000\n",
            "",
            "cpu.csv:3: the series `b` ends after 5.0 s of 10.0 s",
        ),
        ("b,5,lots\n", "", "cpu.csv:3: "),
        ("b,5,1,2\n", "trace_speed = 0.0\n", "above 0"),
        (
            "b,5,1,2\n",
            "trace_speed = 2.0\n",
            "cpu.csv:2: the series `a` ends after 5.0 s",
        ),
    ] {
        let said = scenario(samples, more).unwrap_err();
        assert!(
            said.contains("s.toml:5: `trace`: ") && said.contains(wanted),
            "{said}"
        );
    }
    let tenant = "[[tenant]]\nenvironment = \"e\"\nmachine_function = \"f\"\nservers = 4\n\
                  pattern = \"constant\"\n";
    let said = scenario("", tenant).unwrap_err();
    assert!(said.contains("leave `servers` out"), "{said}");
    let text = "name = \"t\"\nduration_s = 1\n[cluster]\ntrace = \"cpu.csv\"\n";
    let text = format!("{text}{tenant}");
    let said = Scenario::parse(&directory.path().join("s.toml"), &text).unwrap_err();
    assert!(
        said.to_string().contains("s.toml:9: `trace` says"),
        "{said}"
    );
}

#[test]
fn every_shipped_scenario_says_what_it_would_find() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    for entry in fs::read_dir(directory).unwrap() {
        let scenario = Scenario::load(&entry.unwrap().path()).unwrap();
        assert!(!scenario.finds.is_empty(), "{}", scenario.name);
    }
}
