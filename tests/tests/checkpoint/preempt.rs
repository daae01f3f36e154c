//! What `preempt` says is free.

use harvestfs_tests::{Cluster, ClusterOptions};

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
    let said = checkpoints.refusal(&mount, &go_on);
    assert!(said.contains("dump --leave-running"), "{said}");
    job.goes_on();
    let twice = [&preempt[..], &[other.as_str()]].concat();
    let said = checkpoints.refusal(&mount, &twice);
    assert!(said.contains("processes in common"), "{said}");
    job.goes_on();
}
