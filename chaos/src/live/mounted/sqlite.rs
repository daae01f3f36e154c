//! SQLite databases, one for each journal mode. Each transaction is a process of `sqlite3`.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

use rand::RngExt;
use rand::rngs::SmallRng;

use super::job::{Check, Job, Place, output};
use super::state::{Era, Shared};
use super::work::Reports;
use crate::live::metrics::Operation;
use crate::live::verify::{Comparison, note};
use crate::random;

const DIRECTORY: &str = "sqlite";
const MODES: [&str; 2] = ["wal", "delete"];
const PAYLOAD_BYTES_MAX: usize = 3_000;
/// The number of rows of each transaction: all of them are there, or none.
const ROWS: usize = 2;
/// One step out of this many checks the database during the run.
const CHECKED: u32 = 20;

/// A transaction that began.
#[derive(Debug)]
struct Transaction {
    payload: String,
    committed: bool,
}

/// The promised contents of a database.
#[derive(Debug, Default)]
struct Promised(BTreeMap<u64, Transaction>);

impl Promised {
    /// What is wrong with a list of rows, each a line with the number of the transaction and its payload.
    fn difference(&self, rows: &str) -> Option<String> {
        let mut found: BTreeMap<u64, usize> = BTreeMap::new();
        for line in rows.lines() {
            let row = line.split_once('|');
            let row = row.and_then(|(number, payload)| Some((number.parse().ok()?, payload)));
            let promised = row.and_then(|(number, payload): (u64, &str)| {
                let transaction = self.0.get(&number)?;
                (transaction.payload == payload).then_some(number)
            });
            let Some(number) = promised else {
                let shown: String = line.chars().take(40).collect();
                return Some(format!("the row `{shown}` was never inserted"));
            };
            *found.entry(number).or_default() += 1;
        }
        self.0.iter().find_map(|(number, transaction)| {
            let rows = found.get(number).copied().unwrap_or(0);
            let right = rows == ROWS || rows == 0 && !transaction.committed;
            (!right).then(|| {
                let committed = transaction.committed;
                format!("transaction {number} (committed: {committed}) has {rows} of {ROWS} rows")
            })
        })
    }

    fn has_committed(&self) -> bool {
        self.0.values().any(|it| it.committed)
    }

    fn bytes(&self) -> usize {
        let committed = self.0.values().filter(|it| it.committed);
        committed.map(|it| it.payload.len() * ROWS).sum()
    }
}

/// The program that uses the databases.
pub(crate) struct Sqlite {
    place: Place,
    /// The directory on the mount on which they are checked at the end.
    checked: PathBuf,
    rng: SmallRng,
    databases: [Promised; MODES.len()],
    next: u64,
}

impl Sqlite {
    /// Creates a program on a mount; `checked_at` is the mount point on which its databases are checked.
    pub fn new(
        mount: (usize, &Path),
        checked_at: &Path,
        seed: u64,
        all: (&Arc<Shared>, &Reports),
    ) -> Self {
        Self {
            place: Place::new(mount, DIRECTORY, all),
            checked: checked_at.join(DIRECTORY),
            rng: random::stream(seed, "sqlite"),
            databases: Default::default(),
            next: 0,
        }
    }

    fn commit(&mut self, era: Era, database: usize) {
        let mode = MODES[database];
        let number = self.next;
        self.next += 1;
        let len = self.rng.random_range(1..PAYLOAD_BYTES_MAX);
        let payload: String = (0..len)
            .map(|_| char::from(self.rng.random_range(b'a'..=b'z')))
            .collect();
        let rows: Vec<String> = (0..ROWS)
            .map(|row| format!("({number}, {row}, '{payload}')"))
            .collect();
        let transaction = Transaction {
            payload,
            committed: false,
        };
        self.databases[database].0.insert(number, transaction);
        let sql = format!(
            "PRAGMA journal_mode={mode}; PRAGMA synchronous=FULL; BEGIN IMMEDIATE; CREATE TABLE IF NOT EXISTS \
             rows (number INTEGER, row INTEGER, payload TEXT, PRIMARY KEY (number, row)); \
             INSERT INTO rows VALUES {}; COMMIT;",
            rows.join(", ")
        );
        let began = Instant::now();
        match sqlite(&self.place.directory, database, &sql) {
            Ok(said) => {
                self.place
                    .reports
                    .done(Operation::Write, began.elapsed(), 0);
                if said.trim() != mode {
                    let text = format!("SQLite has no journal of mode {mode}: {}", said.trim());
                    self.place.reports.wrong(&text);
                }
                if self.place.counts(era)
                    && let Some(transaction) = self.databases[database].0.get_mut(&number)
                {
                    transaction.committed = true;
                }
            }
            Err(error) => self.place.failed(Operation::Write, "commit", &error),
        }
    }

    fn check(&self, era: Era, database: usize) {
        let began = Instant::now();
        match self.difference(&self.place.directory, database) {
            Ok(difference) => {
                let difference = difference.filter(|_| self.place.counts(era));
                let promised = &self.databases[database];
                let compared = difference.is_none() && self.place.counts(era);
                let bytes = if compared { promised.bytes() } else { 0 };
                self.place
                    .reports
                    .done(Operation::Read, began.elapsed(), bytes);
                if let Some(difference) = difference {
                    let path = path(database);
                    let text = format!("{path} during the run: {difference}");
                    self.place.reports.wrong(&text);
                }
            }
            Err(error) => self.place.failed(Operation::Read, "select", &error),
        }
    }

    fn difference(&self, directory: &Path, database: usize) -> io::Result<Option<String>> {
        let promised = &self.databases[database];
        if !promised.has_committed() {
            return Ok(None);
        }
        let said = sqlite(directory, database, "PRAGMA integrity_check;")?;
        if said.trim() != "ok" {
            let said: String = said.chars().take(200).collect();
            return Ok(Some(format!("the integrity check says: {said}")));
        }
        let select = "SELECT number, payload FROM rows ORDER BY number, row;";
        let rows = sqlite(directory, database, select)?;
        Ok(promised.difference(&rows))
    }
}

impl Job for Sqlite {
    fn begin(&mut self) -> io::Result<()> {
        self.place.make()
    }

    fn step(&mut self, era: Era) {
        let drawn = self.rng.random_range(0..MODES.len());
        let checks = self.rng.random_range(0..CHECKED) == 0;
        match lacking(&self.databases, drawn) {
            Some(database) => self.commit(era, database),
            None if checks => self.check(era, drawn),
            None => self.commit(era, drawn),
        }
    }

    fn compare(&mut self, _check: &Check<'_>, to: &mut Comparison) {
        for (database, promised) in self.databases.iter().enumerate() {
            to.names += 1;
            let path = path(database);
            if !promised.has_committed() {
                note(&mut to.wrong, format!("{path}: nothing was committed"));
                continue;
            }
            match self.difference(&self.checked, database) {
                Ok(None) => {
                    to.files += 1;
                    to.bytes += promised.bytes() as u64;
                }
                Ok(Some(difference)) => note(&mut to.wrong, format!("{path}: {difference}")),
                Err(error) => note(&mut to.lost, format!("{path}: {error}")),
            }
        }
    }
}

/// A database without a commit so far, if possible the one that was drawn. At the end each of them must have a commit,
/// which cannot be left to chance in a short run or with a slow mount.
fn lacking(databases: &[Promised], drawn: usize) -> Option<usize> {
    let mut all = std::iter::once(drawn).chain(0..databases.len());
    all.find(|&database| !databases[database].has_committed())
}

fn path(database: usize) -> String {
    format!("/{DIRECTORY}/{}.db", MODES[database])
}

fn sqlite(directory: &Path, database: usize, sql: &str) -> io::Result<String> {
    let file = directory.join(format!("{}.db", MODES[database]));
    let mut command = Command::new("sqlite3");
    // Without the settings of any user.
    command.args(["-batch", "-bail", "-init", "/dev/null"]);
    output(command.arg(file).arg(sql))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_database_gets_a_commit_before_chance_decides() {
        let mut databases: [Promised; MODES.len()] = Default::default();
        let mut add = |database: usize, committed| {
            let payload = String::new();
            let transaction = Transaction { payload, committed };
            databases[database]
                .0
                .insert(u64::from(committed), transaction);
            [0, 1].map(|drawn| lacking(&databases, drawn))
        };
        // A failed commit does not count.
        assert_eq!(add(1, false), [Some(0), Some(1)]);
        assert_eq!(add(1, true), [Some(0); 2]);
        assert_eq!(add(0, true), [None; 2]);
    }

    #[test]
    fn what_was_committed_is_there_and_a_transaction_is_whole() {
        let mut promised = Promised::default();
        for (number, committed) in [(0, true), (1, false)] {
            let payload = format!("row{number}");
            let transaction = Transaction { payload, committed };
            promised.0.insert(number, transaction);
        }
        for right in ["0|row0\n0|row0\n", "0|row0\n0|row0\n1|row1\n1|row1\n"] {
            assert_eq!(promised.difference(right), None, "{right}");
        }
        for wrong in [
            "",
            "0|row0\n",
            "0|row0\n0|row0\n1|row1\n",
            "0|row0\n0|row1\n",
            "0|row0\n0|row0\n2|row2\n",
            "0|row0\n0|row0\nx",
        ] {
            assert!(promised.difference(wrong).is_some(), "{wrong}");
        }
    }
}
