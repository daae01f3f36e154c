//! Several namenodes, with a change of the leader.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::SetXattrMode;
use harvestfs_protocol::meta::query::Lookup;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::faults::write_all;
use super::{create, name, pattern, root};
use crate::testing::{Cluster, Member, Part};
use crate::{
    CacheListener, Client, ClientError, ClientOptions, Invalidated, Invalidation, OpenFlags,
};

/// Simulated duration of an election.
const ELECTION: Duration = Duration::from_millis(300);
/// The longest that a program may wait, the election included.
const GAP_MAX: Duration = Duration::from_secs(2);
/// A gap is measured at most this often, until it is short enough: the machine has other work too.
const MEASUREMENTS: u32 = 5;

const NOBODY: Part = Part::Stands { leader: None };

struct Group {
    cluster: Cluster,
    members: Vec<Member>,
}

impl Group {
    /// Three namenodes. The first one leads.
    async fn start() -> Self {
        let cluster = Cluster::start(3, 3).await;
        let members = (0..3).map(|_| cluster.namenode.member(NOBODY)).collect();
        let group = Self { cluster, members };
        group.elect(0);
        group
    }

    fn options(&self) -> ClientOptions {
        let mut options = self.cluster.options("a");
        options.namenodes = self.members.iter().map(Member::addr).collect();
        options
    }

    async fn client(&self) -> Client {
        Client::connect(self.options()).await.unwrap()
    }

    /// Makes one member lead from now on. The former leader may not notice.
    fn elect(&self, leader: usize) {
        let hint = Some(self.members[leader].addr());
        for member in &self.members {
            member.plays(Part::Stands { leader: hint });
        }
        self.cluster.namenode.elect(&self.members[leader]);
    }

    fn nobody_leads(&self) {
        for member in &self.members {
            member.plays(NOBODY);
        }
    }
}

/// How the leader stops leading.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// It refuses requests, because it is no longer leader.
    Deposed,
    /// It ends its connections.
    Stops,
    Hangs,
}

/// Returns the longest duration of an operation of a program that makes directories one after
/// another, while another namenode becomes leader. Everything is executed exactly once.
async fn gap(fault: Fault) -> Duration {
    let group = Group::start().await;
    let client = group.client().await;
    let session = client.core().session.clone();
    let generation = session.generation();
    let program = tokio::spawn({
        let client = client.clone();
        async move {
            let (mut longest, mut made) = (Duration::ZERO, 0);
            let started = Instant::now();
            while started.elapsed() < Duration::from_secs(3) {
                let began = Instant::now();
                let called = name(&format!("dir-{made}"));
                let dir = client.mkdir(&root(), InodeId::ROOT, &called, 0o755).await;
                dir.unwrap();
                made += 1;
                longest = longest.max(began.elapsed());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            (longest, made)
        }
    });
    tokio::time::sleep(Duration::from_millis(200)).await;
    // Its last operation is not answered.
    group.cluster.namenode.lose_replies(1);
    group.nobody_leads();
    match fault {
        Fault::Deposed => {}
        Fault::Stops => group.members[0].stop(),
        Fault::Hangs => group.members[0].plays(Part::Hangs),
    }
    tokio::time::sleep(ELECTION).await;
    group.elect(2);
    if let Fault::Hangs = fault {
        group.members[0].plays(Part::Hangs);
    }
    let (longest, made) = program.await.unwrap();
    assert_eq!(session.generation(), generation, "the session went on");
    for number in 0..made {
        let called = name(&format!("dir-{number}"));
        client
            .lookup(&root(), InodeId::ROOT, &called)
            .await
            .unwrap();
    }
    longest
}

async fn is_short(fault: Fault) {
    let mut gaps = Vec::new();
    for _ in 0..MEASUREMENTS {
        let gap = gap(fault).await;
        println!("{fault:?}: {gap:?}");
        if gap < GAP_MAX {
            return;
        }
        gaps.push(gap);
    }
    panic!("{fault:?}: {gaps:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deposed_leader_is_left_within_a_moment() {
    is_short(Fault::Deposed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_stops_is_replaced_within_a_moment() {
    is_short(Fault::Stops).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_hangs_is_replaced_within_a_moment() {
    is_short(Fault::Hangs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn open_files_and_written_data_outlive_a_change_of_the_leader() {
    let group = Group::start().await;
    let client = group.client().await;
    let (attr, file) = create(&client, "file").await;
    let content = pattern(3 << 20, 1);
    write_all(&file, &content[..2 << 20]).await;
    // It is visible but not durable: the next leader does not know the commit.
    file.flush().await.unwrap();
    group.elect(1);
    client
        .unlink(&root(), InodeId::ROOT, &name("file"))
        .await
        .unwrap();
    for (offset, leader) in [(2 << 20, 2), (5 << 19, 0)] {
        let piece = &content[offset..offset + (1 << 19)];
        file.write(offset as u64, Bytes::copy_from_slice(piece))
            .await
            .unwrap();
        group.elect(leader);
    }
    file.sync().await.unwrap();
    assert!(file.read(0, 4 << 20).await.unwrap() == content);
    assert!(group.cluster.namenode.inode_exists(attr.ino));
    assert_eq!(group.cluster.namenode.size_bytes(attr.ino), 3 << 20);
    assert_eq!(group.cluster.namenode.calls("create"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_next_leader_neither_knows_nor_takes_is_reported_once() {
    let group = Group::start().await;
    let client = group.client().await;
    let (_, open) = create(&client, "open").await;
    let (attr, closed) = create(&client, "closed").await;
    for file in [&open, &closed] {
        file.write(0, Bytes::from_static(b"content")).await.unwrap();
        file.flush().await.unwrap();
    }
    drop(closed);
    assert!(client.core().session.has_unconfirmed());
    // A namenode that this client does not know leads for a moment, and leaves no room for it.
    group.nobody_leads();
    let unknown = group.cluster.namenode.member(NOBODY);
    group.cluster.namenode.elect(&unknown);
    let mut options = group.cluster.options("b");
    options.namenodes = vec![unknown.addr()];
    let other = Client::connect(options).await.unwrap();
    let (by, quota) = (root(), b"user.harvestfs.quota_bytes");
    let limited = other.setxattr(&by, InodeId::ROOT, quota, b"0", SetXattrMode::Any);
    limited.await.unwrap();
    unknown.plays(NOBODY);
    group.elect(1);
    // A handle that only reads does not get the report.
    let reader = client.open(&root(), attr.ino, OpenFlags::READ).await;
    reader.unwrap().close().await.unwrap();
    let inherited = client
        .open(&root(), open.ino(), OpenFlags::READ_WRITE)
        .await;
    let inherited = inherited.unwrap();
    let reopened = client.open(&root(), attr.ino, OpenFlags::READ).await;
    for file in [open, reopened.unwrap()] {
        let lost = file.sync().await;
        assert!(
            matches!(lost, Err(ClientError::DataLost { .. })),
            "{lost:?}"
        );
        file.sync().await.unwrap();
    }
    // Closing inherited descriptors in children does not take the report from the one that checks.
    for _ in 0..2 {
        let closed = inherited.flush().await;
        assert!(
            matches!(closed, Err(ClientError::DataLost { .. })),
            "{closed:?}"
        );
    }
    assert!(inherited.sync().await.is_err());
    inherited.flush().await.unwrap();
}

/// A mount whose kernel is slow to forget everything, but forgets a name immediately.
struct ForgetsSlowly {
    is_asked: Arc<AtomicBool>,
    may: Arc<Semaphore>,
}

impl CacheListener for ForgetsSlowly {
    fn invalidate(&self, what: Vec<Invalidation>) -> Invalidated {
        if !what.contains(&Invalidation::All) {
            return Box::pin(async {});
        }
        self.is_asked.store(true, Ordering::SeqCst);
        let may = self.may.clone();
        Box::pin(async move {
            let permit = may.acquire().await;
            permit.expect("it is not closed").forget();
        })
    }
}

/// What a change builds on may have changed while no namenode could notify this client.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_acknowledged_to_the_next_leader_before_everything_is_forgotten() {
    let group = Group::start().await;
    let (client, other) = (group.client().await, group.cluster.client("b").await);
    let (is_asked, may) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(Semaphore::new(0)),
    );
    client.set_cache_listener(Arc::new(ForgetsSlowly {
        is_asked: is_asked.clone(),
        may: may.clone(),
    }));
    group.elect(1);
    let made = |client: &Client, called: &str| {
        let (client, called) = (client.clone(), name(called));
        tokio::spawn(async move { client.mkdir(&root(), InodeId::ROOT, &called, 0o755).await })
    };
    // It notices.
    let own = made(&client, "own");
    let began = Instant::now();
    while !is_asked.load(Ordering::SeqCst) {
        assert!(began.elapsed() < GAP_MAX, "the session was not resumed");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let change = made(&other, "change");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(!change.is_finished(), "it was acknowledged");
    may.add_permits(100);
    for made in [change, own] {
        made.await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_answer_is_no_reason_to_leave() {
    let group = Group::start().await;
    let client = group.client().await;
    create(&client, "file").await;
    let session = client.core().session.clone();
    let link = session.link(Duration::ZERO).await.unwrap();
    group.cluster.namenode.hold(Some(Lookup::NAME));
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.lookup(&root(), InodeId::ROOT, &name("other")).await }
    });
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    group.cluster.namenode.hold(None);
    assert!(asking.await.unwrap().unwrap_err().is_gone());

    // A leader that hangs is not left either, while no other leads.
    group.members[0].plays(Part::Hangs);
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.lookup(&root(), InodeId::ROOT, &name("third")).await }
    });
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    assert!(!asking.is_finished());
    group.members[0].plays(Part::Leads);
    assert!(asking.await.unwrap().unwrap_err().is_gone());
    let after = session.link(Duration::ZERO).await.unwrap();
    assert!(Arc::ptr_eq(&link, &after), "the connection is the same");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_starts_during_an_election_waits_for_its_end() {
    let group = Group::start().await;
    group.nobody_leads();
    // Nobody answers here.
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut options = group.options();
    options.namenodes[0] = silent.local_addr().unwrap();
    let connecting = tokio::spawn(Client::connect(options));
    tokio::time::sleep(ELECTION).await;
    assert!(!connecting.is_finished());
    let began = Instant::now();
    group.elect(1);
    let client = connecting.await.unwrap().unwrap();
    println!("connected {:?} after the election", began.elapsed());
    create(&client, "file").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_knows_one_namenode_goes_on_with_those_that_replace_it() {
    let group = Group::start().await;
    let all = group.options().namenodes;
    let knowing = |at: usize| ClientOptions {
        namenodes: vec![all[at]],
        ..group.options()
    };
    let client = Client::connect(knowing(0)).await.unwrap();
    let session = client.core().session.clone();
    let generation = session.generation();
    create(&client, "with-the-first").await;
    group.cluster.namenode.tell_namenodes(&all);
    tokio::time::sleep(Duration::from_millis(200)).await;
    group.nobody_leads();
    group.members[0].plays(Part::Hangs);
    let asking = tokio::spawn({
        let client = client.clone();
        async move { create(&client, "with-another").await }
    });
    tokio::time::sleep(ELECTION).await;
    group.elect(1);
    group.members[0].plays(Part::Hangs);
    let began = Instant::now();
    asking.await.unwrap();
    println!("found {:?} after the election", began.elapsed());
    assert_eq!(session.generation(), generation, "the session went on");

    // It learns of the others only from one that does not lead.
    let other = Client::connect(knowing(2)).await.unwrap();
    create(&other, "by-a-hint").await;
    group.cluster.namenode.tell_namenodes(&all[1..]);
    group.members[0].stop();
    group.elect(2);
    group.members[1].stop();
    create(&client, "with-the-last").await;
    create(&other, "with-the-last-too").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_is_given_no_namenode_is_told_so() {
    let cluster = Cluster::start(1, 1).await;
    let mut options = cluster.options("a");
    options.namenodes.clear();
    let refused = Client::connect(options).await;
    assert!(
        matches!(refused, Err(ClientError::Fs(FsError::InvalidArgument(_)))),
        "{refused:?}"
    );
}
