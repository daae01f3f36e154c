//! Running jobs on a volume's disk, as long as it answers.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::error::StoreError;
use super::health::Health;
use super::place::Place;
use super::volume::Volume;
use super::workers::JobLost;

/// A job on a disk fails after this long because the disk is silent.
const DISK_DEADLINE: Duration = Duration::from_secs(30);

/// Why a volume is not used any more after a broken invariant.
pub(super) const BROKEN_OFF: &str = "a job on it broke off; the log says where";

/// Gives a volume up, on the thread of a job.
struct Judge {
    health: Arc<Health>,
    place: Arc<Place>,
    path: PathBuf,
}

impl Judge {
    fn note_error(&self, error: &io::Error) {
        self.health.note_error(error, &self.path);
        if error.kind() == io::ErrorKind::NotFound {
            self.look();
        }
    }

    fn look(&self) {
        match self.place.loss() {
            Ok(None) => {}
            Ok(Some(loss)) => self.health.fail(loss, &self.path),
            Err(error) => self.health.note_error(&error, &self.path),
        }
    }
}

/// For jobs that run one after the other.
pub(super) struct InTurn(Arc<Semaphore>);

impl Default for InTurn {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Volume {
    /// Whether its disk owes an answer for so long that it is to be left alone.
    pub fn is_silent(&self) -> bool {
        self.pulse.is_silent()
    }

    /// That it can be used now.
    ///
    /// # Errors
    /// [`StoreError::VolumeDown`] or [`StoreError::Silent`].
    pub fn check_usable(&self) -> Result<(), StoreError> {
        self.check_health()?;
        if self.is_silent() {
            return Err(self.silent());
        }
        Ok(())
    }

    fn silent(&self) -> StoreError {
        StoreError::Silent {
            path: self.path.clone(),
        }
    }

    /// Runs a job that accesses the disk, and judges the disk by its result.
    ///
    /// # Errors
    /// What the job says; [`StoreError::VolumeDown`] if the volume is; [`StoreError::Silent`] if the
    /// disk does not answer in time. Then a job that has not begun never runs, and what it held is dropped; one that
    /// has begun goes on.
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        self.check_health()?;
        let beat = self.pulse.begin();
        let judge = self.judge();
        let job = move || {
            let result = job();
            if let Err(StoreError::Disk { source, .. }) = &result {
                judge.note_error(source);
            }
            beat.end();
            result
        };
        match tokio::time::timeout(DISK_DEADLINE, self.workers.run(job)).await {
            Ok(Ok(result)) => result,
            Ok(Err(JobLost)) => Err(self.down(BROKEN_OFF)),
            Err(_) => {
                tracing::warn!(volume = %self.path.display(), "the disk does not answer");
                Err(self.silent())
            }
        }
    }

    /// Gives the volume up when its directory is not where it was.
    pub async fn check_place(&self) {
        if self.check_usable().is_err() {
            return;
        }
        let judge = self.judge();
        let job = move || {
            judge.look();
            Ok(())
        };
        // A volume that went down, or is silent, has said so.
        let _ = self.run(job).await;
    }

    fn judge(&self) -> Judge {
        Judge {
            health: self.health.clone(),
            place: self.place.clone(),
            path: self.path.clone(),
        }
    }

    /// Whether the volume can be used.
    ///
    /// # Errors
    /// [`StoreError::VolumeDown`].
    pub fn check_health(&self) -> Result<(), StoreError> {
        match self.health.failure() {
            None => Ok(()),
            Some(reason) => Err(self.down(&reason)),
        }
    }

    fn down(&self, reason: &str) -> StoreError {
        StoreError::VolumeDown {
            path: self.path.clone(),
            reason: reason.to_owned(),
        }
    }

    /// As [`Volume::run`], for what replaces a file of the volume as a whole: it begins when each such job
    /// before it has ended. Else one whose disk did not answer for long would put back old content.
    ///
    /// # Errors
    /// As for [`Volume::run`].
    pub(super) async fn run_in_turn<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let turn = self.in_turn.0.clone().acquire_owned();
        let Ok(turn) = tokio::time::timeout(DISK_DEADLINE, turn).await else {
            return Err(self.silent());
        };
        let turn = turn.expect("the semaphore is never closed");
        self.run(move || {
            let result = job();
            drop(turn);
            result
        })
        .await
    }
}
