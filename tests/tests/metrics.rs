//! The metrics of the parts: runs every query of the dashboard and of the alert rules on a real
//! Prometheus server that scrapes a real cluster.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use harvestfs_tests::{
    Cluster, ClusterOptions, Prometheus, Server, Target, TargetAccess, can_mount, free_address,
    have_program, wait_until,
};
use serde_json::Value;

const DATANODES: usize = 3;

fn dashboards() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/dashboards")
}

fn server_name(part: &str) -> String {
    let role = part.split('-').next().expect("a role");
    format!("{part}.{role}.harvestfs")
}

/// A mount whose metrics are accessible to every user of this machine.
fn mount_with_metrics(cluster: &mut Cluster) -> (PathBuf, std::net::SocketAddr) {
    let address = free_address();
    let path = cluster.path("client/client.toml");
    let config = fs::read_to_string(&path).expect("a configuration");
    let http = format!("{config}\n[http]\nlisten = \"{address}\"\naccess = \"anyone\"\n");
    fs::write(&path, http).expect("it can be written");
    (cluster.mount("mnt"), address)
}

fn queries_of_the_dashboard() -> Vec<(String, String)> {
    let text = fs::read_to_string(dashboards().join("harvestfs.json")).expect("the dashboard");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels");
    let queries = panels.iter().flat_map(|panel| {
        let title = panel["title"].as_str().expect("a title").to_owned();
        let targets = panel["targets"].as_array().cloned().unwrap_or_default();
        targets.into_iter().map(move |target| {
            let query = target["expr"].as_str().expect("a query");
            (title.clone(), query.replace("$__rate_interval", "20s"))
        })
    });
    queries.collect()
}

/// The names of metrics in the alert rules.
fn metrics_of_the_alerts() -> BTreeSet<String> {
    let rules = fs::read_to_string(dashboards().join("alerts.yml")).expect("rules");
    let expressions = rules.lines().filter(|line| {
        let line = line.trim();
        !line.starts_with('#') && !line.starts_with("summary") && !line.starts_with("what_to_do")
    });
    let words = expressions.flat_map(|line| {
        line.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .map(str::to_owned)
            .collect::<Vec<_>>()
    });
    words
        .filter(|word| word.starts_with("harvestfs_"))
        .collect()
}

#[test]
fn every_query_finds_data_in_a_running_cluster() {
    let Some(program) = have_program("prometheus", "apt install prometheus") else {
        return;
    };
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: DATANODES,
        http: true,
        ..ClusterOptions::default()
    });
    let (mount, mount_address) = mount_with_metrics(&mut cluster);
    let server = |part: &str| Server {
        name: server_name(part),
        identity: cluster.path("admin/identity"),
    };
    let mut targets = vec![
        Target {
            job: "namenode".to_owned(),
            address: cluster.http("namenode"),
            access: TargetAccess::Token(cluster.path("namenode/http-token"), server("namenode")),
        },
        Target {
            job: "mount".to_owned(),
            address: mount_address,
            access: TargetAccess::Plain,
        },
    ];
    for number in 1..=DATANODES {
        let name = Cluster::datanode(number);
        targets.push(Target {
            address: cluster.http(&name),
            access: TargetAccess::Certificate(server(&name)),
            job: name,
        });
    }
    let rules = dashboards().join("alerts.yml");
    let directory = cluster.path("prometheus");
    let prometheus = Prometheus::start(&program, &directory, &targets, &rules);
    prometheus.wait_for_targets(targets.len());

    for number in 0..20 {
        fs::write(mount.join(format!("f{number}")), vec![7; 100_000]).expect("write");
    }
    // Blocks that are full, and so sealed.
    fs::write(mount.join("large"), vec![7; 40 << 20]).expect("write");
    assert!(!cluster.command(&["fs", "cat", "/nothing"]).status.success());
    for query in [
        "sum(harvestfs_namenode_inodes{kind=\"file\"}) == 21",
        // Three replicas of each byte.
        "sum(harvestfs_datanode_bytes_total{direction=\"written\", purpose=\"client\"}) >= 1.3e8",
        "sum(harvestfs_namenode_operation_seconds_count{operation=\"commit\"}) > 0",
        "sum(harvestfs_namenode_refusals_total{operation=\"lookup\"}) > 0",
        "sum(harvestfs_namenode_journal_seconds_count) > 0",
        "harvestfs_namenode_datanodes{state=\"free\"} == 3",
        "sum(harvestfs_datanode_registered) == 3",
        "harvestfs_mount_connected == 1",
        "sum(harvestfs_namenode_diversity_blocks) > 0",
    ] {
        prometheus.wait_for_data(query);
    }
    let queries = queries_of_the_dashboard();
    assert!(queries.len() >= 40, "{} were found", queries.len());
    for (title, query) in queries {
        eprintln!("{title}: {query}");
        prometheus.wait_for_data(&query);
    }
    let told = prometheus.metric_names();
    let metrics = metrics_of_the_alerts();
    assert!(!metrics.is_empty(), "the alerts are about nothing");
    for metric in metrics {
        assert!(
            told.contains(&metric),
            "{metric} is in an alert, and nobody tells it"
        );
    }
    // The cluster has no problems, and the rules can be evaluated.
    assert_eq!(
        prometheus.query("ALERTS{alertstate=\"firing\"}"),
        Vec::<Value>::new()
    );

    // A server that comes back with an empty disk is counted, and so are the repairs that follow.
    cluster.stop(&Cluster::datanode(1));
    cluster.reimage(1);
    cluster.start_datanode(1);
    prometheus.wait_for_data("harvestfs_namenode_reimages_total == 1");
    prometheus.wait_for_data("harvestfs_namenode_repairs_total{result=\"repaired\"} > 0");
    prometheus.wait_for_data(
        "sum(harvestfs_datanode_bytes_total{direction=\"written\", purpose=\"repair\"}) > 0",
    );
    prometheus.wait_for_data("sum(harvestfs_namenode_missing_replicas_blocks) == 0");
}

#[test]
fn the_alert_rules_fire_when_they_should() {
    let Some(promtool) = have_program("promtool", "apt install prometheus") else {
        return;
    };
    let output = Command::new(promtool)
        .args(["test", "rules", "alerts_test.yml"])
        .current_dir(dashboards())
        .output()
        .expect("promtool runs");
    assert!(output.status.success(), "{output:?}");
}

/// Requests a page with curl, as the administrator's machine would.
fn curl(program: &Path, cluster: &Cluster, part: &str, more: &[&str]) -> Output {
    let address = cluster.http(part);
    let name = server_name(part);
    Command::new(program)
        .args([
            "--silent",
            "--show-error",
            "--max-time",
            "60",
            "--write-out",
            "%{http_code}",
        ])
        .args(["--connect-to", &format!("{name}:443:{address}"), "--cacert"])
        .arg(cluster.path("admin/identity/ca.pem"))
        .args(more)
        .arg(format!("https://{name}/metrics"))
        .output()
        .expect("curl runs")
}

#[test]
fn only_who_proves_it_may_look() {
    let Some(program) = have_program("curl", "apt install curl") else {
        return;
    };
    let cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        http: true,
        ..ClusterOptions::default()
    });
    let identity = |who: &str| {
        let directory = cluster.path(who).join("identity").display().to_string();
        vec![
            "--cert".to_owned(),
            format!("{directory}/cert.pem"),
            "--key".to_owned(),
            format!("{directory}/key.pem"),
        ]
    };
    let token_path = cluster.path("namenode/http-token");
    let token = fs::read_to_string(&token_path).expect("the token");
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &fs::metadata(&token_path).expect("the token").permissions(),
    );
    assert_eq!(mode & 0o777, 0o600);
    let bearer = format!("Authorization: Bearer {}", token.trim());
    let password = format!("somebody:{}", token.trim());
    let status = |part: &str, more: &[&str]| {
        let output = curl(&program, &cluster, part, more);
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8(output.stdout).expect("text");
        said[said.len() - 3..].to_owned()
    };
    let status_with = |who: &str| {
        let arguments = identity(who);
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        status("namenode", &arguments)
    };
    assert_eq!(status("namenode", &[]), "401");
    assert_eq!(status("namenode", &["--header", &bearer]), "200");
    assert_eq!(status("namenode", &["--user", &password]), "200");
    assert_eq!(status("namenode", &["--user", "somebody:else"]), "401");
    assert_eq!(status_with("admin"), "200");
    // A client of the cluster is not an operator.
    assert_eq!(status_with("client"), "401");
    // The token of one part does not open another.
    assert_eq!(status("datanode-1", &["--header", &bearer]), "401");
    assert_eq!(
        status("namenode", &["--header", &bearer, "--request", "POST"]),
        "405"
    );
    wait_until("the namenode's log", Duration::from_secs(60), || {
        cluster.log("namenode").contains("can be looked at")
    });
    assert!(
        !cluster.log("namenode").contains(token.trim()),
        "the token is in the log"
    );
}

/// The events that a part has logged so far.
fn events(cluster: &Cluster, part: &str) -> Vec<Value> {
    let text = fs::read_to_string(cluster.path(&format!("{part}.log"))).expect("a log");
    // The last line may be incomplete.
    let whole = text.rsplit_once('\n').map_or("", |(lines, _)| lines);
    let lines = whole.lines();
    lines
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

/// The requests for which a mount served an operation.
fn requests_of(cluster: &Cluster, mount: &str, operation: &str) -> BTreeSet<String> {
    let served = events(cluster, mount).into_iter().filter(|event| {
        event["fields"]["message"] == "served" && event["fields"]["operation"] == operation
    });
    served
        .map(|event| event["request"].as_str().expect("a request").to_owned())
        .collect()
}

fn mentions(cluster: &Cluster, part: &str, request: &str) -> bool {
    let mut events = events(cluster, part).into_iter();
    events.any(|event| event["request"] == request)
}

#[test]
fn a_request_is_followed_through_the_logs_of_all_parts() {
    if !can_mount() {
        return;
    }
    let mut cluster = Cluster::start(&ClusterOptions {
        environment: &[
            ("HARVESTFS_LOG", "debug,quinn=warn"),
            ("HARVESTFS_LOG_FORMAT", "json"),
        ],
        ..ClusterOptions::default()
    });
    let writer = cluster.mount("writer");
    let file = fs::File::create(writer.join("f")).expect("a file");
    std::io::Write::write_all(&mut &file, &[7; 300_000]).expect("written");
    file.sync_all().expect("durable");
    // A request is logged after it was answered.
    let mut synced = BTreeSet::new();
    wait_until("the fsync is logged", Duration::from_secs(60), || {
        synced = requests_of(&cluster, "writer", "fsync");
        !synced.is_empty()
    });
    let [request] = &synced.iter().collect::<Vec<_>>()[..] else {
        panic!("one fsync was asked for: {synced:?}");
    };
    let datanodes: Vec<String> = (1..=ClusterOptions::default().datanodes)
        .map(Cluster::datanode)
        .collect();
    wait_until(
        "the request is in the logs of namenode and datanodes",
        Duration::from_secs(60),
        || {
            let with_data = datanodes
                .iter()
                .filter(|it| mentions(&cluster, it, request));
            mentions(&cluster, "namenode", request) && with_data.count() == 3
        },
    );

    let reader = cluster.mount("reader");
    assert_eq!(fs::read(reader.join("f")).expect("read"), [7; 300_000]);
    wait_until(
        "the read is in the log of a datanode",
        Duration::from_secs(60),
        || {
            let reads = requests_of(&cluster, "reader", "read");
            reads
                .iter()
                .any(|read| datanodes.iter().any(|it| mentions(&cluster, it, read)))
        },
    );

    // Truncated, as by `logrotate` with `copytruncate`, a log continues with whole lines.
    fs::File::create(cluster.path("namenode.log")).expect("a log");
    assert!(!reader.join("nothing").exists());
    wait_until("the log goes on", Duration::from_secs(60), || {
        !events(&cluster, "namenode").is_empty()
    });
}
