//! The names, numbers and addresses of machines.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use harvestfs_namenode::consensus::{Member, MemberId};

use crate::live::plan::namenode_name;

/// Where each namenode listens.
pub const NAMENODE_PORT: u16 = 9_310;
/// The name in the certificate of each namenode.
pub const NAMENODE_NAME: &str = "namenode";

/// A machine of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// A namenode's machine, numbered from 0.
    Namenode(u8),
    /// A datanode's machine, numbered from 0.
    Datanode(u8),
    /// A client's machine, numbered from 0.
    Client(u8),
    /// A mount's machine, numbered from 0.
    Mount(u8),
}

impl Part {
    /// The first namenode, which is the only one unless there is a group.
    pub const FIRST_NAMENODE: Self = Self::Namenode(0);

    /// Whether it is a machine of a namenode.
    pub fn is_namenode(self) -> bool {
        matches!(self, Self::Namenode(_))
    }

    /// Its address, which it keeps.
    pub fn ip(self) -> IpAddr {
        let (subnet, host) = match self {
            Part::Namenode(number) => (0, 1 + number),
            Part::Datanode(number) => (1, number),
            Part::Client(number) => (2, number),
            Part::Mount(number) => (3, number),
        };
        IpAddr::from([10, 0, subnet, host])
    }

    /// Where a namenode listens.
    pub fn namenode_addr(self) -> SocketAddr {
        SocketAddr::new(self.ip(), NAMENODE_PORT)
    }
}

/// The member id of a namenode in the group.
pub fn member_id(number: u8) -> MemberId {
    MemberId(u64::from(number) + 1)
}

/// The group of this many namenodes.
pub fn members(namenodes: u8) -> BTreeMap<MemberId, Member> {
    let member = |number| {
        let member = Member {
            name: NAMENODE_NAME.to_owned(),
            addr: Part::Namenode(number).namenode_addr(),
        };
        (member_id(number), member)
    };
    (0..namenodes).map(member).collect()
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Part::Namenode(number) => f.write_str(&namenode_name(usize::from(*number))),
            Part::Datanode(number) => write!(f, "datanode-{number}"),
            Part::Client(number) => write!(f, "client-{number}"),
            Part::Mount(number) => write!(f, "mount-{number}"),
        }
    }
}
