//! Seeds for what is read from disk.

use std::collections::BTreeMap;
use std::time::Duration;

use harvestfs_namenode::backup::BackupWriter;
use harvestfs_namenode::engine::namespace::Command;
use harvestfs_protocol::backup::BackupContent;
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::timeline::Epoch;
use harvestfs_protocol::token::TokenKey;

use super::{commands, flagged, in_parts, noise, postcard_of};
use crate::{journal, namespace};

/// Returns owners, reimages and a few slots, as written by the namenode.
pub(super) fn history_files() -> Vec<u8> {
    use harvestfs_telemetry::history::{History, SLOTS_PER_DAY, ServerId};
    use harvestfs_telemetry::profile::TenantKey;
    let mut history = History::default();
    for number in 0..3 {
        let tenant = TenantKey {
            environment: "prod".into(),
            machine_function: format!("f{number}"),
        };
        let server = format!("s{number}");
        history.owns(&server, &tenant, 5).expect("there is room");
        history.reimaged(&server, 100).expect("it is known");
        let slot = 20_000 * SLOTS_PER_DAY as u32 + number;
        history.record_slot(slot, [(ServerId(number), 0.5)]);
    }
    let servers: Vec<u8> = history.server_records().flatten().collect();
    let day: Vec<u8> = history.day_records(20_000).flatten().collect();
    flagged(None, &[&servers, &day])
}

pub(super) fn trace_files() -> Vec<Vec<u8>> {
    let files = [
        "series,values\na,1234,,18200\n",
        "series,period_s,start_unix_s,unit,values\na,60,1000,pct_x100,1,2\nb,1,,cores,1.5,3\n",
        "date,node,slice,values\n20110303,n,s,24,,100\n",
        "server,rack,from_s,tenant\n1,2,3,4\n",
        "t_s,server,tenant,kind,burst\n5,1,2,rolling,3\n",
    ];
    files.map(|text| text.as_bytes().to_vec()).to_vec()
}

pub(super) fn identity_files() -> Vec<Vec<u8>> {
    let directory = tempfile::tempdir().expect("TMPDIR can be written");
    let authority = CertificateAuthority::in_memory().expect("random numbers");
    let identity = authority
        .issue(Role::Client, "client", Duration::from_secs(86_400))
        .expect("a name");
    identity.save(directory.path()).expect("TMPDIR has room");
    let read = |name| std::fs::read(directory.path().join(name)).expect("it was saved");
    let files = ["ca.pem", "cert.pem", "key.pem"].map(read);
    vec![flagged(None, &files.each_ref().map(Vec::as_slice))]
}

pub(super) fn journal_files() -> Vec<Vec<u8>> {
    let segment = journal::first_segment(&[b"first", b"", b"third"]);
    let snapshot = journal::snapshot_of_record_1(b"content");
    vec![
        flagged(Some(0), &[&segment, &snapshot]),
        flagged(Some(0), &[&segment, &[]]),
    ]
}

pub(super) fn namespace_snapshot() -> Vec<Vec<u8>> {
    let mut state = namespace::formatted();
    // Without the last command, which ends the session.
    for command in &commands()[..8] {
        let command = Command::decode(command).expect("it was encoded");
        state.apply(&command).expect("a seed is valid");
    }
    let whole = namespace::snapshot(&state);
    // Magic and version, then one frame: length and checksum before its payload.
    let payload = whole[20..].to_vec();
    vec![
        flagged(Some(0), &[&whole]),
        flagged(Some(1), &[&in_parts(&[payload])]),
    ]
}

/// Returns a backup that becomes a directory, and the input of plans.
pub(super) fn backup_files() -> Vec<Vec<u8>> {
    let state = namespace::formatted();
    let snapshot = journal::snapshot_of_record_1(&namespace::snapshot(&state));
    let (counts, addr) = (state.counts(), ([127, 0, 0, 1], 9_310).into());
    let content = BackupContent {
        cluster: ClusterId(7),
        record: 1,
        term: 0,
        epoch: Epoch::default(),
        unix_ms: 1,
        version: "1.2.3".into(),
        edition: state.edition(),
        name: "namenode".into(),
        addr,
        led: true,
        behind_records: 0,
        namenodes: vec![addr],
        files: counts.files,
        directories: counts.directories,
        blocks: counts.blocks,
        length_bytes: snapshot.len() as u64,
    };
    let mut writer = BackupWriter::begin(Vec::new(), &content).expect("memory takes everything");
    writer.part(&snapshot).expect("memory takes everything");
    let mut seeds = vec![writer.end().expect("memory takes everything")];
    seeds.extend((1..=32).map(noise));
    seeds
}

pub(super) fn namenode_directory() -> Vec<Vec<u8>> {
    let keys = postcard_of(&(
        1_u8,
        vec![(
            TokenKey {
                key_id: 1,
                secret: [5; 32],
            },
            1_u64,
        )],
    ));
    let session = namespace::open_session().encode().expect("memory");
    let mut records = vec![session];
    records.extend(commands());
    vec![
        flagged(Some(1), &[b"", &keys, b"", &in_parts(&records)]),
        flagged(Some(2), &[b"", b"", &member(&[1]), &in_parts(&records)]),
        flagged(Some(2), &[b"", b"", &member(&[1, 2, 3]), &[]]),
        flagged(Some(2), &[b"", b"", &member(&[]), &[]]),
        flagged(
            Some(0),
            &[
                b"00000000000000000000000000000007\n",
                b"",
                b"",
                &in_parts(&records[..1]),
            ],
        ),
    ]
}

/// Returns the file of a member of a group with these members; without any, it is in no group.
fn member(ids: &[u64]) -> Vec<u8> {
    let addr = std::net::SocketAddr::from(([127, 0, 0, 1], 9));
    let nodes: BTreeMap<u64, _> = ids.iter().map(|id| (*id, ("namenode", addr))).collect();
    let members = postcard_of(&(vec![ids], nodes));
    let named = (!ids.is_empty()).then_some((None::<(u64, u64)>, members));
    let (vote, terms) = (Some((3_u64, 1_u64, true)), vec![(1_u64, 0_u64)]);
    let named: Vec<_> = named.into_iter().collect();
    let known = BTreeMap::from([(2_u64, (7_u64, 5_u64))]);
    let file = None::<(u64, u64)>;
    postcard_of(&(1_u64, vote, named, terms, 4_u64, known, false, file))
}

pub(super) fn config_files() -> Vec<Vec<u8>> {
    let namenode = "listen = \"127.0.0.1:9310\"\nidentity = \"identity\"\ndata = \"data\"\n";
    let datanode = "name = \"dn1\"\nrack = \"r\"\nenvironment = \"e\"\nmachine_function = \"f\"\n\
                    listen = \"127.0.0.1:0\"\nnamenodes = [\"127.0.0.1:9310\"]\n\
                    identity = \"identity\"\nscrub_bytes_per_s = \"8MiB\"\n\n\
                    [[volume]]\npath = \"volume\"\nquota = \"1GiB\"\nclass = \"ssd\"\n";
    let client = "namenodes = [\"127.0.0.1:9310\"]\nidentity = \"identity\"\ndirty = 1000\n";
    vec![
        flagged(Some(0), &[namenode.as_bytes()]),
        flagged(Some(1), &[datanode.as_bytes()]),
        flagged(Some(2), &[client.as_bytes()]),
    ]
}

pub(super) fn version_file() -> Vec<Vec<u8>> {
    let body = "harvestfs-volume 1\nstorage 00000000000000000000000000000009\n\
                cluster 00000000000000000000000000000007\nserver dn1\n";
    vec![
        flagged(Some(1), &[body.as_bytes()]),
        flagged(Some(0), &[body.as_bytes()]),
    ]
}

/// Returns a manifest, hashes of pages, a map of pages and messages of CRIU.
pub(super) fn checkpoint_files() -> Vec<Vec<u8>> {
    use harvestfs_checkpoint::manifest::{Allow, Image, MANIFEST_VERSION, Manifest};
    use harvestfs_checkpoint::page::{PageHash, PageTable};
    use harvestfs_checkpoint::pagemap::{IN_PARENT, PRESENT, PageMap, Run};
    let image = Image {
        name: "pages-1.img".into(),
        size_bytes: 4096,
        sent_bytes: 4096,
        sha256: "00".into(),
    };
    let manifest = Manifest {
        version: MANIFEST_VERSION,
        job: "job".parse().expect("a name"),
        number: 2,
        parent: Some(1),
        depth: 1,
        node: "node".into(),
        pid: 42,
        created_unix_ms: 1,
        stopped_ms: 2,
        progress_ms: 3,
        left_running: true,
        criu: "4.1".into(),
        allow: vec![Allow::ShellJob],
        images: vec![image],
    };
    let mut table = PageTable::default();
    table.extend_pages(&[PageHash([1; 16]), PageHash([2; 16])]);
    table.complete_groups(&PageTable::default());
    let mut map = PageMap::new(1);
    for (address, flags) in [(4096, PRESENT), (16_384, IN_PARENT), (65_536, PRESENT | 2)] {
        let run = Run {
            address,
            pages: 2,
            flags,
        };
        map.push(run).expect("they are in order");
    }
    let open = [&[4_u8, 0, 0, 0][..], &[0; 12], &[1, 42, 0, 0, 0, 0, 0, 0]].concat();
    let add = [&[6_u8, 0, 4, 0][..], &[0; 4], &[2; 8], &[0; 8], &[1; 8]].concat();
    vec![
        flagged(Some(0), &[&manifest.encode().expect("it is whole")]),
        flagged(Some(1), &[&table.encode()]),
        flagged(Some(2), &[&map.encode()]),
        flagged(Some(3), &[&open]),
        flagged(Some(3), &[&add]),
    ]
}
