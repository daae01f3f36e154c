use super::*;

use proptest::prelude::*;

const LEASE_MS: u64 = 10_000;
const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const C: SessionId = SessionId(3);
const FILE: InodeId = InodeId(10);
const DIR: InodeId = InodeId(20);

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn two_sessions() -> Leases {
    let mut leases = Leases::new(LEASE_MS, 1_000);
    leases.opened(0, A);
    leases.opened(0, B);
    leases
}

fn id_of(notice: &Notice) -> u64 {
    match notice {
        Notice::Invalidate { id, .. } | Notice::InvalidateAll { id } => *id,
        Notice::Recall { .. } | Notice::Namenodes { .. } => panic!("leases say no such thing"),
    }
}

#[test]
fn a_session_that_is_alone_is_never_notified() {
    let mut leases = Leases::new(LEASE_MS, 1_000);
    leases.opened(0, A);
    leases.granted(A, Cached::Inode(FILE));
    assert_eq!(leases.changed(1, A, &[FILE], &[], 7), (vec![], false));
}

#[test]
fn a_reply_waits_until_the_holder_has_forgotten() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Inode(FILE));
    let (notices, waits) = leases.changed(1, A, &[FILE], &[], 7);
    let notice = Notice::Invalidate {
        id: 1,
        inodes: vec![FILE],
        entries: vec![],
    };
    assert_eq!(notices, vec![(B, notice)]);
    assert!(waits);
    assert_eq!(
        leases.acked(A, 1),
        Vec::<WaitId>::new(),
        "not A's to acknowledge"
    );
    assert_eq!(leases.acked(B, 1), vec![7]);
    assert_eq!(leases.acked(B, 1), Vec::<WaitId>::new());
    // It holds nothing any more.
    assert_eq!(leases.changed(2, A, &[FILE], &[], 8), (vec![], false));
}

#[test]
fn a_later_change_waits_for_a_notice_under_way_too() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Inode(FILE));
    let (notices, _) = leases.changed(1, A, &[FILE], &[], 7);
    assert_eq!(leases.changed(2, A, &[FILE], &[], 8), (vec![], true));
    assert_eq!(leases.acked(B, id_of(&notices[0].1)), vec![7, 8]);
}

#[test]
fn names_are_forgotten_one_by_one() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Entries(DIR));
    for (wait, text) in [(1, "a"), (2, "b")] {
        let (notices, waits) = leases.changed(1, A, &[], &[(DIR, name(text))], wait);
        assert!(waits);
        let notice = Notice::Invalidate {
            id: wait,
            inodes: vec![],
            entries: vec![(DIR, name(text))],
        };
        assert_eq!(notices, vec![(B, notice)]);
    }
    // A change waits for all notices about entries of the same directory.
    assert_eq!(leases.acked(B, 1), vec![1]);
    assert_eq!(leases.acked(B, 2), vec![2]);
}

#[test]
fn a_silent_session_delays_for_its_lease_and_no_longer() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Inode(FILE));
    leases.heard(4_000, B);
    let (_, waits) = leases.changed(5_000, A, &[FILE], &[], 7);
    assert!(waits);
    leases.heard(9_000, A);
    assert_eq!(leases.expire(13_999), Expired::default());
    assert_eq!(leases.expire(14_000).released, vec![7]);
    // And is not notified afterwards.
    assert_eq!(leases.changed(14_001, A, &[FILE], &[], 8), (vec![], false));
    // When it comes back, it starts with nothing.
    leases.heard(15_000, A);
    leases.heard(15_000, B);
    assert_eq!(leases.changed(15_001, A, &[FILE], &[], 9), (vec![], false));
    leases.granted(B, Cached::Inode(FILE));
    assert!(leases.changed(15_002, A, &[FILE], &[], 10).1);
}

#[test]
fn a_session_that_does_not_acknowledge_is_found_out() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Inode(FILE));
    leases.changed(0, A, &[FILE], &[], 7);
    // What it has to do first may wait for the end of another lease.
    for now_ms in (0..2 * LEASE_MS).step_by(1_000) {
        leases.heard(now_ms, B);
        leases.heard(now_ms, A);
        assert_eq!(leases.expire(now_ms), Expired::default());
    }
    leases.heard(2 * LEASE_MS, B);
    assert_eq!(leases.expire(2 * LEASE_MS).unresponsive, vec![B]);
    leases.revoke(B);
    // It may trust its cache for a lease after it was last answered.
    leases.heard(2 * LEASE_MS + 5_000, B);
    assert_eq!(leases.expire(3 * LEASE_MS - 1), Expired::default());
    assert_eq!(leases.expire(3 * LEASE_MS).released, vec![7]);
    assert!(!leases.sessions.contains_key(&B));
}

#[test]
fn a_session_from_before_a_restart_may_hold_anything() {
    let mut leases = Leases::new(LEASE_MS, 1_000);
    leases.restored(0, A);
    leases.restored(0, B);
    let (notices, waits) = leases.changed(1, A, &[FILE], &[(DIR, name("x"))], 7);
    assert!(waits);
    assert_eq!(notices[0].0, B);
    assert_eq!(leases.expire(LEASE_MS).released, vec![7]);
}

#[test]
fn a_session_that_was_silent_before_a_restart_is_not_waited_for_until_it_comes_back() {
    let mut leases = Leases::new(LEASE_MS, 1_000);
    leases.restored(5, A);
    leases.restored_lapsed(5, B);
    assert!(leases.has_lapsed(5, B) && !leases.has_lapsed(5, A));
    assert_eq!(leases.changed(6, A, &[FILE], &[], 7), (vec![], false));
    leases.heard(7, B);
    assert!(!leases.has_lapsed(7, B));
    leases.granted(B, Cached::Inode(FILE));
    assert!(
        leases.changed(8, A, &[FILE], &[], 8).1,
        "it has read it since"
    );
}

#[test]
fn what_a_session_must_not_cache_is_waited_for_like_all_that_it_is_to_forget() {
    let mut leases = two_sessions();
    let (session, notice) = leases.forget(1, B, &[FILE]);
    assert_eq!(session, B);
    assert_eq!(leases.changed(2, A, &[FILE], &[], 7), (vec![], true));
    assert_eq!(leases.acked(B, id_of(&notice)), vec![7]);
    assert_eq!(leases.changed(3, A, &[FILE], &[], 8), (vec![], false));
}

#[test]
fn many_announcements_end_in_one_that_covers_everything() {
    let mut leases = Leases::new(LEASE_MS, 1_000);
    leases.restored(0, A);
    leases.restored(0, B);
    for wait in 0..u64::from(ANNOUNCED_MAX) {
        let (notices, _) = leases.changed(1, A, &[FILE], &[], wait);
        assert!(matches!(notices[0].1, Notice::Invalidate { .. }));
        leases.acked(B, id_of(&notices[0].1));
    }
    let (notices, waits) = leases.changed(1, A, &[FILE], &[], 1_000);
    assert!(matches!(notices[0].1, Notice::InvalidateAll { .. }) && waits);
    // Everything else waits for it as well, since the session may hold anything until then.
    assert_eq!(leases.changed(1, A, &[DIR], &[], 1_001), (vec![], true));
    assert_eq!(leases.acked(B, id_of(&notices[0].1)), vec![1_000, 1_001]);
    assert_eq!(leases.changed(1, A, &[DIR], &[], 1_002), (vec![], false));
}

#[test]
fn a_full_table_makes_all_sessions_hold_everything() {
    let mut leases = Leases::new(LEASE_MS, 3);
    leases.opened(0, A);
    leases.opened(0, B);
    leases.opened(0, C);
    for ino in 0..4 {
        leases.granted(B, Cached::Inode(InodeId(100 + ino)));
    }
    assert!(leases.grants.len() <= 3);
    let (notices, _) = leases.changed(1, A, &[FILE], &[], 1);
    let notices: Vec<SessionId> = notices.into_iter().map(|(session, _)| session).collect();
    assert!(
        notices.contains(&B),
        "it holds something that is not in the table"
    );
}

#[test]
fn a_new_connection_gets_what_the_old_one_may_have_lost() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Inode(FILE));
    leases.granted(B, Cached::Inode(DIR));
    assert_eq!(leases.repeat(0, B), None);
    leases.changed(1, A, &[FILE, DIR], &[], 7);
    leases.granted(B, Cached::Inode(DIR));
    leases.changed(2, A, &[DIR], &[], 8);
    let repeated = leases.repeat(3, B).unwrap();
    assert!(matches!(repeated, Notice::InvalidateAll { .. }));
    assert_eq!(leases.acked(B, 1), Vec::<WaitId>::new(), "replaced");
    assert_eq!(leases.acked(B, id_of(&repeated)), vec![7, 8]);
}

#[test]
fn ending_a_session_ends_what_waits_for_it() {
    let mut leases = two_sessions();
    leases.granted(B, Cached::Inode(FILE));
    leases.changed(1, A, &[FILE], &[], 7);
    assert_eq!(leases.closed(B), vec![7]);
    assert!(leases.periods.is_empty() && leases.unacked.is_empty() && leases.waits.is_empty());
    assert!(leases.unacked_by_cached.is_empty());
}

/// One step of the random test. Sessions are indices; so are cacheable things: an even index is an inode, an odd one
/// the entries of a directory.
#[derive(Clone, Debug)]
enum Step {
    Open(u8),
    Close(u8),
    /// A request whose reply shows a thing to the session.
    Read(u8, u8),
    /// A request that changes something.
    Change(u8, u8),
    /// The session receives its oldest notice and acknowledges it.
    TakeNotice(u8),
    Reconnect(u8),
    Pass(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let session = 0..4_u8;
    prop_oneof![
        1 => session.clone().prop_map(Step::Open),
        1 => session.clone().prop_map(Step::Close),
        6 => (session.clone(), 0..6_u8).prop_map(|(s, thing)| Step::Read(s, thing)),
        6 => (session.clone(), 0..6_u8).prop_map(|(s, thing)| Step::Change(s, thing)),
        6 => session.clone().prop_map(Step::TakeNotice),
        1 => session.prop_map(Step::Reconnect),
        3 => (0..4_000_u16).prop_map(Step::Pass),
    ]
}

/// A client that caches everything it may.
#[derive(Default)]
struct Client {
    /// Version of each thing as the reply gave it.
    cache: FxHashMap<u8, u64>,
    inbox: Vec<Notice>,
    lease_ends_ms: u64,
}

#[derive(Default)]
struct World {
    now_ms: u64,
    /// The truth: how often each thing was changed.
    versions: FxHashMap<u8, u64>,
    clients: FxHashMap<u8, Client>,
    /// Changes whose reply waits: their author, their thing, and its version after them.
    waiting: FxHashMap<WaitId, (u8, u8, u64)>,
}

impl World {
    /// The author is about to receive the reply to its change: no other session may still trust an older state.
    fn check_released(&self, author: u8, thing: u8, version: u64) {
        for (&session, client) in &self.clients {
            let believes = client.cache.get(&thing);
            let alive = client.lease_ends_ms > self.now_ms;
            assert!(
                session == author || !alive || believes.is_none_or(|&v| v >= version),
                "session {session} believes version {believes:?} of {thing}, changed to {version}"
            );
        }
    }

    fn release(&mut self, waits: Vec<WaitId>) {
        for wait in waits {
            let (author, thing, version) = self.waiting.remove(&wait).expect("released once");
            self.check_released(author, thing, version);
        }
    }
}

fn cached(thing: u8) -> Cached {
    let ino = InodeId(u64::from(thing / 2));
    if thing.is_multiple_of(2) {
        Cached::Inode(ino)
    } else {
        Cached::Entries(ino)
    }
}

fn session_id(index: u8) -> SessionId {
    SessionId(u64::from(index) + 1)
}

fn run(steps: Vec<Step>, grants_max: usize) {
    let mut leases = Leases::new(LEASE_MS, grants_max);
    let mut world = World::default();
    for (wait, step) in (0..).zip(steps) {
        match step {
            Step::Open(s) => {
                if !world.clients.contains_key(&s) {
                    leases.opened(world.now_ms, session_id(s));
                    let client = Client {
                        lease_ends_ms: world.now_ms + LEASE_MS,
                        ..Client::default()
                    };
                    world.clients.insert(s, client);
                }
            }
            Step::Close(s) => {
                if world.clients.remove(&s).is_some() {
                    let released = leases.closed(session_id(s));
                    world.release(released);
                }
            }
            Step::Read(s, thing) => {
                let version = world.versions.get(&thing).copied().unwrap_or(0);
                if hear(&mut leases, &mut world, s) {
                    leases.granted(session_id(s), cached(thing));
                    let client = world.clients.get_mut(&s).expect("heard");
                    // Notices sent before are older than this reply, but arrive later: they make it forget more than
                    // needed, never less.
                    client.cache.insert(thing, version);
                }
            }
            Step::Change(s, thing) => {
                if !hear(&mut leases, &mut world, s) {
                    continue;
                }
                let version = world.versions.entry(thing).or_default();
                *version += 1;
                let version = *version;
                let (mut inodes, mut entries) = (vec![], vec![]);
                match cached(thing) {
                    Cached::Inode(ino) => inodes.push(ino),
                    Cached::Entries(dir) => entries.push((dir, name("x"))),
                }
                let (notices, waits) =
                    leases.changed(world.now_ms, session_id(s), &inodes, &entries, wait);
                let client = world.clients.get_mut(&s).expect("heard");
                client.cache.insert(thing, version);
                leases.granted(session_id(s), cached(thing));
                for (session, notice) in notices {
                    let index = u8::try_from(session.0 - 1).unwrap();
                    let client = world.clients.get_mut(&index).expect("alive");
                    client.inbox.push(notice);
                }
                if waits {
                    world.waiting.insert(wait, (s, thing, version));
                } else {
                    world.check_released(s, thing, version);
                }
            }
            Step::TakeNotice(s) => take_notice(&mut leases, &mut world, s),
            Step::Reconnect(s) => {
                if hear(&mut leases, &mut world, s) {
                    let client = world.clients.get_mut(&s).expect("heard");
                    client.inbox.clear();
                    client
                        .inbox
                        .extend(leases.repeat(world.now_ms, session_id(s)));
                }
            }
            Step::Pass(ms) => {
                world.now_ms += u64::from(ms);
                let expired = leases.expire(world.now_ms);
                world.release(expired.released);
            }
        }
        assert!(leases.grants.len() <= grants_max);
    }
    // Once all have acknowledged their notices, no reply waits.
    for s in 0..4 {
        while world
            .clients
            .get(&s)
            .is_some_and(|client| !client.inbox.is_empty())
        {
            take_notice(&mut leases, &mut world, s);
        }
    }
    assert!(world.waiting.is_empty());
    assert!(leases.waits.is_empty() && leases.unacked.is_empty());
    assert!(leases.unacked_by_cached.is_empty() && leases.unacked_everything.is_empty());
}

/// A request of the session reaches the namenode; false if there is no such session.
fn hear(leases: &mut Leases, world: &mut World, s: u8) -> bool {
    let now_ms = world.now_ms;
    let Some(client) = world.clients.get_mut(&s) else {
        return false;
    };
    if client.lease_ends_ms <= now_ms {
        client.cache.clear();
    }
    client.lease_ends_ms = now_ms + LEASE_MS;
    let released = leases.heard(now_ms, session_id(s));
    world.release(released);
    true
}

fn take_notice(leases: &mut Leases, world: &mut World, s: u8) {
    let Some(client) = world.clients.get_mut(&s) else {
        return;
    };
    if client.inbox.is_empty() {
        return;
    }
    let notice = client.inbox.remove(0);
    match &notice {
        Notice::Invalidate {
            inodes, entries, ..
        } => {
            let inodes = inodes.iter().map(|&ino| Cached::Inode(ino));
            let entries = entries.iter().map(|&(dir, _)| Cached::Entries(dir));
            let named: Vec<Cached> = inodes.chain(entries).collect();
            client
                .cache
                .retain(|&thing, _| !named.contains(&cached(thing)));
        }
        Notice::InvalidateAll { .. } => client.cache.clear(),
        Notice::Recall { .. } | Notice::Namenodes { .. } => panic!("leases say no such thing"),
    }
    hear(leases, world, s);
    let released = leases.acked(session_id(s), id_of(&notice));
    world.release(released);
}

proptest! {
    #[test]
    fn no_session_believes_what_was_changed_and_acknowledged(
        steps in prop::collection::vec(step(), 1..200),
        grants_max in prop_oneof![Just(2_usize), Just(5), Just(1_000)],
    ) {
        run(steps, grants_max);
    }
}
