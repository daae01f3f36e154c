//! Changes that operators made while the cluster ran; they are journaled, so that they survive a restart.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::placement::RepairLimits;
use harvestfs_protocol::types::Timestamp;
use harvestfs_protocol::version::Version;
use serde::{Deserialize, Serialize};

use super::servers::Server;

/// The longest name of a policy in bytes: names are words.
const POLICY_BYTES_MAX: usize = 64;

/// A value that an operator chose instead of the configured one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice<T> {
    /// The value in the configuration at that time. Once the configuration has another value, it was
    /// edited later, and that value applies.
    pub configured: T,
    /// The value that applies until then.
    pub chosen: T,
}

impl<T: PartialEq> Choice<T> {
    /// The chosen value, if the configuration has not changed since; none if the configured value applies.
    #[must_use]
    pub fn instead_of(&self, configured: &T) -> Option<&T> {
        (self.configured == *configured).then_some(&self.chosen)
    }
}

/// An operator's change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// The placement policy for replicas, by name.
    Policy(Choice<String>),
    /// The limits of repair.
    Repair(Choice<RepairLimits>),
    /// Whether a server gets no new replicas and those that it has are copied elsewhere. Ends by itself when
    /// one of its volumes is reimaged or removed.
    Hold {
        /// The server's number.
        node: NodeId,
        /// Whether it is held.
        held: bool,
    },
    /// Until when a server may be unreachable without its blocks being repaired; `None` ends a maintenance.
    Maintenance {
        /// The server's number.
        node: NodeId,
        /// By the wall clock.
        until: Option<Timestamp>,
    },
    /// By how much a volume may be fuller than a server before replicas move, in thousandths; 0 for any amount.
    BalanceSpread(Choice<u32>),
}

impl Operation {
    /// The first version of the cluster whose journal may contain it.
    pub(super) fn since(&self) -> Version {
        match self {
            Self::Policy(_)
            | Self::Repair(_)
            | Self::Hold { .. }
            | Self::Maintenance { .. }
            | Self::BalanceSpread(_) => Version::V0_2,
        }
    }
}

/// The changes in effect, except those kept in the table of servers. (The first two fields were serialized
/// before the third existed, so they are encoded without it.)
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Operations {
    pub policy: Option<Choice<String>>,
    pub repair: Option<Choice<RepairLimits>>,
    #[serde(skip)]
    pub balance_spread: Option<Choice<u32>>,
}

impl super::Namespace {
    /// An operator's choice instead of the configured policy.
    #[must_use]
    pub fn chosen_policy(&self) -> Option<&Choice<String>> {
        self.operations.policy.as_ref()
    }

    /// An operator's choice instead of the configured limits of repair.
    #[must_use]
    pub fn chosen_repair(&self) -> Option<&Choice<RepairLimits>> {
        self.operations.repair.as_ref()
    }

    /// An operator's choice instead of the configured spread of fill levels among servers, in thousandths.
    #[must_use]
    pub fn chosen_balance_spread(&self) -> Option<&Choice<u32>> {
        self.operations.balance_spread.as_ref()
    }

    pub(super) fn operate(&mut self, operation: &Operation) -> Result<(), FsError> {
        match operation {
            Operation::Policy(choice) => {
                let names = [&choice.configured, &choice.chosen];
                if names.iter().any(|name| name.len() > POLICY_BYTES_MAX) {
                    return Err(FsError::InvalidArgument(format!(
                        "the name of a policy has at most {POLICY_BYTES_MAX} bytes"
                    )));
                }
                self.operations.policy = Some(choice.clone());
            }
            Operation::Repair(choice) => self.operations.repair = Some(choice.clone()),
            Operation::Hold { node, held } => self.server_mut(*node)?.held = *held,
            Operation::Maintenance { node, until } => {
                self.server_mut(*node)?.maintenance_until = *until;
            }
            Operation::BalanceSpread(choice) => {
                self.operations.balance_spread = Some(choice.clone());
            }
        }
        Ok(())
    }

    fn server_mut(&mut self, node: NodeId) -> Result<&mut Server, FsError> {
        let unknown = || FsError::InvalidArgument(format!("there is no server {node}"));
        self.servers.get_mut(node).ok_or_else(unknown)
    }
}
