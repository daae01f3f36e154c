//! The history of the primary tenants, with real processes: imported, shown, preserved, and
//! immediately updated after a reimage.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harvestfs_tests::{Cluster, ClusterOptions, KillOnDrop, harvestfs, wait_until};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(60);

fn now_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.expect("the clock is past 1970").as_secs()
}

fn file(cluster: &Cluster, name: &str, content: &str) -> PathBuf {
    let path = cluster.path(name);
    fs::write(&path, content).expect("the file is written");
    path
}

fn show(cluster: &Cluster) -> Value {
    let shown = cluster.output_of(&["admin", "history", "show", "--json"]);
    serde_json::from_str(&shown).expect("JSON")
}

fn tenant<'a>(shown: &'a Value, environment: &str) -> &'a Value {
    let tenants = shown["tenants"].as_array().expect("a list");
    tenants
        .iter()
        .find(|tenant| tenant["tenant"]["environment"] == environment)
        .unwrap_or_else(|| panic!("no tenant of {environment}: {shown:#}"))
}

#[test]
fn history_is_imported_kept_and_goes_on() {
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 2,
        replication: 1,
        ..ClusterOptions::default()
    });
    cluster.wait_alive(2, DEADLINE);
    let year_ago_s = now_s() - 365 * 86_400;
    let owners = format!(
        "from_s,server,environment,machine_function\n\
         {year_ago_s},datanode-1,environment-1,function-1\n\
         {year_ago_s},old-1,environment-9,function-9\n"
    );
    let owners = file(&cluster, "owners.csv", &owners);
    let reimages = format!(
        "at_s,server\n{},datanode-1\n{},old-1\n",
        now_s() - 9_000,
        now_s() - 50_000
    );
    let reimages = file(&cluster, "reimages.csv", &reimages);
    // Three weeks of days and nights, a sample every five minutes, one in ten missing.
    let start_s = now_s() - 21 * 86_400 - 600;
    let sample = |index: u64| match index % 288 {
        _ if index % 10 == 3 => String::new(),
        0..144 => "1000".to_owned(),
        _ => "15000".to_owned(),
    };
    let samples: Vec<String> = (0..21 * 288).map(sample).collect();
    let use_of_cpu = format!(
        "series,period_s,start_unix_s,values\nenvironment-1/function-1,300,{start_s},{}\n",
        samples.join(",")
    );
    let use_of_cpu = file(&cluster, "cpu.csv", &use_of_cpu);
    let import = |files: &[&PathBuf]| {
        let mut arguments = vec!["admin".into(), "history".into(), "import".into()];
        arguments.extend(files.iter().map(|file| file.as_os_str().to_owned()));
        cluster.command(&arguments)
    };
    let imported = import(&[&use_of_cpu, &reimages, &owners]);
    let said = String::from_utf8_lossy(&imported.stdout);
    assert!(imported.status.success(), "{imported:?}");
    assert!(said.contains("owners.csv: 2 new, 0 known before"), "{said}");
    assert!(
        said.contains("reimages.csv: 2 new, 0 known before"),
        "{said}"
    );
    let again = import(&[&use_of_cpu, &reimages, &owners]);
    let said = String::from_utf8_lossy(&again.stdout);
    assert!(
        said.contains("reimages.csv: 0 new, 2 known before"),
        "{said}"
    );
    assert!(said.contains("cpu.csv: 0 new"), "{said}");

    let shown = show(&cluster);
    let one = tenant(&shown, "environment-1");
    assert_eq!(one["pattern"], "periodic", "{one:#}");
    // 10 % for half of the day, and more than 100 % for the other half.
    assert_eq!(one["peak_cpu_permille"], 1000);
    let average = one["average_cpu_permille"].as_u64().expect("a number");
    assert!((540..=560).contains(&average), "{one:#}");
    assert_eq!((&one["servers"], &one["reimages"]), (&1.into(), &1.into()));
    assert_eq!(one["server_months"], 12);
    assert_eq!(tenant(&shown, "environment-9")["reimages"], 1);
    assert_eq!(tenant(&shown, "environment-2")["reimages"], 0);
    assert_eq!(shown["overview"]["problems"], Value::Array(Vec::new()));

    // Schedulers learn which servers have similar use.
    let classes = cluster.output_of(&["cycles", "classes", "--json"]);
    let classes: Value = serde_json::from_str(&classes).expect("JSON");
    let class = &classes["classes"][0];
    assert_eq!(
        (&classes["version"], &class["class"]),
        (&1.into(), &0.into())
    );
    assert_eq!(class["pattern"], "periodic", "{classes:#}");
    assert_eq!(class["tenants"][0]["environment"], "environment-1");
    assert_eq!(class["servers"][0]["name"], "datanode-1");
    assert_eq!(classes["without_class"][0]["name"], "datanode-2");
    let text = cluster.output_of(&["cycles", "classes", "--servers"]);
    assert!(text.contains("environment-1/function-1"), "{text}");

    // Wrong input is reported with file and line, and nothing else is lost.
    let wrong = file(
        &cluster,
        "wrong.csv",
        "at_s,server\n5,datanode-1\n6,nobody\n",
    );
    let refused = import(&[&wrong]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success(), "{said}");
    assert!(
        said.contains("wrong.csv:3: server nobody is unknown"),
        "{said}"
    );

    // A crash of the namenode costs nothing.
    cluster.kill("namenode");
    cluster.start_namenode();
    cluster.wait_alive(2, DEADLINE);
    let after = show(&cluster);
    assert_eq!(tenant(&after, "environment-1")["pattern"], "periodic");
    assert_eq!(
        tenant(&after, "environment-1")["average_cpu_permille"],
        average
    );
    assert_eq!(tenant(&after, "environment-9")["reimages"], 1);

    // The owner reimages a server: it counts when it comes back, not when heartbeats are missed.
    let reimages_before = tenant(&after, "environment-2")["reimages"].clone();
    assert_eq!(reimages_before, 0);
    cluster.stop("datanode-2");
    cluster.reimage(2);
    cluster.start_datanode(2);
    wait_until("the reimage counts", DEADLINE, || {
        tenant(&show(&cluster), "environment-2")["reimages"] == 1
    });
    let text = cluster.output_of(&["admin", "history", "show"]);
    assert!(
        text.contains("periodic") && text.contains("class  0: periodic"),
        "{text}"
    );
    let text = cluster.output_of(&["admin", "history", "analyse"]);
    assert!(text.contains("3 tenants, 3 servers"), "{text}");
}

/// The caller of a job relies on the exit status of its command.
#[test]
fn a_length_that_cannot_be_remembered_fails_no_job() {
    let cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    let job = "name = \"job\"\n[[stages]]\nname = \"all\"\ntasks = 1\n";
    let job = file(&cluster, "job.toml", job).display().to_string();
    let history = cluster.path("nowhere/lengths.json").display().to_string();
    for (command, status) in [("true", 0), ("false", 1)] {
        let arguments = ["cycles", "run", &job, "--history", &history, "--", command];
        let output = cluster.command(&arguments);
        assert_eq!(output.status.code(), Some(status), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.contains("cannot remember"), status == 0, "{said}");
    }
}

#[test]
fn a_job_that_is_to_outlive_its_terminal_does() {
    let cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    let job = "name = \"job\"\n[[stages]]\nname = \"all\"\ntasks = 1\n";
    let job = file(&cluster, "job.toml", job).display().to_string();
    for (name, before, status) in [("hung-up", "", 129), ("nohup", "trap '' HUP;", 0)] {
        let begun = cluster.path(name);
        // It also ends when the cluster's directory is removed, in case it does not end otherwise.
        let job_command = format!(
            "touch '{0}'; while [ -e '{0}' ]; do sleep 0.1; done",
            begun.display()
        );
        let run = Command::new("sh")
            .args(["-c", &format!("{before} exec \"$0\" \"$@\"")])
            .arg(harvestfs())
            .args(["cycles", "run", &job, "--", "sh", "-c", &job_command])
            .env("HARVESTFS_DATA", cluster.path(""))
            .env_remove("HARVESTFS_CLIENT_CONFIG")
            .process_group(0)
            .spawn();
        let mut run = KillOnDrop(run.expect("the command is started"));
        wait_until("the job begins", DEADLINE, || begun.exists());
        let group = Pid::from_child(&run.0);
        kill_process_group(group, Signal::HUP).expect("the group is there");
        if status == 0 {
            fs::remove_file(&begun).expect("it is there");
        }
        let mut ended = None;
        wait_until("the command ends", DEADLINE, || {
            ended = run.0.try_wait().expect("it is our child");
            ended.is_some()
        });
        let ended = ended.expect("waited for");
        assert_eq!(ended.code(), Some(status), "{name}: {ended:?}");
    }
}
