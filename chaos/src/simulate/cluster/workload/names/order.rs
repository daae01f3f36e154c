//! Looks for an order of operations that explains their answers: the search of Wing and Gong, with what Lowe adds, that no state is
//! reached twice.

use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use rustc_hash::FxHashSet;

use super::{Action, Answer, Operation};

/// States that are looked at before it is given up.
const STATES_MAX: usize = 200_000;

/// What came of it, when nothing is wrong.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Order,
    TooMuchWork,
}

/// Which file has each name of the pair.
type Names = [Option<File>; 2];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum File {
    Known(InodeId),
    /// Created by the operation with this number, whose answer never came.
    Of(usize),
}

/// What was done so far, and what there is then.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    done: Vec<bool>,
    names: Names,
}

/// Operations have to be in the order in which they began.
///
/// # Errors
/// No order explains the answers: where the longest attempt ended.
pub(super) fn find(operations: &[Operation]) -> Result<Found, String> {
    let known: FxHashSet<InodeId> = operations.iter().filter_map(created).collect();
    let search = Search { operations, known };
    let mut seen = FxHashSet::default();
    let mut left = vec![State {
        done: vec![false; operations.len()],
        names: [None; 2],
    }];
    let mut longest = (0, String::new());
    while let Some(mut state) = left.pop() {
        search.take_looks(&mut state);
        let open = search.open(&state);
        let Some(first) = open else {
            return Ok(Found::Order);
        };
        if !seen.insert(state.clone()) {
            continue;
        }
        if seen.len() > STATES_MAX {
            return Ok(Found::TooMuchWork);
        }
        let count = state.done.iter().filter(|done| **done).count();
        if count >= longest.0 {
            let names = state.names;
            let operation = &operations[first];
            longest = (count, format!("{operation:?}, where there is {names:?}"));
        }
        left.extend(search.after_one_change(&state));
    }
    Err(longest.1)
}

fn created(operation: &Operation) -> Option<InodeId> {
    match (operation.action, operation.answered) {
        (Action::Create(_), Some((_, Answer::Done(ino)))) => ino,
        _ => None,
    }
}

struct Search<'a> {
    operations: &'a [Operation],
    /// Files that are known to be created by one of them.
    known: FxHashSet<InodeId>,
}

impl Search<'_> {
    /// The first operation that was answered and is not in the order yet.
    fn open(&self, state: &State) -> Option<usize> {
        let mut operations = self.operations.iter().zip(&state.done);
        operations.position(|(operation, done)| operation.answered.is_some() && !done)
    }

    /// Operations that may come next.
    fn next(&self, state: &State) -> Vec<usize> {
        let mut next = Vec::new();
        // The earliest end of what is not in the order yet: of changes, of anything, and of each client.
        let mut change_ended = Duration::MAX;
        let mut any_ended = Duration::MAX;
        let mut client_ended = [Duration::MAX; u8::MAX as usize + 1];
        for (number, operation) in self.operations.iter().enumerate() {
            if operation.began > change_ended {
                break;
            }
            if state.done[number] {
                continue;
            }
            let of_client = &mut client_ended[usize::from(operation.client)];
            let is_blocked = operation.is_change() && operation.began > any_ended
                || operation.began > *of_client;
            if !is_blocked {
                next.push(number);
            }
            if let Some((ended, _)) = operation.answered {
                any_ended = any_ended.min(ended);
                *of_client = ended.min(*of_client);
                if operation.is_change() {
                    change_ended = change_ended.min(ended);
                }
            }
        }
        next
    }

    /// A look that shows what there is changes nothing, so that it comes as early as it may.
    fn take_looks(&self, state: &mut State) {
        loop {
            let next = self.next(state);
            let mut looks = next.into_iter().filter(|number| {
                let operation = &self.operations[*number];
                !operation.is_change() && self.explains(&state.names, operation)
            });
            let Some(look) = looks.next() else {
                return;
            };
            state.done[look] = true;
        }
    }

    /// Whether there is what a look showed, or what a refused change was refused for.
    fn explains(&self, names: &Names, operation: &Operation) -> bool {
        match (operation.answered, names[operation.action.name()]) {
            (Some((_, Answer::Done(Some(seen)))), Some(file)) => match file {
                File::Known(ino) => ino == seen,
                File::Of(_) => !self.known.contains(&seen),
            },
            (Some((_, Answer::Exists)), file) => file.is_some(),
            (Some((_, Answer::NotFound)), file) => file.is_none(),
            _ => false,
        }
    }

    /// States in which one change more is done.
    fn after_one_change(&self, state: &State) -> Vec<State> {
        let mut states = Vec::new();
        for number in self.next(state) {
            let operation = &self.operations[number];
            if !operation.is_change() {
                continue;
            }
            if let Some(names) = self.changed(&state.names, number) {
                let mut after = State {
                    done: state.done.clone(),
                    names,
                };
                after.done[number] = true;
                states.push(after);
            }
        }
        states
    }

    /// The names after a change; none: it is impossible now.
    fn changed(&self, names: &Names, number: usize) -> Option<Names> {
        let mut names = *names;
        let operation = &self.operations[number];
        match operation.action {
            Action::Create(name) if names[name].is_none() => {
                let created = created(operation);
                names[name] = Some(created.map_or(File::Of(number), File::Known));
            }
            Action::Unlink(name) => _ = names[name].take()?,
            Action::Rename(name) => names[1 - name] = Some(names[name].take()?),
            Action::Create(_) | Action::Look(_) => return None,
        }
        Some(names)
    }
}

impl Operation {
    /// Whether it changed something, or may have.
    fn is_change(&self) -> bool {
        match self.answered {
            Some((_, Answer::Done(_))) | None => !matches!(self.action, Action::Look(_)),
            Some((_, Answer::Exists | Answer::NotFound)) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operation(client: u8, action: Action, ms: (u64, u64), answer: Answer) -> Operation {
        Operation {
            client,
            action,
            began: Duration::from_millis(ms.0),
            answered: Some((Duration::from_millis(ms.1), answer)),
        }
    }

    fn done(ino: u64) -> Answer {
        Answer::Done(Some(InodeId(ino)))
    }

    #[test]
    fn a_look_shows_what_had_returned_before_it() {
        let create = operation(0, Action::Create(0), (1, 2), done(7));
        for (answer, is_right) in [(done(7), true), (done(8), false), (Answer::NotFound, false)] {
            let look = operation(1, Action::Look(0), (3, 4), answer);
            assert_eq!(find(&[create, look]).is_ok(), is_right, "{answer:?}");
        }
    }

    #[test]
    fn looks_of_different_clients_may_overtake_a_change_that_has_not_returned() {
        let create = operation(0, Action::Create(0), (1, 9), done(7));
        let new = operation(1, Action::Look(0), (2, 3), done(7));
        let old = |client| operation(client, Action::Look(0), (4, 5), Answer::NotFound);
        assert_eq!(find(&[create, new, old(2)]), Ok(Found::Order));
        assert!(find(&[create, new, old(1)]).is_err(), "of the same client");
    }

    #[test]
    fn of_two_that_create_a_name_one_wins() {
        let both = [0, 1].map(|it| operation(it, Action::Create(0), (1, 3), done(u64::from(it))));
        assert!(find(&both).is_err());
    }

    #[test]
    fn what_has_no_known_outcome_may_happen_at_any_time_or_never() {
        let create = operation(0, Action::Create(0), (1, 2), done(7));
        let rename = Operation {
            answered: None,
            ..operation(1, Action::Rename(0), (1, 1), Answer::Exists)
        };
        for answer in [done(7), Answer::NotFound] {
            let looks = [50, 90].map(|at| operation(2, Action::Look(0), (at, at + 1), answer));
            let history = [create, rename, looks[0], looks[1]];
            assert_eq!(find(&history), Ok(Found::Order), "{answer:?}");
        }
        let back = [(50, Answer::NotFound), (90, done(7))]
            .map(|(at, answer)| operation(2, Action::Look(0), (at, at + 1), answer));
        assert!(find(&[create, rename, back[0], back[1]]).is_err());
    }
}
