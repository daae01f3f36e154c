//! Unmounting, which is done by a process of its own.
//!
//! The kernel asks for answers while it unmounts a file system or writes back what programs have
//! changed in its cache. A thread of the mount's process that waits for that inside the kernel cannot
//! be killed, and while it is there the connection stays open: nothing would ever end its wait once the
//! threads that give the answers are gone. A child has no part in the connection. When the process
//! of the mount ends, however it ends, the kernel breaks the connection and the child goes on.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use crate::guard;
use crate::mount_table::{MOUNT_TYPE, MountEntry, canonical, mounted_besides, mounted_on, mounts};

/// Tells the child the device of the mount that it is to unmount.
const DEVICE_VARIABLE: &str = "HARVESTFS_UNMOUNT_DEVICE";
/// What the child says when programs still use the file system.
const IN_USE: &str = "in use";
/// A mount that does not answer within this time hangs, and is not dead.
const ANSWER_DEADLINE: Duration = Duration::from_secs(10);
/// How often what is mounted besides a mount is looked for: programs may mount more meanwhile.
const ATTEMPTS: usize = 3;

/// How a mount was unmounted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unmounted {
    /// Nobody used it.
    Entirely,
    /// Under programs that use it, for which it works until its process ends.
    InUse,
}

/// Whether this process is a child of a mount's, to be asked before anything else by a program that
/// mounts: then it has done what it is for, successfully or not.
#[must_use]
pub fn asked_by_mount() -> Option<bool> {
    if let Some(done) = guard::asked() {
        return Some(done);
    }
    let device = std::env::var(DEVICE_VARIABLE).ok()?;
    // The mount may have ended meanwhile: this goes on without a reader.
    Some(match unmount_device(&device) {
        Ok(Unmounted::Entirely) => true,
        Ok(Unmounted::InUse) => {
            let _ = writeln!(io::stdout(), "{IN_USE}");
            true
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            false
        }
    })
}

/// Unmounts by a child, after what programs changed is written back.
pub(crate) async fn by_child(device: &str) -> io::Result<Unmounted> {
    // This program as it runs, even if its file has been replaced meanwhile.
    let output = tokio::process::Command::new("/proc/self/exe")
        .env(DEVICE_VARIABLE, device)
        .current_dir("/")
        // A second Ctrl-C is for the mount alone: this is what unmounts it then.
        .process_group(0)
        .stdin(Stdio::null())
        .output()
        .await?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    let said = text(&output.stderr);
    if !output.status.success() {
        return Err(io::Error::other(said));
    }
    for line in said.lines() {
        tracing::warn!("{line}");
    }
    Ok(if text(&output.stdout) == IN_USE {
        Unmounted::InUse
    } else {
        Unmounted::Entirely
    })
}

fn unmount_device(device: &str) -> io::Result<Unmounted> {
    let all = mounts()?;
    let Some(first) = first_of(&all, device) else {
        // Somebody else did.
        return Ok(Unmounted::Entirely);
    };
    let others = unmount_others(first)?;
    let all = mounts()?;
    // It went with another one, or somebody else did: another file system may have its device by now.
    if first_of(&all, device) != Some(first) {
        return Ok(others);
    }
    write_back(&all, first);
    let all = mounts()?;
    if first_of(&all, device) != Some(first) {
        return Ok(others);
    }
    let directory = &first.mount_point;
    // It is still this mount that would be unmounted.
    if !shows(&all, first) {
        return Err(io::Error::other(format!(
            "{} shows another mount",
            directory.display()
        )));
    }
    let unmounted = unmount_or_detach(directory)?;
    Ok(match others {
        Unmounted::Entirely => unmounted,
        // The file system lives on, and so does its connection to the kernel.
        Unmounted::InUse => Unmounted::InUse,
    })
}

/// The mount of a device that its others were made of.
fn first_of<'a>(mounts: &'a [MountEntry], device: &str) -> Option<&'a MountEntry> {
    mounts.iter().find(|it| it.device == device)
}

/// Whether what is seen where a mount is has its device.
fn shows(mounts: &[MountEntry], mount: &MountEntry) -> bool {
    mounted_on(mounts, &mount.mount_point).is_some_and(|top| top.device == mount.device)
}

/// Of a file system in use the kernel keeps what programs have changed until they close it. An error would reach a
/// program that syncs or closes; from an unmounted file system it reaches none.
fn write_back(mounts: &[MountEntry], mount: &MountEntry) {
    // What is over it may hang.
    if !shows(mounts, mount) {
        return;
    }
    let written_back =
        File::open(&mount.mount_point).and_then(|root| Ok(rustix::fs::syncfs(root.as_fd())?));
    if let Err(error) = written_back {
        let _ = writeln!(io::stderr(), "cannot write back everything: {error}");
    }
}

/// Unmounts what is mounted in or over a file system, and where that is mounted a further time: while it is,
/// unmounting the first mount would not end it. That one stays, so that nobody else gets the number of the
/// device meanwhile, unless the kernel takes it away with another one, as it does where mounts propagate.
fn unmount_others(first: &MountEntry) -> io::Result<Unmounted> {
    let device = &first.device;
    let mut unmounted = Unmounted::Entirely;
    let mut failed = Vec::new();
    for _ in 0..ATTEMPTS {
        let all = mounts()?;
        let others = mounted_besides(&all, device);
        let is_gone = first_of(&all, device) != Some(first);
        if is_gone && !failed.is_empty() {
            break;
        }
        // What has the device of one that is gone is none of ours.
        if is_gone || others.is_empty() {
            return Ok(unmounted);
        }
        failed.clear();
        for other in others {
            let directory = &other.mount_point;
            let now = mounts()?;
            // It may have gone with another one.
            if mounted_on(&now, directory) != Some(other) {
                continue;
            }
            let done = if other.device == *device {
                // The first mount may go with it, and what programs have changed with that.
                write_back(&now, other);
                unmount_or_detach(directory)
            } else {
                detach(directory).map(|()| Unmounted::Entirely)
            };
            let shown = directory.display();
            match done {
                Ok(how) => {
                    let _ = writeln!(io::stderr(), "{shown} was unmounted as well");
                    if how == Unmounted::InUse {
                        unmounted = how;
                    }
                }
                // The others and this mount are none the worse for it.
                Err(error) => failed.push(format!("cannot unmount {shown}: {error}")),
            }
        }
    }
    for line in failed {
        let _ = writeln!(io::stderr(), "{line}");
    }
    Ok(Unmounted::InUse)
}

/// Unmounts a mount of a file system of ours.
fn unmount_or_detach(directory: &Path) -> io::Result<Unmounted> {
    match unmount(directory, UnmountFlags::empty()) {
        Ok(()) => Ok(Unmounted::Entirely),
        Err(Errno::BUSY) => detach(directory).map(|()| Unmounted::InUse),
        Err(Errno::PERM) => match fusermount("-u", directory) {
            Ok(()) => Ok(Unmounted::Entirely),
            Err(_) => detach(directory).map(|()| Unmounted::InUse),
        },
        Err(error) => Err(error.into()),
    }
}

fn detach(directory: &Path) -> io::Result<()> {
    match unmount(directory, UnmountFlags::DETACH) {
        Err(Errno::PERM) => fusermount("-uz", directory),
        done => Ok(done?),
    }
}

/// Users other than root need this program.
fn fusermount(option: &str, directory: &Path) -> io::Result<()> {
    let output = Command::new("fusermount3")
        .args([OsStr::new(option), OsStr::new("-q"), OsStr::new("--")])
        .arg(directory)
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        Ok(())
    } else {
        let said = String::from_utf8_lossy(&output.stderr);
        Err(io::Error::other(format!("fusermount3: {}", said.trim())))
    }
}

/// Unmounts a HarvestFS whose process was killed: it stays behind, and answers that it is not
/// connected. Anything else is left alone, also where the dead one is bound elsewhere: nothing is mounted
/// there next, and programs would write to the local directory without an error.
///
/// # Errors
/// When it is there and cannot be unmounted, or hangs.
pub fn remove_dead(directory: &Path) -> io::Result<()> {
    let directory = match canonical(directory) {
        // Nothing is mounted below a directory that is gone.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        directory => directory?,
    };
    loop {
        let all = mounts()?;
        let dead = match mounted_on(&all, &directory) {
            Some(mount) if mount.kind == MOUNT_TYPE => &mount.device,
            _ => return Ok(()),
        };
        if asked(&directory)? != Err(Errno::NOTCONN) {
            return Ok(());
        }
        // Meanwhile it may have been unmounted, and what was below it is nobody's to detach.
        if mounted_on(&mounts()?, &directory).is_none_or(|it| it.device != *dead) {
            continue;
        }
        // Who else unmounts it may have been faster.
        if let Err(error) = detach(&directory)
            && mounted_on(&mounts()?, &directory).is_some_and(|it| it.device == *dead)
        {
            return Err(error);
        }
        tracing::info!("the dead mount {} was unmounted", directory.display());
    }
}

/// What a mounted file system answers to a question that the kernel always passes on.
fn asked(directory: &Path) -> io::Result<Result<(), Errno>> {
    let (sender, answers) = mpsc::channel();
    let asked = directory.to_owned();
    // Its thread may hang for as long as the mount does.
    thread::spawn(move || sender.send(rustix::fs::statvfs(&asked).map(drop)));
    answers.recv_timeout(ANSWER_DEADLINE).map_err(|_| {
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!(
                "what is mounted on {} already does not answer: `umount --lazy` it first",
                directory.display()
            ),
        )
    })
}
