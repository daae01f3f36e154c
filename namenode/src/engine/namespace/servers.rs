//! Datanodes ever registered: their numbers, and when their disks were reimaged.

use std::collections::{BTreeMap, VecDeque};

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::{NodeId, StorageId};
use harvestfs_protocol::limits::{LABEL_BYTES_MAX, VOLUMES_PER_NODE_MAX};
use harvestfs_protocol::node::ServerDescription;
use harvestfs_protocol::types::Timestamp;
use serde::{Deserialize, Serialize};

use super::command::Outcome;
use super::views::ServerView;

/// The most reimages remembered for one server: enough for years of the most often reimaged one.
const REIMAGES_MAX: usize = 1_024;

/// All servers.
#[derive(Debug, Default)]
pub(super) struct ServerTable {
    /// The server with the number `n` is at `n - 1`.
    servers: Vec<Server>,
    by_name: BTreeMap<String, NodeId>,
}

/// A server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Server {
    pub description: ServerDescription,
    /// Its volumes, in ascending order.
    pub storages: Vec<StorageId>,
    pub registered: Timestamp,
    /// One entry for each volume found reimaged, oldest first.
    pub reimages: VecDeque<Timestamp>,
    /// Whether an operator is having it emptied before it is reimaged.
    pub held: bool,
    /// The end of the maintenance that an operator announced. Snapshots store it in a record of its own.
    #[serde(skip)]
    pub maintenance_until: Option<Timestamp>,
}

impl Server {
    pub fn view(&self, node: NodeId) -> ServerView<'_> {
        ServerView {
            node,
            server: &self.description,
            storages: &self.storages,
            registered: self.registered,
            reimages: self.reimages.iter().copied().collect(),
            held: self.held,
            maintenance_until: self.maintenance_until,
        }
    }
}

impl ServerTable {
    pub fn iter(&self) -> impl Iterator<Item = (NodeId, &Server)> {
        (1..).map(NodeId).zip(&self.servers)
    }

    pub fn by_name(&self, name: &str) -> Option<(NodeId, &Server)> {
        let node = *self.by_name.get(name)?;
        match index_of(node).and_then(|index| self.servers.get(index)) {
            Some(server) => Some((node, server)),
            None => panic!("the server {name} has the number {node}, which is none's"),
        }
    }

    pub fn get_mut(&mut self, node: NodeId) -> Option<&mut Server> {
        self.servers.get_mut(index_of(node)?)
    }

    pub fn len(&self) -> usize {
        self.servers.len()
    }

    pub fn register(
        &mut self,
        description: &ServerDescription,
        storages: &[StorageId],
        now: Timestamp,
    ) -> Result<Outcome, FsError> {
        check(description, storages)?;
        let mut storages = storages.to_vec();
        storages.sort_unstable();
        storages.dedup();
        if let Some(&node) = self.by_name.get(&description.name) {
            let Some(server) = self.get_mut(node) else {
                panic!("the server {description:?} has the number {node}, which is none's");
            };
            for _ in 0..reimaged(&server.storages, &storages) {
                while server.reimages.len() >= REIMAGES_MAX {
                    server.reimages.pop_front();
                }
                server.reimages.push_back(now);
            }
            // A hold ends when one of the volumes was reimaged or removed.
            server.held &= server.storages.iter().all(|it| storages.contains(it));
            server.description = description.clone();
            server.storages = storages;
            return Ok(Outcome::Node(node));
        }
        let node = self.push(Server {
            description: description.clone(),
            storages,
            registered: now,
            reimages: VecDeque::new(),
            held: false,
            maintenance_until: None,
        });
        node.map(Outcome::Node)
            .ok_or_else(|| FsError::Internal("there are too many servers".into()))
    }

    /// Adds a server with the next number; none when the name is taken or the numbers are used up.
    pub fn push(&mut self, server: Server) -> Option<NodeId> {
        let node = NodeId(u32::try_from(self.servers.len()).ok()?.checked_add(1)?);
        if self.by_name.contains_key(&server.description.name) {
            return None;
        }
        self.by_name.insert(server.description.name.clone(), node);
        self.servers.push(server);
        assert_eq!(
            self.by_name.len(),
            self.servers.len(),
            "there are as many servers as names, up to server {node}"
        );
        Some(node)
    }
}

/// The index of a server in the table: numbers count from 1.
fn index_of(node: NodeId) -> Option<usize> {
    (node.0 as usize).checked_sub(1)
}

fn check(description: &ServerDescription, storages: &[StorageId]) -> Result<(), FsError> {
    let labels = [
        &description.name,
        &description.rack,
        &description.environment,
        &description.machine_function,
    ];
    if labels
        .iter()
        .any(|label| label.is_empty() || label.len() > LABEL_BYTES_MAX)
    {
        return Err(FsError::InvalidArgument(format!(
            "name, rack, environment and machine function have 1 to {LABEL_BYTES_MAX} bytes"
        )));
    }
    if storages.len() > VOLUMES_PER_NODE_MAX {
        return Err(FsError::InvalidArgument(format!(
            "a server has at most {VOLUMES_PER_NODE_MAX} volumes"
        )));
    }
    Ok(())
}

/// The number of volumes that came back with another id. A volume that was only added, or only removed,
/// was not reimaged.
fn reimaged(before: &[StorageId], now: &[StorageId]) -> usize {
    let gone = before.iter().filter(|storage| !now.contains(storage));
    let new = now.iter().filter(|storage| !before.contains(storage));
    gone.count().min(new.count())
}
