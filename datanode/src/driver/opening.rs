//! Opening the volumes at the start, each as long as its disk answers.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, join_all};
use harvestfs_protocol::machine;
use tokio::sync::oneshot;

use crate::options::{DatanodeOptions, StartError};
use crate::store::{BlockStore, BufferPool, Disk, Progress, Volume, VolumeError};

/// A volume whose disk owes one answer for this long is left out. Verifying what is on it may take much longer. An owner
/// may keep a disk busy for longer too, and while the datanode runs that is borne; but until the volumes are opened,
/// those on other disks are away as well. What is opened after this comes back with the next start.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2 * 60);

/// What came of opening the volumes.
pub struct Opened {
    /// Over those that are open.
    pub store: BlockStore,
    /// Why the others are not.
    pub errors: Vec<VolumeError>,
    /// Those of the others whose disks did not answer.
    pub late: Vec<LateVolume>,
}

/// A volume that is left out and may be opened yet: its directory, once it is; nothing where it cannot be used.
pub type LateVolume = BoxFuture<'static, Option<PathBuf>>;

/// A volume that is being opened.
struct Opening<T> {
    path: PathBuf,
    progress: Arc<Progress>,
    opened: oneshot::Receiver<Result<T, VolumeError>>,
}

/// What came of opening a volume.
enum Ended<T> {
    /// It is open, or cannot be used.
    InTime(Result<T, VolumeError>),
    /// Its disk does not answer, and may yet.
    Late(Opening<T>),
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
        // What nobody waits for any more is dropped here.
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
    async fn end(mut self) -> Result<Ended<T>, StartError> {
        loop {
            let answers = self.progress.answers();
            match tokio::time::timeout(ANSWER_DEADLINE, &mut self.opened).await {
                Ok(Ok(opened)) => return Ok(Ended::InTime(opened)),
                Ok(Err(_)) => return Err(StartError::OpeningFailed),
                Err(_) if self.progress.answers() > answers => {}
                Err(_) => return Ok(Ended::Late(self)),
            }
        }
    }

    /// Waits for its end as long as it takes: the directory, once it is open. It is closed again then, for the process
    /// that is to use it.
    async fn end_late(self) -> Option<PathBuf> {
        match self.opened.await {
            Ok(Ok(_)) => Some(self.path),
            Ok(Err(error)) => {
                tracing::error!(%error, "a volume cannot be used");
                None
            }
            Err(_) => {
                tracing::error!(volume = %self.path.display(), "opening it broke off: this is a bug");
                None
            }
        }
    }
}

/// Opens all volumes at the same time, because each may have to verify open replicas.
///
/// # Errors
/// None can be used, or opening one broke off.
pub async fn open_volumes(
    options: &DatanodeOptions,
    disk: Arc<dyn Disk>,
    links_max: usize,
) -> Result<Opened, StartError> {
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
            Err(error) => Ok(Ended::InTime(Err(error))),
        }
    });
    let (mut volumes, mut errors) = (Vec::new(), Vec::new());
    let mut late = Vec::<LateVolume>::new();
    for ended in join_all(endings).await {
        let error = match ended? {
            Ended::InTime(Ok(volume)) => {
                volumes.push(volume);
                continue;
            }
            Ended::InTime(Err(error)) => error,
            Ended::Late(opening) => {
                let path = opening.path.clone();
                late.push(Box::pin(opening.end_late()));
                VolumeError::Silent { path }
            }
        };
        tracing::error!(%error, "a volume cannot be used");
        errors.push(error);
    }
    if volumes.is_empty() {
        return Err(StartError::NoVolume(errors));
    }
    let buffers = BufferPool::new(options.buffer_bytes);
    let store = BlockStore::new(volumes, buffers, options.table_cache_bytes, links_max);
    Ok(Opened {
        store,
        errors,
        late,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_volume_is_waited_for_as_long_as_its_disk_answers_and_may_be_opened_later() {
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
        let Ended::Late(late) = ending.await.unwrap().unwrap() else {
            panic!("it cannot have ended");
        };
        drop(release);
        assert_eq!(late.end_late().await, Some(PathBuf::from("v")));
    }

    #[tokio::test]
    async fn one_that_is_found_later_to_be_of_no_use_stays_left_out() {
        let path = PathBuf::from("v");
        let missing = path.clone();
        let begun = Opening::begin(path, move |_| -> Result<(), VolumeError> {
            Err(VolumeError::Missing { path: missing })
        });
        assert_eq!(begun.unwrap().end_late().await, None);
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
