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
/// How long after a volume was late again it is opened once more.
const AGAIN_AFTER: Duration = Duration::from_secs(15 * 60);

/// What came of opening the volumes.
pub struct Opened {
    /// Over those that are open.
    pub store: BlockStore,
    /// Why the others are not.
    pub errors: Vec<VolumeError>,
    /// Those of the others whose disks did not answer.
    pub late: Vec<LateVolume>,
}

/// A volume that is left out and may be opened in time yet: its directory, once it was; nothing where it cannot be used.
pub type LateVolume = BoxFuture<'static, Option<PathBuf>>;

/// Opens a volume, perhaps several times.
type Open<T> = Arc<dyn Fn(&Progress) -> Result<T, VolumeError> + Send + Sync>;

/// A volume that is being opened.
struct Opening<T> {
    path: PathBuf,
    open: Open<T>,
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
    fn begin(path: PathBuf, open: Open<T>) -> Result<Self, VolumeError> {
        let progress = Arc::<Progress>::default();
        let (sender, opened) = oneshot::channel();
        let (noted, opens) = (progress.clone(), open.clone());
        // What nobody waits for any more is dropped here.
        let work = move || drop(sender.send(opens(&noted)));
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
            open,
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

    /// Begins, and waits for the end as [`Opening::end`] does.
    async fn attempt(path: PathBuf, open: Open<T>) -> Result<Ended<T>, StartError> {
        match Self::begin(path, open) {
            Ok(opening) => opening.end().await,
            Err(error) => Ok(Ended::InTime(Err(error))),
        }
    }

    /// Waits for its end as long as it takes, and then until it can be opened in time: the directory, once it could. It
    /// is closed again then, for the process that is to use it. A disk may be as slow at each start: a process that
    /// ended because of it would be started over and over, and the good volumes were away each time.
    async fn end_late(self) -> Option<PathBuf> {
        let (path, open) = (self.path.clone(), self.open.clone());
        let mut late = self;
        loop {
            let ended = match late.opened.await {
                Ok(Ok(opened)) => {
                    // It holds the lock.
                    drop(opened);
                    Self::attempt(path.clone(), open.clone()).await
                }
                Ok(Err(error)) => Ok(Ended::InTime(Err(error))),
                Err(_) => Err(StartError::OpeningFailed),
            };
            match ended {
                Ok(Ended::InTime(Ok(_))) => return Some(path),
                Ok(Ended::InTime(Err(error))) => {
                    tracing::error!(%error, "a volume cannot be used");
                    return None;
                }
                Ok(Ended::Late(again)) => late = again,
                Err(error) => {
                    tracing::error!(volume = %path.display(), %error, "a volume cannot be used");
                    return None;
                }
            }
            tracing::warn!(
                volume = %path.display(),
                "the disk did not answer in time again: the volume is still left out"
            );
            tokio::time::sleep(AGAIN_AFTER).await;
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
    let endings = options.volumes.iter().cloned().map(|volume| {
        let (server, disk, threads) = (server.clone(), disk.clone(), options.disk_threads);
        let path = volume.path.clone();
        let open = move |progress: &Progress| {
            Volume::open(&volume, &server, disk.clone(), threads, progress)
        };
        Opening::attempt(path, Arc::new(open))
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

    use parking_lot::Mutex;
    use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

    use super::*;

    fn begin(open: impl Fn() -> Result<(), VolumeError> + Send + Sync + 'static) -> Opening<()> {
        let open = move |_: &Progress| open();
        Opening::begin(PathBuf::from("v"), Arc::new(open)).unwrap()
    }

    /// A volume that says each time when its opening begins, and is open once that is released.
    fn held_back() -> (Opening<()>, UnboundedReceiver<()>, mpsc::Sender<()>) {
        let (begins, begun) = unbounded_channel();
        let (release, released) = mpsc::channel();
        let released = Mutex::new(released);
        let opening = begin(move || {
            // A test may not look.
            let _ = begins.send(());
            // Without the other end, nothing is held back any more.
            let _ = released.lock().recv();
            Ok(())
        });
        (opening, begun, release)
    }

    async fn be_late(opening: Opening<()>) -> Opening<()> {
        match opening.end().await.unwrap() {
            Ended::Late(late) => late,
            Ended::InTime(_) => panic!("it cannot have ended"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_is_waited_for_as_long_as_its_disk_answers_and_may_be_opened_later() {
        let (opening, _begun, release) = held_back();
        let progress = opening.progress.clone();
        let ending = tokio::spawn(be_late(opening));
        for _ in 0..10 {
            tokio::time::sleep(ANSWER_DEADLINE * 2 / 3).await;
            progress.answered();
            assert!(!ending.is_finished());
        }
        let late = ending.await.unwrap();
        // The second opening is to be in time.
        tokio::time::resume();
        drop(release);
        assert_eq!(late.end_late().await, Some(PathBuf::from("v")));
    }

    /// Else the process that is started for it would leave it out again, and be ended again.
    #[tokio::test(start_paused = true)]
    async fn one_that_is_late_again_is_left_out_until_it_is_opened_in_time() {
        let (opening, mut begun, release) = held_back();
        let late = be_late(opening).await;
        release.send(()).unwrap();
        let ending = tokio::spawn(late.end_late());
        for _ in 0..2 {
            begun.recv().await.unwrap();
        }
        // It is late again, and waited for again.
        tokio::time::sleep(ANSWER_DEADLINE + AGAIN_AFTER * 2).await;
        assert!(!ending.is_finished());
        // The third opening is to be in time.
        tokio::time::resume();
        drop(release);
        assert_eq!(ending.await.unwrap(), Some(PathBuf::from("v")));
    }

    #[tokio::test]
    async fn one_that_is_found_later_to_be_of_no_use_stays_left_out() {
        let path = PathBuf::from("v");
        let missing = begin(move || Err(VolumeError::Missing { path: path.clone() }));
        assert_eq!(missing.end_late().await, None);
    }

    #[tokio::test]
    async fn one_that_breaks_off_is_said() {
        let broken = begin(|| panic!("on purpose")).end().await;
        assert!(matches!(broken, Err(StartError::OpeningFailed)));
    }
}
