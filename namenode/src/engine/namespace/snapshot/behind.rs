//! The part that follows a snapshot in its file: the sessions whose leases have expired. The snapshots of 0.2.0 have no
//! record for them.
//!
//! Layout: frames like those of a snapshot, with [`Behind`] in postcard, up to the end of the file; none if there are
//! no such sessions. 0.2.0 reads a snapshot up to its end and no further: it continues without this part, and waits for
//! these sessions once more. So the part is written regardless of the version of the cluster.

use std::io::{Read, Write};

use harvestfs_protocol::ids::SessionId;
use serde::{Deserialize, Serialize};

use super::read::read_frame;
use super::{Frames, ITEMS_PER_RECORD, SnapshotError, damaged};
use crate::engine::namespace::Namespace;

#[derive(Debug, Serialize, Deserialize)]
enum Behind {
    /// Sessions whose leases have expired, and that have not come back since.
    Lapsed(Vec<SessionId>),
}

impl Namespace {
    /// Writes the part that follows the output of [`Namespace::write_snapshot`].
    ///
    /// # Errors
    /// [`SnapshotError::Io`].
    pub fn write_behind_snapshot(&self, to: &mut impl Write) -> Result<(), SnapshotError> {
        let sessions = self.sessions.sessions.iter();
        let lapsed = sessions.filter(|(_, session)| session.has_lapsed);
        let lapsed: Vec<SessionId> = lapsed.map(|(id, _)| *id).collect();
        let mut frames = Frames {
            to,
            payload: Vec::new(),
            records: 0,
        };
        for part in lapsed.chunks(ITEMS_PER_RECORD) {
            frames.put(&Behind::Lapsed(part.to_vec()))?;
        }
        if frames.payload.is_empty() {
            return Ok(());
        }
        frames.flush()
    }

    /// Reads the output of [`Namespace::write_behind_snapshot`], up to the end of the file, after
    /// [`Namespace::read_snapshot`]. It cannot tell whether the file is complete; the caller must know.
    ///
    /// # Errors
    /// See [`SnapshotError`].
    pub fn read_behind_snapshot(&mut self, from: &mut impl Read) -> Result<(), SnapshotError> {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes)?;
        let mut frames = bytes.as_slice();
        let mut payload = Vec::new();
        while !frames.is_empty() {
            read_frame(&mut frames, &mut payload)?;
            let mut rest = payload.as_slice();
            while !rest.is_empty() {
                let (record, after) = postcard::take_from_bytes::<Behind>(rest)
                    .map_err(|error| damaged(format!("what follows cannot be decoded: {error}")))?;
                rest = after;
                let Behind::Lapsed(sessions) = record;
                for id in sessions {
                    let Some(session) = self.sessions.sessions.get_mut(&id) else {
                        return Err(damaged("a session that has lapsed is not open"));
                    };
                    session.has_lapsed = true;
                }
            }
        }
        Ok(())
    }
}
