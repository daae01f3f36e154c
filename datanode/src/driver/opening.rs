//! Opening the volumes at the start, each as long as its disk answers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use harvestfs_protocol::machine;
use tokio::sync::oneshot;

use crate::options::{DatanodeOptions, StartError};
use crate::store::{BlockStore, BufferPool, Disk, Progress, Volume, VolumeError};

/// A volume whose disk owes an answer for this long, as long as jobs wait for one, is left out. Verifying what is on it
/// may take much longer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(30);

/// A volume that is being opened.
struct Opening<T> {
    path: PathBuf,
    progress: Arc<Progress>,
    opened: oneshot::Receiver<Result<T, VolumeError>>,
}

impl<T: Send + 'static> Opening<T> {
    /// Begins on a thread of its own. The runtime would wait for one of its own when the process is to end, and
    /// a disk may never answer.
    ///
    /// # Errors
    /// There is no thread.
    fn begin(
        path: PathBuf,
        open: impl FnOnce(&Progress) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<Self, VolumeError> {
        let progress = Arc::<Progress>::default();
        let (sender, opened) = oneshot::channel();
        let noted = progress.clone();
        // What is opened too late is dropped here.
        let work = move || drop(sender.send(open(&noted)));
        if machine::is_simulated() {
            tokio::spawn(async move { work() });
        } else {
            std::thread::Builder::new()
                .name("open".to_owned())
                .spawn(work)
                .map_err(VolumeError::io(&path))?;
        }
        Ok(Self {
            path,
            progress,
            opened,
        })
    }

    /// Waits for its end, or until the disk does not answer.
    async fn end(mut self) -> Result<Result<T, VolumeError>, StartError> {
        loop {
            let answers = self.progress.answers();
            match tokio::time::timeout(ANSWER_DEADLINE, &mut self.opened).await {
                Ok(Ok(opened)) => return Ok(opened),
                Ok(Err(_)) => return Err(StartError::OpeningFailed),
                Err(_) if self.progress.answers() > answers => {}
                Err(_) => return Ok(Err(VolumeError::Silent { path: self.path })),
            }
        }
    }
}

/// Opens all volumes at the same time, because each may have to verify open replicas.
pub async fn open_volumes(
    options: &DatanodeOptions,
    disk: Arc<dyn Disk>,
    links_max: usize,
) -> Result<(BlockStore, Vec<VolumeError>), StartError> {
    let server = options.identity.peer().name.clone();
    let openings = options.volumes.iter().cloned().map(|volume| {
        let (server, disk, threads) = (server.clone(), disk.clone(), options.disk_threads);
        Opening::begin(volume.path.clone(), move |progress| {
            Volume::open(&volume, &server, disk, threads, progress)
        })
    });
    let endings = openings.map(|opening| async move {
        match opening {
            Ok(opening) => opening.end().await,
            Err(error) => Ok(Err(error)),
        }
    });
    let mut volumes = Vec::new();
    let mut errors = Vec::new();
    for opened in join_all(endings).await {
        match opened? {
            Ok(volume) => volumes.push(volume),
            Err(error) => {
                tracing::error!(%error, "a volume cannot be used");
                errors.push(error);
            }
        }
    }
    if volumes.is_empty() {
        return Err(StartError::NoVolume(errors));
    }
    let buffers = BufferPool::new(options.buffer_bytes);
    let store = BlockStore::new(volumes, buffers, options.table_cache_bytes, links_max);
    Ok((store, errors))
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_volume_is_waited_for_as_long_as_its_disk_answers() {
        let (release, released) = mpsc::channel::<()>();
        let begun = Opening::begin(PathBuf::from("v"), move |_| {
            let _ = released.recv();
            Ok(())
        });
        let opening = begun.unwrap();
        let progress = opening.progress.clone();
        let ending = tokio::spawn(opening.end());
        for _ in 0..10 {
            tokio::time::sleep(ANSWER_DEADLINE * 2 / 3).await;
            progress.answered();
            assert!(!ending.is_finished());
        }
        let opened = ending.await.unwrap().unwrap();
        assert!(matches!(opened, Err(VolumeError::Silent { .. })));
        drop(release);
    }

    #[tokio::test]
    async fn one_that_breaks_off_is_said() {
        let begun = Opening::begin(PathBuf::from("v"), |_| -> Result<(), VolumeError> {
            panic!("on purpose")
        });
        let broken = begun.unwrap().end().await;
        assert!(matches!(broken, Err(StartError::OpeningFailed)));
    }
}
