use std::os::unix::ffi::OsStrExt;

use super::*;

fn manifest(job: &Job, number: u32) -> Manifest {
    Manifest {
        job: job.name.clone(),
        number,
        ..Manifest::sample(Vec::new())
    }
}

fn job(directory: &tempfile::TempDir) -> Job {
    let store = Store::open(directory.path().to_owned()).expect("it is there");
    store.job("job".parse().expect("a name"))
}

fn dump(job: &Job) -> Checkpoint {
    let lock = job.lock().expect("it is free");
    dump_with(job, &lock)
}

fn dump_with(job: &Job, lock: &JobLock) -> Checkpoint {
    let draft = job.begin(lock, "here").expect("a draft");
    let manifest = manifest(job, draft.number());
    draft.commit(manifest).expect("it is committed")
}

#[test]
fn a_store_that_is_not_there_is_refused_and_not_made() {
    let mount_point = tempfile::tempdir().expect("a directory");
    let path = mount_point.path().join("store");
    let error = Store::open(path.clone()).expect_err("nothing is mounted");
    assert!(
        error.to_string().contains("mount the file system"),
        "{error}"
    );
    fs::create_dir(&path).expect("it is made");
    let store = Store::open(path.clone()).expect("it is there");
    let job = store.job("job".parse().expect("a name"));
    // It is unmounted.
    fs::remove_dir(&path).expect("it is empty");
    job.lock().expect_err("its store is gone");
    assert!(!path.exists());
    fs::write(&path, "").expect("it is written");
    assert!(matches!(Store::open(path), Err(StoreError::NoStore(_))));
}

#[test]
fn a_link_to_a_store_is_followed_only_once() {
    let directory = tempfile::tempdir().expect("a directory");
    let [one, other, link] = ["one", "other", "link"].map(|name| directory.path().join(name));
    for made in [&one, &other] {
        fs::create_dir(made).expect("it is made");
    }
    std::os::unix::fs::symlink(&one, &link).expect("a link");
    let job = Store::open(link.clone()).expect("it is there");
    let job = job.job("job".parse().expect("a name"));
    fs::remove_file(&link).expect("it is there");
    std::os::unix::fs::symlink(&other, &link).expect("a link");
    dump(&job);
    assert!(one.join("job").exists() && !other.join("job").exists());
}

#[test]
fn a_checkpoint_is_there_once_it_is_committed() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    assert!(matches!(job.numbers(), Err(StoreError::NoJob(_))));
    assert!(job.newest().expect("no job is no error").is_none());
    assert_eq!(dump(&job).manifest.number, 1);
    assert_eq!(dump(&job).manifest.number, 2);
    assert_eq!(job.numbers().expect("numbers"), [1, 2]);
    let newest = job.newest().expect("it is whole").expect("there is one");
    assert_eq!(newest.manifest.number, 2);
}

#[test]
fn no_checkpoint_follows_the_last_number() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    dump(&job);
    let last = job.directory.join(directory_name(LAST_NUMBER));
    fs::create_dir(&last).expect("it is made");
    let lock = job.lock().expect("it is free");
    let error = job.begin(&lock, "here").expect_err("no number is left");
    assert!(matches!(&error, StoreError::NoNumber(_)), "{error}");
    job.remove(&lock, LAST_NUMBER).expect("it is there");
    assert_eq!(dump_with(&job, &lock).manifest.number, 2);
}

#[test]
fn jobs_are_directories() {
    let directory = tempfile::tempdir().expect("a directory");
    dump(&job(&directory));
    fs::write(directory.path().join("README"), "").expect("it is written");
    let store = Store::open(directory.path().to_owned()).expect("it is there");
    let jobs = store.jobs().expect("they are listed");
    let names: Vec<&str> = jobs.iter().map(|job| job.name().as_str()).collect();
    assert_eq!(names, ["job"]);
}

#[test]
fn a_link_is_no_job() {
    let directory = tempfile::tempdir().expect("a directory");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let of_somebody = job(&elsewhere);
    for _ in 0..2 {
        dump(&of_somebody);
    }
    fs::remove_file(of_somebody.directory.join(LOCK_FILE)).expect("it is there");
    let job = job(&directory);
    std::os::unix::fs::symlink(&of_somebody.directory, &job.directory).expect("a link");
    let store = Store::open(directory.path().to_owned()).expect("it is there");
    assert!(store.jobs().expect("they are listed").is_empty());
    let is_link = |error: StoreError| matches!(error, StoreError::Link(at) if at == job.directory);
    assert!(is_link(job.numbers().expect_err("a link")));
    assert!(is_link(job.newest().expect_err("a link")));
    assert!(is_link(job.lock().expect_err("a link")));
    assert!(!of_somebody.directory.join(LOCK_FILE).exists());
    assert_eq!(of_somebody.numbers().expect("numbers"), [1, 2]);
}

#[test]
fn a_link_is_no_checkpoint_and_nothing_is_replaced_where_it_leads() {
    let directory = tempfile::tempdir().expect("a directory");
    let elsewhere = tempfile::tempdir().expect("a directory");
    let of_somebody = job(&elsewhere);
    let mut checkpoint = dump(&of_somebody);
    checkpoint.manifest.depth = 2;
    of_somebody.replace_manifest(&checkpoint).expect("written");
    let job = job(&directory);
    dump(&job);
    let link = job.directory.join("000009");
    std::os::unix::fs::symlink(&checkpoint.directory, &link).expect("a link");
    let error = job.newest().expect_err("a link");
    assert!(matches!(error, StoreError::Link(at) if at == link));
    let lock = job.lock().expect("it is free");
    crate::image::compact_newest(&job, &lock, 1).expect_err("a link");
    let after = of_somebody.checkpoint(1).expect("it is whole");
    assert_eq!(after.manifest.depth, 2);
    // Only the link itself is removed, and it does not count as kept.
    let removed = job.collect(&lock, "here", 1).expect("it is collected");
    assert!(removed.is_empty(), "{removed:?}");
    job.remove(&lock, 9).expect("it is there");
    assert!(!link.is_symlink());
    of_somebody.checkpoint(1).expect("it is whole");
}

#[test]
fn a_lock_ends_though_a_child_has_its_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    let lock = job.lock().expect("it is free");
    assert!(matches!(job.lock(), Err(StoreError::Locked(_))));
    let of_a_child = lock.file.try_clone().expect("one more");
    drop(lock);
    job.lock().expect("it is free");
    drop(of_a_child);
}

#[test]
fn a_lock_whose_file_is_removed_is_not_held() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    // Another command has the file open when `rm` removes it.
    let opened = || {
        let lock = job.lock().expect("it is free");
        dump_with(&job, &lock);
        let opened = job.open_lock().expect("it is opened");
        job.remove_all(&lock).expect("it is removed");
        opened.expect("it was there")
    };
    let left = job.lock_opened(opened()).expect("it is free");
    assert!(left.is_none(), "the file is gone");
    let file = opened();
    let _new = job.lock().expect("it is free");
    let left = job.lock_opened(file).expect("nobody has that file locked");
    assert!(left.is_none(), "another command has locked the job");
}

#[test]
fn a_lock_that_is_a_link_makes_no_file_elsewhere() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    fs::create_dir(&job.directory).expect("it is made");
    let elsewhere = directory.path().join("elsewhere");
    std::os::unix::fs::symlink(&elsewhere, job.directory.join(LOCK_FILE)).expect("a link");
    job.lock().expect_err("it leads elsewhere");
    assert!(!elsewhere.exists());
}

#[test]
fn a_dump_that_failed_leaves_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    dump(&job);
    let lock = job.lock().expect("it is free");
    let draft = job.begin(&lock, "here").expect("a draft");
    let path = draft.directory().to_owned();
    fs::write(path.join("core-1.img"), "half").expect("it is written");
    assert_eq!(job.numbers().expect("numbers"), [1]);
    drop(draft);
    assert!(!path.exists());
    assert_eq!(job.numbers().expect("numbers"), [1]);
}

#[test]
fn what_a_crash_left_is_removed_by_the_next_dump_and_by_gc() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    dump(&job);
    let draft = job.directory.join(".dump-here.0");
    let other = job.directory.join(".dump-not.here.0");
    let removed = job.directory.join(".removed-7");
    for left in [&draft, &other, &removed] {
        fs::create_dir(left).expect("it is made");
    }
    assert_eq!(dump(&job).manifest.number, 2);
    fs::create_dir(&draft).expect("it is made");
    let lock = job.lock().expect("it is free");
    job.collect(&lock, "here", 2).expect("it is collected");
    assert!(!draft.exists() && !removed.exists());
    assert!(other.exists(), "another node may be at work on it");
    assert_eq!(job.numbers().expect("numbers"), [1, 2]);
}

#[test]
fn old_measurements_are_removed() {
    let directory = tempfile::tempdir().expect("a directory");
    let store = Store::open(directory.path().to_owned()).expect("it is there");
    let path = |name: &str| directory.path().join(name);
    for name in [".probe-old", ".probe-new"] {
        fs::write(path(name), "").expect("it is written");
    }
    for name in [".bench-old", ".bench-new", "job"] {
        fs::create_dir(path(name)).expect("it is made");
    }
    let long_ago = SystemTime::now() - 2 * DRAFT_AGE_MAX;
    for name in [".probe-old", ".bench-old", "job"] {
        let file = File::open(path(name)).expect("it is there");
        file.set_modified(long_ago).expect("it is ours");
    }
    store.collect().expect("they are removed");
    for (name, is_left) in [
        (".probe-old", false),
        (".probe-new", true),
        (".bench-old", false),
        (".bench-new", true),
        ("job", true),
    ] {
        assert_eq!(path(name).exists(), is_left, "{name}");
    }
}

#[test]
fn the_newest_are_kept_and_never_none() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    for _ in 0..4 {
        dump(&job);
    }
    let lock = job.lock().expect("it is free");
    let removed = job.collect(&lock, "here", 2).expect("it is collected");
    assert_eq!(removed, [1, 2]);
    assert_eq!(job.collect(&lock, "here", 0).expect("collected"), [3]);
    assert_eq!(job.numbers().expect("numbers"), [4]);
}

/// Locks do not extend to other mounts.
#[test]
fn two_nodes_remove_the_same_ones() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    for _ in 0..40 {
        dump(&job);
    }
    let lock = job.lock().expect("it is free");
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| job.collect(&lock, "here", 1).expect("it is collected"));
        }
    });
    assert_eq!(job.numbers().expect("numbers"), [40]);
}

#[test]
fn what_is_not_usable_does_not_count_as_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    let damage = |checkpoint: Checkpoint| {
        fs::write(checkpoint.directory.join(MANIFEST_FILE), "{").expect("it is written");
    };
    dump(&job);
    damage(dump(&job));
    dump(&job);
    damage(dump(&job));
    let lock = job.lock().expect("it is free");
    let removed = job.collect(&lock, "here", 1).expect("it is collected");
    assert_eq!(removed, [1, 2]);
    assert_eq!(job.numbers().expect("numbers"), [3, 4]);
    damage(job.checkpoint(3).expect("it is usable"));
    // None is removed: which of them can be repaired is unknown.
    let removed = job.collect(&lock, "here", 1).expect("it is collected");
    assert!(removed.is_empty(), "{removed:?}");
}

#[test]
fn a_job_is_worked_on_by_one() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    let lock = job.lock().expect("it is free");
    assert!(matches!(job.lock(), Err(StoreError::Locked(_))));
    drop(lock);
    assert!(job.lock().is_ok());
}

#[test]
fn two_nodes_never_make_one_checkpoint() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    // Locks do not extend to other mounts: only the rename decides.
    let lock = job.lock().expect("it is free");
    let here = job.begin(&lock, "here").expect("a draft");
    let there = job.begin(&lock, "there").expect("a draft");
    there.commit(manifest(&job, 1)).expect("the first one");
    let second = here.commit(manifest(&job, 1));
    assert!(matches!(
        second,
        Err(StoreError::Overtaken { number: 1, .. })
    ));
    assert_eq!(job.numbers().expect("numbers"), [1]);
}

#[test]
fn two_machines_of_one_name_mix_no_checkpoint() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    let lock = job.lock().expect("it is free");
    let first = job.begin(&lock, "same").expect("a draft");
    let second = job.begin(&lock, "same").expect("a draft");
    fs::write(second.directory().join("core-1.img"), "of the second").expect("it is written");
    let error = first
        .commit(manifest(&job, 1))
        .expect_err("its images are gone");
    assert!(matches!(error, StoreError::Io { .. }), "{error}");
    let checkpoint = second.commit(manifest(&job, 1)).expect("it is whole");
    assert!(checkpoint.directory.join("core-1.img").exists());
    assert_eq!(job.numbers().expect("numbers"), [1]);
}

/// If a draft is removed that another node is about to commit, there is never a checkpoint without its images.
#[test]
fn a_draft_is_removed_as_a_whole() {
    const IMAGES: usize = 3000;
    type Remove = fn(&Job, &JobLock);
    let ways: [Remove; 3] = [
        |job, lock| drop(job.begin(lock, "same").expect("a draft")),
        |job, lock| drop(job.collect(lock, "same", 1).expect("it is collected")),
        |job, lock| job.remove_all(lock).expect("it is removed"),
    ];
    for remove in ways {
        let directory = tempfile::tempdir().expect("a directory");
        let job = job(&directory);
        let lock = job.lock().expect("it is free");
        let draft = job.begin(&lock, "same").expect("a draft");
        let images = draft.directory().to_owned();
        for number in 0..IMAGES {
            fs::write(images.join(format!("core-{number}.img")), "").expect("it is written");
        }
        std::thread::scope(|scope| {
            let removing = scope.spawn(|| remove(&job, &lock));
            let is_whole = || fs::read_dir(&images).is_ok_and(|left| left.count() == IMAGES);
            // A thread that removes nothing must fail instead of blocking the test.
            while !removing.is_finished() && is_whole() {}
            let error = draft.commit(manifest(&job, 1)).expect_err("it is gone");
            assert!(matches!(error, StoreError::Io { .. }), "{error}");
            removing.join().expect("no panic");
        });
        assert!(!job.directory.join("000001").exists());
        assert!(names_in(&job.directory).expect("listed").len() <= 1);
    }
}

#[test]
fn a_job_is_removed_with_all_that_is_in_its_directory() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    dump(&job);
    for left in [".dump-not.here.0", ".removed-7", "of-somebody"] {
        fs::create_dir(job.directory.join(left)).expect("it is made");
    }
    // The last name is not UTF-8.
    for name in [&b"README"[..], b"of-somebody-\xff"] {
        let path = job.directory.join(OsStr::from_bytes(name));
        fs::write(path, "").expect("it is written");
    }
    let lock = job.lock().expect("it is free");
    job.remove_all(&lock).expect("it is removed");
    assert!(!job.directory.exists());
}

#[test]
fn an_unusable_newest_checkpoint_is_reported_and_the_older_one_untouched() {
    let directory = tempfile::tempdir().expect("a directory");
    let job = job(&directory);
    dump(&job);
    let second = dump(&job);
    let path = second.directory.join(MANIFEST_FILE);
    fs::write(&path, r#"{"version": 9}"#).expect("it is written");
    let error = job.newest().expect_err("it is of a later release");
    assert!(error.to_string().contains("version 9"), "{error}");
    assert_eq!(job.checkpoint(1).expect("whole").manifest.number, 1);
}
