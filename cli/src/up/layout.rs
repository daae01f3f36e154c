//! Layout of the files and directories of `up`, and the recorded parameters with which the cluster was created.

use std::ffi::OsString;
use std::fs::Permissions;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use harvestfs_protocol::durable;
use harvestfs_protocol::outlook::count;
use serde::{Deserialize, Serialize};

use super::{UpArgs, mount_point};
use crate::config::{
    self, ClientConfig, DatanodeConfig, NamenodeConfig, PrimaryConfig, PrimarySourceConfig,
    Priority, VolumeConfig,
};
use crate::http::{AccessConfig, HttpConfig};
use crate::init::{self, LayoutArgs};
use crate::primary::Cast;
use crate::units::{self, Size};

/// Default number of datanodes: nine, so that each cell of the grid has a tenant.
const DATANODES: u16 = 9;
/// Maximum of the default quota of a datanode, in bytes.
const QUOTA_MAX_BYTES: u64 = 64 << 30;
/// Name of the file with the parameters of the cluster: [`Made`].
const MADE_FILE: &str = "up.toml";
/// Name of the file with the path of the mount, while that is ready.
const READY_FILE: &str = "up.ready";
/// Name of the file with the error of the last `up`, once that has ended.
const END_FILE: &str = "up.end";
/// Content of that file until then.
const RUNNING: &str = "running";
/// Minimum quota of a datanode in bytes: less cannot hold the blocks being written.
const QUOTA_MIN_BYTES: u64 = 64 << 20;

/// Content of `up.toml`: parameters of the cluster, set at its creation and never changed by a later `up`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Made {
    /// One if absent: the file predates groups.
    #[serde(default = "one_namenode")]
    namenodes: usize,
    datanodes: u16,
    replication: u8,
    block_size: Size,
    quota: Size,
}

fn one_namenode() -> usize {
    1
}

/// A namenode of the cluster.
#[derive(Debug)]
pub struct Namenode {
    /// Its name among the parts, and the name of its directory.
    pub name: String,
    directory: PathBuf,
    listen: SocketAddr,
    /// Address and protection of its page.
    page: HttpConfig,
}

impl Namenode {
    /// Path of its configuration.
    pub fn config(&self) -> PathBuf {
        self.directory.join("namenode.toml")
    }

    /// Sets the policy, and protects the page with a token: the page shows all names that root sees, and other users
    /// of this machine can reach it.
    fn configure(data: &Path, at: usize, args: &UpArgs) -> anyhow::Result<Self> {
        let name = init::namenode_directory(at);
        let directory = data.join(&name);
        let path = directory.join("namenode.toml");
        let mut config: NamenodeConfig = config::load(&path)?;
        config.policy = args.policy.unwrap_or(config.policy);
        let page = match config.http {
            Some(page) if page.access != AccessConfig::Anyone => page,
            Some(open) => HttpConfig::with_token(open.listen, &directory)?,
            None => HttpConfig::with_token(free_page_address()?, &directory)?,
        };
        config.http = Some(page.clone());
        config::store(&path, &config)?;
        Ok(Self {
            name,
            directory,
            listen: config.listen,
            page,
        })
    }

    /// Reads the namenode's existing configuration.
    fn made(data: &Path, at: usize) -> anyhow::Result<Self> {
        let name = init::namenode_directory(at);
        let directory = data.join(&name);
        let config: NamenodeConfig = config::load(&directory.join("namenode.toml"))?;
        let page = config.http.context("it has none yet")?;
        Ok(Self {
            name,
            directory,
            listen: config.listen,
            page,
        })
    }

    fn move_page_if_address_is_taken(&mut self) -> anyhow::Result<()> {
        let page = self.page.listen;
        if !page.ip().is_loopback() || TcpListener::bind(page).is_ok() {
            return Ok(());
        }
        let mut config: NamenodeConfig = config::load(&self.config())?;
        self.page.listen = free_page_address()?;
        config.http = Some(self.page.clone());
        config::store(&self.config(), &config)
    }

    /// The address of its page, with the token if that may be shown.
    fn page_address(&self, shows_token: bool) -> anyhow::Result<String> {
        if shows_token {
            self.page.address(&self.directory)
        } else {
            Ok(self.page.address_for_all(&self.directory))
        }
    }
}

/// The directories of a cluster on this machine.
#[derive(Debug)]
pub struct Layout {
    /// Directory that contains everything, except perhaps the mount.
    pub data: PathBuf,
    /// Directory on which the cluster is mounted.
    pub mount: PathBuf,
    /// The only namenode, or the members of the group.
    pub namenodes: Vec<Namenode>,
    made: Made,
    /// The traces that the datanodes replay as their primary tenants, if any.
    pub cast: Option<Cast>,
}

impl Layout {
    /// Creates the cluster, if it does not exist, and its configuration.
    pub fn prepare(args: &UpArgs) -> anyhow::Result<Self> {
        let data = super::data_directory(args.data.as_deref())?;
        let mount = match &args.mount {
            Some(mount) => std::path::absolute(mount)?,
            None => data.join("mnt"),
        };
        if data.is_dir() {
            // Cleans up after a process that was killed while it wrote.
            durable::recover(&data).with_context(|| format!("in {}", data.display()))?;
        }
        let made_path = data.join(MADE_FILE);
        let made = if made_path.exists() {
            let made: Made = config::load(&made_path)?;
            made.refuse_changes(args, &data)?;
            made
        } else {
            let made = Made::decide(args, &data)?;
            if !data.join("ca").exists() {
                init::cluster(
                    &data,
                    &free_addresses(made.namenodes)?,
                    &[],
                    &LayoutArgs {
                        replication: Some(made.replication),
                        block_size: Some(made.block_size),
                    },
                )?;
            }
            let namenodes = init::addresses(&data)?.len();
            if namenodes != made.namenodes {
                bail!(
                    "the cluster in {} was interrupted while it was made, with --namenodes {namenodes}: say so \
                     again, or remove it",
                    data.display()
                );
            }
            // Written last: a cluster without this file was interrupted while it was created, and is completed now.
            config::store(&made_path, &made)?;
            made
        };
        init::make_private_directory(&Self::log_directory(&data))?;
        let layout = Self {
            namenodes: (0..made.namenodes)
                .map(|at| Namenode::configure(&data, at, args))
                .collect::<anyhow::Result<_>>()?,
            data,
            mount,
            made,
            cast: args.cast()?,
        };
        layout.make_datanodes()?;
        mount_point::make(&layout)?;
        Ok(layout)
    }

    /// Removes others' access to the directory of our cluster and to that of its logs, which earlier releases created
    /// open to everybody. A directory without a cluster is the user's own, and is left unchanged.
    pub fn close_to_others(data: &Path) -> anyhow::Result<()> {
        if !data.join(MADE_FILE).exists() {
            return Ok(());
        }
        for directory in [data, &Self::log_directory(data)] {
            let Ok(metadata) = std::fs::metadata(directory) else {
                continue;
            };
            let mode = metadata.permissions().mode();
            if mode & 0o077 == 0 || metadata.uid() != rustix::process::geteuid().as_raw() {
                continue;
            }
            eprintln!(
                "{} was open to other users, and is closed to them now: mount where they can reach it with --mount",
                directory.display()
            );
            std::fs::set_permissions(directory, Permissions::from_mode(mode & 0o700))
                .with_context(|| format!("cannot close {} to others", directory.display()))?;
        }
        Ok(())
    }

    /// The file that is locked while a cluster is running, and contains the id of the process to stop.
    pub fn lock_path(data: &Path) -> PathBuf {
        data.join("up.pid")
    }

    /// The file that says how the last `up` ended.
    pub fn end_path(data: &Path) -> PathBuf {
        data.join(END_FILE)
    }

    /// The file that stays locked as long as a namenode or datanode runs.
    pub fn servers_lock_path(data: &Path) -> PathBuf {
        data.join("servers.lock")
    }

    /// The file that stays locked as long as the mount runs. The servers start before it is unlocked, as
    /// the mount of a killed cluster may need them to write back.
    pub fn mount_lock_path(data: &Path) -> PathBuf {
        data.join("mount.lock")
    }

    /// Directory of the parts' logs.
    pub fn log_directory(data: &Path) -> PathBuf {
        data.join("log")
    }

    /// The file that exists while the mount is ready.
    pub fn ready_path(&self) -> PathBuf {
        self.data.join(READY_FILE)
    }

    /// Announces that the mount is ready, and its path.
    pub fn announce_ready(&self) -> anyhow::Result<()> {
        let path = self.ready_path();
        // A process may read the file as soon as it exists, so it must be complete by then.
        durable::replace_file(&path, self.mount.as_os_str().as_bytes(), 0o644)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// Records that this `up` has not ended. This remains if it is killed.
    pub fn announce_begin(data: &Path) -> anyhow::Result<()> {
        Self::write_end(data, RUNNING)
    }

    /// Records how this `up` ended, for `down`.
    pub fn announce_end(data: &Path, ended: &anyhow::Result<()>) -> anyhow::Result<()> {
        let failed = match ended {
            Ok(()) => String::new(),
            Err(error) => format!("{error:#}"),
        };
        Self::write_end(data, &failed)
    }

    fn write_end(data: &Path, text: &str) -> anyhow::Result<()> {
        let path = Self::end_path(data);
        durable::replace_file(&path, text.as_bytes(), 0o600)
            .with_context(|| format!("cannot write {}", path.display()))
    }

    /// The error of the last `up` that has ended in a directory; empty if it had none. `None` if it did not record how
    /// it ended.
    pub fn failed_in(data: &Path) -> anyhow::Result<Option<String>> {
        let path = Self::end_path(data);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok((text != RUNNING).then_some(text)),
            // It ran in a release that did not record this.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Some(String::new())),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Path of the mount of the cluster that runs in a directory, if it is mounted.
    pub fn ready_mount(data: &Path) -> Option<PathBuf> {
        let path = std::fs::read(data.join(READY_FILE)).ok()?;
        Some(OsString::from_vec(path).into())
    }

    /// Name and configuration of each datanode.
    pub fn datanodes(&self) -> impl Iterator<Item = (String, PathBuf)> {
        (1..=self.made.datanodes).map(|number| {
            let name = datanode_name(number);
            let config = self.data.join(&name).join("datanode.toml");
            (name, config)
        })
    }

    /// The message for the user once everything runs.
    ///
    /// # Errors
    /// When the token of a page cannot be read.
    pub fn welcome(&self) -> anyhow::Result<String> {
        Ok(format!(
            "HarvestFS is mounted at {}\n\
             Look at it at {}\n\
             ({} with {} each, {} of each block; logs in {})",
            self.mount.display(),
            self.page_addresses()?,
            count(self.made.datanodes.into(), "datanode"),
            units::human(self.made.quota.0),
            count(self.made.replication.into(), "replica"),
            Self::log_directory(&self.data).display()
        ))
    }

    /// Same as [`Layout::page_addresses`], for the cluster that runs in a directory.
    ///
    /// # Errors
    /// When the cluster is still being created, or a file cannot be read.
    pub fn page_addresses_of(data: &Path, shows_token: bool) -> anyhow::Result<String> {
        let made: Made = config::load(&data.join(MADE_FILE))?;
        let namenodes = (0..made.namenodes).map(|at| Namenode::made(data, at));
        let namenodes: Vec<Namenode> = namenodes.collect::<anyhow::Result<_>>()?;
        addresses_of_pages(&namenodes, shows_token)
    }

    /// The address of the namenode's page, with the token; for several namenodes, one line each with the address on
    /// which it listens.
    ///
    /// # Errors
    /// When a token cannot be read.
    pub fn page_addresses(&self) -> anyhow::Result<String> {
        addresses_of_pages(&self.namenodes, true)
    }

    /// Moves a namenode to another address before a start if another program uses its address. The members of a group
    /// have agreed on their addresses, so they do not move, and a majority of the addresses must be free.
    pub fn move_if_address_is_taken(&mut self) -> anyhow::Result<()> {
        for namenode in &mut self.namenodes {
            namenode.move_page_if_address_is_taken()?;
        }
        let is_taken = |it: &Namenode| UdpSocket::bind(it.listen).is_err();
        if self.namenodes.len() > 1 {
            let taken: Vec<&Namenode> = self.namenodes.iter().filter(|it| is_taken(it)).collect();
            return check_taken(&taken, self.namenodes.len());
        }
        for namenode in &mut self.namenodes {
            if !is_taken(namenode) {
                continue;
            }
            let [moved] = free_addresses(1)?[..] else {
                unreachable!("one was asked for");
            };
            namenode.listen = moved;
            let mut config: NamenodeConfig = config::load(&namenode.config())?;
            config.listen = moved;
            config::store(&namenode.config(), &config)?;
            return self.tell_addresses();
        }
        Ok(())
    }

    /// The addresses at which clients and datanodes find the namenodes.
    fn addresses(&self) -> Vec<SocketAddr> {
        self.namenodes.iter().map(|it| it.listen).collect()
    }

    fn tell_addresses(&self) -> anyhow::Result<()> {
        for name in ["admin", "client"] {
            let path = self.data.join(name).join("client.toml");
            let mut config: ClientConfig = config::load(&path)?;
            config.namenodes = self.addresses();
            config::store(&path, &config)?;
        }
        for (_, path) in self.datanodes() {
            let mut config: DatanodeConfig = config::load(&path)?;
            config.namenodes = self.addresses();
            config::store(&path, &config)?;
        }
        Ok(())
    }

    fn make_datanodes(&self) -> anyhow::Result<()> {
        for number in 1..=self.made.datanodes {
            let name = datanode_name(number);
            let directory = self.data.join(&name);
            if directory.join("datanode.toml").exists() {
                continue;
            }
            // Each datanode plays a server of another owner: an environment, a machine function
            // and a rack of its own. Rows and columns of the grid leave few enough choices among
            // nine servers, some of which are busy.
            init::datanode(
                &self.data,
                &directory,
                &DatanodeConfig {
                    name,
                    rack: format!("rack-{number}"),
                    environment: format!("environment-{number}"),
                    machine_function: format!("function-{number}"),
                    listen: SocketAddr::from(([127, 0, 0, 1], 0)),
                    namenodes: self.addresses(),
                    identity: "identity".into(),
                    scrub_bytes_per_s: config::default_scrub_rate(),
                    scrub_every_s: config::default_scrub_interval(),
                    removal_bytes_per_s: config::default_removal_rate(),
                    // Both the cluster and the machine are the user's own.
                    priority: Priority::Normal,
                    primary: PrimaryConfig {
                        source: PrimarySourceConfig::None,
                        ..PrimaryConfig::default()
                    },
                    volumes: vec![VolumeConfig {
                        path: "volume".into(),
                        quota: self.made.quota,
                        class: config::Class::Disk,
                    }],
                    http: None,
                },
            )?;
        }
        Ok(())
    }
}

impl Made {
    fn decide(args: &UpArgs, data: &Path) -> anyhow::Result<Self> {
        let namenodes = args.namenodes.unwrap_or_else(one_namenode);
        let datanodes = args.datanodes.unwrap_or(DATANODES);
        let replication = args.layout.replication.unwrap_or_else(|| {
            LayoutArgs::REPLICATION.min(datanodes.try_into().unwrap_or(u8::MAX))
        });
        if u16::from(replication) > datanodes {
            bail!("{replication} replicas need as many datanodes; there would be {datanodes}");
        }
        let quota = match args.quota {
            Some(quota) => quota,
            None => Size(default_quota_bytes(data, datanodes)?),
        };
        Ok(Self {
            namenodes,
            datanodes,
            replication,
            block_size: args.layout.block_size.unwrap_or(LayoutArgs::BLOCK_SIZE),
            quota,
        })
    }

    fn refuse_changes(&self, args: &UpArgs, data: &Path) -> anyhow::Result<()> {
        if let Some(asked) = args.namenodes
            && asked != self.namenodes
        {
            bail!(
                "the cluster in {} was made with --namenodes {}, and cannot be given {asked}: leave that out, or \
                 make another cluster with --data and copy the files there",
                data.display(),
                self.namenodes
            );
        }
        let same = args.datanodes.is_none_or(|n| n == self.datanodes)
            && args
                .layout
                .replication
                .is_none_or(|r| r == self.replication)
            && args.layout.block_size.is_none_or(|b| b == self.block_size)
            && args.quota.is_none_or(|q| q == self.quota);
        if same {
            return Ok(());
        }
        bail!(
            "the cluster in {} was made with --datanodes {} --replication {} --block-size {} \
             --quota {}; leave these out, or name another directory with --data",
            data.display(),
            self.datanodes,
            self.replication,
            self.block_size,
            self.quota
        )
    }
}

/// Reports namenodes of a group whose addresses are used by other programs.
///
/// # Errors
/// When too many are affected for the others to form a majority.
fn check_taken(taken: &[&Namenode], all: usize) -> anyhow::Result<()> {
    for (number, namenode) in taken.iter().enumerate() {
        let what = format!(
            "{} listens on {}, which another program uses now: end that (`ss -ulpn` names it)",
            namenode.name, namenode.listen
        );
        if number >= (all - 1) / 2 {
            bail!("{what}, and start the cluster again");
        }
        eprintln!("{what}. Until then the cluster goes without it.");
    }
    Ok(())
}

fn addresses_of_pages(namenodes: &[Namenode], shows_token: bool) -> anyhow::Result<String> {
    if let [only] = namenodes {
        return only.page_address(shows_token);
    }
    let lines = namenodes.iter().map(|namenode| {
        let Namenode { name, listen, .. } = namenode;
        let page = namenode.page_address(shows_token)?;
        Ok(format!("\n  {page}  ({name}, listens on {listen})"))
    });
    lines.collect()
}

fn datanode_name(number: u16) -> String {
    format!("datanode-{number}")
}

/// Finds distinct free addresses, keeping all of them in use until the last one is found.
fn free_addresses(count: usize) -> anyhow::Result<Vec<SocketAddr>> {
    let sockets: std::io::Result<Vec<UdpSocket>> =
        (0..count).map(|_| UdpSocket::bind("127.0.0.1:0")).collect();
    sockets
        .and_then(|sockets| sockets.iter().map(UdpSocket::local_addr).collect())
        .context("no free port on 127.0.0.1")
}

/// Finds a free address for the page. It is stored, as a browser remembers the page by its address.
fn free_page_address() -> anyhow::Result<SocketAddr> {
    TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .context("no free port on 127.0.0.1")
}

/// Default quota of each datanode in bytes, which leaves a fifth of the disk free for the machine's owner.
fn default_quota_bytes(data: &Path, datanodes: u16) -> anyhow::Result<u64> {
    let existing = data
        .ancestors()
        .find(|path| path.exists())
        .with_context(|| format!("no directory above {} is there", data.display()))?;
    let disk = rustix::fs::statvfs(existing)
        .with_context(|| format!("cannot tell the free space of {}", existing.display()))?;
    let free_bytes = disk.f_bavail * disk.f_frsize;
    let share = free_bytes / 5 * 4 / u64::from(datanodes);
    if share < QUOTA_MIN_BYTES {
        bail!(
            "{} has {} free, too little for {datanodes} datanodes: free some, name another \
             directory with --data, or ask for fewer with --datanodes",
            existing.display(),
            units::human(free_bytes)
        );
    }
    Ok((share & !((1 << 20) - 1)).min(QUOTA_MAX_BYTES))
}
