//! The policy that takes the best tenants first.

use harvestfs_protocol::ids::NodeId;
use rand::Rng;

use crate::diversity::Constraints;
use crate::grid::Scope;
use crate::policy::{Nodes, Policy, PolicyKind, Request, TooFew};
use crate::view::View;

/// The intuitive best-first approach of OSDI'16, section 4.2, for comparison: of the tenants that are reimaged least,
/// those with the lowest peaks of CPU utilisation; once their space is exhausted, the next best.
///
/// Replicas of a block go to different tenants in that order, one each, and to a random server of the tenant; only
/// when there are fewer tenants than replicas, to different servers of the same tenants. It satisfies no constraint:
/// good tenants are often neighbours.
#[derive(Clone, Copy, Debug, Default)]
pub struct Greedy;

impl Policy for Greedy {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Greedy
    }

    fn constraints(&self) -> Constraints {
        Constraints::NONE
    }

    fn scope(&self) -> Scope {
        Scope::Everything
    }

    fn find(&self, view: &View, request: &Request<'_>, rng: &mut dyn Rng) -> Result<Nodes, TooFew> {
        let mut chosen = Nodes::new();
        let wanted = usize::from(request.wanted);
        let (listed, tenants) = (view.best_first().len(), view.tenants().len());
        assert!(
            listed <= tenants,
            "{listed} tenants have an order, of {tenants}"
        );
        let holds = |tenant, nodes: &[NodeId]| {
            let mut servers = nodes.iter().filter_map(|&node| view.server(node));
            servers.any(|server| server.tenant == tenant)
        };
        'choosing: for new_tenants_only in [true, false] {
            for &tenant in view.best_first() {
                if chosen.len() == wanted {
                    break 'choosing;
                }
                if new_tenants_only && holds(tenant, request.existing) {
                    continue;
                }
                while chosen.len() < wanted {
                    let drawn =
                        view.draw_in_tenant(request.lane, request.class, tenant, rng, |server| {
                            request.admits(&chosen, server.node)
                        });
                    match drawn {
                        Some(node) => chosen.push(node),
                        None => break,
                    }
                    if new_tenants_only {
                        break;
                    }
                }
            }
        }
        let count = chosen.len();
        assert!(count <= wanted, "{count} servers for {wanted} replicas");
        if count == wanted {
            return Ok(chosen);
        }
        Err(TooFew {
            wanted: request.wanted,
            placeable: chosen,
        })
    }
}
