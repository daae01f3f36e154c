//! Creates a cluster. Its parts are created in a temporary directory and then moved to their places, the authority
//! last, so that an interrupted attempt never leaves an incomplete cluster.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use harvestfs_namenode::consensus::{Member, MemberId};
use harvestfs_namenode::server::{FormatOptions, GroupOptions};
use harvestfs_placement::{Locality, PolicyKind};
use harvestfs_protocol::durable;
use harvestfs_protocol::identity::{CertificateAuthority, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::types::{Durability, PlacementRules, Timestamp};

use super::{
    LayoutArgs, NAMENODE_NAME, NAMENODES, SEGMENT_BYTES, client, issue, make_private_directory,
    proven, refuse_unspecified,
};
use crate::config::{self, NamenodeConfig, RepairConfig};

/// Name of the authority's directory, whose existence marks a complete cluster.
const AUTHORITY: &str = "ca";
/// Name of the directory in which the parts are created.
const MAKING: &str = ".making";
/// Name of the directory of complete parts that are yet to be moved to their places.
const MADE: &str = ".made";

/// Creates a cluster: `ca/`, `namenode/`, `admin/` and `client/` below `data`. An interrupted attempt is started from
/// scratch, or completed if its parts were already being moved. Returns the addresses of the namenodes, which differ
/// from `listen` if the completed attempt had others.
///
/// # Errors
/// When there is a cluster already, or something cannot be written.
pub fn cluster(
    data: &Path,
    listen: &[SocketAddr],
    http: &[SocketAddr],
    layout: &LayoutArgs,
) -> anyhow::Result<Vec<SocketAddr>> {
    if data.join(AUTHORITY).exists() {
        bail!("{} holds a cluster already", data.display());
    }
    check_addresses(listen, http)?;
    make_private_directory(data)?;
    let made = data.join(MADE);
    if !is_being_moved(data, &made)? {
        let making = data.join(MAKING);
        for leftover in [&making, &made] {
            remove(leftover)?;
        }
        refuse_what_is_in_the_way(data, listen.len())?;
        make(&making, listen, http, layout)?;
        durable::rename(&making, &made).with_context(|| cannot_make(data))?;
    }
    put_in_place(data, &made).with_context(|| cannot_make(data))?;
    addresses(data)
}

/// The addresses of a cluster's namenodes.
///
/// # Errors
/// When the configuration of a namenode cannot be read.
pub fn addresses(data: &Path) -> anyhow::Result<Vec<SocketAddr>> {
    let configs = (0..).map(|at| data.join(namenode_directory(at)).join("namenode.toml"));
    let made = configs.take_while(|it| it.exists());
    made.map(|it| Ok(config::load::<NamenodeConfig>(&it)?.listen))
        .collect()
}

fn cannot_make(data: &Path) -> String {
    format!("cannot make a cluster in {}", data.display())
}

fn remove(directory: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", directory.display()))
        }
        _ => Ok(()),
    }
}

/// Whether some of the created parts have already been moved.
fn is_being_moved(data: &Path, made: &Path) -> anyhow::Result<bool> {
    let entries = match entries_of(made) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        entries => entries.with_context(|| cannot_make(data))?,
    };
    // The first one is moved first.
    Ok(!entries.contains(&made.join(namenode_directory(0))))
}

/// The parts of a cluster in the order in which they are moved: the first namenode first, the authority last.
fn entries_of(made: &Path) -> io::Result<Vec<PathBuf>> {
    let entries: io::Result<Vec<PathBuf>> = fs::read_dir(made)?.map(|it| Ok(it?.path())).collect();
    let mut entries = entries?;
    let (first, last) = (made.join(namenode_directory(0)), made.join(AUTHORITY));
    entries.sort_by_key(|it| (*it == last, *it != first, it.clone()));
    Ok(entries)
}

fn put_in_place(data: &Path, made: &Path) -> io::Result<()> {
    for entry in entries_of(made)? {
        let name = entry.file_name().unwrap_or_default();
        durable::rename(&entry, &data.join(name))?;
    }
    fs::remove_dir(made)
}

/// Refuses to overwrite existing parts, for example of a cluster whose authority is kept elsewhere.
fn refuse_what_is_in_the_way(data: &Path, namenodes: usize) -> anyhow::Result<()> {
    let namenodes = (0..namenodes).map(namenode_directory);
    for name in namenodes.chain(["admin", "client"].map(str::to_owned)) {
        let path = data.join(name);
        if path.exists() {
            bail!(
                "{} is there already: name another directory, or move it away",
                path.display()
            );
        }
    }
    Ok(())
}

fn make(
    data: &Path,
    listen: &[SocketAddr],
    http: &[SocketAddr],
    layout: &LayoutArgs,
) -> anyhow::Result<()> {
    make_private_directory(data)?;
    let authority = CertificateAuthority::create(&data.join(AUTHORITY))?;
    for (role, name) in [(Role::Admin, "admin"), (Role::Client, "client")] {
        client(data, &data.join(name), role, name, listen, None)?;
    }
    let format = FormatOptions {
        cluster: new_cluster_id()?,
        root_uid: rustix::process::geteuid().as_raw(),
        root_gid: rustix::process::getegid().as_raw(),
        block_bytes: layout.block_size.unwrap_or(LayoutArgs::BLOCK_SIZE).0,
        default_rules: PlacementRules {
            replication: layout.replication.unwrap_or(LayoutArgs::REPLICATION),
            durability: Durability::Strict,
            class: None,
        },
        segment_bytes: SEGMENT_BYTES,
        group: None,
    };
    let now = Timestamp::now();
    let members = members(listen);
    for (at, address) in listen.iter().enumerate() {
        let group = (listen.len() > 1).then(|| GroupOptions {
            this: members[at].0,
            members: members.iter().cloned().collect(),
            now,
        });
        let format = FormatOptions {
            group,
            ..format.clone()
        };
        let http = http.get(at).copied();
        namenode(
            &authority,
            &data.join(namenode_directory(at)),
            *address,
            http,
            &format,
        )?;
    }
    Ok(())
}

/// Makes the certificate, the configuration and the data directory of a namenode.
fn namenode(
    authority: &CertificateAuthority,
    directory: &Path,
    listen: SocketAddr,
    http: Option<SocketAddr>,
    format: &FormatOptions,
) -> anyhow::Result<()> {
    configure(authority, directory, listen, http)?;
    harvestfs_namenode::server::format(&directory.join("data"), format)
        .context("cannot format the namenode's journal")
}

/// Makes the certificate and the configuration of a namenode.
pub(super) fn configure(
    authority: &CertificateAuthority,
    directory: &Path,
    listen: SocketAddr,
    http: Option<SocketAddr>,
) -> anyhow::Result<()> {
    make_private_directory(directory)?;
    let identity = directory.join("identity");
    issue(authority, Role::Namenode, NAMENODE_NAME, &identity)?;
    config::store(
        &directory.join("namenode.toml"),
        &NamenodeConfig {
            listen,
            identity: "identity".into(),
            data: "data".into(),
            policy: PolicyKind::default(),
            locality: Locality::default(),
            min_write_replicas: config::default_min_write_replicas(),
            repair: RepairConfig::default(),
            quarantine_s: config::default_quarantine(),
            http: proven(http, directory)?,
        },
    )
}

fn check_addresses(listen: &[SocketAddr], http: &[SocketAddr]) -> anyhow::Result<()> {
    // Clients and datanodes are configured with these addresses.
    for address in listen {
        refuse_unspecified("namenode", *address)?;
    }
    let distinct: BTreeSet<SocketAddr> = listen.iter().copied().collect();
    if distinct.len() != listen.len() {
        bail!("two namenodes cannot listen on the same address");
    }
    if !NAMENODES.contains(&listen.len()) {
        bail!(
            "{} namenodes were named: make it one, three or five. Most of them have to work, so that an even number \
             survives no more failures than one less",
            listen.len()
        );
    }
    if !http.is_empty() && http.len() != listen.len() {
        bail!(
            "{} addresses for pages and {} for namenodes: name one for each, or none",
            http.len(),
            listen.len()
        );
    }
    Ok(())
}

/// The directory of a namenode in that of the cluster; the first one's is `namenode`.
pub fn namenode_directory(at: usize) -> String {
    match at {
        0 => "namenode".to_owned(),
        _ => format!("namenode-{}", at + 1),
    }
}

/// Members with these addresses, in their order, and their numbers.
fn members(listen: &[SocketAddr]) -> Vec<(MemberId, Member)> {
    let member = |addr: &SocketAddr| {
        let member = Member {
            name: NAMENODE_NAME.to_owned(),
            addr: *addr,
        };
        (MemberId::random(), member)
    };
    listen.iter().map(member).collect()
}

fn new_cluster_id() -> anyhow::Result<ClusterId> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("the kernel gives no random bytes")?;
    Ok(ClusterId(u128::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: LayoutArgs = LayoutArgs {
        replication: None,
        block_size: None,
    };

    fn three(port: u16) -> Vec<SocketAddr> {
        let addr = |ip: u8| SocketAddr::from(([10, 0, 0, ip], port));
        (1..=3).map(addr).collect()
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string();
        let mut names: Vec<String> = entries.map(|entry| name(entry).unwrap()).collect();
        names.sort();
        names
    }

    fn check_whole(data: &Path) {
        let parts = [
            "admin",
            "ca",
            "client",
            "namenode",
            "namenode-2",
            "namenode-3",
        ];
        assert_eq!(names(data), parts);
        let id = |at| {
            let directory = data.join(namenode_directory(at)).join("data");
            harvestfs_namenode::server::cluster_id(&directory).unwrap()
        };
        assert!(id(0) == id(1) && id(1) == id(2));
        CertificateAuthority::load(&data.join(AUTHORITY)).unwrap();
    }

    #[test]
    fn an_attempt_that_was_interrupted_anywhere_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        // Interrupted while parts were created: any of them may be missing.
        for kept in 0..6 {
            let making = data.join(MAKING);
            make(&making, &three(1), &[], &LAYOUT).unwrap();
            for part in names(&making).iter().skip(kept) {
                fs::remove_dir_all(making.join(part)).unwrap();
            }
            assert_eq!(cluster(&data, &three(2), &[], &LAYOUT).unwrap(), three(2));
            check_whole(&data);
            fs::remove_dir_all(&data).unwrap();
        }
        // Interrupted while parts were moved.
        for moved in 0..6 {
            let made = data.join(MADE);
            make(&made, &three(1), &[], &LAYOUT).unwrap();
            for entry in &entries_of(&made).unwrap()[..moved] {
                fs::rename(entry, data.join(entry.file_name().unwrap())).unwrap();
            }
            let listen = three(if moved == 0 { 2 } else { 1 });
            let found = cluster(&data, &three(2), &[], &LAYOUT).unwrap();
            assert_eq!(found, listen, "{moved} moved");
            check_whole(&data);
            assert!(
                cluster(&data, &three(2), &[], &LAYOUT).is_err(),
                "there is one"
            );
            fs::remove_dir_all(&data).unwrap();
        }
    }

    #[test]
    fn what_is_there_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path();
        cluster(data, &three(1), &[], &LAYOUT).unwrap();
        fs::rename(data.join(AUTHORITY), data.join("safe")).unwrap();
        let before = fs::read(data.join("admin/identity/cert.pem")).unwrap();
        let refused = cluster(data, &three(1), &[], &LAYOUT)
            .unwrap_err()
            .to_string();
        assert!(refused.contains("is there already"), "{refused}");
        assert_eq!(
            fs::read(data.join("admin/identity/cert.pem")).unwrap(),
            before
        );
    }

    #[test]
    fn impossible_addresses_are_refused_and_nothing_is_made() {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let all = three(1);
        let twice = [all[0], all[1], all[0]];
        let anywhere = [SocketAddr::from(([0, 0, 0, 0], 1))];
        for (listen, http, said) in [
            (&all[..2], &[][..], "an even number"),
            (&twice, &[], "the same address"),
            (&all, &all[..2], "one for each"),
            (&[], &[], "0 namenodes"),
            (&anywhere, &[], "do not reach a namenode"),
        ] {
            let refused = cluster(&data, listen, http, &LAYOUT).unwrap_err();
            assert!(refused.to_string().contains(said), "{refused}");
            assert!(!data.exists());
        }
    }
}
