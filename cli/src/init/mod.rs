//! `harvestfs init`: creates the certificates, configuration and directories of a cluster and its parts.

mod cluster;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use harvestfs_protocol::identity::{CertificateAuthority, Peer, Role};
use harvestfs_protocol::ids::ClusterId;
use harvestfs_protocol::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN, REPLICATION_MAX};
use harvestfs_protocol::outlook::count;

pub use self::cluster::{addresses, cluster, namenode_directory};
use crate::config::{
    self, Class, ClientConfig, DatanodeConfig, PrimaryConfig, PrimarySourceConfig, Priority,
    VolumeConfig,
};
use crate::http::HttpConfig;
use crate::units::Size;

/// How many namenodes a cluster may have.
pub const NAMENODES: [usize; 3] = [1, 3, 5];

/// The name in the certificates of all namenodes of a cluster.
pub const NAMENODE_NAME: &str = "namenode";

/// Certificates are renewed by `init` before they end; ten years outlive the servers.
const CERTIFICATE_LIFETIME: Duration = Duration::from_secs(3650 * 24 * 3600);

/// Size of one segment of the journal: a few hundred thousand records.
pub const SEGMENT_BYTES: u64 = 64 << 20;

/// What to make.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  harvestfs init cluster --data /srv/harvestfs --listen 10.0.0.1:9310\n  harvestfs init datanode web1 --data /srv/harvestfs --out web1 --namenode 10.0.0.1:9310 --listen 10.0.0.2:9311 --rack r1 --environment web --machine-function front --volume /data/harvestfs=100GiB\n  harvestfs init client laptop --data /srv/harvestfs --out laptop --namenode 10.0.0.1:9310"
)]
pub struct InitArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// A new cluster: certificate authority, namenode, an administrator and a client.
    #[command(after_help = "Examples:\n  \
        harvestfs init cluster --data /srv/harvestfs --listen 10.0.0.1:9310 --http 10.0.0.1:9312\n  \
        harvestfs init cluster --data /srv/harvestfs --namenodes 3 \\\n      \
        --listen 10.0.0.1:9310,10.0.0.2:9310,10.0.0.3:9310")]
    Cluster {
        /// Directory of the cluster; must not hold one.
        #[arg(long, env = "HARVESTFS_DATA")]
        data: PathBuf,
        /// Address of the namenode; three or five, separated by commas, for as many namenodes that agree: the
        /// cluster works as long as most of them do. They belong on servers of different racks.
        #[arg(long, default_value = "127.0.0.1:9310", value_delimiter = ',')]
        listen: Vec<SocketAddr>,
        /// How many namenodes that is: 1, 3 or 5. It may be left out; given, it has to be the number of addresses.
        #[arg(long, value_name = "N", value_parser = namenode_count)]
        namenodes: Option<usize>,
        /// Address of its page and metrics; one for each namenode. They need an administrator's certificate, or the
        /// token that is made.
        #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
        http: Vec<SocketAddr>,
        #[command(flatten)]
        layout: LayoutArgs,
    },
    /// Another namenode for a cluster that runs, to be moved to its server.
    #[command(after_help = "Example:\n  \
        harvestfs init namenode --data /srv/harvestfs --out namenode-2 --listen 10.0.0.2:9310")]
    Namenode {
        /// Directory of the cluster.
        #[arg(long, env = "HARVESTFS_DATA")]
        data: PathBuf,
        /// Directory to write to; must not exist.
        #[arg(long)]
        out: PathBuf,
        /// Address to listen on, under which others reach it.
        #[arg(long)]
        listen: SocketAddr,
        /// Address of its page and metrics.
        #[arg(long, value_name = "ADDRESS")]
        http: Option<SocketAddr>,
        /// The cluster's id, as `admin status` and `admin backup --check` say it; needed where `--data` has no namenode any more.
        #[arg(long, value_parser = cluster_id)]
        cluster: Option<ClusterId>,
    },
    /// Certificate and configuration of a datanode, to be moved to its server.
    #[command(after_help = "Example:\n  \
        harvestfs init datanode web1 --data /srv/harvestfs --out web1 --namenode 10.0.0.1:9310 \\\n      \
        --listen 10.0.0.2:9311 --rack r1 --environment web --machine-function front \\\n      \
        --volume /data/harvestfs=100GiB")]
    Datanode {
        /// Name of the server.
        name: String,
        /// Directory of the cluster.
        #[arg(long, env = "HARVESTFS_DATA")]
        data: PathBuf,
        /// Directory to write to; must not exist.
        #[arg(long)]
        out: PathBuf,
        /// Address of the namenode.
        #[arg(
            long,
            required = true,
            env = "HARVESTFS_NAMENODES",
            value_delimiter = ','
        )]
        namenode: Vec<SocketAddr>,
        /// Address to listen on, under which others reach the server.
        #[arg(long)]
        listen: SocketAddr,
        /// Rack of the server.
        #[arg(long)]
        rack: String,
        /// Environment of its primary tenant.
        #[arg(long)]
        environment: String,
        /// Machine function of its primary tenant.
        #[arg(long)]
        machine_function: String,
        /// Where the use of its primary tenant is read: `machine` or `none`; more can be said in the
        /// configuration.
        #[arg(long, default_value = "machine", value_name = "SOURCE", value_parser = primary_source)]
        primary_source: PrimarySourceConfig,
        /// How it competes with others for CPU and disks: `idle`, `low` or `normal`.
        #[arg(long, default_value = "idle")]
        priority: Priority,
        /// Address of its metrics. They need an administrator's certificate, or the token that is
        /// made.
        #[arg(long, value_name = "ADDRESS")]
        http: Option<SocketAddr>,
        /// A directory and the most bytes to use there.
        #[arg(long = "volume", required = true, value_name = "DIR=SIZE", value_parser = volume)]
        volumes: Vec<(PathBuf, Size)>,
    },
    /// Certificate and configuration of a client, to be moved to where it mounts.
    #[command(after_help = "Examples:\n  \
        harvestfs init client laptop --data /srv/harvestfs --out laptop --namenode 10.0.0.1:9310\n  \
        harvestfs init client ops --administrator --data /srv/harvestfs --out ops --namenode 10.0.0.1:9310")]
    Client {
        /// Name of the client.
        name: String,
        /// Directory of the cluster.
        #[arg(long, env = "HARVESTFS_DATA")]
        data: PathBuf,
        /// Directory to write to; must not exist.
        #[arg(long)]
        out: PathBuf,
        /// Address of the namenode.
        #[arg(
            long,
            required = true,
            env = "HARVESTFS_NAMENODES",
            value_delimiter = ','
        )]
        namenode: Vec<SocketAddr>,
        /// Address of the metrics of a mount, for all users of the same machine: 127.0.0.1:PORT.
        #[arg(long, value_name = "ADDRESS")]
        http: Option<SocketAddr>,
        /// Allow `harvestfs admin` with it.
        #[arg(long)]
        administrator: bool,
    },
}

/// What is decided when a cluster is made.
#[derive(Clone, Debug, Args)]
pub struct LayoutArgs {
    /// Replicas of each block, unless a directory or file asks for another number.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=i64::from(REPLICATION_MAX)))]
    pub replication: Option<u8>,
    /// Largest block, 1MiB to 256MiB.
    #[arg(long, value_parser = block_size)]
    pub block_size: Option<Size>,
}

impl LayoutArgs {
    /// Three replicas, as HDFS and the paper.
    pub const REPLICATION: u8 = 3;
    /// 256 MiB, as the paper.
    pub const BLOCK_SIZE: Size = Size(BLOCK_BYTES_MAX);
}

fn block_size(text: &str) -> Result<Size, String> {
    let size: Size = text.parse()?;
    if (BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&size.0) && size.0.is_multiple_of(4096) {
        Ok(size)
    } else {
        Err("a block has 1MiB to 256MiB, in multiples of 4KiB".into())
    }
}

/// The id of a cluster as it is written.
pub fn cluster_id(text: &str) -> Result<ClusterId, String> {
    match u128::from_str_radix(text, 16) {
        Ok(id) if text.len() == 32 => Ok(ClusterId(id)),
        _ => Err("a cluster has an id of 32 hexadecimal digits".into()),
    }
}

/// How many namenodes a cluster is to have.
pub fn namenode_count(text: &str) -> Result<usize, String> {
    let count = text.parse().ok().filter(|it| NAMENODES.contains(it));
    count.ok_or_else(|| "a cluster has 1, 3 or 5 namenodes: most of them have to run".into())
}

fn primary_source(text: &str) -> Result<PrimarySourceConfig, String> {
    match text {
        "machine" => Ok(PrimarySourceConfig::Machine { own_cgroup: None }),
        "none" => Ok(PrimarySourceConfig::None),
        _ => Err("write `machine` or `none`; a cgroup or a trace is named in the file".into()),
    }
}

fn volume(text: &str) -> Result<(PathBuf, Size), String> {
    let (path, size) = text.rsplit_once('=').ok_or("write DIR=SIZE")?;
    Ok((path.into(), size.parse()?))
}

/// Runs `harvestfs init`.
///
/// # Errors
/// When something is in the way or cannot be written.
pub fn run(args: &InitArgs) -> anyhow::Result<()> {
    match &args.what {
        What::Cluster {
            data,
            listen,
            namenodes,
            http,
            layout,
        } => {
            if let Some(namenodes) = namenodes
                && *namenodes != listen.len()
            {
                bail!(
                    "--namenodes {namenodes}, and {} in --listen: name the address of each, separated by commas",
                    count(listen.len() as u64, "address")
                );
            }
            let made = cluster(data, listen, http, layout)?;
            if made != *listen {
                bail!(
                    "an attempt before this one was interrupted, and is finished instead: {} holds a cluster for \
                     the addresses that it was given. Remove that, and begin again, to have others",
                    data.display()
                );
            }
            println!("Made a cluster in {}.", data.display());
            for (at, listen) in listen.iter().enumerate() {
                let directory = data.join(namenode_directory(at));
                if listen.ip().is_loopback() || at == 0 {
                    println!(
                        "Start its namenode:  harvestfs namenode --config {}/namenode.toml",
                        directory.display()
                    );
                } else {
                    println!(
                        "Move {0} to {1}, then: harvestfs namenode --config {0}/namenode.toml",
                        directory.display(),
                        listen.ip()
                    );
                }
            }
            println!(
                "Add a datanode:      harvestfs init datanode --data {} ...",
                data.display()
            );
        }
        What::Namenode {
            data,
            out,
            listen,
            http,
            cluster,
        } => {
            refuse_existing(out)?;
            refuse_unspecified("namenode", *listen)?;
            let cluster = match cluster {
                Some(cluster) => *cluster,
                None => harvestfs_namenode::server::cluster_id(&data.join("namenode").join("data"))
                    .context("name the cluster with --cluster, as `admin status` shows it")?,
            };
            let authority = CertificateAuthority::load(&data.join("ca"))?;
            cluster::configure(&authority, out, *listen, *http)?;
            let directory = out.join("data");
            harvestfs_namenode::server::format_outside(&directory, cluster, SEGMENT_BYTES)
                .context("cannot make the namenode's journal")?;
            println!(
                "Move {0} to {1}, then: harvestfs namenode --config {0}/namenode.toml",
                out.display(),
                listen.ip()
            );
            println!("When it runs:  harvestfs admin namenode add {listen}");
        }
        What::Datanode {
            name,
            data,
            out,
            namenode,
            listen,
            rack,
            environment,
            machine_function,
            primary_source,
            priority,
            http,
            volumes,
        } => {
            refuse_existing(out)?;
            refuse_unspecified("datanode", *listen)?;
            check_issuable(data, Role::Datanode, name)?;
            make_private_directory(out)?;
            let config = DatanodeConfig {
                name: name.clone(),
                rack: rack.clone(),
                environment: environment.clone(),
                machine_function: machine_function.clone(),
                listen: *listen,
                namenodes: namenode.clone(),
                identity: "identity".into(),
                scrub_bytes_per_s: config::default_scrub_rate(),
                scrub_every_s: config::default_scrub_interval(),
                removal_bytes_per_s: config::default_removal_rate(),
                priority: *priority,
                primary: PrimaryConfig {
                    source: primary_source.clone(),
                    ..PrimaryConfig::default()
                },
                volumes: volumes
                    .iter()
                    .map(|(path, quota)| VolumeConfig {
                        path: path.clone(),
                        quota: *quota,
                        class: Class::Disk,
                    })
                    .collect(),
                http: proven(*http, out)?,
            };
            datanode(data, out, &config)?;
            println!(
                "Move {0} to the server `{name}`, then: harvestfs datanode --config {0}/datanode.toml",
                out.display()
            );
        }
        What::Client {
            name,
            data,
            out,
            namenode,
            http,
            administrator,
        } => {
            refuse_existing(out)?;
            let role = if *administrator {
                Role::Admin
            } else {
                Role::Client
            };
            check_issuable(data, role, name)?;
            client(data, out, role, name, namenode, *http)?;
            let then = if *administrator {
                "admin status"
            } else {
                "mount DIR"
            };
            println!(
                "Move {0} to where it is needed, then: harvestfs {then} --config {0}/client.toml",
                out.display()
            );
        }
    }
    Ok(())
}

/// Makes the certificate and the configuration of a datanode below `out`.
///
/// # Errors
/// When something cannot be written.
pub fn datanode(data: &Path, out: &Path, config: &DatanodeConfig) -> anyhow::Result<()> {
    let authority = CertificateAuthority::load(&data.join("ca"))?;
    make_private_directory(out)?;
    issue(
        &authority,
        Role::Datanode,
        &config.name,
        &out.join(&config.identity),
    )?;
    config::store(&out.join("datanode.toml"), config)
}

fn client(
    data: &Path,
    out: &Path,
    role: Role,
    name: &str,
    namenodes: &[SocketAddr],
    http: Option<SocketAddr>,
) -> anyhow::Result<()> {
    let authority = CertificateAuthority::load(&data.join("ca"))?;
    make_private_directory(out)?;
    issue(&authority, role, name, &out.join("identity"))?;
    config::store(
        &out.join("client.toml"),
        &ClientConfig {
            http: http.map(HttpConfig::anyone),
            ..ClientConfig::new(namenodes.to_vec(), "identity".into())
        },
    )
}

/// Whether a certificate can be made, before anything is: what was made would be in the way of the corrected command.
fn check_issuable(data: &Path, role: Role, name: &str) -> anyhow::Result<()> {
    CertificateAuthority::load(&data.join("ca"))?;
    Peer::new(role, name)?;
    Ok(())
}

fn issue(
    authority: &CertificateAuthority,
    role: Role,
    name: &str,
    directory: &Path,
) -> anyhow::Result<()> {
    Ok(authority
        .issue(role, name, CERTIFICATE_LIFETIME)?
        .save(directory)?)
}

/// What a part that is asked to serve HTTP is configured to, with a new token in its directory.
fn proven(listen: Option<SocketAddr>, directory: &Path) -> anyhow::Result<Option<HttpConfig>> {
    listen
        .map(|listen| HttpConfig::proven(listen, directory))
        .transpose()
}

fn refuse_existing(out: &Path) -> anyhow::Result<()> {
    if out.exists() {
        bail!("{} exists; name a directory that does not", out.display());
    }
    Ok(())
}

/// A part is registered at the address that it listens on.
fn refuse_unspecified(part: &str, listen: SocketAddr) -> anyhow::Result<()> {
    if listen.ip().is_unspecified() {
        bail!("others do not reach a {part} under {listen}: name its own address");
    }
    Ok(())
}

/// Makes a directory for its owner only, as keys and journals are. One that is there stays as it is.
///
/// # Errors
/// When it cannot be made.
pub fn make_private_directory(path: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot make {}", path.display()))
}
