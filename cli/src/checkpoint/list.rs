//! `harvestfs checkpoint list`, `rm` and `gc`

use clap::Args;
use harvestfs_chaos::report::Table;
use harvestfs_checkpoint::image::{self, CHAIN_DEPTH_MAX};
use harvestfs_checkpoint::manifest::{JobName, Manifest};
use harvestfs_checkpoint::node::draft_maker;
use harvestfs_checkpoint::store::{Job, StoreError};

use super::CheckpointArgs;
use crate::{output, units};

/// Arguments of `harvestfs checkpoint list`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs checkpoint list train")]
pub struct ListArgs {
    /// Only this job.
    job: Option<JobName>,
    /// Print the manifests as a JSON array.
    #[arg(long)]
    json: bool,
}

/// Arguments of `harvestfs checkpoint rm`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    harvestfs checkpoint rm train\n  \
    harvestfs checkpoint rm train --number 3")]
pub struct RmArgs {
    /// Name of the job.
    job: JobName,
    /// Only this checkpoint.
    #[arg(long)]
    number: Option<u32>,
}

/// Arguments of `harvestfs checkpoint gc`.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  \
    harvestfs checkpoint gc --keep 3")]
pub struct GcArgs {
    /// Only this job.
    job: Option<JobName>,
    /// How many checkpoints of each job are kept [default: `keep` in `[checkpoint]` of the
    /// configuration, or 2].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..))]
    keep: Option<u16>,
    /// How many checkpoints may share pages before the last one is stored whole.
    #[arg(long, default_value_t = CHAIN_DEPTH_MAX)]
    depth: u32,
}

/// Runs `list`. What cannot be used is shown with the reason, and makes the command fail.
pub fn list(args: &CheckpointArgs, command: &ListArgs) -> anyhow::Result<()> {
    let mut manifests: Vec<Manifest> = Vec::new();
    let mut unusable = 0;
    for job in jobs(args, command.job.as_ref())? {
        let numbers = match job.numbers() {
            // It has been removed since it was listed.
            Err(StoreError::NoJob(_)) if command.job.is_none() => continue,
            numbers => numbers?,
        };
        unusable += read_manifests(&job, &numbers, &mut manifests);
    }
    if command.json {
        println!("{}", serde_json::to_string_pretty(&manifests)?);
    } else {
        print!("{}", table(&manifests));
    }
    anyhow::ensure!(unusable == 0, "{unusable} checkpoints are not usable");
    Ok(())
}

/// Adds those of checkpoints that were seen. Returns how many cannot be used.
fn read_manifests(job: &Job, numbers: &[u32], manifests: &mut Vec<Manifest>) -> usize {
    let mut unusable = 0;
    for &number in numbers {
        match job.checkpoint(number) {
            Ok(checkpoint) => manifests.push(checkpoint.manifest),
            // It has been removed since it was listed.
            Err(StoreError::NoCheckpoint { .. }) => {}
            Err(error) => {
                eprintln!("harvestfs: {error}");
                unusable += 1;
            }
        }
    }
    unusable
}

fn table(manifests: &[Manifest]) -> Table {
    let mut table = Table::new(&[
        "job", "number", "made", "node", "size", "sent", "parent", "depth", "stopped",
    ]);
    for manifest in manifests {
        let made = std::time::Duration::from_millis(manifest.created_unix_ms);
        table.row(&[
            manifest.job.to_string(),
            manifest.number.to_string(),
            units::utc(made),
            manifest.node.clone(),
            units::human(manifest.size_bytes()),
            units::human(manifest.sent_bytes()),
            manifest.parent.map(|it| it.to_string()).unwrap_or_default(),
            manifest.depth.to_string(),
            format!("{:.2} s", manifest.stopped_ms as f64 / 1000.0),
        ]);
    }
    table
}

/// Runs `rm`.
pub fn remove(args: &CheckpointArgs, command: &RmArgs) -> anyhow::Result<()> {
    let job = args.job(&command.job)?;
    // Taking the lock would create the directory of a job that does not exist.
    job.numbers()?;
    let lock = job.lock()?;
    match command.number {
        Some(number) => job.remove(&lock, number)?,
        None => job.remove_all(&lock)?,
    }
    Ok(())
}

/// Runs `gc`. What goes wrong with one job keeps none of the others as it is.
pub fn collect(args: &CheckpointArgs, command: &GcArgs) -> anyhow::Result<()> {
    let keep = match command.keep {
        Some(keep) => usize::from(keep),
        None => args.keep()?,
    };
    if let Some(name) = &command.job {
        return collect_job(&args.job(name)?, keep, command.depth);
    }
    let store = args.store()?;
    let mut failed = 0;
    for job in store.jobs()? {
        let Err(error) = collect_job(&job, keep, command.depth) else {
            continue;
        };
        match error.downcast_ref::<StoreError>() {
            // It has been removed since it was listed.
            Some(StoreError::NoJob(_)) => {}
            // A dump collects its own job.
            Some(StoreError::Locked(_)) => {
                println!("{}: left to the command that works on it", job.name());
            }
            _ => {
                output::complain(&error.context(format!("job {}", job.name())));
                failed += 1;
            }
        }
    }
    store.collect()?;
    anyhow::ensure!(failed == 0, "{failed} jobs could not be collected");
    Ok(())
}

fn collect_job(job: &Job, keep: usize, depth: u32) -> anyhow::Result<()> {
    // Taking the lock would create the directory of a job that does not exist.
    job.numbers()?;
    let lock = job.lock()?;
    let removed = job.collect(&lock, &draft_maker(), keep)?;
    let is_compacted = image::compact_newest(job, &lock, depth)?;
    println!(
        "{}: {} removed{}",
        job.name(),
        removed.len(),
        if is_compacted {
            ", the newest stored whole"
        } else {
            ""
        }
    );
    Ok(())
}

fn jobs(args: &CheckpointArgs, only: Option<&JobName>) -> anyhow::Result<Vec<Job>> {
    let store = args.store()?;
    Ok(match only {
        Some(name) => vec![store.job(name.clone())],
        None => store.jobs()?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::Parser;
    use harvestfs_checkpoint::manifest::{MANIFEST_FILE, MANIFEST_VERSION};
    use harvestfs_checkpoint::store::Store;

    use super::super::Command;
    use super::*;

    #[derive(Parser)]
    struct CommandLine {
        #[command(flatten)]
        args: CheckpointArgs,
    }

    fn dump(job: &Job) {
        let lock = job.lock().expect("it is free");
        let draft = job.begin(&lock, "here").expect("a draft");
        let manifest = manifest(job.name().clone(), draft.number());
        draft.commit(manifest).expect("it is committed");
    }

    fn manifest(job: JobName, number: u32) -> Manifest {
        Manifest {
            version: MANIFEST_VERSION,
            job,
            number,
            parent: None,
            depth: 0,
            node: "here".to_owned(),
            pid: 42,
            created_unix_ms: 0,
            stopped_ms: 0,
            progress_ms: 0,
            left_running: false,
            criu: String::new(),
            allow: Vec::new(),
            images: Vec::new(),
        }
    }

    #[test]
    fn a_manifest_of_any_time_is_listed() {
        let late = Manifest {
            created_unix_ms: u64::MAX,
            ..manifest("job".parse().expect("a name"), 1)
        };
        let shown = table(&[late]).to_string();
        assert!(shown.contains("after the year 9999"), "{shown}");
    }

    #[test]
    fn what_was_removed_meanwhile_is_not_unusable() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path().to_owned()).expect("it is there");
        let job = store.job("job".parse().expect("a name"));
        dump(&job);
        let mut manifests = Vec::new();
        // As if the second one had existed when they were listed.
        assert_eq!(read_manifests(&job, &[1, 2], &mut manifests), 0);
        assert_eq!(manifests.len(), 1);
        let path = directory.path().to_str().expect("text");
        let CommandLine { args } = CommandLine::parse_from(["checkpoint", "--store", path, "list"]);
        let Command::List(command) = &args.command else {
            panic!("{args:?}");
        };
        list(&args, command).expect("it is usable");
        let link = job.directory().join("000002");
        std::os::unix::fs::symlink("000001", &link).expect("a link");
        list(&args, command).expect_err("a link is none");
        fs::remove_file(&link).expect("it is there");
        fs::write(job.directory().join("000001").join(MANIFEST_FILE), "{").expect("it is written");
        list(&args, command).expect_err("it is damaged");
    }

    #[test]
    fn one_job_that_is_busy_or_damaged_keeps_no_other_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = Store::open(directory.path().to_owned()).expect("it is there");
        let [a, b] = ["a", "b"].map(|name| store.job(name.parse().expect("a name")));
        for job in [&a, &b] {
            for _ in 0..3 {
                dump(job);
            }
        }
        fs::write(directory.path().join("README"), "").expect("it is written");
        let path = directory.path().to_str().expect("text");
        let arguments = ["checkpoint", "--store", path, "gc", "--keep", "1"];
        let CommandLine { args } = CommandLine::parse_from(arguments);
        let Command::Gc(command) = &args.command else {
            panic!("{args:?}");
        };
        let busy = a.lock().expect("it is free");
        collect(&args, command).expect("one is busy");
        assert_eq!(a.numbers().expect("numbers"), [1, 2, 3]);
        assert_eq!(b.numbers().expect("numbers"), [3]);
        drop(busy);
        dump(&b);
        let newest = a.directory().join("000003").join(MANIFEST_FILE);
        fs::write(newest, "{").expect("it is written");
        let error = collect(&args, command).expect_err("one is damaged");
        assert_eq!(error.to_string(), "1 jobs could not be collected");
        assert_eq!(a.numbers().expect("numbers"), [2, 3]);
        assert_eq!(b.numbers().expect("numbers"), [4]);
    }
}
