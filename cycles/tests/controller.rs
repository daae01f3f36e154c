//! The controller against a resource manager that forgets, loses instructions, and answers late.

use std::collections::{BTreeMap, VecDeque};

use harvestfs_cycles::controller::{
    Action, Controller, LABEL_PREFIX, Node, Remembered, Server, Settings, label_of,
};
use harvestfs_cycles::offer::OwnerShare;
use harvestfs_cycles::reserve::Resources;
use proptest::prelude::*;

const SETTINGS: Settings = Settings {
    grow_after_ms: 5_000,
    unknown_after_ms: 30_000,
    adopt: false,
};

const TOTAL: Resources = Resources {
    cores: 12,
    memory_mib: 12_000,
};

const NOTHING: Resources = Resources {
    cores: 0,
    memory_mib: 0,
};

fn cores(cores: u32) -> Resources {
    Resources {
        cores,
        memory_mib: u64::from(cores) * 1_000,
    }
}

/// A resource manager with one node.
struct Manager {
    node: Node,
    /// Changes that it shows only after a number of queries.
    late: VecDeque<Resources>,
}

impl Manager {
    fn new() -> Self {
        Self {
            node: Node {
                id: "host:1".to_owned(),
                server: Some("server".to_owned()),
                capacity: TOTAL,
                total: None,
                labels: Vec::new(),
            },
            late: VecDeque::new(),
        }
    }

    fn take(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Resize { capacity, .. } => self.node.capacity = capacity,
                Action::Label { label, .. } => self.node.labels = label.into_iter().collect(),
            }
        }
    }
}

fn servers(cpu: f64) -> BTreeMap<String, Server> {
    known(Some(OwnerShare { cpu, memory: None }), Some(3))
}

fn known(owner: Option<OwnerShare>, class: Option<u32>) -> BTreeMap<String, Server> {
    BTreeMap::from([("server".to_owned(), Server { class, owner })])
}

fn controller() -> Controller {
    Controller::new(SETTINGS, BTreeMap::new())
}

#[test]
fn capacity_shrinks_at_once_and_grows_in_steps() {
    let (mut manager, mut controller) = (Manager::new(), controller());
    let mut at = |now_ms: u64, cpu: f64| {
        let actions = controller.step(now_ms, &[manager.node.clone()], &servers(cpu));
        manager.take(actions);
        manager.node.capacity.cores
    };
    // Of 12 cores 4 are the reserve, and 3 the owner's.
    assert_eq!(at(0, 0.25), 5);
    assert_eq!(at(1_000, 0.5), 2);
    assert_eq!(at(2_000, 0.0), 2);
    assert_eq!(at(6_999, 0.0), 2, "not before it was lower for a while");
    assert_eq!(
        at(7_000, 0.0),
        2,
        "half was used at the beginning of that while"
    );
    assert_eq!(at(12_000, 0.0), 5);
    assert_eq!(at(17_000, 0.0), 7, "the margin is kept");
    assert_eq!(at(18_000, 1.0), 0);
}

#[test]
fn what_is_eaten_into_is_evicted_and_what_is_unknown_is_not() {
    let (mut manager, mut controller) = (Manager::new(), controller());
    let mut step = |now_ms, servers| {
        let actions = controller.step(now_ms, &[manager.node.clone()], &servers);
        manager.take(actions.clone());
        actions
    };
    let resize = |actions: &[Action]| match actions {
        [
            Action::Resize {
                capacity, evict, ..
            },
        ] => Some((capacity.cores, *evict)),
        _ => None,
    };
    step(0, servers(0.0));
    assert_eq!(resize(&step(1_000, servers(0.5))), Some((2, true)));
    // The namenode becomes unreachable, and returns.
    assert_eq!(step(2_000, BTreeMap::new()), []);
    assert_eq!(step(30_999, BTreeMap::new()), []);
    assert_eq!(resize(&step(31_000, BTreeMap::new())), Some((0, false)));
    assert_eq!(step(60_000, BTreeMap::new()), []);
    // What ran all the time is not evicted.
    assert_eq!(resize(&step(61_000, servers(0.5))), Some((2, true)));
}

#[test]
fn labels_and_nodes_of_others_are_left_alone() {
    let mut controller = controller();
    let mut node = Manager::new().node;
    let label = |controller: &mut Controller, node: &Node, class| {
        let actions = controller.step(0, std::slice::from_ref(node), &known(None, class));
        match &actions[..] {
            [] => None,
            [Action::Label { label, .. }] => Some(label.clone()),
            _ => panic!("{actions:?}"),
        }
    };
    assert_eq!(
        label(&mut controller, &node, Some(3)),
        Some(Some(label_of(3)))
    );
    node.labels = vec![label_of(3)];
    assert_eq!(label(&mut controller, &node, Some(3)), None);
    assert_eq!(
        label(&mut controller, &node, Some(4)),
        Some(Some(label_of(4)))
    );
    assert_eq!(label(&mut controller, &node, None), Some(None));
    node.labels = vec!["gpu".to_owned()];
    assert_eq!(label(&mut controller, &node, Some(3)), None);
    assert_eq!(label(&mut controller, &node, None), None);
    // One whose owner is not measured keeps its capacity; one that is no server of ours is not touched.
    node.server = None;
    assert_eq!(controller.step(0, &[node], &servers(0.9)), []);
}

#[test]
fn a_controller_that_takes_over_knows_what_a_node_has() {
    let (mut manager, mut first) = (Manager::new(), controller());
    manager.take(first.step(0, &[manager.node.clone()], &servers(0.5)));
    assert_eq!(manager.node.capacity.cores, 2);
    let mut second = Controller::new(SETTINGS, first.remembered());
    assert_eq!(second.step(0, &[manager.node.clone()], &servers(0.5)), []);
    assert_eq!(
        second.restore(&[manager.node.clone()]),
        [
            Action::Label {
                node: "host:1".to_owned(),
                label: None
            },
            Action::Resize {
                node: "host:1".to_owned(),
                capacity: TOTAL,
                evict: false
            },
        ]
    );
    // One that knows nothing does not take a third away for a second time.
    let mut third = controller();
    assert_eq!(third.step(0, &[manager.node.clone()], &servers(0.5)), []);
    assert!(third.unsure().contains("host:1"));
    let adopt = Settings {
        adopt: true,
        ..SETTINGS
    };
    let mut fourth = Controller::new(adopt, BTreeMap::new());
    let actions = fourth.step(0, &[manager.node.clone()], &servers(0.0));
    assert_eq!(actions.len(), 1, "{actions:?}");
    assert!(fourth.unsure().is_empty());
}

#[test]
fn what_others_say_that_a_node_has_is_believed() {
    let (mut manager, mut controller) = (Manager::new(), controller());
    manager.take(controller.step(0, &[manager.node.clone()], &servers(0.5)));
    // The resource manager was restarted: the node registers with the last capacity that it received.
    manager.node.labels.clear();
    let actions = controller.step(1, &[manager.node.clone()], &servers(0.5));
    assert!(
        matches!(&actions[..], [Action::Label { .. }]),
        "{actions:?}"
    );
    // The node was started again with half as much.
    manager.node.capacity = cores(6);
    manager.take(controller.step(2, &[manager.node.clone()], &servers(0.0)));
    assert_eq!(manager.node.capacity.cores, 4);
}

/// The resource manager shows nodes and refuses to change them.
#[test]
fn what_a_node_has_is_known_however_much_does_not_arrive() {
    let (mut manager, mut controller) = (Manager::new(), controller());
    manager.take(controller.step(0, &[manager.node.clone()], &servers(0.0)));
    let applied = manager.node.capacity;
    assert_ne!(applied, TOTAL);
    for second in 1..=20u32 {
        let share = f64::from(second) / 40.0;
        let now_ms = u64::from(second) * 1_000;
        let actions = controller.step(now_ms, &[manager.node.clone()], &servers(share));
        let told = actions.iter().find_map(|action| match action {
            Action::Resize { capacity, .. } => Some(*capacity),
            Action::Label { .. } => None,
        });
        let told = told.expect("the owner uses more each time");
        assert!(told.memory_mib < applied.memory_mib, "{told:?}");
    }
    let restored = controller.restore(&[manager.node]);
    assert!(
        restored
            .iter()
            .any(|it| matches!(it, Action::Resize { capacity, .. } if *capacity == TOTAL)),
        "{restored:?}"
    );
}

#[test]
fn what_is_told_apart_needs_no_memory() {
    let mut node = Node {
        total: Some(TOTAL),
        capacity: NOTHING,
        labels: vec![label_of(1)],
        ..Manager::new().node
    };
    let actions = controller().step(0, &[node.clone()], &servers(0.25));
    let [Action::Label { .. }, Action::Resize { capacity, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!(capacity.cores, 5);
    node.capacity = *capacity;
    let restored = controller().restore(&[node]);
    assert!(
        matches!(&restored[1], Action::Resize { capacity, .. } if *capacity == NOTHING),
        "{restored:?}"
    );
}

#[test]
fn what_is_remembered_is_stored_as_it_was() {
    let (manager, mut controller) = (Manager::new(), controller());
    controller.step(0, &[manager.node], &servers(0.5));
    let remembered = controller.remembered();
    assert_eq!(remembered.len(), 1);
    let same: BTreeMap<String, Remembered> = remembered.clone();
    assert_eq!(Controller::new(SETTINGS, same).remembered(), remembered);
    assert!(label_of(7).starts_with(LABEL_PREFIX));
}

#[derive(Clone, Debug)]
enum Event {
    Owner(f64),
    Unknown,
    /// Instructions are lost on the way.
    Lost,
    /// The resource manager forgets labels, and the node comes back with a capacity that was sent before.
    Restart,
    Controller,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => (0.0..1.0).prop_map(Event::Owner),
        2 => Just(Event::Unknown),
        2 => Just(Event::Lost),
        1 => Just(Event::Restart),
        1 => Just(Event::Controller),
    ]
}

proptest! {
    /// Whatever happens: no sent capacity reduces the reserve, the total is never misjudged, and growth is as slow as
    /// promised.
    #[test]
    fn owners_keep_their_reserve(events in prop::collection::vec((event(), 1u64..4_000), 1..200)) {
        let (mut manager, mut controller) = (Manager::new(), controller());
        let mut now_ms = 0;
        let mut last_change_ms = 0;
        let mut owner = Some(0.0);
        // Steps follow each other as they were decided, whether or not they arrived.
        let mut told = TOTAL;
        for (event, wait_ms) in events {
            now_ms += wait_ms;
            let mut is_lost = false;
            let mut may_jump = false;
            match event {
                Event::Owner(share) => {
                    may_jump = owner.is_none();
                    owner = Some(share);
                }
                Event::Unknown => owner = None,
                Event::Lost => is_lost = true,
                Event::Restart => {
                    manager.node.labels.clear();
                    if let Some(old) = manager.late.pop_front() {
                        manager.node.capacity = old;
                    }
                    may_jump = true;
                }
                Event::Controller => {
                    controller = Controller::new(SETTINGS, controller.remembered());
                    // Its clock is another one.
                    now_ms = 0;
                    last_change_ms = 0;
                    may_jump = true;
                }
            }
            let owner = owner.map(|cpu| OwnerShare { cpu, memory: None });
            let actions = controller.step(now_ms, &[manager.node.clone()], &known(owner, Some(1)));
            if !actions.iter().any(|action| matches!(action, Action::Resize { .. })) {
                // By chance, it already has the capacity that was to be sent.
                told = manager.node.capacity;
            }
            for action in &actions {
                if let Action::Resize { capacity, evict, .. } = action {
                    prop_assert_eq!(*evict, owner.is_some());
                    if let Some(owner) = owner {
                        let used = (owner.cpu * 12.0 - 1e-6).ceil().max(0.0);
                        prop_assert!(f64::from(capacity.cores) <= (8.0 - used).max(0.0), "{:?}, {:?}", capacity, owner);
                        let left_mib = (8_000.0 - owner.cpu * 12_000.0).max(0.0);
                        prop_assert!(capacity.memory_mib as f64 <= left_mib + 0.5, "{:?}, {:?}", capacity, owner);
                        if !may_jump && told != NOTHING {
                            prop_assert!(capacity.cores <= told.cores + 3, "{:?} {:?}", told, capacity);
                        }
                    }
                    told = *capacity;
                    last_change_ms = now_ms;
                    manager.late.push_back(*capacity);
                    if manager.late.len() > 4 {
                        manager.late.pop_front();
                    }
                }
            }
            prop_assert!(last_change_ms <= now_ms);
            if !is_lost {
                manager.take(actions);
            }
            let restored = controller.restore(&[manager.node.clone()]);
            let gives_back = restored.iter().all(|action| match action {
                Action::Resize { capacity, .. } => *capacity == TOTAL,
                Action::Label { label, .. } => label.is_none(),
            });
            prop_assert!(gives_back, "{:?}", restored);
        }
    }

    /// An owner whose usage fluctuates by less than the margin changes nothing, once that was observed.
    #[test]
    fn nothing_flaps(middle in 0.05f64..0.9, noise in prop::collection::vec(-0.024f64..0.024, 100..200)) {
        let (mut manager, mut controller) = (Manager::new(), controller());
        let mut grew = 0;
        for (second, noise) in (0u64..).zip(noise) {
            let actions = controller.step(second * 1_000, &[manager.node.clone()], &servers(middle + noise));
            let before = manager.node.capacity;
            manager.take(actions);
            let grown = manager.node.capacity.max(before) != before;
            grew += u32::from(grown);
        }
        prop_assert_eq!(grew, 0, "it began with all that was left, which was never less by more than the margin");
    }

    /// A steady owner is followed to the end, in a bounded number of steps.
    #[test]
    fn what_is_left_is_offered_in_the_end(before in 0.0f64..1.0, after in 0.0f64..1.0) {
        let (mut manager, mut controller) = (Manager::new(), controller());
        for second in 0..60u64 {
            let cpu = if second < 10 { before } else { after };
            let actions = controller.step(second * 1_000, &[manager.node.clone()], &servers(cpu));
            manager.take(actions);
        }
        let owner = OwnerShare { cpu: after, memory: None };
        let most = owner.leaves(TOTAL);
        let with_margin = OwnerShare { cpu: (after + 0.05).min(1.0), memory: None }.leaves(TOTAL);
        let capacity = manager.node.capacity;
        prop_assert_eq!(capacity.min(most), capacity);
        prop_assert_eq!(capacity.max(with_margin), capacity, "{:?} of {:?}", capacity, with_margin);
    }
}
