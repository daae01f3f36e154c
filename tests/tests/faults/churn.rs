//! Many small changes on both mounts, concurrently with programs that sync or watch everything.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use harvestfs_tests::Cluster;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::logs::Step;
use crate::worker::{Said, Worker};

const LASTS: Duration = Duration::from_secs(3);
/// Maximum duration of a step.
const STEP_MAX: Duration = Duration::from_secs(5);
/// The same while the namenode is restarted.
const STEP_WITH_RESTART_MAX: Duration = Duration::from_secs(30);
/// Yields the processor to the programs that create files to be synced.
const SYNC_PAUSE: Duration = Duration::from_millis(1);
/// With a listener, the number of steps before denied ones are counted.
const STEPS_BEFORE_COUNTED: u32 = 20;
/// Milliseconds for which a listener waits for events in a step.
const POLL_MS: u8 = 20;
/// Number of names in the directory that the workers share, and in which they replace each other's files.
const NAMES: u64 = 8;

/// A step creates, replaces, renames, links and removes files, concurrently with other workers.
pub fn churn(place: &str, seed: u64) -> Step {
    let place = Path::new(place).to_owned();
    let mut done = seed;
    Box::new(move || {
        done += 1;
        let path = |number: u64| place.join(format!("file-{}", number % NAMES));
        let own = place.join(format!("own-{}", std::process::id()));
        fs::write(&own, vec![b'x'; (done * 701 % 9000) as usize])?;
        fs::rename(&own, path(done))?;
        // Pages of a mapping are stored later, when the file is synced, whether or not it still has a name.
        match File::options().read(true).write(true).open(path(done)) {
            Ok(file) if file.metadata()?.len() > 0 => write_through_mapping(&file)?,
            Ok(_) => {}
            Err(error) if is_expected(error.kind()) => {}
            Err(error) => return Err(error),
        }
        for result in [
            fs::hard_link(path(done), path(done * 3 + 1)),
            fs::read(path(done * 5 + 2)).map(drop),
            fs::remove_file(path(done * 7 + 3)),
        ] {
            match result {
                Err(error) if !is_expected(error.kind()) => return Err(error),
                _ => {}
            }
        }
        Ok(done)
    })
}

/// Whether an error is the expected result of another worker's change; see also the exceptions in SEMANTICS.
fn is_expected(kind: ErrorKind) -> bool {
    matches!(
        kind,
        ErrorKind::NotFound
            | ErrorKind::AlreadyExists
            | ErrorKind::StaleNetworkFileHandle
            | ErrorKind::Interrupted
    )
}

/// A step of [`churn`] while [`listen`] runs. The kernel opens a file for the listener before it opens it for the
/// caller; if that fails because the file has been removed, it denies access (`EPERM`). Most steps are permitted
/// nevertheless.
pub fn churn_watched(place: &str, seed: u64) -> Step {
    let mut step = churn(place, seed);
    let mut done = seed;
    let (mut steps, mut refused) = (0, 0);
    Box::new(move || {
        done += 1;
        steps += 1;
        match step() {
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => {
                refused += 1;
                if steps > STEPS_BEFORE_COUNTED && refused * 2 > steps {
                    let what = format!("{refused} of {steps} steps were not permitted");
                    return Err(io::Error::other(what));
                }
                Ok(done)
            }
            result => result,
        }
    })
}

fn write_through_mapping(file: &File) -> io::Result<()> {
    let (mut reader, mut writer) = io::pipe()?;
    writer.write_all(b"x")?;
    // SAFETY: a new mapping, at an address that the kernel chooses.
    let address = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            1,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file,
            0,
        )?
    };
    // The kernel writes to it, so that an error, not a signal, results if the file is empty by now.
    // SAFETY: it was just mapped for writing, with this length, and has no other user.
    let result = reader.read(unsafe { std::slice::from_raw_parts_mut(address.cast::<u8>(), 1) });
    // SAFETY: nothing refers to it any more.
    unsafe { rustix::mm::munmap(address, 1)? };
    match result {
        Err(error) if error.raw_os_error() != Some(Errno::FAULT.raw_os_error()) => Err(error),
        _ => Ok(()),
    }
}

/// A step is a `syncfs` of the mount.
pub fn sync(place: &str) -> io::Result<Step> {
    let root = File::open(place)?;
    let mut done = 0;
    Ok(Box::new(move || {
        rustix::fs::syncfs(&root)?;
        sleep(SYNC_PAUSE);
        done += 1;
        Ok(done)
    }))
}

/// A step reads the events of a file system, and grants all permission requests.
pub fn listen(place: &str) -> io::Result<Step> {
    let listener = Fanotify::init(
        InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC,
        EventFFlags::O_RDONLY | EventFFlags::O_LARGEFILE | EventFFlags::O_CLOEXEC,
    )?;
    listener.mark(
        MarkFlags::FAN_MARK_ADD | MarkFlags::FAN_MARK_FILESYSTEM,
        MaskFlags::FAN_OPEN_PERM
            | MaskFlags::FAN_ACCESS_PERM
            | MaskFlags::FAN_MODIFY
            | MaskFlags::FAN_CLOSE_WRITE,
        rustix::fs::CWD,
        Some(Path::new(place)),
    )?;
    let mut seen = 0;
    Ok(Box::new(move || {
        let mut asked = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
        if poll(&mut asked, PollTimeout::from(POLL_MS))? == 0 {
            return Ok(seen);
        }
        let events = match listener.read_events() {
            // The kernel could not open the file for it, see above.
            Err(nix::errno::Errno::ESTALE | nix::errno::Errno::ENOENT) => return Ok(seen),
            events => events?,
        };
        for event in &events {
            seen += 1;
            let Some(file) = event.fd() else { continue };
            let wants_permission = MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_ACCESS_PERM;
            if event.mask().intersects(wants_permission) {
                // The process that asked may have been killed in the meantime.
                let _ = listener.write_response(FanotifyResponse::new(file, Response::FAN_ALLOW));
            } else {
                rustix::fs::fstat(file)?;
            }
        }
        Ok(seen)
    }))
}

/// Workers that churn in the same directory, through each mount.
fn churning(role: &str, mounts: [&Path; 2]) -> Vec<Worker> {
    let directory = |mount: &Path| mount.join("churn");
    fs::create_dir(directory(mounts[0])).expect("mkdir");
    let mut workers = Vec::new();
    for number in 0..4 {
        let place = directory(mounts[number % 2]);
        let name = format!("churns {number}");
        workers.push(Worker::of_this_test(
            &name,
            role,
            &place,
            number as u64 * 11,
        ));
    }
    workers
}

/// Checks that no worker failed, and none had to wait for long.
fn finish(workers: Vec<Worker>, began: Instant, step_max: Duration) {
    for worker in workers {
        let name = worker.name.clone();
        let said: Vec<Said> = worker.finish();
        let longest = said
            .iter()
            .scan(began, |before, &(_, at)| {
                let took = at.saturating_duration_since(*before);
                *before = at;
                Some(took)
            })
            .max();
        let longest = longest.unwrap_or_else(|| panic!("{name} did nothing"));
        eprintln!("{name}: {} steps, the longest took {longest:?}", said.len());
        assert!(longest <= step_max, "{name}: {longest:?}");
    }
}

#[test]
fn a_file_system_is_synced_while_names_come_and_go_and_the_namenode_restarts() {
    let Some((mut cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let began = Instant::now();
    let mut workers = churning("churn", [&one, &other]);
    for mount in [&one, &other] {
        let name = format!("syncs {mount:?}");
        workers.push(Worker::of_this_test(&name, "sync", mount, 0));
    }
    for _ in 0..2 {
        sleep(LASTS / 2);
        cluster.kill("namenode");
        cluster.start_namenode();
    }
    sleep(LASTS / 2);
    finish(workers, began, STEP_WITH_RESTART_MAX);
}

#[test]
fn whoever_watches_a_file_system_holds_up_nobody() {
    if !rustix::process::geteuid().is_root() {
        harvestfs_tests::skip("only root is asked for permission (fanotify)");
        return;
    }
    let Some((_cluster, one, other)) = Cluster::with_two_mounts() else {
        return;
    };
    let listener = Worker::of_this_test("listens", "listen", &one, 0);
    let began = Instant::now();
    let workers = churning("churn-watched", [&one, &other]);
    sleep(LASTS);
    finish(workers, began, STEP_MAX);
    let seen = listener.finish().last().map_or(0, |&(seen, _)| seen);
    assert!(seen > 100, "{seen} events");
}
