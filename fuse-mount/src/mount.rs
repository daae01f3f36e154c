//! From a configuration to a mounted file system, and back.

use std::{io, os::fd::AsFd, path::PathBuf, sync::Arc};

use fuser::{Session, SessionUnmounter};
use harvestfs_client::{Client, ClientError, ClientOptions};
use tokio::{sync::watch, task::spawn_blocking};

use crate::{
    kernel_cache::KernelCache, kernel_options, metrics::Metrics, read_ahead, serve::Adapter,
    shared::Shared,
};

/// Where and how to mount.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The directory to mount on.
    pub directory: PathBuf,
    /// Whether users other than the mounting one may use it.
    pub allow_other: bool,
}

impl MountOptions {
    /// For the mounting user only.
    #[must_use]
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            allow_other: false,
        }
    }
}

/// Why a mount failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// The cluster cannot be reached, or refuses us.
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
            " (users who are not root need fusermount3, and `user_allow_other` in /etc/fuse.conf \
             for --allow-other)"
        }
        _ => "",
    }
}

/// A mounted file system.
pub struct Mount {
    directory: PathBuf,
    client: Client,
    metrics: Arc<Metrics>,
    unmounter: SessionUnmounter,
    ended: Ended,
}

impl Mount {
    /// Opens a session with the cluster and mounts.
    ///
    /// # Errors
    /// [`MountError`]
    pub async fn start(client: ClientOptions, options: MountOptions) -> Result<Self, MountError> {
        let client = Client::connect(client).await?;
        match Self::mount(client.clone(), options).await {
            Ok(mount) => Ok(mount),
            Err(error) => {
                // Otherwise the cluster would keep the session until it expires.
                client.close().await?;
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
            tokio::runtime::Handle::current(),
        );
        let config = kernel_options::config("harvestfs", options.allow_other);
        let on = options.directory.clone();
        let mut session = spawn_blocking(move || Session::new(adapter, &on, &config))
            .await
            .map_err(|error| failed(io::Error::other(error)))?
            .map_err(failed)?;
        let device = session.as_fd().try_clone_to_owned().map_err(failed)?;
        let kernel = KernelCache::new(shared.clone(), session.notifier(), device);
        shared.let_kernel_cache_entries(kernel.entries_can_be_declared_old());
        client.set_cache_listener(Arc::new(kernel));
        let unmounter = session.unmount_callable();
        let (end, ended) = watch::channel(None);
        // A thread of its own: it lives as long as the mount.
        std::thread::Builder::new()
            .name("fuse-session".into())
            .spawn(move || {
                let result = session.run().map_err(|error| error.to_string());
                // Nobody listens any more once the mount is dropped.
                let _ = end.send(Some(result));
            })
            .map_err(failed)?;
        if let Err(error) = read_ahead::raise(&options.directory) {
            tracing::debug!(%error, "the kernel's read-ahead stays as it is");
        }
        Ok(Self {
            directory: options.directory,
            client,
            metrics,
            unmounter,
            ended,
        })
    }

    /// The session with the cluster.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What is told to Prometheus, whenever it is called; without waiting.
    pub fn metrics_text(&self) -> impl Fn() -> String + Send + Sync + 'static {
        let (client, metrics) = (self.client.clone(), self.metrics.clone());
        move || metrics.text(&client.counters())
    }

    /// Returns when the file system is unmounted, by whomever; then ends the session with the
    /// cluster.
    ///
    /// # Errors
    /// When the connection to the kernel broke, or written data could not be made visible.
    pub async fn ended(&mut self) -> Result<(), MountError> {
        finish(self.client.clone(), self.ended.clone()).await
    }

    /// Unmounts, writes back what is dirty and ends the session. What programs still have open is
    /// written back too, and then gone for them.
    ///
    /// # Errors
    /// When the kernel refuses, or written data could not be made visible.
    pub async fn unmount(self) -> Result<(), MountError> {
        let mut unmounter = self.unmounter;
        let unmounted = spawn_blocking(move || unmounter.unmount())
            .await
            .map_err(|error| MountError::Unmount(io::Error::other(error)))?;
        match unmounted {
            Ok(()) => finish(self.client, self.ended).await,
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                tracing::warn!(
                    "{} is in use; it is unmounted under the programs that use it",
                    self.directory.display()
                );
                detach(self.client, self.directory).await
            }
            Err(error) => Err(MountError::Unmount(error)),
        }
    }
}

type Ended = watch::Receiver<Option<Result<(), String>>>;

async fn finish(client: Client, mut ended: Ended) -> Result<(), MountError> {
    let result = match ended.wait_for(Option::is_some).await {
        Ok(result) => result.clone().unwrap_or(Ok(())),
        Err(_) => Err("its thread panicked".to_owned()),
    };
    client.close().await?;
    result.map_err(MountError::Session)
}

async fn detach(client: Client, directory: PathBuf) -> Result<(), MountError> {
    spawn_blocking(move || {
        let root = std::fs::File::open(&directory)?;
        rustix::fs::syncfs(&root)?;
        rustix::mount::unmount(&directory, rustix::mount::UnmountFlags::DETACH)?;
        Ok(())
    })
    .await
    .map_err(|error| MountError::Unmount(io::Error::other(error)))?
    .map_err(MountError::Unmount)?;
    Ok(client.close().await?)
}
