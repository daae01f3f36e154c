use std::cell::RefCell;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use harvestfs_client::{Client, ClientOptions};
use harvestfs_datanode::{Datanode, DatanodeOptions, VolumeOptions};
use harvestfs_namenode::server::{FormatOptions, Namenode, NamenodeOptions, format};
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::types::{Credentials, Durability, PlacementRules, StorageClass};

use super::*;

const TICK: Duration = Duration::from_millis(1);

fn ip(number: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, number])
}

#[test]
fn a_file_is_written_and_read() {
    let wall = Instant::now();
    let directory = tempfile::tempdir().expect("a directory");
    let authority = CertificateAuthority::in_memory().expect("an authority");
    let identity = |role, name: &str| {
        let validity = Duration::from_secs(3_600);
        authority.issue(role, name, validity).expect("an identity")
    };
    let network = Network::new(1, Duration::from_micros(200));
    let mut hosts: Vec<Host> = (1..=5)
        .map(|number| Host::new(ip(number), u64::from(number), &network).expect("a host"))
        .collect();
    let namenode = SocketAddr::new(ip(1), 9_310);
    let data = directory.path().join("namenode");
    let rules = PlacementRules {
        replication: 3,
        durability: Durability::Space,
        class: None,
    };
    format(
        &data,
        &FormatOptions {
            cluster: ClusterId(1),
            root_uid: 0,
            root_gid: 0,
            block_bytes: 1 << 20,
            default_rules: rules,
            segment_bytes: 4 << 20,
        },
    )
    .expect("a data directory");
    let options = NamenodeOptions::new(data, namenode, identity(Role::Namenode, "nn"));
    hosts[0].spawn(async move {
        let mut namenode = Namenode::start(options).await.expect("a namenode");
        namenode.ended().await.expect("it goes on");
    });
    for number in 2..=4 {
        let name = format!("dn{number}");
        let identity = identity(Role::Datanode, &name);
        let mut options = DatanodeOptions::new(identity, "nn".into(), vec![namenode]);
        options.listen = SocketAddr::new(ip(number), 9_311);
        options.rack = format!("rack{number}");
        options.environment = format!("environment{number}");
        options.machine_function = format!("function{number}");
        options.volumes = vec![VolumeOptions {
            path: directory.path().join(&name),
            quota_bytes: 1 << 30,
            class: StorageClass::default(),
        }];
        hosts[usize::from(number) - 1].spawn(async move {
            let _datanode = Datanode::start(options).await.expect("a datanode");
            std::future::pending::<()>().await;
        });
    }
    let mut options = ClientOptions::new(vec![namenode], "nn", identity(Role::Client, "c"));
    options.bind = Some(SocketAddr::new(ip(5), 0));
    let read = Rc::new(RefCell::new(None));
    let result = Rc::clone(&read);
    hosts[4].spawn(async move {
        tokio::time::sleep(Duration::from_secs(5)).await;
        let client = Client::connect(options).await.expect("a client");
        let me = Credentials::root();
        let content = vec![7; 3_000_000];
        for number in 0..20 {
            let path = format!("/f{number}");
            client
                .write_file(&me, path.as_bytes(), &content)
                .await
                .expect("written");
        }
        let read = client.read_file(&me, b"/f7").await.expect("read");
        *result.borrow_mut() = Some(read == content);
    });
    let mut now = Duration::ZERO;
    while now < Duration::from_secs(60) && read.borrow().is_none() {
        now += TICK;
        network.advance(now);
        for host in &mut hosts {
            host.run_for(TICK);
        }
    }
    println!("{now:?} of virtual time in {:?}", wall.elapsed());
    assert_eq!(*read.borrow(), Some(true));
}
