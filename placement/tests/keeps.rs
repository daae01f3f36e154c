//! A replica may move only to where its block is spread as well.

mod common;

use harvestfs_placement::diversity::held;
use harvestfs_placement::{PolicyKind, PolicyOptions};
use harvestfs_protocol::ids::NodeId;
use proptest::prelude::*;

use common::{servers_of, world};

proptest! {
    #[test]
    fn what_may_move_is_spread_as_well(
        world in world(),
        numbers in prop::collection::btree_set(0u32..40, 2..5),
        target in 0u32..40,
    ) {
        let count = world.servers.len() as u32;
        let before: Vec<NodeId> = numbers.into_iter().filter(|&it| it < count).map(NodeId).collect();
        let target = NodeId(target % count);
        prop_assume!(!before.is_empty() && !before.contains(&target));
        for kind in PolicyKind::ALL {
            let policy = kind.build(&PolicyOptions::default());
            let view = world.view(&*policy);
            prop_assert!(policy.keeps(&view, &before, &before));
            for from in 0..before.len() {
                let mut after = before.clone();
                after[from] = target;
                if !policy.keeps(&view, &before, &after) {
                    continue;
                }
                let constraints = |nodes: &[NodeId]| held(&view, servers_of(&view, nodes));
                prop_assert!(constraints(&after).contains(constraints(&before)));
                let rate = |node| view.server(node).map(|it| view.reimage_rate(it));
                prop_assert!(rate(target) <= rate(before[from]).map(|it| it + 1e-9));
                // Back and forth only between equals.
                if policy.keeps(&view, &after, &before) {
                    prop_assert_eq!(constraints(&after), constraints(&before));
                }
            }
        }
    }
}
