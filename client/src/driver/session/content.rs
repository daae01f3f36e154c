//! Queries about files: attributes with extents, placement rules.

use std::sync::Arc;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::InodeId;
use harvestfs_protocol::meta::{MetaReply, query};
use harvestfs_protocol::types::{
    Attr, Credentials, Durability, Extent, PlacementRules, StorageClass,
};

use super::Session;
use crate::engine::cache::extents::{ExtentMap, is_sound};
use crate::error::ClientError;

/// Maximum number of requests for the content of a file while another session keeps changing it.
pub(crate) const CONTENT_ATTEMPTS: u32 = 16;
/// Maximum number of requests for attributes while this client keeps changing them.
pub(crate) const ATTR_ATTEMPTS: u32 = 8;

impl Session {
    /// Returns attributes as the namenode knows them.
    pub(crate) async fn attr(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Attr, ClientError> {
        if let Some(attr) = self.valid_cache().and_then(|cache| cache.attr(ino)) {
            return Ok(attr);
        }
        self.attr_asked(credentials, ino).await
    }

    /// Requests attributes from the namenode. They include what this client has changed since: a
    /// reply that was overtaken is discarded and requested again.
    pub(crate) async fn attr_asked(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<Attr, ClientError> {
        let mut attempt = 1;
        loop {
            let ticket = self.cache.ticket();
            let op = query::GetAttr { ino };
            let MetaReply::Attr(attr) = self.query(credentials, op).await? else {
                return Err(ClientError::UnexpectedReply(query::GetAttr::NAME));
            };
            if ticket.learn_attr(&attr) || attempt == ATTR_ATTEMPTS {
                return Ok(attr);
            }
            attempt += 1;
        }
    }

    /// Returns attributes and extents of the same content version.
    pub(crate) async fn content(
        &self,
        credentials: &Credentials,
        ino: InodeId,
    ) -> Result<(Attr, Arc<ExtentMap>), ClientError> {
        let mut attempt = 1;
        loop {
            let cache = self.valid_cache();
            if let Some(content) = cache.and_then(|cache| cache.content(ino)) {
                return Ok(content);
            }
            let ticket = self.cache.ticket();
            let before = self.attr(credentials, ino).await?;
            let extents = self.extents(credentials, ino, Vec::new(), false).await?;
            // Extents come without a version: they belong to the one that was found both before and after.
            let attr = self.attr_asked(credentials, ino).await?;
            if before.content_version == attr.content_version {
                ticket.learn_content(&attr, &extents);
                return Ok((attr, extents));
            }
            if attempt == CONTENT_ATTEMPTS {
                return Err(ClientError::ChangesTooFast { ino });
            }
            attempt += 1;
        }
    }

    /// Returns all extents of a file, requesting those after the known ones.
    pub(crate) async fn extents(
        &self,
        credentials: &Credentials,
        ino: InodeId,
        known: Vec<Extent>,
        complete: bool,
    ) -> Result<Arc<ExtentMap>, ClientError> {
        let mut map = ExtentMap::default();
        if !known.iter().all(is_sound) {
            return Err(ClientError::UnexpectedReply(query::Open::NAME));
        }
        let mut from_offset = known.last().map_or(0, Extent::file_end);
        map.apply(&known);
        let mut complete = complete;
        while !complete {
            let op = query::GetExtents { ino, from_offset };
            let MetaReply::Extents { extents, end } = self.query(credentials, op).await? else {
                return Err(ClientError::UnexpectedReply(query::GetExtents::NAME));
            };
            if !extents.iter().all(is_sound) {
                return Err(ClientError::UnexpectedReply(query::GetExtents::NAME));
            }
            map.apply(&extents);
            let next = extents.last().map_or(from_offset, Extent::file_end);
            if !end && next <= from_offset {
                return Err(ClientError::UnexpectedReply(query::GetExtents::NAME));
            }
            from_offset = next;
            complete = end;
        }
        Ok(Arc::new(map))
    }

    /// Returns how the blocks of a file are to be placed.
    pub(crate) async fn rules_of(&self, ino: InodeId) -> Result<PlacementRules, ClientError> {
        Ok(self.own_rules(self.placement_rules(ino).await?))
    }

    async fn placement_rules(&self, ino: InodeId) -> Result<PlacementRules, ClientError> {
        if let Some(rules) = self.valid_cache().and_then(|cache| cache.rules(ino)) {
            return Ok(rules);
        }
        let default = self.default_rules();
        let ticket = self.cache.ticket();
        let (replication, durability, class) = tokio::join!(
            self.setting(ino, "replication"),
            self.setting(ino, "durability"),
            self.setting(ino, "class"),
        );
        let rules = PlacementRules {
            replication: replication?
                .and_then(|text| text.parse().ok())
                .unwrap_or(default.replication),
            durability: match durability?.as_deref() {
                Some("space") => Durability::Space,
                Some(_) => Durability::Strict,
                None => default.durability,
            },
            class: match class?.as_deref() {
                Some("disk") => Some(StorageClass::Disk),
                Some("ssd") => Some(StorageClass::Ssd),
                Some("memory") => Some(StorageClass::Memory),
                _ => default.class,
            },
        };
        ticket.learn_rules(ino, rules);
        Ok(rules)
    }

    /// Applies the overrides of this client to the rules of a file.
    pub(crate) fn own_rules(&self, rules: PlacementRules) -> PlacementRules {
        let replication = self.options.replication;
        PlacementRules {
            replication: replication.unwrap_or(rules.replication),
            ..rules
        }
    }

    async fn setting(&self, ino: InodeId, name: &str) -> Result<Option<String>, ClientError> {
        let op = query::GetXattr {
            ino,
            name: format!("user.harvestfs.{name}").into_bytes(),
        };
        match self.query(&Credentials::root(), op).await {
            Ok(MetaReply::Bytes(value)) => Ok(String::from_utf8(value).ok()),
            Ok(_) => Err(ClientError::UnexpectedReply(query::GetXattr::NAME)),
            // This includes a removed inode: data written to it still has to go somewhere.
            Err(ClientError::Fs(FsError::SessionExpired)) => {
                Err(ClientError::Fs(FsError::SessionExpired))
            }
            Err(ClientError::Fs(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
