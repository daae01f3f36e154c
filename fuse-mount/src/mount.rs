//! Mounting a file system from its options, and unmounting it.

use std::io;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

use fuser::Session;
use harvestfs_client::{Client, ClientError};
use tokio::task::spawn_blocking;

use crate::caller::ProcFs;
use crate::device::Device;
use crate::guard::Guard;
use crate::kernel::{FuseKernel, Kernel};
use crate::kernel_cache::KernelCache;
use crate::kernel_options::{self, Permissions};
use crate::metrics::Metrics;
use crate::mount_table::{MOUNT_TYPE, canonical, mounted_on, mounts, source_of};
use crate::notices::Notices;
use crate::read_ahead;
use crate::serve::Adapter;
use crate::session_end::{Ended, SessionEnd};
use crate::shared::Shared;
use crate::submounts::Submounts;
use crate::unmount::{self, Unmounted};

/// The subtype by which the kernel knows the file system.
const SUBTYPE: &str = "harvestfs";

/// Where and how to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The directory to mount on.
    pub directory: PathBuf,
    /// Name of the cluster, as shown in the kernel's table of mounts.
    pub cluster: String,
    /// What the kernel allows programs to do there.
    pub permissions: Permissions,
}

impl MountOptions {
    /// Options for a mount that only the mounting user can use.
    #[must_use]
    pub fn new(directory: PathBuf, cluster: String) -> Self {
        Self {
            directory,
            cluster,
            permissions: Permissions::default(),
        }
    }
}

/// Why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The cluster cannot be reached, or refuses the client.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The kernel, or `fusermount3`, refused.
    #[error("cannot mount on {}: {source}{}", directory.display(), hint(source))]
    Mount {
        /// Where.
        directory: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel refused to unmount.
    #[error("cannot unmount: {0}")]
    Unmount(#[source] io::Error),
    /// The connection to the kernel broke.
    #[error("the connection to the kernel broke: {0}")]
    Session(String),
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            " (is the directory there, is /dev/fuse there, is fusermount3 installed?)"
        }
        io::ErrorKind::PermissionDenied => {
            " (users other than root need fusermount3, and `user_allow_other` in /etc/fuse.conf \
             for --allow-other)"
        }
        _ => "",
    }
}

/// A mounted file system.
pub struct Mount {
    directory: PathBuf,
    /// Its device, as shown in the kernel's table of mounts.
    device: String,
    client: Client,
    metrics: Arc<Metrics>,
    ended: Ended,
    /// `None` if it could not be started.
    _guard: Option<Guard>,
}

impl Mount {
    /// Mounts the file system of a session with the cluster, and ends the session if that fails. Only the returned
    /// mount can be unmounted: the future must not be dropped before it completes.
    ///
    /// # Errors
    /// [`MountError`]
    pub async fn start(client: Client, options: MountOptions) -> Result<Self, MountError> {
        match Self::mount(client.clone(), options).await {
            Ok(mount) => Ok(mount),
            Err(error) => {
                // Otherwise the cluster would keep the session until it expires.
                if let Err(error) = client.close().await {
                    tracing::warn!(%error, "the session did not end in good order");
                }
                Err(error)
            }
        }
    }

    async fn mount(client: Client, options: MountOptions) -> Result<Self, MountError> {
        let directory = options.directory.clone();
        let failed = |source| MountError::Mount {
            directory: directory.clone(),
            source,
        };
        let shared = Arc::new(Shared::new());
        let metrics = Arc::new(Metrics::new());
        let adapter = Adapter::new(
            client.clone(),
            shared.clone(),
            metrics.clone(),
            Arc::new(ProcFs),
            tokio::runtime::Handle::current(),
        );
        let source = source_of(&options.cluster);
        let config = kernel_options::config(&source, SUBTYPE, options.permissions);
        let on = options.directory.clone();
        let (end, ended) = SessionEnd::new(on.clone());
        let at_end = end.clone();
        let (session, directory_path) = spawn_blocking(move || {
            unmount::remove_dead(&on)?;
            let path = canonical(&on)?;
            let session = Session::new(Device(adapter, at_end), &on, &config)?;
            Ok::<_, io::Error>((session, path))
        })
        .await
        .map_err(|error| failed(io::Error::other(error)))?
        .map_err(failed)?;
        let entry = mounts()
            .ok()
            .and_then(|all| {
                let entry = mounted_on(&all, &directory_path)?;
                (entry.kind == MOUNT_TYPE).then(|| entry.clone())
            })
            .ok_or_else(|| {
                failed(io::Error::other(
                    "it is not in the kernel's table of mounts",
                ))
            })?;
        let device_number = entry.device.clone();
        let device = session.as_fd().try_clone_to_owned().map_err(failed)?;
        let submounts = Submounts::new(device_number.clone()).map_err(failed)?;
        let kernel = FuseKernel::new(session.notifier(), device, submounts);
        connect(&client, shared, Arc::new(kernel));
        // A dedicated thread: it lives as long as the process.
        std::thread::Builder::new()
            .name("fuse-session".into())
            .spawn(move || {
                end.begin(entry);
                // `run` returns only if it cannot continue: see [`SessionEnd`].
                if let Err(error) = session.run() {
                    end.failed(error.to_string());
                }
            })
            .map_err(failed)?;
        let guard = Guard::start(&device_number)
            .inspect_err(|error| tracing::warn!(%error, "the mount has no guard"))
            .ok();
        if let Err(error) = read_ahead::raise(&directory_path) {
            tracing::debug!(%error, "the kernel's read-ahead stays as it is");
        }
        Ok(Self {
            directory: options.directory,
            device: device_number,
            client,
            metrics,
            ended,
            _guard: guard,
        })
    }

    /// The session with the cluster.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// A function that returns the metrics for Prometheus, without waiting.
    pub fn metrics_text(&self) -> impl Fn() -> String + Send + Sync + 'static {
        let (client, metrics) = (self.client.clone(), self.metrics.clone());
        move || metrics.text(&client.counters())
    }

    /// Returns when the file system is unmounted, by any process; then ends the session with the cluster.
    ///
    /// # Errors
    /// If the connection to the kernel broke, or written data could not be made visible.
    pub async fn ended(&mut self) -> Result<(), MountError> {
        finish(self.client.clone(), self.ended.clone()).await
    }

    /// Unmounts, writes back dirty data and ends the session. Files that programs still have open are written back
    /// too, and then no longer work for these programs.
    ///
    /// # Errors
    /// If the kernel refuses, or written data could not be made visible.
    pub async fn unmount(self) -> Result<(), MountError> {
        // The kernel first writes back what it can; from now on, a write-back is no longer retried without limit.
        self.client.will_close();
        match unmount::by_child(&self.device).await {
            Ok(Unmounted::Entirely) => finish(self.client, self.ended).await,
            Ok(Unmounted::InUse) => {
                tracing::warn!(
                    "{} is in use; it is unmounted under the programs that use it",
                    self.directory.display()
                );
                Ok(self.client.close().await?)
            }
            Err(error) => {
                // Dirty data is stored all the same.
                if let Err(error) = self.client.close().await {
                    tracing::error!(%error, "not everything that was written is stored");
                }
                Err(MountError::Unmount(error))
            }
        }
    }
}

/// Notifies the kernel of changes by other sessions from now on.
pub(crate) fn connect(client: &Client, shared: Arc<Shared>, kernel: Arc<dyn Kernel>) {
    let notices = Arc::new(Notices::new(kernel, tokio::runtime::Handle::current()));
    shared.connect(notices.clone());
    client.set_cache_listener(Arc::new(KernelCache::new(shared, notices)));
}

async fn finish(client: Client, mut ended: Ended) -> Result<(), MountError> {
    let result = match ended.wait_for(Option::is_some).await {
        Ok(result) => result.clone().expect("it was waited for"),
        Err(_) => Err("its thread panicked".to_owned()),
    };
    client.close().await?;
    result.map_err(MountError::Session)
}
