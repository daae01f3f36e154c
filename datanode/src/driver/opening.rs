//! Opening the volumes at startup: volumes that are open wait for the others, but not for long.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use harvestfs_protocol::{machine, watch};
use tokio::sync::oneshot;

use crate::driver::late::{LateVolume, OpenVolume};
use crate::options::{DatanodeOptions, StartError};
use crate::store::{BlockStore, BufferPool, Disk, Progress, Volume, VolumeError, now};

/// How long open volumes wait for a disk that does not respond. A volume that cannot be used when the server registers
/// is repaired immediately, but while the open volumes wait for it, they are unavailable, and a disk that hangs may
/// hang for long.
const SILENCE_WAIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// The same while it is not yet known which volume is on the disk. The namenode, to which that volume is not reported,
/// would take the server for reimaged and cancel what operators have ordered for it; but after 30 s without the
/// server, it repairs everything on it.
const UNKNOWN_WAIT: Duration = Duration::from_secs(25);
/// How long open volumes wait for a disk that does respond: a large volume may take longer to open than a small one at
/// each start. After an orderly stop the namenode expects the server back within 120 s and repairs nothing until then.
/// After a crash it repairs from 30 s on until the server is back.
const OTHERS_WAIT: Duration = Duration::from_secs(90);
/// When no volume is open, a disk that has owed one answer for this long is given up, so that whatever supervises the
/// datanode notices. Verifying the contents of the disk may take much longer.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2 * 60);

/// The result of opening the volumes.
pub struct Opened {
    /// The store over the volumes that are open.
    pub store: BlockStore,
    /// Why the other volumes are not open.
    pub errors: Vec<VolumeError>,
    /// Those of the other volumes that may still be opened.
    pub late: Vec<LateVolume>,
    /// The directories of those that are not opened before the next start.
    pub failed: Vec<PathBuf>,
}

/// A volume that is being opened.
struct Opening<T> {
    path: PathBuf,
    progress: Arc<Progress>,
    opened: oneshot::Receiver<Result<T, VolumeError>>,
}

/// The result of opening a volume.
enum Ended<T> {
    Open(T),
    Unusable(VolumeError),
    /// It may still be opened.
    Late(Opening<T>, VolumeError),
}

impl<T: Send + 'static> Opening<T> {
    /// Starts opening on a dedicated thread. The runtime would wait for one of its own threads when the process exits,
    /// and a disk may never respond.
    ///
    /// # Errors
    /// The thread cannot be started.
    fn begin(
        path: PathBuf,
        open: impl FnOnce(&Progress) -> Result<T, VolumeError> + Send + 'static,
    ) -> Result<Self, VolumeError> {
        let progress = Arc::<Progress>::default();
        let (sender, opened) = oneshot::channel();
        let noted = progress.clone();
        // If nothing waits for the result any more, it is dropped here.
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

    /// Waits until opening ends, or has kept another volume waiting for long enough, or the disk does not respond.
    async fn end(mut self, is_one_open: &watch::Sender<bool>) -> Result<Ended<T>, StartError> {
        let error = tokio::select! {
            biased;
            opened = &mut self.opened => return match opened {
                Ok(Ok(opened)) => {
                    is_one_open.send_replace(true);
                    Ok(Ended::Open(opened))
                }
                Ok(Err(error)) => Ok(Ended::Unusable(error)),
                Err(_) => Err(StartError::OpeningFailed),
            },
            () = others_waited(is_one_open, &self.progress) => VolumeError::Opening {
                path: self.path.clone(),
            },
            () = silence(&self.progress) => VolumeError::Silent {
                path: self.path.clone(),
            },
        };
        Ok(Ended::Late(self, error))
    }
}

/// Starts to open a volume, and waits as [`Opening::end`] does.
async fn attempt<T: Send + 'static>(
    path: PathBuf,
    open: impl FnOnce(&Progress) -> Result<T, VolumeError> + Send + 'static,
    is_one_open: &watch::Sender<bool>,
) -> Result<Ended<T>, StartError> {
    match Opening::begin(path, open) {
        Ok(opening) => opening.end(is_one_open).await,
        Err(error) => Ok(Ended::Unusable(error)),
    }
}

/// Completes when an open volume has waited for this one for long enough.
async fn others_waited(is_one_open: &watch::Sender<bool>, progress: &Progress) {
    // The sender is only borrowed.
    let _ = is_one_open.subscribe().wait_for(|is_open| *is_open).await;
    let begun = now();
    let (mut answers, mut answered_at) = (progress.answers(), begun);
    loop {
        tokio::time::sleep(SILENCE_WAIT / 10).await;
        if progress.answers() != answers {
            (answers, answered_at) = (progress.answers(), now());
        }
        let is_silent = now() - answered_at >= SILENCE_WAIT;
        let is_known = progress.storage().is_some();
        let waited = now() - begun;
        if waited >= OTHERS_WAIT || (is_silent && (is_known || waited >= UNKNOWN_WAIT)) {
            return;
        }
    }
}

/// Completes when a disk has owed an answer for too long.
async fn silence(progress: &Progress) {
    loop {
        let answers = progress.answers();
        tokio::time::sleep(ANSWER_DEADLINE).await;
        if progress.answers() == answers {
            return;
        }
    }
}

/// Opens all volumes at the same time, because each may have open replicas to verify.
///
/// # Errors
/// No volume can be used, or opening one ended without a result.
pub async fn open_volumes(
    options: &DatanodeOptions,
    disk: Arc<dyn Disk>,
    links_max: usize,
) -> Result<Opened, StartError> {
    let server = options.identity.peer().name.clone();
    let is_one_open = watch::Sender::new(false);
    let endings = options.volumes.iter().cloned().map(|volume| {
        let (server, disk, threads) = (server.clone(), disk.clone(), options.disk_threads);
        let path = volume.path.clone();
        let open =
            move |progress: &Progress| Volume::open(&volume, &server, disk, threads, progress);
        attempt(path, open, &is_one_open)
    });
    let endings: Vec<Result<Ended<OpenVolume>, StartError>> = join_all(endings).await;
    let endings = endings.into_iter().collect::<Result<Vec<_>, _>>()?;
    let (mut volumes, mut errors) = (Vec::new(), Vec::new());
    let (mut late, mut failed) = (Vec::new(), Vec::new());
    for (configured, ended) in options.volumes.iter().zip(refuse_copies(endings)) {
        let error = match ended {
            Ended::Open(volume) => {
                volumes.push(volume);
                continue;
            }
            Ended::Unusable(error) => {
                tracing::error!(%error, "a volume cannot be used");
                failed.push(configured.path.clone());
                error
            }
            Ended::Late(opening, error) => {
                tracing::warn!(%error, "a volume is left out until it is open");
                late.push(LateVolume {
                    options: configured.clone(),
                    progress: opening.progress,
                    opened: opening.opened,
                });
                error
            }
        };
        errors.push(error);
    }
    if volumes.is_empty() {
        return Err(StartError::NoVolume(errors));
    }
    let buffers = BufferPool::new(options.buffer_bytes);
    let cache_bytes = options.table_cache_bytes;
    let store = BlockStore::new(volumes, late.len(), buffers, cache_bytes, links_max);
    Ok(Opened {
        store,
        errors,
        late,
        failed,
    })
}

/// Refuses volumes that are the same one: a directory is a copy of another. Namenodes would not register a server that
/// has a volume twice, and would thus lose all its volumes. None of the copies is used, because nothing in them tells
/// which one is current: an old one lacks what was written since it was made.
fn refuse_copies(endings: Vec<Ended<OpenVolume>>) -> Vec<Ended<OpenVolume>> {
    let open = endings.iter().filter_map(|ended| match ended {
        Ended::Open((volume, _)) => Some(volume.clone()),
        Ended::Unusable(_) | Ended::Late(..) => None,
    });
    let open: Vec<Arc<Volume>> = open.collect();
    let refuse = |ended: Ended<OpenVolume>| match ended {
        Ended::Open((volume, found)) => {
            let is_copy =
                |it: &&Arc<Volume>| it.storage() == volume.storage() && !Arc::ptr_eq(it, &volume);
            match open.iter().find(is_copy) {
                Some(other) => Ended::Unusable(VolumeError::Copy {
                    path: volume.path().to_owned(),
                    other: other.path().to_owned(),
                }),
                None => Ended::Open((volume, found)),
            }
        }
        ended @ (Ended::Unusable(_) | Ended::Late(..)) => ended,
    };
    endings.into_iter().map(refuse).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use harvestfs_protocol::ids::StorageId;
    use tokio::time::Instant;

    use super::*;

    fn begin(open: impl FnOnce() -> Result<(), VolumeError> + Send + 'static) -> Opening<()> {
        Opening::begin(PathBuf::from("v"), |_: &Progress| open()).unwrap()
    }

    /// A volume that is open once it is released.
    fn held_back() -> (Opening<()>, mpsc::Sender<()>) {
        let (release, released) = mpsc::channel();
        let opening = begin(move || {
            // If the other end is dropped, nothing is held back any more.
            let _ = released.recv();
            Ok(())
        });
        (opening, release)
    }

    #[tokio::test(start_paused = true)]
    async fn while_none_is_open_a_volume_is_waited_for_as_long_as_its_disk_answers() {
        let (opening, _release) = held_back();
        let progress = opening.progress.clone();
        let ending = tokio::spawn(async move {
            let none_is_open = watch::Sender::new(false);
            opening.end(&none_is_open).await
        });
        for _ in 0..10 {
            tokio::time::sleep(ANSWER_DEADLINE * 2 / 3).await;
            progress.answered();
            assert!(!ending.is_finished());
        }
        let ended = ending.await.unwrap().unwrap();
        assert!(matches!(ended, Ended::Late(_, VolumeError::Silent { .. })));
    }

    /// Otherwise the good volumes of a server would be unavailable for as long as its worst disk likes. But a volume
    /// that is not waited for is repaired.
    #[tokio::test]
    async fn one_that_is_open_waits_for_the_others_only_for_a_while() {
        for (is_known, answers, wanted) in [
            (true, 0, SILENCE_WAIT),
            (true, 10, SILENCE_WAIT * 6),
            (true, 1_000, OTHERS_WAIT),
            (false, 0, UNKNOWN_WAIT),
            (false, 1_000, OTHERS_WAIT),
        ] {
            let is_one_open = watch::Sender::new(false);
            let (opening, release) = held_back();
            let progress = opening.progress.clone();
            if is_known {
                progress.found(StorageId(1));
            }
            let first = begin(|| Ok(())).end(&is_one_open).await.unwrap();
            assert!(matches!(first, Ended::Open(())));
            // Not before: time would pass while the thread of the first one works.
            tokio::time::pause();
            let begun = Instant::now();
            let answering = tokio::spawn(async move {
                for _ in 0..answers {
                    tokio::time::sleep(SILENCE_WAIT / 2).await;
                    progress.answered();
                }
            });
            let ended = opening.end(&is_one_open).await.unwrap();
            let Ended::Late(late, VolumeError::Opening { .. }) = ended else {
                panic!("it cannot be open");
            };
            let waited = begun.elapsed();
            let wanted = wanted..wanted + SILENCE_WAIT / 2;
            assert!(wanted.contains(&waited), "{waited:?}, and not {wanted:?}");
            answering.abort();
            tokio::time::resume();
            drop(release);
            late.opened.await.unwrap().unwrap();
        }
    }

    #[tokio::test]
    async fn one_that_breaks_off_is_said() {
        let is_one_open = watch::Sender::new(false);
        let broken = begin(|| panic!("on purpose")).end(&is_one_open).await;
        assert!(matches!(broken, Err(StartError::OpeningFailed)));
    }
}
