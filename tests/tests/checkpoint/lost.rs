//! Checkpoints of which parts are lost with their datanodes.

use std::fs;
use std::path::Path;

use harvestfs_tests::wait_until;

use crate::job::{Checkpoints, Job};
use crate::{DEADLINE, on_two_mounts};

/// Maximum number of dumps: about one in a hundred is by chance on a single datanode, and is then repeated.
const DUMPS_MAX: usize = 5;

/// The datanodes of each extent of a file.
fn datanodes(file: &Path) -> Vec<Vec<String>> {
    let mut value = vec![0; 1 << 16];
    let length = rustix::fs::getxattr(file, "user.harvestfs.locations", &mut value);
    value.truncate(length.expect("it is on the mount"));
    let text = String::from_utf8(value).expect("text");
    let names = |line: &str| line.split_whitespace().skip(3).map(str::to_owned).collect();
    text.lines().map(names).collect()
}

#[test]
fn nothing_lost_is_shared_with_a_new_checkpoint_or_counts_as_stored() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (mut cluster, here, there) = on_two_mounts(1);
    let mut job = Job::start();
    let digest = job.ask("digest");
    let pid = job.pid.to_string();
    let dump = ["dump", &pid, "--job", "job"];
    let full = [&dump[..], &["--leave-running", "--full"]].concat();
    // Not a datanode that also has the manifest: without that, nothing is compared anyway.
    let found = (1..=DUMPS_MAX).find_map(|number| {
        checkpoints.run(&here, &full);
        let directory = here.join(format!("checkpoints/job/{number:06}"));
        let pages = directory.join("pages-1.img");
        let of_manifest = datanodes(&directory.join("manifest.json")).concat();
        let mut of_pages = datanodes(&pages).concat().into_iter();
        let other = of_pages.find(|name| !of_manifest.contains(name))?;
        Some((pages, other))
    });
    let (pages, other) = found.expect("pages on a datanode without the manifest");
    cluster.kill(&other);
    wait_until("it is missed", DEADLINE * 3, || {
        datanodes(&pages).iter().any(Vec::is_empty)
    });

    // None of its work is stored safely, so it is not killed, but stored completely.
    let measured = r#"{"write_bytes_per_s":1e15,"read_bytes_per_s":1e15}"#;
    fs::write(checkpoints.node.path().join("measured.json"), measured).expect("written");
    let candidate = format!("job={pid}");
    let preempt = ["preempt", "--free", "1MiB", &candidate, "--dry-run"];
    let said = checkpoints.run(&here, &preempt);
    assert!(said.contains("job: checkpoint"), "{said}");

    let output = checkpoints.output(&here, &dump);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("are on no datanode that runs"), "{said}");
    job.has_ended();
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);
}
