//! The files of history, stored beside the journal.
//!
//! | name | is |
//! |---|---|
//! | `servers` | the owners of each server, and when it was reimaged |
//! | `day-00` to `day-30` | CPU use of one day each; the file number is the day modulo 31, which bounds their number |
//! | `*.damaged` | a file in which something could not be read, as it was found; the newest of each |
//!
//! Files are appended to in checksummed frames (see `harvestfs_telemetry::history::records`). They are rewritten when
//! they have grown to a multiple of their contents, were damaged, or a write or sync of them failed. A file that was
//! found at the start is not appended to, either: what can be read from it may not be on the disk, and no sync would
//! write it. None of this is needed to serve files: every failure is reported and leaves a gap in history.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use harvestfs_protocol::durable;
use harvestfs_telemetry::history::records::{DayRecord, FILE_HEADER, append};
use harvestfs_telemetry::history::{DAYS_KEPT, History, Level, SLOTS_PER_DAY, Slot};

/// Largest file that is read, in bytes: a hundred times what a large cluster needs.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// How much a file may grow, in bytes, beyond twice its last rewritten size before it is rewritten.
const SLACK_BYTES: u64 = 1 << 20;
/// Days of history.
const DAYS: usize = DAYS_KEPT as usize;
/// Slots of a day.
const DAY_SLOTS: u32 = SLOTS_PER_DAY as u32;
/// Maximum number of problems that are kept for the operator.
const PROBLEMS_MAX: usize = 16;

/// The files of history, open for appending.
pub(super) struct Store {
    dir: PathBuf,
    servers: Option<Grown>,
    days: [Option<Day>; DAYS],
    problems: Vec<String>,
}

/// A file that is appended to.
struct Grown {
    file: File,
    bytes: u64,
    /// Its size when it was last rewritten.
    compact_bytes: u64,
}

/// The file of a day.
struct Day {
    number: u32,
    grown: Grown,
    /// Number of tenants that were named in it since it was opened.
    named: usize,
}

impl Store {
    /// Reads the existing files. Anything wrong with them is reported as a problem, never returned as an error: what
    /// cannot be read is missing in the history.
    pub(super) fn open(dir: PathBuf) -> (Self, History) {
        let mut store = Self {
            dir,
            servers: None,
            days: [const { None }; DAYS],
            problems: Vec::new(),
        };
        let mut history = History::default();
        if let Err(error) = fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&store.dir)
        {
            store.problem(&store.dir.clone(), "cannot be made", &error);
        }
        if let Err(error) = durable::recover(&store.dir) {
            store.problem(&store.dir.clone(), "cannot be synced", &error);
        }
        store.read_servers(&mut history);
        let mut rewrite = BTreeSet::new();
        for index in 0..DAYS {
            rewrite.extend(store.read_day(index, &mut history));
        }
        // The last sync of its file may have failed.
        rewrite.extend(history.days().last());
        for day in rewrite {
            store.rewrite_day(day, &history);
        }
        (store, history)
    }

    fn read_servers(&mut self, history: &mut History) {
        let path = self.servers_path();
        let Some(content) = self.read(&path) else {
            return;
        };
        let damage = match content.strip_prefix(&FILE_HEADER) {
            Some(records) => {
                let damage = history.read_servers(records);
                (damage != Default::default()).then(|| describe(damage.records, damage.tail_bytes))
            }
            None => Some("it is not a file of history, or of another version".to_owned()),
        };
        if let Some(damage) = damage {
            self.set_aside(&path, &damage);
        }
        self.rewrite_servers(history);
    }

    /// Reads the file of a day. Returns the day if its file is damaged and must be rewritten.
    fn read_day(&mut self, index: usize, history: &mut History) -> Option<u32> {
        let path = self.day_path(index);
        let content = self.read(&path)?;
        let header = content.strip_prefix(&FILE_HEADER);
        let header = header.and_then(|rest| rest.split_first_chunk::<4>());
        let day = header.map(|(day, records)| (u32::from_le_bytes(*day), records));
        let Some((day, records)) = day.filter(|(day, _)| *day as usize % DAYS == index) else {
            // Moved, since nothing of it is used: if that fails, it stays where it is until its day is written.
            let moved = durable::rename(&path, &aside(&path));
            let damage = "it is not a file of history, or of another version";
            self.report_damage(&path, damage, moved);
            return None;
        };
        let damage = history.read_day(day, records);
        if damage == Default::default() {
            return None;
        }
        self.set_aside(&path, &describe(damage.records, damage.tail_bytes));
        Some(day)
    }

    /// Appends framed records to the file of servers, durably; `history` contains them already.
    pub(super) fn append_servers(&mut self, records: &[u8], history: &History) {
        if records.is_empty() {
            return;
        }
        let is_added = match &mut self.servers {
            Some(grown) if !grown.is_overgrown() => grown.append(records),
            _ => return self.rewrite_servers(history),
        };
        if let Err(error) = is_added {
            self.problem(&self.servers_path(), "cannot be written", &error);
            self.rewrite_servers(history);
        }
    }

    /// Appends one slot of all tenants, durably.
    pub(super) fn append_slot(&mut self, slot: Slot, levels: Vec<u8>, history: &History) {
        let record = DayRecord::Slot {
            slot: (slot % DAY_SLOTS) as u16,
            levels,
        };
        let mut bytes = Vec::new();
        append(&mut bytes, &record);
        self.append_day(slot / DAY_SLOTS, bytes, history);
    }

    /// Appends slots of one tenant, in ascending order, durably.
    pub(super) fn append_spans(&mut self, spans: &[(u32, Vec<(Slot, Level)>)], history: &History) {
        let mut days: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        for (tenant, slots) in spans {
            for day in slots.chunk_by(|a, b| a.0 / DAY_SLOTS == b.0 / DAY_SLOTS) {
                let (first, _) = day[0];
                let (last, _) = day[day.len() - 1];
                let mut levels = vec![Level::MISSING.0; (last - first) as usize + 1];
                for (slot, level) in day {
                    levels[(slot - first) as usize] = level.0;
                }
                let record = DayRecord::Span {
                    tenant: *tenant,
                    slot: (first % DAY_SLOTS) as u16,
                    levels,
                };
                append(days.entry(first / DAY_SLOTS).or_default(), &record);
            }
        }
        for (day, bytes) in days {
            self.append_day(day, bytes, history);
        }
    }

    fn append_day(&mut self, number: u32, records: Vec<u8>, history: &History) {
        let index = number as usize % DAYS;
        let open = self.days[index].take().filter(|day| day.number == number);
        let Some(mut day) = open.filter(|day| !day.grown.is_overgrown()) else {
            return self.rewrite_day(number, history);
        };
        // A tenant has a number in the file only once it is named there.
        let mut bytes = history.tenant_records(day.named).concat();
        day.named = history.tenants().len();
        bytes.extend(records);
        match day.grown.append(&bytes) {
            Ok(()) => self.days[index] = Some(day),
            Err(error) => {
                self.problem(&self.day_path(index), "cannot be written", &error);
                self.rewrite_day(number, history);
            }
        }
    }

    fn rewrite_servers(&mut self, history: &History) {
        let path = self.servers_path();
        let records = history.server_records().flatten();
        let content: Vec<u8> = FILE_HEADER.into_iter().chain(records).collect();
        self.servers = self.write_anew(&path, &content);
    }

    fn rewrite_day(&mut self, number: u32, history: &History) {
        let index = number as usize % DAYS;
        let path = self.day_path(index);
        let header = [&FILE_HEADER[..], &number.to_le_bytes()].concat();
        let records = history.day_records(number).flatten();
        let content: Vec<u8> = header.into_iter().chain(records).collect();
        let grown = self.write_anew(&path, &content);
        self.days[index] = grown.map(|grown| Day {
            number,
            grown,
            named: history.tenants().len(),
        });
    }

    /// Rewrites a file and opens it for appending. If that fails, it is attempted again with the next record.
    fn write_anew(&mut self, path: &Path, content: &[u8]) -> Option<Grown> {
        let written = durable::replace_file(path, content, 0o600);
        match written.and_then(|()| OpenOptions::new().append(true).open(path)) {
            Ok(file) => Some(Grown {
                file,
                bytes: content.len() as u64,
                compact_bytes: content.len() as u64,
            }),
            Err(error) => {
                self.problem(path, "cannot be written", &error);
                None
            }
        }
    }

    fn read(&mut self, path: &Path) -> Option<Vec<u8>> {
        let read = || -> io::Result<Vec<u8>> {
            let mut content = Vec::new();
            let file = File::open(path)?;
            file.take(FILE_BYTES_MAX).read_to_end(&mut content)?;
            Ok(content)
        };
        match read() {
            Ok(content) => Some(content),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                // It is rewritten with the next record: what it holds is kept for another attempt to read it.
                let moved = durable::rename(path, &aside(path));
                self.problem(path, "cannot be read", &error);
                if let Err(error) = moved {
                    self.problem(path, "cannot be kept", &error);
                }
                None
            }
        }
    }

    /// Keeps a copy of a damaged file for an operator to look into.
    fn set_aside(&mut self, path: &Path, damage: &str) {
        let copied = fs::copy(path, aside(path));
        self.report_damage(path, damage, copied.map(|_| ()));
    }

    /// Reports a damaged file, and whether it was kept under its other name.
    fn report_damage(&mut self, path: &Path, damage: &str, kept: io::Result<()>) {
        let aside = aside(path);
        let kept = match kept {
            Ok(()) => format!("as it was found it is kept as {}", aside.display()),
            Err(error) => format!("it cannot be kept as {}: {error}", aside.display()),
        };
        self.report(format!("{}: {damage}; {kept}", path.display()));
    }

    fn problem(&mut self, path: &Path, what: &str, error: &io::Error) {
        self.report(format!("{}: {what}: {error}", path.display()));
    }

    fn report(&mut self, problem: String) {
        // What goes wrong every two minutes is reported only once.
        if self.problems.contains(&problem) {
            return;
        }
        tracing::error!(problem, "a part of history is lost");
        if self.problems.len() >= PROBLEMS_MAX {
            self.problems.remove(0);
        }
        self.problems.push(problem);
    }

    /// The problems, oldest first.
    pub(super) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Space that the files take in bytes.
    pub(super) fn disk_bytes(&self) -> u64 {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let sizes = entries.filter_map(|entry| Some(entry.metadata().ok()?.len()));
        sizes.sum()
    }

    fn servers_path(&self) -> PathBuf {
        self.dir.join("servers")
    }

    fn day_path(&self, index: usize) -> PathBuf {
        self.dir.join(format!("day-{index:02}"))
    }
}

impl Grown {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)?;
        self.file.sync_data()?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn is_overgrown(&self) -> bool {
        self.bytes > 2 * self.compact_bytes + SLACK_BYTES
    }
}

/// Where a file that cannot be read completely is kept.
fn aside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".damaged");
    path.with_file_name(name)
}

fn describe(records: u64, tail_bytes: u64) -> String {
    match (records, tail_bytes) {
        (0, tail) => format!("its last {tail} bytes were cut off by a crash, or are damaged"),
        (records, 0) => format!("{records} damaged records were passed over"),
        (records, tail) => {
            format!("{records} damaged records and the last {tail} bytes were passed over")
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_telemetry::history::{SLOT_S, ServerId};
    use harvestfs_telemetry::profile::TenantKey;

    use super::*;

    const NOW: u32 = 20_500 * 86_400;

    fn key(name: &str) -> TenantKey {
        TenantKey {
            environment: "e".to_owned(),
            machine_function: name.to_owned(),
        }
    }

    fn owns(store: &mut Store, history: &mut History, server: &str, tenant: &str) {
        use harvestfs_telemetry::history::records::ServerRecord;
        history.owns(server, &key(tenant), 5).unwrap();
        let mut bytes = Vec::new();
        let record = ServerRecord::Owns {
            server: server.to_owned(),
            tenant: key(tenant),
            from_s: 5,
        };
        append(&mut bytes, &record);
        store.append_servers(&bytes, history);
    }

    fn slot(store: &mut Store, history: &mut History, slot: Slot, share: f32) {
        let servers = history.servers().len() as u32;
        let means: Vec<_> = (0..servers)
            .map(|server| (ServerId(server), share))
            .collect();
        let levels = history.record_slot(slot, means);
        store.append_slot(slot, levels, history);
    }

    fn month(history: &History, tenant: &str) -> Vec<Option<f32>> {
        let tenant = history.find_tenant(&key(tenant)).unwrap();
        history.month(tenant, NOW + 40 * SLOT_S).collect()
    }

    #[test]
    fn what_was_appended_is_there_after_every_restart() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let mut expected = History::default();
        for start in 0..4 {
            let (mut store, mut history) = Store::open(path.clone());
            assert_eq!(store.problems(), &[] as &[String]);
            // Tenants get other numbers than in the run before.
            owns(
                &mut store,
                &mut history,
                &format!("s{start}"),
                &format!("t{}", 9 - start),
            );
            owns(
                &mut store,
                &mut expected,
                &format!("s{start}"),
                &format!("t{}", 9 - start),
            );
            for number in 0..5 {
                let share = (start * 5 + number) as f32 / 20.0;
                let at = NOW / SLOT_S + start * 5 + number;
                slot(&mut store, &mut history, at, share);
                let means: Vec<_> = (0..=start)
                    .map(|server| (ServerId(server), share))
                    .collect();
                expected.record_slot(at, means);
            }
            let id = history.find_tenant(&key("t9")).unwrap();
            let spans = vec![(NOW / SLOT_S - 800, Level(7)), (NOW / SLOT_S - 2, Level(8))];
            for (slot, level) in &spans {
                history.set_level(id, *slot, *level);
                expected.set_level(expected.find_tenant(&key("t9")).unwrap(), *slot, *level);
            }
            store.append_spans(&[(id.0, spans)], &history);
            assert!(store.disk_bytes() > 0);
        }
        let (_, history) = Store::open(path);
        for start in 0..4 {
            let tenant = format!("t{}", 9 - start);
            assert_eq!(
                month(&history, &tenant),
                month(&expected, &tenant),
                "{tenant}"
            );
        }
        assert_eq!(history.servers().len(), 4);
    }

    #[test]
    fn damage_is_reported_set_aside_and_mended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let (mut store, mut history) = Store::open(path.clone());
        owns(&mut store, &mut history, "s1", "a");
        owns(&mut store, &mut history, "s2", "b");
        for number in 0..10 {
            slot(&mut store, &mut history, NOW / SLOT_S + number, 0.5);
        }
        drop(store);
        let day = path.join(format!("day-{:02}", NOW / 86_400 % 31));
        for file in [path.join("servers"), day.clone()] {
            let mut content = fs::read(&file).unwrap();
            let at = content.len() / 2;
            content[at] ^= 1;
            fs::write(&file, content).unwrap();
        }
        fs::write(path.join("day-07"), b"something else").unwrap();
        let (store, _) = Store::open(path.clone());
        assert_eq!(store.problems().len(), 3, "{:?}", store.problems());
        assert!(store.problems().iter().all(|p| p.contains(".damaged")));
        assert!(path.join("servers.damaged").exists() && path.join("day-07.damaged").exists());
        // Mended: nothing to report the next time.
        let (store, history) = Store::open(path);
        assert_eq!(store.problems(), &[] as &[String]);
        assert!(month(&history, "b").iter().flatten().count() >= 9);
    }

    #[test]
    fn a_file_that_cannot_be_set_aside_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let day = path.join("day-07");
        fs::create_dir_all(path.join("day-07.damaged")).unwrap();
        fs::write(&day, b"something else").unwrap();
        let (store, _) = Store::open(path);
        assert_eq!(store.problems().len(), 1, "{:?}", store.problems());
        assert!(store.problems()[0].contains("it cannot be kept"));
        assert_eq!(fs::read(&day).unwrap(), b"something else");
    }

    #[test]
    fn a_day_takes_the_file_of_the_one_31_days_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let (mut store, mut history) = Store::open(path.clone());
        owns(&mut store, &mut history, "s1", "a");
        for day in 0..100 {
            slot(&mut store, &mut history, NOW / SLOT_S + day * 720, 0.5);
        }
        assert_eq!(fs::read_dir(&path).unwrap().count(), 31 + 1);
        let (_, again) = Store::open(path);
        assert_eq!(again.days(), history.days());
        assert_eq!(again.days().len(), 31);
    }

    #[test]
    fn a_file_that_grew_is_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let (mut store, mut history) = Store::open(dir.path().join("history"));
        owns(&mut store, &mut history, "s1", "a");
        // The same slot again and again, as no clock does.
        for number in 0..200u32 {
            let id = history.find_tenant(&key("a")).unwrap();
            let levels = (0..700).map(|slot| (NOW / SLOT_S + slot, Level((number % 200) as u8)));
            let spans: Vec<_> =
                std::iter::repeat_n((id.0, levels.collect::<Vec<_>>()), 20).collect();
            for (slot, level) in &spans[0].1 {
                history.set_level(id, *slot, *level);
            }
            store.append_spans(&spans, &history);
        }
        assert!(store.disk_bytes() < 2 << 20, "{}", store.disk_bytes());
        let (_, again) = Store::open(dir.path().join("history"));
        assert_eq!(month(&again, "a"), month(&history, "a"));
    }

    /// What a failed sync was to write stays readable, and no later sync of the same file writes it.
    #[test]
    fn a_file_whose_sync_may_have_failed_is_written_anew() {
        use std::os::unix::fs::MetadataExt;

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history");
        let (mut store, mut history) = Store::open(path.clone());
        owns(&mut store, &mut history, "s1", "a");
        slot(&mut store, &mut history, NOW / SLOT_S, 0.5);
        let files = [
            path.join("servers"),
            store.day_path((NOW / 86_400) as usize % DAYS),
        ];
        // Kept open, so that their inodes are not used again.
        let old = files.each_ref().map(|path| File::open(path).unwrap());
        let is_new = |at: usize| {
            fs::metadata(&files[at]).unwrap().ino() != old[at].metadata().unwrap().ino()
        };
        owns(&mut store, &mut history, "s2", "b");
        slot(&mut store, &mut history, NOW / SLOT_S + 1, 0.5);
        assert!(!is_new(0) && !is_new(1), "they are appended to");

        // Descriptors to which nothing can be written.
        let [servers, day] = files.each_ref().map(|path| File::open(path).unwrap());
        store.servers.as_mut().unwrap().file = servers;
        let index = (NOW / 86_400) as usize % DAYS;
        store.days[index].as_mut().unwrap().grown.file = day;
        owns(&mut store, &mut history, "s3", "c");
        slot(&mut store, &mut history, NOW / SLOT_S + 2, 0.5);
        assert_eq!(store.problems().len(), 2, "{:?}", store.problems());
        assert!(is_new(0) && is_new(1));

        let old = files.each_ref().map(|path| File::open(path).unwrap());
        let (_, again) = Store::open(path);
        for (path, old) in files.iter().zip(old) {
            assert_ne!(
                fs::metadata(path).unwrap().ino(),
                old.metadata().unwrap().ino(),
                "also at the start"
            );
        }
        assert_eq!(again.servers().len(), 3);
        assert_eq!(month(&again, "c"), month(&history, "c"));
    }

    #[test]
    fn a_directory_that_cannot_be_used_is_a_problem_only() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, b"").unwrap();
        let (mut store, mut history) = Store::open(path);
        owns(&mut store, &mut history, "s1", "a");
        slot(&mut store, &mut history, 1, 0.5);
        assert!(!store.problems().is_empty());
    }
}
