//! A namenode that is in no group: it serves nobody, and waits until it is taken into one.

use std::pin::pin;
use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use tokio::sync::{mpsc, oneshot};

use super::connection::Event;
use super::owner::Stop;
use super::{NamenodeError, NamenodeOptions, data_dir};
use crate::consensus::{self, Asked, MemberId, Outside, OutsideJournal, Standing};
use crate::journal::disk::Disk;
use crate::journal::{Journal, Lsn};

/// Its number in the group that it will be in, and what its journal has.
pub(super) fn number(standing: Standing, options: &NamenodeOptions) -> (MemberId, OutsideJournal) {
    let addr = options.listen;
    match standing {
        Standing::New(id) => {
            tracing::info!(
                %addr,
                "this namenode is in no group yet: add it with `harvestfs admin namenode add`"
            );
            (id, OutsideJournal::Empty)
        }
        Standing::Founding(id) => {
            tracing::info!(
                %addr,
                "this namenode of a new group waits until each of the others has said that it knows \
                 nothing of it yet: start them too"
            );
            (id, OutsideJournal::Founding)
        }
        Standing::Copy => {
            tracing::error!(
                %addr,
                "the directory of this namenode is a copy, and may lack what it told the others since \
                 that was made: it takes part in nothing. Add it again as a new member, with \
                 `harvestfs admin namenode add`; when most of the group are copies, have one go on alone \
                 first, with `harvestfs admin namenode recover`"
            );
            (MemberId::random(), OutsideJournal::Stale)
        }
        Standing::Forgetful => {
            tracing::error!(
                %addr,
                "this namenode has forgotten what it told the others: it takes part in nothing. Add it \
                 again as a new member, with `harvestfs admin namenode add`"
            );
            (MemberId::random(), OutsideJournal::Stale)
        }
        Standing::Member => unreachable!("a member is in its group"),
    }
}

/// How waiting ended.
pub(super) enum Waited {
    /// The directory has something else now.
    Changed,
    /// The namenode is to stop.
    Stopped,
}

/// Waits until it is taken into a group.
pub(super) async fn wait(
    mut journal: Journal,
    outside: &Outside,
    options: &NamenodeOptions,
    disk: Option<&Arc<dyn Disk>>,
    mut events: mpsc::Receiver<Event>,
    stop: &mut oneshot::Receiver<Stop>,
) -> Result<Waited, NamenodeError> {
    let others = consensus::other_members(&journal, Lsn::MAX)?;
    let mut founded = pin!(outside.founded(others));
    loop {
        tokio::select! {
            biased;
            _ = &mut *stop => return Ok(Waited::Stopped),
            () = &mut founded => {
                consensus::found_here(&journal)?;
                return Ok(Waited::Changed);
            }
            asked = outside.asked() => match asked {
                Asked::MakeRoom => {
                    drop(journal);
                    data_dir::make_room(
                        &options.data_dir,
                        disk,
                        options.segment_bytes,
                        outside.id(),
                    )?;
                    return Ok(Waited::Changed);
                }
                Asked::Join(joining) => {
                    joining.install(&mut journal)?;
                    return Ok(Waited::Changed);
                }
            },
            event = events.recv() => match event {
                Some(Event::Request { responder, .. }) => {
                    responder.send(&Err(FsError::NotLeader { leader: None }));
                }
                // Whoever looks at it sees that it does not serve.
                Some(Event::Connected { .. } | Event::Look(_) | Event::Disconnected { .. }) => {}
                None => return Ok(Waited::Stopped),
            },
        }
    }
}
