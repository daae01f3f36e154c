//! Why a run could not be carried out.

use std::io;

/// Why a run could not be carried out. That data was lost is no error, but a result.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// A file, directory or process of the cluster.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// Why it failed.
        source: io::Error,
    },
    /// A part of the cluster did not do as it should.
    #[error("{0}")]
    Cluster(String),
    /// This machine cannot do what the scenario asks for.
    #[error("this machine cannot run the scenario: {0}")]
    Machine(String),
    /// Ctrl-C.
    #[error("interrupted; everything is healed and stopped")]
    Interrupted,
}

impl LiveError {
    /// Says what was tried.
    pub(crate) fn io<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Io {
            what,
            source: source.into(),
        }
    }
}
