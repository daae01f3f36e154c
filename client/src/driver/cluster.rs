//! The namenode and the datanodes, as the rest of the driver reaches them.

use std::sync::Arc;

use super::locations::Locations;
use super::session::Session;

/// See the module.
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
