//! Metadata operations: queries and housekeeping. Mutations are in [`super::mutate`].

use std::net::IpAddr;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{InodeId, SessionId};
use harvestfs_protocol::limits::{BLOCKS_PER_REQUEST_MAX, GROUPS_MAX};
use harvestfs_protocol::meta::housekeeping::{Release, ReportBadReplica, ReturnDelegations};
use harvestfs_protocol::meta::{
    Cached, Housekeeping, MetaCall, MetaOp, MetaReply, Query, StatFs, query,
};
use harvestfs_protocol::rpc::Reply;
use harvestfs_protocol::types::Credentials;

use super::Owner;
use super::deferred::files_shown;
use super::locate::LOCATIONS_XATTR;
use crate::server::metrics::Responder;
use crate::server::sessions::{ConnectionId, OpenTo};

/// When a client with too much in flight may try again.
pub(super) const TOO_MUCH_RETRY_AFTER_MS: u32 = 100;

/// How long a session that compacts may take to ask for more before another session gets its turn.
const COMPACTION_TURN_MS: u64 = 600_000;

/// The session that asks, and the address that it asks from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    pub session: SessionId,
    pub ip: IpAddr,
}

impl Owner {
    pub(super) fn meta(&mut self, connection: ConnectionId, call: MetaCall, responder: Responder) {
        match self.session_of(connection) {
            Ok(_) => self.meta_now(connection, call, responder),
            Err(error) => responder.send(&Err(error)),
        }
    }

    /// Handles a call that has just arrived, or arrived earlier and had to wait.
    pub(super) fn meta_now(
        &mut self,
        connection: ConnectionId,
        call: MetaCall,
        responder: Responder,
    ) {
        let asker = match self.asker(connection, &call.credentials) {
            Ok(asker) => asker,
            Err(error) => return responder.send(&Err(error)),
        };
        if self.waits_for_lease(asker.session, &call.op) {
            return self.defer(connection, call, responder);
        }
        let credentials = call.credentials;
        match call.op {
            MetaOp::Query(query) => self.read(asker, connection, credentials, query, responder),
            MetaOp::Mutation(call) => {
                self.mutate(asker, connection, credentials, call, responder);
            }
            MetaOp::Housekeeping(operation) => {
                self.keep_house(asker, operation);
                responder.send(&Ok(Reply::Meta(MetaReply::Done)));
            }
        }
    }

    fn asker(&self, connection: ConnectionId, credentials: &Credentials) -> Result<Asker, FsError> {
        let session = self.session_on(connection)?;
        let connected = self.connections.get(&connection);
        let connected = connected.ok_or(FsError::SessionExpired)?;
        let groups = credentials.groups.len();
        if groups > GROUPS_MAX {
            return Err(FsError::InvalidArgument(format!(
                "{groups} groups, at most {GROUPS_MAX} are accepted"
            )));
        }
        Ok(Asker {
            session,
            ip: connected.ip,
        })
    }

    // --- queries ---

    fn read(
        &mut self,
        asker: Asker,
        connection: ConnectionId,
        credentials: Credentials,
        query: Query,
        responder: Responder,
    ) {
        let result = self.query(asker, &credentials, &query);
        let facts = query.facts();
        if let Ok(reply) = &result
            && self.is_ahead_of_commits(asker.session, || files_shown(facts.content, reply))
        {
            let op = MetaOp::Query(query);
            return self.defer(connection, MetaCall { credentials, op }, responder);
        }
        let mut record = self.undurable.last().filter(|_| facts.shows_sums);
        match &result {
            Ok(_) | Err(FsError::NotFound | FsError::NoAttribute) => {
                let attrs = result.iter().flat_map(MetaReply::attrs);
                let attrs = attrs.map(|attr| Cached::Inode(attr.ino));
                for cached in facts.cacheable.into_iter().flatten().chain(attrs) {
                    self.leases.granted(asker.session, cached);
                    let (Cached::Inode(ino) | Cached::Entries(ino)) = cached;
                    record = record.max(self.undurable.record_of([ino]));
                }
            }
            // An error may show anything.
            Err(_) => record = self.undurable.last(),
        }
        let response = result.map(Reply::Meta);
        match record {
            None => responder.send(&response),
            Some(_) => self.answer(responder, response, record),
        }
    }

    fn query(
        &mut self,
        asker: Asker,
        credentials: &Credentials,
        query: &Query,
    ) -> Result<MetaReply, FsError> {
        match query {
            Query::Locate(query::Locate { ino, blocks }) => {
                check_block_count(blocks.len())?;
                let reader = self.opener(asker.session, *ino, OpenTo::Read);
                let reader = reader.as_ref().unwrap_or(credentials);
                let blocks = self.namespace.readable_blocks(reader, *ino, blocks)?;
                Ok(MetaReply::Located(self.located(blocks, asker.ip)))
            }
            Query::GetExtents(op) => {
                let opener = self.opener(asker.session, op.ino, OpenTo::Write);
                self.namespace
                    .query(opener.as_ref().unwrap_or(credentials), query)
            }
            Query::GetXattr(op) if op.name == LOCATIONS_XATTR => {
                self.locations(credentials, op.ino)
            }
            Query::Open(op) => {
                let mut reply = self.namespace.query(credentials, query)?;
                let to = if op.read || op.execute || self.may_read(credentials, op.ino) {
                    OpenTo::Read
                } else {
                    OpenTo::Write
                };
                self.hold(asker.session, op.ino, to)?;
                if to == OpenTo::Read
                    && let MetaReply::Opened {
                        extents, located, ..
                    } = &mut reply
                {
                    *located = self.located_first(extents, asker.ip);
                }
                Ok(reply)
            }
            Query::StatFs(_) => {
                let reply = self.namespace.query(credentials, query)?;
                Ok(self.with_space(reply))
            }
            Query::FindSparse(_) => {
                // First, since it refuses users that may not compact: they must not get the turn.
                let found = self.namespace.query(credentials, query)?;
                self.take_compaction_turn(asker.session)?;
                Ok(found)
            }
            Query::Lookup(_)
            | Query::GetAttr(_)
            | Query::Access(_)
            | Query::ReadDir(_)
            | Query::ReadLink(_)
            | Query::GetXattr(_)
            | Query::ListXattr(_)
            | Query::GetUsage(_) => self.namespace.query(credentials, query),
        }
    }

    /// Lets one session compact at a time: two would copy the same data.
    fn take_compaction_turn(&mut self, session: SessionId) -> Result<(), FsError> {
        let now_ms = self.clock.now_ms();
        match self.compactor {
            Some((other, until_ms)) if other != session && now_ms < until_ms => {
                Err(FsError::Busy {
                    retry_after_ms: u32::try_from(until_ms - now_ms).unwrap_or(u32::MAX),
                })
            }
            _ => {
                self.compactor = Some((session, now_ms + COMPACTION_TURN_MS));
                Ok(())
            }
        }
    }

    pub(super) fn hold(
        &mut self,
        session: SessionId,
        ino: InodeId,
        to: OpenTo,
    ) -> Result<(), FsError> {
        let holds_max = self.options.holds_per_session_max;
        if self.sessions.hold(session, ino, to, holds_max) {
            return Ok(());
        }
        Err(FsError::Busy {
            retry_after_ms: TOO_MUCH_RETRY_AFTER_MS,
        })
    }

    /// Caps the space that quotas leave at the space that the cluster has.
    fn with_space(&self, reply: MetaReply) -> MetaReply {
        let MetaReply::StatFs(quotas) = reply else {
            return reply;
        };
        let summary = self.cluster.summary(self.clock.now_ms());
        let replication = u64::from(self.formatted.default_rules.replication.max(1));
        let free_bytes = summary.quota_bytes.saturating_sub(summary.used_bytes);
        let free_bytes = quotas.free_bytes.min(free_bytes / replication);
        let outlook = self.cluster.write_outlook(&self.formatted.default_rules);
        MetaReply::StatFs(StatFs {
            total_bytes: quotas.total_bytes.min(summary.quota_bytes / replication),
            free_bytes,
            available_bytes: free_bytes.min(outlook.writable_bytes),
            ..quotas
        })
    }

    // --- housekeeping ---

    fn keep_house(&mut self, asker: Asker, operation: Housekeeping) {
        match operation {
            Housekeeping::Release(Release { inodes }) => {
                for &ino in &inodes {
                    self.delegation_returned(asker.session, ino);
                }
                let unheld = inodes
                    .into_iter()
                    .filter(|&ino| self.sessions.release(asker.session, ino))
                    .collect();
                self.release_orphans(unheld);
            }
            Housekeeping::ReturnDelegations(ReturnDelegations { inodes }) => {
                for ino in inodes {
                    self.delegation_returned(asker.session, ino);
                }
            }
            Housekeeping::ReportBadReplica(ReportBadReplica {
                block,
                node,
                corrupt,
            }) => {
                let now_ms = self.clock.now_ms();
                self.cluster
                    .report_bad_replica(now_ms, block, node, corrupt);
            }
        }
    }
}

pub(super) fn check_block_count(count: usize) -> Result<(), FsError> {
    if count <= BLOCKS_PER_REQUEST_MAX {
        return Ok(());
    }
    Err(FsError::InvalidArgument(format!(
        "{count} blocks or nodes in one request, at most {BLOCKS_PER_REQUEST_MAX} are accepted"
    )))
}
