//! What `preempt` reports as freed.

use std::process::Command;

use harvestfs_tests::{Cluster, ClusterOptions, KillOnDrop};

use crate::job::{Checkpoints, Job, make_store};

#[test]
fn memory_that_is_not_free_does_not_count() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    make_store(&mount);
    let job = Job::start();
    let [one, other] = ["one", "other"].map(|name| format!("{name}={}", job.pid));
    let preempt = ["preempt", "--free", "1MiB", "--policy", "kill", &one];
    let go_on = [&preempt[..], &["--leave-running"]].concat();
    let output = checkpoints.output(&mount, &go_on);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    job.goes_on();
    let twice = [&preempt[..], &[other.as_str()]].concat();
    let said = checkpoints.refusal(&mount, &twice);
    assert!(said.contains("processes in common"), "{said}");
    job.goes_on();
}

#[test]
fn a_job_that_criu_refuses_keeps_no_other_one() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let mut cluster = Cluster::start(&ClusterOptions::default());
    let mount = cluster.mount("mnt");
    make_store(&mount);
    // In the session of this test, and with so little memory and work that it is the first victim.
    let sleep = Command::new("sleep").arg("600").spawn();
    let mut sleep = KillOnDrop(sleep.expect("sleep"));
    let refused = format!("refused={}", sleep.0.id());
    let preempt = ["preempt", "--policy", "checkpoint", "--free"];
    let alone = [&preempt[..], &["1MiB", refused.as_str()]].concat();
    let said = checkpoints.refusal(&mount, &alone);
    assert!(
        said.contains("without refused, which could not be preempted"),
        "{said}"
    );
    let mut job = Job::start();
    let candidate = format!("job={}", job.pid);
    let both = [
        &preempt[..],
        &["1MiB", refused.as_str(), candidate.as_str()],
    ]
    .concat();
    let output = checkpoints.output(&mount, &both);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("cannot preempt job refused"), "{said}");
    job.has_ended();
    let goes_on = sleep.0.try_wait().expect("it is ours").is_none();
    assert!(goes_on, "what CRIU refused has ended");
}
