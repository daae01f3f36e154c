use proptest::prelude::*;

use super::records::*;
use super::*;

/// Some time in 2026, at the begin of a day.
const NOW: u32 = 20_500 * 86_400;

fn tenant(name: &str) -> TenantKey {
    TenantKey {
        environment: "e".to_owned(),
        machine_function: name.to_owned(),
    }
}

#[test]
fn a_tenant_is_the_mean_of_its_servers() {
    let mut history = History::default();
    for (server, owner) in [("s1", "a"), ("s2", "a"), ("s3", "b")] {
        history.owns(server, &tenant(owner), 0).unwrap();
    }
    let id = |name| history.find_server(name).unwrap();
    let means = [
        (id("s1"), 0.2),
        (id("s2"), 0.6),
        (id("s3"), 9.0),
        (ServerId(77), 0.5),
    ];
    let levels = history.record_slot(NOW / SLOT_S, means);
    assert_eq!(levels, [100, 250]);
    let a = history.find_tenant(&tenant("a")).unwrap();
    assert_eq!(history.level(a, NOW / SLOT_S).share(), Some(0.4));
    assert_eq!(history.level(a, NOW / SLOT_S + 1), Level::MISSING);
}

#[test]
fn collector_gives_each_server_one_voice() {
    let mut collector = Collector::default();
    assert_eq!(collector.advance(NOW), None);
    for permille in [100, 200, 300] {
        collector.observe(3, permille);
    }
    collector.observe(1, 4000);
    assert_eq!(collector.advance(NOW + 119), None);
    let (slot, means) = collector.advance(NOW + 120).unwrap();
    assert_eq!(slot, NOW / 120);
    let shares: Vec<_> = means.iter().map(|mean| (mean.server, mean.share)).collect();
    assert_eq!(shares, [(1, 1.0), (3, 0.2)]);
    // An empty slot, and a clock that goes backwards.
    collector.observe(1, 500);
    let (slot, means) = collector.advance(NOW - 500).unwrap();
    assert_eq!((slot, means.len()), (NOW / 120 + 1, 1));
    assert_eq!(collector.advance(NOW).unwrap().1, []);
    collector.observe(u32::MAX, 1);
    assert_eq!(collector.advance(0).unwrap().1, []);
}

#[test]
fn owners_are_put_in_order() {
    let mut history = History::default();
    assert_eq!(history.owns("s", &tenant("b"), 200), Ok(Recorded::New));
    assert_eq!(history.owns("s", &tenant("a"), 100), Ok(Recorded::New));
    assert_eq!(history.owns("s", &tenant("a"), 150), Ok(Recorded::Known));
    assert_eq!(history.owns("s", &tenant("b"), 200), Ok(Recorded::Known));
    assert_eq!(history.owns("s", &tenant("a"), 50), Ok(Recorded::New));
    let error = history.owns("s", &tenant("a"), 200).unwrap_err();
    assert_eq!(
        error.to_string(),
        "server s already belongs to e/b from second 200 on"
    );
    let server = &history.servers()[0];
    let [a, b] = ["a", "b"].map(|name| history.find_tenant(&tenant(name)).unwrap());
    let owners: Vec<_> = server
        .owners()
        .iter()
        .map(|o| (o.from_s, o.tenant))
        .collect();
    assert_eq!(owners, [(50, a), (200, b)]);
    assert_eq!(server.owner(), Some(b));
    // It is wiped by the owner that gives it away.
    for (at_s, owner) in [(0, a), (50, a), (60, a), (200, a), (201, b)] {
        assert_eq!(server.owner_before(at_s), Some(owner));
    }
}

#[test]
fn reimages_are_counted_once() {
    let mut history = History::default();
    let unknown = history.reimaged("s", 5).unwrap_err();
    assert_eq!(
        unknown.to_string(),
        "server s is unknown: import its owner first"
    );
    history.owns("s", &tenant("a"), 0).unwrap();
    assert_eq!(history.reimaged("s", 1000), Ok(Recorded::New));
    assert_eq!(history.reimaged("s", 1000), Ok(Recorded::Known));
    assert_eq!(history.reimaged("s", 1059), Ok(Recorded::Known));
    assert_eq!(history.reimaged("s", 941), Ok(Recorded::Known));
    assert_eq!(history.reimaged("s", 1060), Ok(Recorded::New));
    assert_eq!(history.reimaged("s", 500), Ok(Recorded::New));
    assert_eq!(history.servers()[0].reimages(), [500, 1000, 1060]);
    for number in 0..2000 {
        history.reimaged("s", 10_000 + number * 60).unwrap();
    }
    assert_eq!(history.reimages(), REIMAGES_PER_SERVER_MAX);
    assert_eq!(history.reimaged("s", 500), Ok(Recorded::TooOld));
    assert_eq!(
        *history.servers()[0].reimages().last().unwrap(),
        10_000 + 1999 * 60
    );
}

#[test]
fn names_and_numbers_are_bounded() {
    let mut history = History::default();
    assert_eq!(
        history.owns("", &tenant("a"), 0),
        Err(HistoryError::Name(0))
    );
    let long = "x".repeat(NAME_BYTES_MAX + 1);
    assert_eq!(
        history.owns("s", &tenant(&long), 0),
        Err(HistoryError::Name(129))
    );
    for number in 0..TENANTS_MAX - 1 {
        history.tenant(&tenant(&number.to_string())).unwrap();
    }
    assert_eq!(
        history.tenant(&tenant("one more")),
        Err(HistoryError::TooManyTenants)
    );
    assert!(history.tenant(&tenant("5")).is_ok());
}

#[test]
fn a_month_takes_720_bytes_a_day() {
    let mut history = History::default();
    let id = history.tenant(&tenant("a")).unwrap();
    for slot in 0..100 * SLOTS_PER_DAY as u32 {
        history.set_level(id, slot, Level(100));
    }
    let bytes = history.memory_bytes();
    println!("a tenant takes {bytes} bytes of memory");
    assert!(bytes < 31 * 720 + 1_500, "{bytes}");
    let end = 100 * 86_400;
    assert_eq!(history.month(id, end).flatten().count(), 30 * 720);
    assert_eq!(history.days(), (69..100).collect::<Vec<_>>());
}

#[test]
fn a_clock_that_jumps_costs_a_day_at_most() {
    let mut history = History::default();
    let id = history.tenant(&tenant("a")).unwrap();
    let now_slot = NOW / SLOT_S;
    for slot in now_slot - 30 * 720..now_slot {
        history.set_level(id, slot, Level(50));
    }
    // For an hour it was years later.
    for slot in 0..30 {
        history.set_level(id, now_slot + 40_000 * 720 + slot, Level(99));
    }
    let left = history.month(id, NOW).flatten().count();
    assert!(left >= 29 * 720, "{left}");
    // Back again, the day can be recorded once more.
    for slot in now_slot - 30 * 720..now_slot {
        history.set_level(id, slot, Level(50));
    }
    assert_eq!(history.month(id, NOW).flatten().count(), 30 * 720);
}

#[test]
fn series_are_imported_into_slots() {
    let mut history = History::default();
    let id = history.tenant(&tenant("a")).unwrap();
    // Five minutes: two or three slots each.
    let shares = [Some(0.2), None, Some(1.7)];
    let (changed, old) = history
        .import_series(id, NOW - 900, 300, &shares, NOW)
        .unwrap();
    assert_eq!((changed.len(), old), (4, 0));
    let slot = |at_s: u32| history.level(id, at_s / SLOT_S).share();
    assert_eq!(
        (slot(NOW - 840), slot(NOW - 480), slot(NOW - 240)),
        (Some(0.2), None, Some(1.0))
    );
    // Again: nothing new.
    let again = history
        .import_series(id, NOW - 900, 300, &shares, NOW)
        .unwrap();
    assert_eq!(again, (vec![], 0));
    // Every second: averaged.
    let seconds: Vec<_> = (0..120)
        .map(|second| Some(if second < 60 { 0.0 } else { 1.0 }))
        .collect();
    history
        .import_series(id, NOW - 240, 1, &seconds, NOW)
        .unwrap();
    assert_eq!(history.level(id, NOW / SLOT_S - 2).share(), Some(0.5));

    let future = history
        .import_series(id, NOW, 300, &[Some(0.1); 2], NOW)
        .unwrap_err();
    assert_eq!(future, HistoryError::InTheFuture { at_s: NOW + 300 });
    let ages = history
        .import_series(id, 5, 86_400, &[Some(0.1); 20_000], NOW)
        .unwrap();
    assert_eq!(ages.1, 20_000);
}

fn sample_history() -> History {
    let mut history = History::default();
    for number in 0..20u32 {
        let server = format!("s{number}");
        history
            .owns(&server, &tenant(&format!("t{}", number % 3)), number)
            .unwrap();
        history
            .owns(&server, &tenant("last"), 1000 + number)
            .unwrap();
        for time in 0..number {
            history.reimaged(&server, 500 + time * 100).unwrap();
        }
    }
    for slot in 0..2000 {
        let means = (0..20).map(|server| (ServerId(server), (slot % 100) as f32 / 100.0));
        history.record_slot(NOW / SLOT_S + slot, means.collect::<Vec<_>>());
    }
    history
}

fn files(history: &History) -> (Vec<u8>, Vec<(u32, Vec<u8>)>) {
    let days = history.days().into_iter();
    let days = days.map(|day| (day, history.day_records(day).flatten().collect()));
    (history.server_records().flatten().collect(), days.collect())
}

#[test]
fn what_is_written_is_read() {
    let history = sample_history();
    let (servers, days) = files(&history);
    let mut read = History::default();
    // Twice: records may repeat.
    for _ in 0..2 {
        assert_eq!(read.read_servers(&servers), Damage::default());
        for (day, bytes) in &days {
            assert_eq!(read.read_day(*day, bytes), Damage::default());
        }
    }
    assert_eq!(files(&read), (servers, days));
    assert_eq!(read.reimages(), history.reimages());
}

#[test]
fn slots_are_appended_by_the_order_of_the_tenants() {
    let mut history = History::default();
    let mut file = Vec::new();
    history.owns("s1", &tenant("a"), 0).unwrap();
    file.extend(history.tenant_records(0).concat());
    let levels = history.record_slot(NOW / SLOT_S, [(ServerId(0), 0.5)]);
    assert!(append(&mut file, &DayRecord::Slot { slot: 0, levels }));
    history.owns("s2", &tenant("b"), 0).unwrap();
    file.extend(history.tenant_records(1).concat());
    let levels = history.record_slot(NOW / SLOT_S + 1, [(ServerId(1), 0.25)]);
    append(&mut file, &DayRecord::Slot { slot: 1, levels });
    let mut read = History::default();
    assert_eq!(read.read_day(NOW / 86_400, &file), Damage::default());
    for name in ["a", "b"] {
        let (one, other) = (
            history.find_tenant(&tenant(name)),
            read.find_tenant(&tenant(name)),
        );
        let month = |history: &History, id: Option<TenantId>| {
            history.month(id.unwrap(), NOW + 86_400).collect::<Vec<_>>()
        };
        assert_eq!(month(&history, one), month(&read, other));
    }
}

#[test]
fn damage_is_counted_and_the_rest_is_read() {
    let history = sample_history();
    let (servers, _) = files(&history);
    // Wherever the damage is: in a length, a checksum or a record.
    for at in 0..80 {
        let mut bad = servers.clone();
        bad[at] ^= 0x41;
        let mut read = History::default();
        let damage = read.read_servers(&bad);
        assert!((1..=2).contains(&damage.records), "{at}: {damage:?}");
        assert_eq!(damage.tail_bytes, 0);
        assert_eq!(read.servers().len(), 20);
    }
    // A crash in the middle of the last record.
    let mut read = History::default();
    let damage = read.read_servers(&servers[..servers.len() - 3]);
    assert!(damage.records == 0 && damage.tail_bytes > 0);
    assert_eq!(read.servers().len(), 20);
}

proptest! {
    /// Any change of a file loses records, never the process, and never the bounds.
    #[test]
    fn damaged_files_do_not_panic(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
        cut in any::<prop::sample::Index>(), day in any::<u32>(),
    ) {
        let mut history = History::default();
        for number in 0..8u32 {
            history.owns(&format!("s{number}"), &tenant("a"), number).unwrap();
            history.reimaged(&format!("s{number}"), 1000).unwrap();
            history.record_slot(NOW / SLOT_S + number, [(ServerId(number), 0.5)]);
        }
        let (mut servers, days) = files(&history);
        let mut a_day = days[0].1.clone();
        for (at, byte) in changes {
            let at_server = at.index(servers.len());
            let at_day = at.index(a_day.len());
            servers[at_server] = byte;
            a_day[at_day] = byte;
        }
        let mut read = History::default();
        read.read_servers(&servers[..cut.index(servers.len())]);
        read.read_servers(&a_day);
        read.read_day(day, &a_day);
        read.read_day(day, &servers);
        prop_assert!(read.servers().len() <= 8 + 8 && read.month(TenantId(0), NOW).count() == 21_600);
    }

    /// Records with sound frames but any content.
    #[test]
    fn odd_records_do_not_panic(bodies in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 0..20)) {
        let mut file = Vec::new();
        for body in bodies {
            file.extend((body.len() as u32).to_le_bytes());
            file.extend(crc32fast::hash(&body).to_le_bytes());
            file.extend(body);
        }
        let mut read = History::default();
        read.read_servers(&file);
        read.read_day(u32::MAX, &file);
    }

    /// After any import, levels are within the month, and the same import again changes nothing.
    #[test]
    fn imports_are_idempotent(
        start in 0..NOW, period in 0..100_000u32,
        shares in proptest::collection::vec(proptest::option::of(-1.0..3.0f32), 0..500),
    ) {
        let mut history = History::default();
        let id = history.tenant(&tenant("a")).unwrap();
        if let Ok((changed, _)) = history.import_series(id, start, period, &shares, NOW) {
            prop_assert!(changed.iter().all(|(slot, _)| *slot <= NOW / SLOT_S));
            let again = history.import_series(id, start, period, &shares, NOW).unwrap();
            prop_assert!(again.0.is_empty());
        }
    }
}
