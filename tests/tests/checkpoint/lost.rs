//! Checkpoints of which datanodes have taken something with them.

use std::path::Path;

use harvestfs_tests::wait_until;

use crate::job::{Checkpoints, Job};
use crate::{DEADLINE, on_two_mounts};

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
fn nothing_lost_is_shared_with_a_new_checkpoint() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (mut cluster, here, there) = on_two_mounts(1);
    let mut job = Job::start();
    let digest = job.ask("digest");
    let pid = job.pid.to_string();
    let dump = ["dump", &pid, "--job", "job", "--leave-running"];
    checkpoints.run(&here, &dump);
    let first = here.join("checkpoints/job/000001");
    let pages = first.join("pages-1.img");
    // If there is a choice, not one that has the manifest: without that, nothing is compared anyway.
    let of_manifest = datanodes(&first.join("manifest.json")).concat();
    let of_pages = datanodes(&pages).concat();
    let other = of_pages.iter().find(|name| !of_manifest.contains(name));
    cluster.kill(other.unwrap_or(&of_pages[0]));
    wait_until("it is missed", DEADLINE * 3, || {
        datanodes(&pages).iter().any(Vec::is_empty)
    });

    let output = checkpoints.output(&here, &dump[..4]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("everything is stored"), "{said}");
    job.has_ended();
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);
}
