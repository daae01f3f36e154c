use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Once;
use std::thread;

use harvestfs_client::Client;
use harvestfs_namenode::journal::disk::Disk;
use harvestfs_namenode::server::journal_dir;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::types::Credentials;
use parking_lot::Mutex;

use super::disk::{Directory, SimulatedDisk};
use super::world::TICK;
use super::*;

const MINUTE: Duration = Duration::from_secs(60);

fn world(seed: u64) -> World {
    let directory = tempfile::tempdir().expect("a directory");
    let mut world = World::new(seed, 1, 3, 1, directory).expect("a cluster");
    world.run_for(Duration::from_secs(5));
    world
}

/// Connects a client and returns the result of `work`, which must arrive within `time`.
fn with_client<T: 'static, F: Future<Output = T> + 'static>(
    world: &mut World,
    time: Duration,
    work: impl FnOnce(Client) -> F + 'static,
) -> T {
    let connections = world.connections(Part::Client(0)).expect("an identity");
    let result = Rc::new(RefCell::new(None));
    let to = Rc::clone(&result);
    world.host(Part::Client(0)).spawn(async move {
        let client = connections().await.expect("it connects");
        *to.borrow_mut() = Some(work(client).await);
    });
    let end = world.now() + time;
    loop {
        if let Some(result) = result.borrow_mut().take() {
            return result;
        }
        assert!(world.now() < end, "not within {time:?}");
        world.run_for(TICK);
    }
}

fn cut(world: &World, part: Part, cut: bool) {
    let link = Link {
        cut,
        ..Link::default()
    };
    for other in world.parts() {
        world.set_link(part, other, link);
        world.set_link(other, part, link);
    }
}

fn content(number: usize) -> Vec<u8> {
    (0..300_000).map(|at| (at / 7 + number) as u8).collect()
}

async fn write(client: &Client, number: usize) {
    let (me, path, content) = (Credentials::root(), format!("/f{number}"), content(number));
    let written = client.write_file(&me, path.as_bytes(), &content);
    written.await.expect("it is written");
}

async fn check(client: &Client, numbers: std::ops::Range<usize>) {
    let me = Credentials::root();
    for number in numbers {
        let path = format!("/f{number}");
        let read = client.read_file(&me, path.as_bytes()).await;
        assert!(read.expect("it is there") == content(number), "{path}");
    }
}

#[test]
fn files_are_written_and_read_in_virtual_time() {
    let mut world = world(1);
    with_client(&mut world, MINUTE, |client| async move {
        for number in 0..10 {
            write(&client, number).await;
        }
        check(&client, 0..10).await;
        client.close().await.expect("it ends");
    });
    with_client(&mut world, MINUTE, |client| async move {
        check(&client, 0..10).await;
    });
}

#[test]
fn what_was_synced_is_there_after_all_machines_lost_their_power() {
    let mut world = world(2);
    with_client(&mut world, MINUTE, |client| async move {
        for number in 0..5 {
            write(&client, number).await;
        }
        // Not closed: its machine crashes.
        std::mem::forget(client);
    });
    for part in world.parts() {
        world.lose_power(part).expect("it has files");
    }
    for part in world.parts() {
        world.host(part).boot().expect("a runtime");
        world.start(part).expect("it starts");
    }
    with_client(&mut world, MINUTE, |client| async move {
        check(&client, 0..5).await;
    });
}

#[test]
fn a_copy_is_copied_while_a_removal_is_not_synced() {
    let directory = tempfile::tempdir().unwrap();
    let [here, copy, again] = ["here", "copy", "again"].map(|it| directory.path().join(it));
    std::fs::create_dir(&here).unwrap();
    let disk = SimulatedDisk::new(1);
    let files = Directory::new(disk.clone(), here.clone());
    drop(files.create("removed", 0).unwrap());
    files.sync_dir().unwrap();
    files.remove("removed").unwrap();

    disk.copy_synced(&here, &copy).unwrap();
    disk.copy_synced(&copy, &again).unwrap();
    assert!(!here.join("removed").exists());
    for copy in [copy, again] {
        assert!(
            copy.join("removed").exists(),
            "a loss of power may leave it"
        );
    }
}

#[test]
fn writing_and_reading_go_on_while_a_datanode_is_cut_off_and_another_crashes() {
    let mut world = world(3);
    cut(&world, Part::Datanode(0), true);
    with_client(&mut world, MINUTE, |client| async move {
        for number in 0..5 {
            write(&client, number).await;
        }
    });
    cut(&world, Part::Datanode(0), false);
    world.run_for(MINUTE);
    world.host(Part::Datanode(1)).crash();
    with_client(&mut world, MINUTE, |client| async move {
        check(&client, 0..5).await;
    });
}

/// Makes changes that do not grow the namespace, enough for more than two snapshots.
async fn change_often(client: &Client) {
    let me = Credentials::root();
    for count in 0..500_u32 {
        let (value, mode) = (count.to_le_bytes(), SetXattrMode::Any);
        let set = client.setxattr(&me, InodeId::ROOT, b"user.count", &value, mode);
        set.await.expect("it is set");
    }
}

#[test]
fn a_namenode_that_was_away_takes_the_snapshot_of_another_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut world = World::new(4, 3, 3, 1, directory).expect("a cluster");
    world.run_for(Duration::from_secs(5));
    let away = Part::Namenode(2);
    let first = journal_dir(&world.path(away)).join("segment-00000000000000000001");
    world.host(away).crash();
    with_client(&mut world, MINUTE, |client| async move {
        change_often(&client).await;
    });
    assert!(first.exists(), "it was down");
    world.host(away).boot().expect("a runtime");
    world.start(away).expect("it starts");

    let (namenodes, bind, identity) = world.outside_operator().expect("an identity");
    let (journal, is_done) = (Journal::default(), Rc::new(Cell::new(false)));
    let (seen, done) = (journal.clone(), Rc::clone(&is_done));
    let connections = world.outside_connections().expect("an identity");
    world.spawn_outside(async move {
        let admin = |namenode: &SocketAddr| Admin::with_identity(&identity, bind, *namenode);
        let admins = namenodes.iter().map(admin);
        let mut admins: Vec<Admin> = admins.collect::<Result<_, _>>().expect("free ports");
        group::compare(&mut admins, &namenodes, connections, &seen).await;
        done.set(true);
    });
    let end = world.now() + MINUTE;
    while !is_done.get() {
        assert!(world.now() < end, "not all lead in turn");
        world.run_for(TICK);
    }
    assert_eq!(journal.failures(), [""; 0]);
    assert!(
        !first.exists(),
        "it has the snapshot instead of its records"
    );
}

fn options(seed: u64, faults: &[FaultKind]) -> Options {
    Options {
        seed,
        length: Duration::from_secs(12),
        namenodes: 1,
        datanodes: 4,
        clients: 2,
        mounts: 2,
        replay: None,
        without: BTreeSet::new(),
        faults: faults.to_vec(),
        directory: std::env::temp_dir(),
        until_failure: false,
        until_calm: false,
        interrupted: Arc::default(),
    }
}

thread_local! {
    static PANICS: Cell<u32> = const { Cell::new(0) };
}

/// Runs a simulation in which nothing may panic. Panics are counted, since the runtimes catch them.
fn simulate(options: &Options) -> Report {
    static COUNTED: Once = Once::new();
    COUNTED.call_once(|| {
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.set(PANICS.get() + 1);
            report(info);
        }));
    });
    let before = PANICS.get();
    let report = run(options).expect("it runs");
    assert_eq!(
        PANICS.get(),
        before,
        "a part panicked, seed {}",
        options.seed
    );
    report
}

#[test]
fn a_seed_decides_everything() {
    let [one, other] = [7, 7].map(|seed| simulate(&options(seed, &FaultKind::ALL)));
    for (line, (one, other)) in one.trace.iter().zip(&other.trace).enumerate() {
        assert_eq!(one, other, "line {line} of the trace");
    }
    assert_eq!(one, other);
    assert!(one.operations > 50, "{}", one.operations);
    let other = simulate(&options(8, &FaultKind::ALL));
    assert_ne!(one.trace, other.trace);
}

#[test]
fn a_seed_decides_what_several_namenodes_do() {
    let [one, other] = [3, 3].map(|seed| {
        simulate(&Options {
            namenodes: 3,
            length: Duration::from_secs(5),
            ..options(seed, &FaultKind::ALL)
        })
    });
    for (line, (one, other)) in one.trace.iter().zip(&other.trace).enumerate() {
        assert_eq!(one, other, "line {line} of the trace");
    }
    assert_eq!(one, other);
}

#[test]
fn nothing_fails_without_faults() {
    let report = simulate(&options(1, &[]));
    assert_eq!(report.failures, [""; 0]);
    assert_eq!(report.errors, 0);
}

/// Runs on several threads: it takes most of the time of this crate's tests.
#[test]
fn promises_are_kept_under_each_fault() {
    let faults = Mutex::new(FaultKind::ALL.into_iter().enumerate());
    thread::scope(|threads| {
        let work = || {
            loop {
                let Some((seed, fault)) = faults.lock().next() else {
                    return;
                };
                let report = simulate(&Options {
                    length: Duration::from_secs(5),
                    namenodes: if fault.is_for_group(false) { 1 } else { 3 },
                    ..options(seed as u64, &[fault])
                });
                assert_eq!(report.failures, [""; 0], "{fault:?}, seed {seed}");
            }
        };
        let threads = [(); 2].map(|()| threads.spawn(work));
        for thread in threads {
            thread.join().expect("it does not panic");
        }
    });
}
