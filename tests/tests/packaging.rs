//! What is shipped for service managers fits the binary.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use harvestfs_tests::{harvestfs, have_program};

const INSTALLED: &str = "/usr/local/bin/harvestfs";

fn units() -> Vec<PathBuf> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/systemd");
    let entries = fs::read_dir(directory).expect("the units");
    let mut units: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    units.sort();
    assert_eq!(units.len(), 3, "one for each part: {units:?}");
    units
}

#[test]
fn systemd_accepts_the_units() {
    let Some(analyze) = have_program("systemd-analyze", "apt install systemd") else {
        return;
    };
    let directory = tempfile::tempdir().expect("a directory");
    for unit in units() {
        // It complains of programs that are not there, and nothing is installed here.
        let text = fs::read_to_string(&unit).expect("a unit");
        let text = text.replace(INSTALLED, &harvestfs().to_string_lossy());
        let copy = directory.path().join(unit.file_name().expect("a name"));
        fs::write(&copy, text).expect("a copy");
        let output = Command::new(&analyze)
            .arg("verify")
            .arg("--man=no")
            .arg(&copy)
            .output()
            .expect("systemd-analyze runs");
        let said = String::from_utf8_lossy(&output.stderr);
        let name = copy.file_name().expect("a name").to_string_lossy();
        // Units of this machine that it depends on may have faults of their own.
        let about_it = said.lines().filter(|line| line.contains(&*name));
        assert_eq!(about_it.collect::<Vec<_>>(), [""; 0], "{name}");
    }
}

#[test]
fn the_units_start_what_the_binary_has() {
    for unit in units() {
        let text = fs::read_to_string(&unit).expect("a unit");
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("ExecStart="))
            .expect("a command");
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some(INSTALLED), "{}", unit.display());
        // Words before it that are unknown are refused before help is given.
        let output = Command::new(harvestfs())
            .args(words)
            .arg("--help")
            .output()
            .expect("the binary runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", unit.display());
    }
}
