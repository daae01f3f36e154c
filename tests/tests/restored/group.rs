//! Groups of namenodes of which a majority, or all, are lost.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use harvestfs_tests::{Cluster, ClusterOptions, Pattern, wait_until};
use serde_json::Value;

use crate::{
    BLOCK_BYTES, DATANODES, DEADLINE, accept_loss, get, obeyed, options, put, replicas, status,
    stderr, store, wait_obeyed, wait_quarantined, wait_recovering,
};

const NAMENODES: usize = 3;

fn group() -> Cluster {
    Cluster::start(&ClusterOptions {
        namenodes: NAMENODES,
        ..options()
    })
}

fn content(seed: u64, blocks: usize) -> Vec<u8> {
    Pattern { seed }.bytes(blocks * BLOCK_BYTES)
}

/// The namenodes as seen by the leader.
fn list(cluster: &Cluster) -> Value {
    let status = cluster.output_of(&["admin", "namenode", "list", "--json"]);
    serde_json::from_str(&status).expect("JSON")
}

/// The followers, by their numbers from 1, once they have everything that the leader has.
fn followers(cluster: &Cluster) -> Vec<usize> {
    let mut followers = Vec::new();
    wait_until("the others have everything", DEADLINE, || {
        let status = list(cluster);
        let members = status["members"].as_array().expect("a list");
        let follows = members.iter().filter(|it| it["id"] != status["leader"]);
        let follows: Vec<&Value> = follows.collect();
        followers = follows.iter().map(|it| number(cluster, it)).collect();
        followers.len() == NAMENODES - 1
            && follows
                .iter()
                .all(|it| it["acknowledged"] == status["last"])
    });
    followers
}

fn number(cluster: &Cluster, member: &Value) -> usize {
    let addr: SocketAddr = member["addr"]
        .as_str()
        .and_then(|addr| addr.parse().ok())
        .expect("an address");
    let at = cluster.namenodes().iter().position(|it| *it == addr);
    at.expect("one of the cluster") + 1
}

fn data_of(number: usize) -> String {
    format!("{}/data", Cluster::namenode_name(number))
}

/// Takes a backup, and returns the description that is printed.
fn backup(cluster: &Cluster, file: &Path, more: &[&str]) -> Value {
    let file = file.to_string_lossy();
    let said = cluster.output_of(&[&["admin", "backup", "--json", &file][..], more].concat());
    serde_json::from_str(&said).expect("JSON")
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).expect("a directory");
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let name = entry.expect("an entry").file_name();
        name.to_string_lossy().into_owned()
    };
    let mut names: Vec<String> = entries.map(name).collect();
    names.sort();
    names
}

#[test]
fn a_backup_brings_back_what_it_has_when_all_namenodes_are_lost() {
    let mut cluster = group();
    let (old, newer, after) = (content(1, 3), content(2, 5), content(3, 2));
    store(&cluster, "/old", &old);
    let backups = cluster.path("backups");
    fs::create_dir(&backups).expect("a directory");
    let (of_leader, of_follower) = (backups.join("leader"), backups.join("follower"));
    let said = backup(&cluster, &of_leader, &[]);
    assert_eq!(
        (&said["led"], &said["files"]),
        (&Value::from(true), &Value::from(1))
    );
    let (mut said, mut address) = (Value::Null, String::new());
    // A follower may be elected before it is asked, and learns after it has the records that they are committed.
    wait_until("a follower has the file", DEADLINE, || {
        // From the attempt before.
        if of_follower.exists() {
            fs::remove_file(&of_follower).expect("it is ours");
        }
        let follower = followers(&cluster)[0];
        address = cluster.namenodes()[follower - 1].to_string();
        said = backup(&cluster, &of_follower, &["--namenode", &address]);
        said["led"] == false && said["files"] == 1
    });
    assert_eq!(said["namenode"], address.as_str());
    check_refusals(&cluster, &of_leader);
    assert_eq!(
        names(&backups),
        ["follower", "leader"],
        "nothing else is left"
    );
    store(&cluster, "/newer", &newer);
    let on_disks = replicas(&cluster);

    for number in 1..=NAMENODES {
        cluster.kill(&Cluster::namenode_name(number));
        fs::remove_dir_all(cluster.path(&data_of(number))).expect("it is there");
    }
    let data = cluster.path(&data_of(1));
    check_damage(&cluster, &of_follower, &data);
    let arguments = [
        "admin",
        "restore",
        &of_follower.to_string_lossy(),
        &data.to_string_lossy(),
    ];
    let said = cluster.output_of(&arguments);
    assert!(said.contains("recover --accept-loss"), "{said}");
    let twice = cluster.command(&arguments);
    assert!(stderr(&twice).contains("is in the way"), "{twice:?}");
    cluster.start_namenode();
    wait_recovering(&cluster);
    cluster.wait_alive(DATANODES as u64, DEADLINE);
    wait_quarantined(&cluster, newer.len() / BLOCK_BYTES);
    assert_eq!(get(&cluster, "/old").as_ref(), Ok(&old));
    assert!(get(&cluster, "/newer").is_err());
    let refused = put(&cluster, "/after", &after);
    assert!(stderr(&refused).contains("recover"), "{refused:?}");
    assert_eq!(replicas(&cluster), on_disks);

    accept_loss(&cluster);
    store(&cluster, "/after", &after);
    for (path, content) in [("/old", &old), ("/after", &after)] {
        assert_eq!(get(&cluster, path).as_ref(), Ok(content), "{path}");
    }
    let lost: Vec<_> = on_disks.difference(&replicas(&cluster)).cloned().collect();
    assert!(lost.is_empty(), "{lost:?}");
    // And no further command is needed.
    let before = obeyed(&cluster);
    cluster.stop("namenode");
    cluster.start_namenode();
    wait_obeyed(&cluster, &before);
    assert!(status(&cluster)["recovery"].is_null());
}

/// Checks when no backup is written, and that nothing is left behind then.
fn check_refusals(cluster: &Cluster, file: &Path) {
    let mode = fs::metadata(file)
        .expect("it is there")
        .permissions()
        .mode();
    assert_eq!(mode & 0o777, 0o600);
    let before = fs::read(file).expect("it is ours");
    let path = file.to_string_lossy();
    let exists = cluster.command(&["admin", "backup", &path]);
    assert!(stderr(&exists).contains("replace it with -f"), "{exists:?}");
    assert_eq!(fs::read(file).expect("it is ours"), before);
    cluster.output_of(&["admin", "backup", "-f", &path]);
    let other = file.with_file_name("other");
    let client = cluster.path("client/client.toml");
    let stranger = cluster.command(&[
        "admin",
        "--config",
        &client.to_string_lossy(),
        "backup",
        &other.to_string_lossy(),
    ]);
    assert!(!stranger.status.success());
    assert!(stderr(&stranger).contains("may not make"), "{stranger:?}");
    let nobody = cluster.command(&[
        "admin",
        "backup",
        "--namenode",
        "127.0.0.1:9",
        &other.to_string_lossy(),
    ]);
    assert!(!nobody.status.success());
}

/// Checks that only a complete backup of this cluster is accepted.
fn check_damage(cluster: &Cluster, good: &Path, data: &Path) {
    let whole = cluster.output_of(&["admin", "backup", "--check", &good.to_string_lossy()]);
    assert!(
        whole.contains("is whole") && whole.contains("followed"),
        "{whole}"
    );
    let bytes = fs::read(good).expect("it is ours");
    let bad = cluster.path("bad");
    for cut in [0, 7, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&bad, &bytes[..cut]).expect("write");
        let checked = cluster.command(&["admin", "backup", "--check", &bad.to_string_lossy()]);
        assert!(
            stderr(&checked).contains("no backup to rely on"),
            "{checked:?}"
        );
        let restored = cluster.command(&[
            "admin",
            "restore",
            &bad.to_string_lossy(),
            &data.to_string_lossy(),
        ]);
        assert!(
            stderr(&restored).contains("nothing was restored"),
            "{restored:?}"
        );
    }
    let restored = cluster.command(&[
        "admin",
        "restore",
        "--cluster",
        "0123456789abcdef0123456789abcdef",
        &good.to_string_lossy(),
        &data.to_string_lossy(),
    ]);
    assert!(stderr(&restored).contains("not of cluster"), "{restored:?}");
    assert!(!data.join("journal").exists());
}

#[test]
fn one_that_is_left_goes_on_alone_when_an_operator_says_so() {
    let mut cluster = group();
    let (old, after) = (content(1, 3), content(2, 2));
    store(&cluster, "/old", &old);
    let [gone, left] = followers(&cluster)[..] else {
        panic!("two follow");
    };
    // Its journal then contains other members, which are lost.
    let address = cluster.namenodes()[gone - 1].to_string();
    cluster.output_of(&["admin", "namenode", "remove", &address]);
    let data = cluster.path(&data_of(left));
    let recover = [
        "admin",
        "namenode",
        "recover",
        "--accept-loss",
        &data.to_string_lossy(),
    ];
    // Refused while other namenodes work.
    cluster.kill(&Cluster::namenode_name(left));
    let refused = cluster.command(&recover);
    assert!(
        stderr(&refused).contains("of the same group, and runs"),
        "{refused:?}"
    );
    cluster.start_namenode_number(left);
    for number in (1..=NAMENODES).filter(|it| *it != left) {
        cluster.kill(&Cluster::namenode_name(number));
        fs::remove_dir_all(cluster.path(&data_of(number))).expect("it is there");
    }
    // Refused while it runs, and waits for the others.
    let refused = cluster.command(&recover);
    assert!(stderr(&refused).contains("in use"), "{refused:?}");
    let listed = cluster.command(&["admin", "namenode", "list"]);
    let said = String::from_utf8_lossy(&listed.stdout).to_lowercase() + &stderr(&listed);
    assert!(said.contains("no namenode leads"), "{listed:?}");
    cluster.kill(&Cluster::namenode_name(left));
    let before = obeyed(&cluster);
    cluster.output_of(&recover);
    cluster.start_namenode_number(left);
    // It lacks nothing.
    wait_obeyed(&cluster, &before);
    assert!(status(&cluster)["recovery"].is_null());
    let members = list(&cluster);
    assert_eq!(
        members["members"].as_array().map(Vec::len),
        Some(1),
        "{members}"
    );
    assert_eq!(get(&cluster, "/old").as_ref(), Ok(&old));
    store(&cluster, "/after", &after);
    assert_eq!(get(&cluster, "/after").as_ref(), Ok(&after));
    cluster.wait_healthy();
}
