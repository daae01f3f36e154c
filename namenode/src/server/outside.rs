//! A namenode that is in no group: it serves nobody, and waits until it is added to one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;

use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::{Condition, GroupRequest};
use harvestfs_protocol::identity::Role;
use harvestfs_protocol::rpc::{Reply, Request};
use rustc_hash::FxHashSet;
use tokio::sync::{mpsc, oneshot};

use super::connection::Event;
use super::owner::Stop;
use super::{NamenodeError, NamenodeOptions, data_dir};
use crate::consensus::{self, Asked, Member, MemberId, Outside};
use crate::journal::disk::Disk;
use crate::journal::{Journal, Lsn};

/// Logs why it takes part in nothing, and what to do.
pub(super) fn announce(condition: Condition, options: &NamenodeOptions) {
    let addr = options.listen;
    match condition {
        Condition::New => {
            tracing::info!(
                %addr,
                "this namenode is in no group yet: add it with `harvestfs admin namenode add`"
            );
        }
        Condition::Founding => {
            tracing::info!(
                %addr,
                "this namenode of a new group waits until each of the others has said that it knows \
                 nothing of it yet: start them too"
            );
        }
        Condition::Copy => {
            tracing::error!(
                %addr,
                "the directory of this namenode is a copy, and may lack what it told the others since \
                 that was made: it takes part in nothing. Add it again as a new member, with \
                 `harvestfs admin namenode add`; when most of the group are copies, have one go on alone \
                 first, with `harvestfs admin namenode recover`"
            );
        }
        Condition::Forgetful => {
            tracing::error!(
                %addr,
                "this namenode has forgotten what it told the others: it takes part in nothing. Add it \
                 again as a new member, with `harvestfs admin namenode add`"
            );
        }
        Condition::Left => {
            tracing::error!(
                %addr,
                "this namenode is in the group no more: it was removed, or another one took its place. It \
                 takes part in nothing. Stop it; or have it in the group again, as a new member, with \
                 `harvestfs admin namenode add`"
            );
        }
        Condition::Member => unreachable!("a member is in its group"),
    }
}

/// Addresses of the members when this namenode last took part. A client that knows only this one, for instance from a
/// configuration written before the others were added, finds the leader through them.
fn known_members(condition: Condition, others: &BTreeMap<MemberId, Member>) -> Vec<SocketAddr> {
    match condition {
        Condition::Left | Condition::Copy | Condition::Forgetful => {
            others.values().map(|it| it.addr).collect()
        }
        Condition::New | Condition::Founding | Condition::Member => Vec::new(),
    }
}

/// How the wait ended.
pub(super) enum Waited {
    /// The directory has other contents now.
    Changed,
    /// The namenode is to stop.
    Stopped,
}

/// Waits until the namenode is added to a group.
pub(super) async fn wait(
    mut journal: Journal,
    outside: &Outside,
    options: &NamenodeOptions,
    disk: Option<&Arc<dyn Disk>>,
    mut events: mpsc::Receiver<Event>,
    stop: &mut oneshot::Receiver<Stop>,
) -> Result<Waited, NamenodeError> {
    let others = consensus::other_members(&journal, Lsn::MAX)?;
    // Each in turn, since some may be unreachable.
    let known = known_members(outside.status().condition, &others);
    let mut hints = known.into_iter().cycle();
    let mut operators = FxHashSet::default();
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
                    // Another fetch may have begun just now, and would keep the journal open.
                    outside.end_fetching().await;
                    joining.install(&mut journal)?;
                    return Ok(Waited::Changed);
                }
            },
            event = events.recv() => match event {
                Some(Event::Connected { connection, peer, .. }) => {
                    if peer.role == Role::Admin {
                        operators.insert(connection);
                    }
                }
                Some(Event::Disconnected { connection }) => {
                    operators.remove(&connection);
                }
                Some(Event::Request { connection, request, responder }) => {
                    let asks = Request::Admin(AdminRequest::Group(GroupRequest::List));
                    let answer = if request == asks && operators.contains(&connection) {
                        Ok(Reply::Admin(AdminReply::Group(outside.status())))
                    } else {
                        Err(FsError::NotLeader { leader: hints.next() })
                    };
                    responder.send(&answer);
                }
                None => return Ok(Waited::Stopped),
            },
        }
    }
}
