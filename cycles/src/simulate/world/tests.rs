use harvestfs_telemetry::profile::Pattern;

use harvestfs_telemetry::scaling::Scaling;

use super::*;
use crate::reserve::PreemptionRule;
use crate::select::ClassHistory;

/// Suspends nothing.
struct Kill;

impl PreemptionRule for Kill {
    fn preempt(&self, _: &Victim, _: f64) -> Preemption {
        Preemption::Kill
    }
}

/// Two classes of 50 servers; what owners leave on each is 2 cores.
fn fleet() -> Fleet {
    let history = ClassHistory {
        pattern: Pattern::Constant,
        average_cpu_share: 0.5,
        peak_cpu_share: 0.5,
    };
    Fleet {
        name: "test".into(),
        scaling: Scaling::Linear,
        target: 0.5,
        slot_ms: 300_000,
        loads: vec![vec![0.5]],
        owners: vec![0; 100],
        class_of: [[0; 50], [1; 50]].concat(),
        classes: vec![history; 2],
        utilisation: 0.5,
    }
}

/// Tasks that run in each class after room came up for two jobs that had waited.
fn running(policy: PolicyKind, of_first: Selection, of_second: Selection) -> [usize; 2] {
    let fleet = fleet();
    let options = Options {
        policy,
        rule: &Kill,
        container_bytes: 0.0,
        seed: 1,
        days: 1,
        demand: 1e-6,
        stretch: None,
    };
    let mut world = World::new(&fleet, options, 1.0, Thresholds::PAPER);
    for (classes, tasks) in [(of_first, 60), (of_second, 100)] {
        let job = world.jobs.arrives(0, 0, classes);
        for _ in 0..tasks {
            let task = Task {
                stage: 0,
                left_ms: 1_000,
                restore_ms: None,
            };
            world.wait_for_core(job, task);
        }
        world.place(job);
    }
    assert_eq!(
        world.running, 0,
        "no server has room before the first sample"
    );
    world.load_changes(false);
    [0, 1].map(|class| {
        let servers = &world.servers[world.begins[class]..world.begins[class + 1]];
        servers.iter().map(|it| it.running.len()).sum()
    })
}

#[test]
fn jobs_that_waited_draw_over_all_their_classes_in_order_of_arrival() {
    // The second one has as many tasks as the second class has cores: it gets those that the first one leaves.
    let second_class = || Selection::One(ClassId(1));
    let both = Selection::Several(vec![ClassId(0), ClassId(1)]);
    for (policy, classes) in [
        (PolicyKind::Pt, Selection::None),
        (PolicyKind::History, both),
    ] {
        let [first, second] = running(policy, classes, second_class());
        assert!((20..=45).contains(&first), "{policy}: {first}");
        assert_eq!(second, 100, "{policy}");
    }
    let [first, second] = running(PolicyKind::History, second_class(), Selection::None);
    // 100 tasks that may run anywhere: on the 100 cores of the first class and the 40 that are left of the second one.
    assert!((55..=85).contains(&first), "{first} {second}");
    assert!(first + second >= 160, "{first} {second}");
}
