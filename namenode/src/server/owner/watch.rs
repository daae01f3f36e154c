//! What the owner shows on its page and to Prometheus. Nothing here changes state.

use std::collections::BTreeSet;
use std::time::Duration;

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::group::GroupStatus;
use harvestfs_protocol::ids::{BlockId, InodeId};
use harvestfs_protocol::limits::ENTRIES_PER_REPLY_MAX;
use harvestfs_protocol::meta::query::ReadDir;
use harvestfs_protocol::name::Name;
use harvestfs_protocol::types::{Attr, Credentials, FileKind};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};

use super::Owner;
use crate::server::overview::{
    BlockUser, FilePlaces, GroupMember, GroupOverview, GroupPart, ListedEntry, Listing, Overview,
    RepairOverview, Watched, WatchedNode,
};

/// How long a leader may be silent before nobody counts as leading: elections take a tenth of it.
const LEADER_SILENT_MAX: Duration = Duration::from_secs(2);
/// Maximum number of datanodes shown.
const NODES_MAX: usize = 1_000;
/// Maximum number of blocks at risk shown.
const AT_RISK_MAX: usize = 50;
/// Maximum number of files named as users of blocks.
const USERS_MAX: usize = 1_000;
/// Maximum number of directory entries shown at a time.
const ENTRIES_MAX: u32 = 200;
const _: () = assert!(ENTRIES_MAX as usize <= ENTRIES_PER_REPLY_MAX);

impl Owner {
    /// The cluster in numbers. O(nodes), and O(blocks that wait for repair).
    pub(crate) fn overview(&self) -> Overview {
        let now_ms = self.clock.now_ms();
        let summary = self.cluster.summary(now_ms);
        let status = self.status();
        Overview {
            group: self.group_overview(),
            write_trouble: status.writes.trouble(),
            status,
            policy: self.cluster.policy().name().into(),
            journal_bytes: self.log.appended_bytes(),
            nodes_busy: summary.nodes_busy,
            fill_permille: summary.fill_permille,
            balance_moves_done: summary.balance_moves_done,
            too_full_volumes: summary.too_full_volumes,
            reimages: self.activity.reimages(),
            missing_by_left: summary.missing_by_left,
            misplaced_blocks: summary.misplaced_blocks,
            blocks_by_score: summary.blocks_by_score,
            repair: RepairOverview {
                waiting: summary.repairs_waiting,
                moves_waiting: summary.moves_waiting,
                oldest_ms: self.cluster.oldest_repair_ms(now_ms),
                held_ms: summary.storm_remaining_ms,
                moves_done: summary.moves_done,
                failed: summary.repairs_failed,
            },
            cells: self.cluster.cells(),
            harvest: self.activity.harvests.totals(now_ms),
        }
    }

    /// The members of the group.
    fn group_overview(&self) -> GroupOverview {
        let view = self.log.group().status();
        let part = self.part_of(&view);
        let behind_records = self.log.behind_records();
        let members = view.members.iter().map(|member| GroupMember {
            number: format!("{:x}", member.id),
            addr: member.addr,
            is_this: member.id == view.this,
            leads: Some(member.id) == view.leader && part != GroupPart::NobodyLeads,
            behind_records: match member.acknowledged {
                _ if member.id == view.this => Some(behind_records),
                Some(record) if self.leads() => Some(view.last.saturating_sub(record)),
                Some(_) | None => None,
            },
        });
        GroupOverview {
            part,
            term: view.term,
            behind_records,
            members: members.collect(),
        }
    }

    /// Whether nobody leads, as far as this namenode knows.
    pub(crate) fn nobody_leads(&self) -> bool {
        self.part_of(&self.log.group().status()) == GroupPart::NobodyLeads
    }

    fn part_of(&self, view: &GroupStatus) -> GroupPart {
        let silent = if view.leader != Some(view.this) {
            self.log.leader_silent_for()
        } else if self.log.has_lease() {
            Duration::ZERO
        } else {
            self.last_lease.elapsed()
        };
        part(view, self.leads(), silent)
    }

    /// Everything that the page shows of the cluster, with the happenings after a number.
    pub(crate) fn watched(&self, since: u64) -> Watched {
        let now_ms = self.clock.now_ms();
        let mut nodes = self.cluster.nodes(now_ms);
        nodes.sort_by(|a, b| a.server.name.cmp(&b.server.name));
        let nodes = nodes.into_iter().take(NODES_MAX).map(|status| {
            let said = self.activity.node(status.node);
            let does = self.cluster.node_activity(status.node).unwrap_or_default();
            WatchedNode {
                cell: does.cell,
                primary: said.and_then(|said| said.primary),
                loads: said.map(|said| said.loads()).unwrap_or_default(),
                denials: said.map_or(0, |said| said.denials),
                repairs_from: does.repairs_from,
                repairs_to: does.repairs_to,
                status,
            }
        });
        Watched {
            overview: self.overview(),
            tenants: self.cluster.tenants(),
            nodes: nodes.collect(),
            schedulers: self.activity.harvests.watched(now_ms),
            at_risk: self.cluster.blocks_at_risk(now_ms, AT_RISK_MAX),
            happenings: self.activity.since(since),
        }
    }

    /// Lists entries of a directory in the order of their names, after a name.
    pub(crate) fn listing(&self, path: &[u8], after: Option<&[u8]>) -> Result<Listing, FsError> {
        let read = ReadDir {
            ino: self.find(path)?.ino,
            after: after.map(Name::new).transpose()?,
            max_entries: ENTRIES_MAX,
            with_attributes: true,
        };
        let (entries, end) = self.namespace.read_dir(&Credentials::root(), &read)?;
        let entries = entries.into_iter().map(|entry| {
            let name = entry.name.as_bytes();
            ListedEntry {
                name: String::from_utf8_lossy(name).into_owned(),
                link: percent_encode(name, NON_ALPHANUMERIC).to_string(),
                kind: match entry.kind {
                    FileKind::Regular => "file",
                    FileKind::Directory => "directory",
                    _ => "other",
                },
                size_bytes: entry.attr.map_or(0, |attr| attr.size_bytes),
            }
        });
        Ok(Listing {
            entries: entries.collect(),
            more: !end,
        })
    }

    /// Where the blocks of a file are.
    pub(crate) fn file_places(&self, path: &[u8]) -> Result<FilePlaces, FsError> {
        let attr = self.find(path)?;
        let blocks = self.blocks_of_file(attr.ino)?;
        Ok(FilePlaces {
            size_bytes: attr.size_bytes,
            blocks: self.cluster.block_places(&blocks),
        })
    }

    /// Paths of files that use blocks; `None` if the namespace is too large to be traversed while requests wait.
    pub(crate) fn block_users(&self, blocks: &BTreeSet<BlockId>) -> Option<Vec<BlockUser>> {
        if self.namespace.counts().inodes > self.options.fsck_in_place_max {
            return None;
        }
        let from_their_start = blocks.iter().map(|&block| (block, 0)).collect();
        let users = self.namespace.files_using(&from_their_start);
        let paths = self
            .namespace
            .paths(&users.iter().map(|&(_, ino)| ino).collect());
        let named = users.into_iter().filter_map(|(block, ino)| {
            let path = paths.get(&ino)?.clone();
            Some(BlockUser { block, path })
        });
        Some(named.take(USERS_MAX).collect())
    }

    /// Returns the inode at an absolute path. Symlinks are not followed.
    pub(super) fn find(&self, path: &[u8]) -> Result<Attr, FsError> {
        let root = Credentials::root();
        let mut attr = self.namespace.attr(InodeId::ROOT)?;
        for part in path
            .split(|&byte| byte == b'/')
            .filter(|part| !part.is_empty())
        {
            attr = self.namespace.lookup(&root, attr.ino, &Name::new(part)?)?;
        }
        Ok(attr)
    }
}

/// The role of a namenode in its group. It takes a failed leader, even itself, for the leader until there is a new
/// one: whether one really leads shows only in what others receive, or acknowledge.
fn part(view: &GroupStatus, leads: bool, silent: Duration) -> GroupPart {
    match view.leader {
        None => GroupPart::NobodyLeads,
        Some(_) if silent > LEADER_SILENT_MAX => GroupPart::NobodyLeads,
        Some(leader) if leader != view.this => GroupPart::Standby,
        Some(_) if leads => GroupPart::Leader,
        Some(_) => GroupPart::TakingOver,
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::group::Condition;

    use super::*;

    #[test]
    fn one_of_which_nothing_is_heard_leads_no_more() {
        let view = |leader| GroupStatus {
            this: 1,
            condition: Condition::Member,
            leader,
            term: 3,
            last: 9,
            last_term: 3,
            members: Vec::new(),
            is_changing: false,
        };
        for (leader, leads, seen) in [
            (Some(1), true, GroupPart::Leader),
            (Some(1), false, GroupPart::TakingOver),
            (Some(2), false, GroupPart::Standby),
            (None, false, GroupPart::NobodyLeads),
        ] {
            assert_eq!(part(&view(leader), leads, Duration::ZERO), seen);
            assert_eq!(part(&view(leader), leads, LEADER_SILENT_MAX), seen);
            let longer = LEADER_SILENT_MAX + Duration::from_millis(1);
            let silent = part(&view(leader), leads, longer);
            assert_eq!(silent, GroupPart::NobodyLeads);
        }
    }
}
