//! Running jobs on a volume's disk, as long as it responds.

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

/// How long a job on a disk may take before it fails because the disk is silent.
const DISK_DEADLINE: Duration = Duration::from_secs(30);

/// Why a volume is no longer used after a broken invariant.
pub(super) const BROKEN_OFF: &str = "a job on it broke off; the log says where";

/// Judges a volume, and gives it up, on the thread of a job.
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

/// Serializes jobs.
pub(super) struct InTurn(Arc<Semaphore>);

impl Default for InTurn {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Volume {
    /// Whether its disk has owed an answer for so long that it is to be left alone.
    pub fn is_silent(&self) -> bool {
        self.pulse.is_silent()
    }

    /// Checks that it can be used now.
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
    /// The job's error; [`StoreError::VolumeDown`] if the volume is down; [`StoreError::Silent`] if the disk does not
    /// respond in time. In that case a job that has not started never runs, and everything that it owns is dropped;
    /// one that has started continues.
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

    /// Gives the volume up if its directory is no longer in place.
    pub async fn check_place(&self) {
        if self.check_usable().is_err() {
            return;
        }
        let judge = self.judge();
        let job = move || {
            judge.look();
            Ok(())
        };
        // A volume that went down, or is silent, has already been logged.
        let _ = self.run(job).await;
    }

    fn judge(&self) -> Judge {
        Judge {
            health: self.health.clone(),
            place: self.place.clone(),
            path: self.path.clone(),
        }
    }

    /// Checks that the volume is not down.
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

    /// As [`Volume::run`], for jobs that replace a file of the volume as a whole: each starts only when all such jobs
    /// before it have ended. Otherwise a job whose disk did not respond for long would restore old content.
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
