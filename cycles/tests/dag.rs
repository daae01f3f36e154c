//! Jobs against a slow description of them.

use std::num::NonZeroU32;

use harvestfs_cycles::dag::{Dag, DagError, Stage};
use proptest::prelude::*;

fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

fn stage(name: &str, tasks: u32, inputs: &[&str]) -> Stage {
    Stage {
        name: name.to_owned(),
        tasks: NonZeroU32::new(tasks).expect("a task"),
        cores_per_task: one(),
        inputs: inputs.iter().map(|&input| input.to_owned()).collect(),
    }
}

#[test]
fn the_largest_wave_is_what_a_job_needs() {
    // Shaped as figure 7 of the paper: mappers that are joined one after the other.
    let dag = Dag::new(&[
        stage("reducer 2", 30, &["map 1", "map 2"]),
        stage("map 1", 400, &[]),
        stage("map 2", 60, &[]),
        stage("map 3", 9, &[]),
        stage("reducer 3", 20, &["reducer 2", "map 3"]),
        stage("out", 1, &["reducer 3"]),
    ])
    .unwrap();
    assert_eq!(dag.max_concurrent_cores().get(), 469);
    assert_eq!(dag.waves(), [vec![1, 2, 3], vec![0], vec![4], vec![5]]);
    assert_eq!(
        (dag.inputs(4), dag.outputs(3), dag.stages()),
        (&[0, 3][..], &[4][..], 6)
    );
}

#[test]
fn what_is_no_job_is_refused_with_the_reason() {
    let error = |stages: &[Stage]| Dag::new(stages).unwrap_err();
    assert_eq!(error(&[]), DagError::NoStage);
    let twice = error(&[stage("a", 1, &[]), stage("a", 1, &[])]);
    assert_eq!(twice, DagError::Duplicate("a".into()));
    let unknown = error(&[stage("a", 1, &["b"])]);
    assert!(unknown.to_string().contains("`a` reads the output of `b`"));
    assert_eq!(
        error(&[stage("a", 1, &["a"])]),
        DagError::Cycle(vec!["a".into()])
    );
    let cycle = error(&[
        stage("begin", 1, &[]),
        stage("end", 1, &["b"]),
        stage("a", 1, &["b", "begin"]),
        stage("b", 1, &["a"]),
    ]);
    assert_eq!(cycle, DagError::Cycle(vec!["b".into(), "a".into()]));
}

/// Any stages: inputs may be later stages, or themselves.
fn stages() -> impl Strategy<Value = Vec<(u32, Vec<usize>)>> {
    (1..9_usize).prop_flat_map(|count| {
        let inputs = prop::collection::vec(0..count, 0..3);
        prop::collection::vec((1..50_u32, inputs), count)
    })
}

/// Stages that only read from earlier ones, so that there is no cycle.
fn ordered(mut stages: Vec<(u32, Vec<usize>)>) -> Vec<(u32, Vec<usize>)> {
    for (number, (_, inputs)) in stages.iter_mut().enumerate() {
        inputs.retain(|&input| input < number);
    }
    stages
}

fn dag(stages: &[(u32, Vec<usize>)]) -> Result<Dag, DagError> {
    let named: Vec<Stage> = stages
        .iter()
        .enumerate()
        .map(|(number, (tasks, inputs))| Stage {
            name: number.to_string(),
            tasks: NonZeroU32::new(*tasks).expect("a task"),
            cores_per_task: one(),
            inputs: inputs.iter().map(usize::to_string).collect(),
        })
        .collect();
    Dag::new(&named)
}

/// Whether a stage waits for another one, however far away. Slow and obvious.
fn waits(stages: &[(u32, Vec<usize>)], stage: usize, other: usize, steps: usize) -> bool {
    let mut inputs = stages[stage].1.iter();
    steps > 0 && inputs.any(|&it| it == other || waits(stages, it, other, steps - 1))
}

/// The longest way from a stage to one without inputs.
fn depth(stages: &[(u32, Vec<usize>)], stage: usize) -> usize {
    let inputs = stages[stage].1.iter();
    inputs.map(|&it| depth(stages, it) + 1).max().unwrap_or(0)
}

/// The most tasks of stages of which none waits for another: all subsets are tried.
fn most_at_once(stages: &[(u32, Vec<usize>)]) -> u64 {
    let count = stages.len();
    let tasks = |set: usize| {
        let members: Vec<usize> = (0..count).filter(|it| set >> it & 1 == 1).collect();
        let apart = members
            .iter()
            .all(|&a| members.iter().all(|&b| !waits(stages, a, b, count)));
        let sum: u64 = members.iter().map(|&it| u64::from(stages[it].0)).sum();
        if apart { sum } else { 0 }
    };
    (0..1 << count).map(tasks).max().unwrap_or(0)
}

proptest! {
    #[test]
    fn cycles_are_found_and_only_they(stages in stages()) {
        let count = stages.len();
        let cyclic = (0..count).any(|it| waits(&stages, it, it, count));
        match dag(&stages) {
            Ok(_) => prop_assert!(!cyclic),
            Err(DagError::Cycle(names)) => {
                prop_assert!(cyclic);
                // Each reads the output of the next, the last that of the first.
                let cycle: Vec<usize> = names.iter().map(|it| it.parse().unwrap()).collect();
                for (place, &stage) in cycle.iter().enumerate() {
                    let next = cycle[(place + 1) % cycle.len()];
                    prop_assert!(stages[stage].1.contains(&next), "{cycle:?}");
                }
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    #[test]
    fn waves_and_need_are_those_of_the_slow_description(stages in stages()) {
        let stages = ordered(stages);
        let dag = dag(&stages).unwrap();
        let mut of_depth = vec![0_u64; stages.len()];
        for (number, (tasks, _)) in stages.iter().enumerate() {
            let depth = depth(&stages, number);
            prop_assert!(dag.waves()[depth].contains(&number));
            of_depth[depth] += u64::from(*tasks);
        }
        let need = dag.max_concurrent_cores().get();
        prop_assert_eq!(Some(need), of_depth.into_iter().max());
        // An estimate: never more than can really run at the same time.
        prop_assert!(need <= most_at_once(&stages));
    }
}
