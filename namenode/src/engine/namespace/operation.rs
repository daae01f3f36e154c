//! What operators changed while the cluster ran, so that it outlives a restart.

use harvestfs_protocol::error::FsError;
use harvestfs_protocol::ids::NodeId;
use harvestfs_protocol::placement::RepairLimits;
use harvestfs_protocol::types::Timestamp;
use harvestfs_protocol::version::Version;
use serde::{Deserialize, Serialize};

use super::servers::Server;

/// Longest name of a policy in bytes: they are words.
const POLICY_BYTES_MAX: usize = 64;

/// What an operator chose instead of what was configured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice<T> {
    /// What the configuration said then. Once it says something else, that holds: it was
    /// edited later.
    pub configured: T,
    /// What holds until then.
    pub chosen: T,
}

impl<T: PartialEq> Choice<T> {
    /// What holds while the configuration says this; none when that does.
    #[must_use]
    pub fn instead_of(&self, configured: &T) -> Option<&T> {
        (self.configured == *configured).then_some(&self.chosen)
    }
}

/// An operator's change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// Which servers replicas go to: the name of a policy.
    Policy(Choice<String>),
    /// The budgets of repair.
    Repair(Choice<RepairLimits>),
    /// Whether a server gets nothing new and what it has is copied elsewhere. Ends by itself when
    /// one of its volumes is reimaged or taken away.
    Hold {
        /// The server's number.
        node: NodeId,
        /// Whether.
        held: bool,
    },
    /// Until when a server may be away without its blocks being repaired; if it was to be, `None` ends
    /// that.
    Maintenance {
        /// The server's number.
        node: NodeId,
        /// By the wall clock.
        until: Option<Timestamp>,
    },
    /// How much fuller than a server a volume may be before replicas move, in thousandths; 0 for any.
    BalanceSpread(Choice<u32>),
}

impl Operation {
    /// The first version of a cluster that may have it in its journal.
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

/// What holds of the changes, beside what the table of servers says. (The first two are a part of the
/// state as bytes of before the other.)
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Operations {
    pub policy: Option<Choice<String>>,
    pub repair: Option<Choice<RepairLimits>>,
    #[serde(skip)]
    pub balance_spread: Option<Choice<u32>>,
}

impl super::Namespace {
    /// What an operator chose instead of the configured policy.
    #[must_use]
    pub fn chosen_policy(&self) -> Option<&Choice<String>> {
        self.operations.policy.as_ref()
    }

    /// What an operator chose instead of the configured budgets of repair.
    #[must_use]
    pub fn chosen_repair(&self) -> Option<&Choice<RepairLimits>> {
        self.operations.repair.as_ref()
    }

    /// What an operator chose instead of how evenly servers are configured to be filled, in thousandths.
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
