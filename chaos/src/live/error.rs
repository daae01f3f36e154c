//! Why a run could not be carried out.

use std::io;

/// Why a run could not be carried out. Lost data is not an error, but a result.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// An operation on a file, directory or process of the cluster failed.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A part of the cluster did not behave as it should.
    #[error("{0}")]
    Cluster(String),
    /// This machine cannot do what the scenario requires.
    #[error("this machine cannot run the scenario: {0}")]
    Machine(String),
    /// The run was interrupted with Ctrl-C.
    #[error("interrupted; everything is healed and stopped")]
    Interrupted,
}

impl LiveError {
    /// Wraps an I/O error with what was tried.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }
}
