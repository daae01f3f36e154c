//! The placement of HDFS.

use harvestfs_protocol::ids::NodeId;
use rand::Rng;
use smallvec::SmallVec;

use crate::diversity::Constraints;
use crate::grid::Scope;
use crate::policy::{Nodes, Policy, PolicyKind, Request, TooFew};
use crate::view::{Area, RackId, View};

/// The default of HDFS: fast to write, safe against the loss of any one rack, oblivious to the owners of the servers.
///
/// 1. The first replica goes to a server on the writer's host, or to a random one if none there can take it.
/// 2. The second goes to another server of the same rack; if the block has only two replicas, to another rack.
/// 3. The third goes to another rack than the first two; if these are already in different racks, to the rack of the
///    first.
/// 4. All others are random, but never leave all replicas of a block in one rack.
///
/// Each server has at most one replica. Where a rule finds no server, any server is accepted: racks are a preference,
/// different servers a requirement. So two racks are used whenever two replicas are wanted and a server of a second
/// rack can take one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stock;

impl Policy for Stock {
    fn kind(&self) -> PolicyKind {
        PolicyKind::Stock
    }

    fn constraints(&self) -> Constraints {
        Constraints::NONE
    }

    fn scope(&self) -> Scope {
        Scope::Everything
    }

    fn find(&self, view: &View, request: &Request<'_>, rng: &mut dyn Rng) -> Result<Nodes, TooFew> {
        let mut chosen = Nodes::new();
        let mut racks: SmallVec<[RackId; 8]> = request
            .existing
            .iter()
            .filter_map(|&node| Some(view.server(node)?.rack))
            .collect();
        let total = request.existing.len() + usize::from(request.wanted);
        for _ in 0..request.wanted {
            let accept = |node: NodeId| request.admits(&chosen, node);
            let draw = |area: Area<'_>, rng: &mut dyn Rng| {
                view.draw(request.lane, request.class, area, rng, accept)
            };
            let preferred = if racks.is_empty() {
                request.writer.and_then(|host| {
                    view.draw_on_host(request.lane, request.class, host, rng, accept)
                })
            } else {
                preferred_area(&racks, total).and_then(|area| draw(area, rng))
            };
            let Some(node) = preferred.or_else(|| draw(Area::Anywhere, rng)) else {
                break;
            };
            chosen.push(node);
            if chosen.len() < usize::from(request.wanted) {
                racks.push(view.drawn(node).rack);
            }
        }
        assert!(
            chosen.len() <= usize::from(request.wanted),
            "{chosen:?} are chosen for {request:?}"
        );
        if chosen.len() < usize::from(request.wanted) {
            return Err(TooFew {
                wanted: request.wanted,
                placeable: chosen,
            });
        }
        Ok(chosen)
    }

    fn surplus(&self, view: &View, replicas: &[NodeId]) -> Option<usize> {
        let rack_of = |node: NodeId| view.server(node).map(|server| server.rack);
        let crowd = |node: NodeId| {
            let rack = rack_of(node);
            replicas.iter().filter(|&&r| rack_of(r) == rack).count()
        };
        let room = |node: NodeId| {
            view.server(node)
                .map_or(0, |server| server.room.blocks(None))
        };
        // Take it from the fullest server of the rack that holds most of them.
        (0..replicas.len())
            .max_by_key(|&i| (crowd(replicas[i]), std::cmp::Reverse(room(replicas[i]))))
    }
}

/// Returns where the next replica should go when `racks` contains the racks of the previous ones, at least one, in
/// order.
fn preferred_area(racks: &[RackId], total: usize) -> Option<Area<'_>> {
    assert!(
        !racks.is_empty() && racks.len() < total,
        "a replica of {total} is to be placed beside those in {racks:?}"
    );
    let first = racks[0];
    let in_one_rack = racks.iter().all(|&rack| rack == first);
    match racks.len() {
        1 if total > 2 => Some(Area::Inside(first)),
        _ if in_one_rack => Some(Area::Outside(&racks[..1])),
        2 => Some(Area::Inside(first)),
        _ => None,
    }
}
