//! A checkpoint is stored while another command waits for its turn on its node.

use std::fs::File;
use std::process::Stdio;

use harvestfs_tests::wait_until;
use rustix::fs::{FlockOperation, flock};

use crate::job::{Checkpoints, Job};
use crate::{DEADLINE, on_two_mounts};

#[test]
fn the_checkpoint_that_is_newest_then_is_restored() {
    let (Some(checkpoints), Some(of_other_node)) = (Checkpoints::new(), Checkpoints::new()) else {
        return;
    };
    let (_cluster, here, there) = on_two_mounts(1);
    let mut job = Job::start();
    let pid = job.pid.to_string();
    let go_on = ["dump", &pid, "--job", "job", "--leave-running"];
    of_other_node.run(&there, &go_on);

    let node = checkpoints.node.path();
    let lock = File::create(node.join("lock")).expect("it is made");
    flock(&lock, FlockOperation::LockExclusive).expect("nobody has it");
    let restore = checkpoints
        .command(&here, &["restore", "job"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let place = node.join("queue").join(restore.id().to_string());
    wait_until("it waits for its turn", DEADLINE, || place.exists());
    job.ask("change 10 together");
    let digest = job.ask("digest");
    of_other_node.dump(&there, &mut job);
    drop(lock);
    let output = restore.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("job 2: runs as process"), "{said}");
    job.goes_on();
    assert_eq!(job.ask("digest"), digest);
}
