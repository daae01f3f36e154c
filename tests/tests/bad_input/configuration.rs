//! Invalid configurations and identities.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use harvestfs_tests::{Cluster, ClusterOptions};

use crate::{edit, refused};

/// The number of the first line that starts with `start`.
fn line_of(path: &Path, start: &str) -> usize {
    let text = fs::read_to_string(path).expect("a text file");
    let index = text.lines().position(|line| line.starts_with(start));
    1 + index.expect("there is such a line")
}

#[test]
fn an_error_in_a_configuration_file_names_file_and_line_and_what_is_accepted() {
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    cluster.stop("datanode-1");
    cluster.stop("namenode");
    let namenode = cluster.path("namenode/namenode.toml");
    let datanode = cluster.path("datanode-1/datanode.toml");
    let client = cluster.path("client/client.toml");
    // Part, file, the start of the line to replace, its replacement, and text in the error message.
    for (part, path, start, line, accepted) in [
        (
            "namenode",
            &namenode,
            "listen",
            "listen_on = \"here\"",
            "`listen`",
        ),
        (
            "namenode",
            &namenode,
            "listen",
            "listen = \"here\"",
            "socket address",
        ),
        ("namenode", &namenode, "listen", "listen = ", ""),
        (
            "datanode",
            &datanode,
            "quota",
            "quotas = \"1GiB\"",
            "`quota`",
        ),
        ("datanode", &datanode, "quota", "quota = \"lots\"", "64GiB"),
        ("datanode", &datanode, "class", "class = \"tape\"", "`ssd`"),
        ("datanode", &datanode, "rack", "rack = 7", "string"),
    ] {
        let good = fs::read_to_string(path).expect("a text file");
        let number = line_of(path, start);
        edit(path, |text| {
            let lines = text.lines().enumerate();
            lines
                .map(|(index, old)| if index + 1 == number { line } else { old })
                .collect::<Vec<_>>()
                .join("\n")
        });
        let (status, said) = refused(&cluster, part, path);
        assert_eq!(status, 2, "{said}");
        let place = format!("{}:{number}: ", path.display());
        assert!(said.contains(&place), "{line}: no {place} in {said}");
        assert!(said.contains(accepted), "{line}: no {accepted} in {said}");
        fs::write(path, good).expect("write");
    }
    let good = fs::read_to_string(&client).expect("a text file");
    fs::write(&client, format!("{good}\ncolour = \"red\"\n")).expect("write");
    let number = line_of(&client, "colour");
    let output = cluster.command(&[
        "fs".as_ref(),
        "--config".as_ref(),
        client.as_os_str(),
        "ls".as_ref(),
        "/".as_ref(),
    ]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains(&format!("client.toml:{number}: ")), "{said}");
    assert!(said.contains("colour"), "{said}");
    fs::write(&client, good).expect("write");

    let (status, said) = refused(&cluster, "namenode", &cluster.path("no-such.toml"));
    assert_eq!(status, 2, "{said}");
    assert!(said.contains("no-such.toml"), "{said}");
    // None of these attempts has left anything behind.
    cluster.start_namenode();
    cluster.start_datanode(1);
}

#[test]
fn a_key_that_others_can_read_or_that_is_not_there_is_refused() {
    let mut cluster = Cluster::start(&ClusterOptions {
        datanodes: 1,
        replication: 1,
        ..ClusterOptions::default()
    });
    cluster.stop("datanode-1");
    cluster.stop("namenode");
    let namenode = cluster.path("namenode/namenode.toml");
    let datanode = cluster.path("datanode-1/datanode.toml");
    for (part, config, secret) in [
        ("namenode", &namenode, "namenode/identity/key.pem"),
        ("namenode", &namenode, "namenode/data/token-keys"),
        ("datanode", &datanode, "datanode-1/identity/key.pem"),
    ] {
        let path = cluster.path(secret);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).expect("chmod");
        let (status, said) = refused(&cluster, part, config);
        assert_eq!(status, 1, "{said}");
        assert!(said.contains(secret), "{said}");
        assert!(said.contains("can be read by others (mode 640)"), "{said}");
        assert!(said.contains("chmod 600"), "{said}");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
    }
    for file in ["key.pem", "cert.pem", "ca.pem"] {
        let path = cluster.path("datanode-1/identity").join(file);
        let good = fs::read(&path).expect("a file");
        fs::remove_file(&path).expect("remove");
        let (status, said) = refused(&cluster, "datanode", &datanode);
        assert_eq!(status, 1, "{said}");
        assert!(said.contains(file) && said.contains("is missing"), "{said}");
        fs::write(&path, "-----BEGIN NONSENSE-----\n").expect("write");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("chmod");
        let (status, said) = refused(&cluster, "datanode", &datanode);
        assert_eq!(status, 1, "{said}");
        assert!(
            said.contains(file) && said.contains("not a valid PEM"),
            "{said}"
        );
        fs::write(&path, good).expect("write");
    }
    // A certificate of another server.
    edit(&datanode, |text| {
        text.replace("\"datanode-1\"", "\"datanode-7\"")
    });
    let (status, said) = refused(&cluster, "datanode", &datanode);
    assert_eq!(status, 1, "{said}");
    assert!(
        said.contains("its certificate is for `datanode-1`"),
        "{said}"
    );
    edit(&datanode, |text| {
        text.replace("\"datanode-7\"", "\"datanode-1\"")
    });
    cluster.start_namenode();
    cluster.start_datanode(1);
}
