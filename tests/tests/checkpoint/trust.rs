//! Directories in which other users could replace images.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::job::{Checkpoints, Job};
use crate::on_two_mounts;

#[test]
fn no_job_is_ended_for_a_checkpoint_that_is_not_restored() {
    let Some(checkpoints) = Checkpoints::new() else {
        return;
    };
    let (_cluster, here, there) = on_two_mounts(1);
    let store = here.join("checkpoints");
    fs::set_permissions(&store, fs::Permissions::from_mode(0o775)).expect("chmod");
    let mut job = Job::start();
    let digest = job.ask("digest");
    let (pid, candidate) = (job.pid.to_string(), format!("job={}", job.pid));
    let dump = ["dump", &pid, "--job", "job"];
    let preempt = ["preempt", "--free", "1MiB", &candidate];
    for refused in [&dump[..], &preempt] {
        let said = checkpoints.refusal(&here, refused);
        assert!(said.contains("mode 0775"), "{said}");
        job.goes_on();
    }
    assert!(!store.join("job").exists(), "something was made there");

    // Follows the advice in the message.
    let said = checkpoints.refusal(&here, &dump);
    let hint = said.split('`').nth(1).expect("a command");
    let status = Command::new("sh").args(["-c", hint]).status();
    assert!(status.expect("a shell").success(), "{hint}");
    checkpoints.dump(&here, &mut job);
    checkpoints.restore(&there, &job);
    assert_eq!(job.ask("digest"), digest);
}
