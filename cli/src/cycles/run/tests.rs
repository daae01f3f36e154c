use harvestfs_protocol::classes::{CLASSES_VERSION, UtilisationClass};
use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::*;

fn class(class: u32, pattern: TenantPattern, permille: &[u16]) -> UtilisationClass {
    let server = |(number, permille): (usize, &u16)| ClassedServer {
        name: format!("s{class}-{number}"),
        cpu_permille: Some(*permille),
        memory_permille: None,
        cores: None,
        memory_mib: None,
    };
    UtilisationClass {
        class,
        pattern,
        average_cpu_permille: 100,
        peak_cpu_permille: 500,
        tenants: Vec::new(),
        servers: permille.iter().enumerate().map(server).collect(),
        cpu_permille: None,
        headroom: None,
    }
}

fn classes(classes: Vec<UtilisationClass>) -> Classes {
    Classes {
        version: CLASSES_VERSION,
        analysed_unix_s: None,
        classes,
        without_class: Vec::new(),
    }
}

fn dag(tasks: u32) -> Dag {
    Dag::new(&[Stage {
        name: "all".to_owned(),
        tasks: NonZeroU32::new(tasks).unwrap(),
        cores_per_task: NonZeroU32::MIN,
        inputs: Vec::new(),
    }])
    .unwrap()
}

fn twelve() -> ServerCores {
    ServerCores {
        given: None,
        here: NonZeroU32::new(12).unwrap(),
    }
}

fn chosen(of: &Classes, job_type: JobType, tasks: u32) -> Option<u32> {
    let cores = twelve();
    let mut rng = SmallRng::seed_from_u64(1);
    choose(of, cores, job_type, &dag(tasks), &mut rng)
        .unwrap()
        .0
}

#[test]
fn the_class_has_room_for_the_job() {
    use TenantPattern::{Constant, Periodic};
    let two = classes(vec![
        class(4, Constant, &[900]),
        class(7, Periodic, &[100, 200]),
    ]);
    assert_eq!(chosen(&two, JobType::Medium, 5), Some(7));
    // Peaks of owners leave 2 cores of a server.
    assert_eq!(chosen(&two, JobType::Long, 5), None);
    assert_eq!(chosen(&two, JobType::Long, 4), Some(7));
    // Both together.
    let both = classes(vec![
        class(0, Constant, &[100]),
        class(1, Constant, &[0, 0]),
    ]);
    assert_eq!(chosen(&both, JobType::Short, 20), Some(1));
    assert_eq!(chosen(&classes(Vec::new()), JobType::Short, 1), None);
    let cores = twelve();
    let mut rng = SmallRng::seed_from_u64(1);
    let error = choose(&two, cores, JobType::Short, &dag(25), &mut rng).unwrap_err();
    assert_eq!((error.need_cores.get(), error.cluster_cores), (25, 24));
}

#[test]
fn labels_are_put_into_commands() {
    let word = |word: &str| with_label(OsStr::new(word), "harvestfs-3");
    assert_eq!(word("-Dx={label}"), "-Dx=harvestfs-3");
    assert_eq!(word("{label}{label}x"), "harvestfs-3harvestfs-3x");
    assert_eq!(word("{labe"), "{labe");
}

#[test]
fn jobs_that_make_no_sense_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("job.toml");
    let error = |text: &str| {
        std::fs::write(&path, text).unwrap();
        format!("{:#}", Job::load(&path).unwrap_err())
    };
    let stage = |name: &str, input: &str| {
        format!("[[stages]]\nname = \"{name}\"\ntasks = 1\ninputs = [\"{input}\"]\n")
    };
    let cycle = format!("name = \"j\"\n{}{}", stage("a", "b"), stage("b", "a"));
    assert!(error(&cycle).contains("stages wait for each other: "));
    let unknown = format!("name = \"j\"\n{}", stage("a", "c"));
    assert!(error(&unknown).contains("`c`, which is no stage"));
    assert!(error("name = \"j\"\nstages = []").contains("has no stage"));
    assert!(error("name = \"j\"\nstages = 3").contains("is not understood"));
}

#[test]
fn lengths_of_jobs_say_what_is_short_and_long() {
    let mut runs: BTreeMap<String, LastRun> = BTreeMap::new();
    let mut add = |number: u32, cores: Option<u64>| {
        let run = LastRun {
            length_s: f64::from(number) * 10.0,
            ended_unix_s: 0,
            cores,
        };
        runs.insert(number.to_string(), run);
        runs.len()
    };
    // Runs with unknown cores do not count.
    add(999, None);
    for number in 1..10 {
        add(number, Some(3));
    }
    let even = Capacities {
        unpredictable: 1.0,
        periodic: 1.0,
        constant: 1.0,
    };
    assert_eq!(thresholds(&runs, even), Thresholds::PAPER);
    let tenth = LastRun {
        length_s: 100.0,
        ended_unix_s: 0,
        cores: Some(3),
    };
    runs.insert("10".to_owned(), tenth);
    // Of 550 x 3 core-seconds, 210 x 3 are before 65 s and 360 x 3 before 85 s: as near to thirds as can be.
    let found = thresholds(&runs, even);
    assert_eq!((found.short_below_s(), found.long_above_s()), (65.0, 85.0));
    let nothing = Capacities {
        unpredictable: 0.0,
        periodic: 0.0,
        constant: 0.0,
    };
    assert_eq!(thresholds(&runs, nothing), Thresholds::PAPER);
}

#[test]
fn what_a_server_says_of_its_cores_counts() {
    use TenantPattern::{Constant, Periodic};
    let mut two = classes(vec![class(0, Constant, &[0, 0]), class(1, Periodic, &[0])]);
    two.classes[0].servers[1].cores = Some(4);
    let found = capacities(&two, twelve());
    // Owners use a tenth on average.
    assert!((found.constant - 14.4).abs() < 1e-9, "{found:?}");
    assert!((found.periodic - 10.8).abs() < 1e-9 && found.unpredictable == 0.0);
    let given = ServerCores {
        given: NonZeroU32::new(2),
        ..twelve()
    };
    assert!((capacities(&two, given).constant - 3.6).abs() < 1e-9);
}

#[tokio::test]
async fn a_signal_that_comes_before_the_command_has_begun_is_passed_on() {
    let mut signals = Ending::listen().unwrap();
    let own = rustix::process::getpid();
    kill_process(own, Signal::TERM).unwrap();
    let mut command = Command::new("sleep");
    command.arg("100").kill_on_drop(true);
    let run = run_to_end(&mut command, &mut signals);
    let status = tokio::time::timeout(std::time::Duration::from_secs(20), run).await;
    let status = status.expect("it was told").unwrap();
    assert_eq!(status.signal(), Some(15));
    assert_eq!(Ended::of(status).map(|it| it.status), Some(143));
}

#[test]
fn the_last_length_is_remembered() {
    let directory = tempfile::tempdir().unwrap();
    let history = History {
        path: directory.path().join("lengths.json"),
    };
    assert!(history.load().unwrap().is_empty());
    history.remember("a", 1.0, 2).unwrap();
    history.remember("b", 500.0, 2).unwrap();
    history.remember("a", 2.5, 2).unwrap();
    let runs = history.load().unwrap();
    assert_eq!((runs["a"].length_s, runs["b"].length_s), (2.5, 500.0));
    // This also works with a name that looks like that of a lock.
    let history = History {
        path: directory.path().join("lengths.lock"),
    };
    history.remember("a", 1.0, 2).unwrap();
    history.remember("b", 2.0, 2).unwrap();
    assert_eq!(history.load().unwrap().len(), 2);
    std::fs::write(&history.path, "{").unwrap();
    assert!(format!("{:#}", history.load().unwrap_err()).contains("is damaged"));
}
