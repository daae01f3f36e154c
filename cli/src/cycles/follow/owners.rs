//! Information from HarvestFS about servers and their owners' use.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context;
use harvestfs_cycles::controller::Server;
use harvestfs_cycles::offer::OwnerShare;
use harvestfs_protocol::admin::{AdminReply, AdminRequest};
use harvestfs_protocol::classes::{ClassedServer, Classes};
use harvestfs_protocol::harvest::HarvestReport;
use tokio::time::timeout;

use crate::admin::link::{self, AdminLink};
use crate::cluster::ClusterArgs;

/// Deadline for an answer, including the connection.
const DEADLINE: Duration = Duration::from_secs(5);

/// A source of the classes.
pub trait Owners {
    /// Queries the current classes, with the owners' use.
    async fn ask(&mut self) -> anyhow::Result<Classes>;
}

/// The cluster's namenode.
pub struct Namenode {
    cluster: ClusterArgs,
    link: Option<AdminLink>,
}

impl Namenode {
    /// The namenode of a cluster; connects on the first request.
    pub fn new(cluster: &ClusterArgs) -> Self {
        Self {
            cluster: cluster.clone(),
            link: None,
        }
    }

    /// Sends it the report of a scheduler.
    ///
    /// # Errors
    /// When it cannot be reached, or refuses.
    pub async fn tell(&mut self, report: HarvestReport) -> anyhow::Result<()> {
        match self.answer(AdminRequest::Harvest(report)).await? {
            AdminReply::Done => Ok(()),
            _ => Err(link::unexpected()),
        }
    }

    async fn answer(&mut self, request: AdminRequest) -> anyhow::Result<AdminReply> {
        let asking = async {
            let link = self.link().await?;
            let answer = link.ask(request, DEADLINE).await?;
            self.link = Some(link);
            Ok(answer)
        };
        let answer = timeout(DEADLINE, asking).await;
        answer.with_context(|| format!("the namenode did not answer within {DEADLINE:?}"))?
    }

    /// Takes the link, or connects. The caller puts it back after an answer, so that a failed link is not used again.
    async fn link(&mut self) -> anyhow::Result<AdminLink> {
        match self.link.take() {
            Some(link) => Ok(link),
            None => AdminLink::connect(&self.cluster.access("admin")?).await,
        }
    }
}

impl Owners for Namenode {
    async fn ask(&mut self) -> anyhow::Result<Classes> {
        match self.answer(AdminRequest::Classes).await? {
            AdminReply::Classes(classes) => Ok(*classes),
            _ => Err(link::unexpected()),
        }
    }
}

/// The servers by name.
pub fn servers(classes: &Classes) -> BTreeMap<String, Server> {
    let server = |class: Option<u32>, it: &ClassedServer| {
        let share = |permille: u16| f64::from(permille) / 1_000.0;
        let owner = it.cpu_permille.map(|permille| OwnerShare {
            cpu: share(permille),
            memory: it.memory_permille.map(share),
        });
        (it.name.clone(), Server { class, owner })
    };
    let classed = classes.classes.iter().flat_map(|class| {
        let servers = class.servers.iter();
        servers.map(|it| server(Some(class.class), it))
    });
    let without = classes.without_class.iter().map(|it| server(None, it));
    classed.chain(without).collect()
}
