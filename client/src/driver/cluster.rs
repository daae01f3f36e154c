//! Access to the namenode and the datanodes for the rest of the driver.

use std::sync::Arc;

use super::locations::Locations;
use super::session::Session;

/// The session with the namenode, and the locations of blocks on datanodes.
pub(crate) struct Cluster {
    pub(crate) session: Arc<Session>,
    pub(crate) locations: Locations,
}

impl Cluster {
    pub(crate) fn new(session: Arc<Session>) -> Self {
        let locations = Locations::new(&session);
        Self { session, locations }
    }
}
