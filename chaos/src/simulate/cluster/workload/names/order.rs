//! Searches for an order of operations that explains their answers: the algorithm of Wing and Gong, with Lowe's
//! extension that no state is visited twice.

use std::time::Duration;

use harvestfs_protocol::ids::InodeId;
use rustc_hash::FxHashSet;

use super::files::Names;
use super::{Action, Actor, Answer, Operation};

/// The number of states after which the search gives up.
const STATES_MAX: usize = 100_000;

/// The result of a search that found nothing wrong.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    Order,
    TooMuchWork,
}

/// The operations that were done so far, and the names after them.
#[derive(Clone, PartialEq, Eq, Hash)]
struct State {
    /// The index of the first operation that is answered and not done.
    first: usize,
    done: Vec<bool>,
    names: Names,
}

/// Searches for an order. `operations` must be sorted by the time at which they began.
///
/// # Errors
/// When no order explains the answers; the text says where the longest attempt ended.
pub(super) fn find(operations: &[Operation]) -> Result<Found, String> {
    let search = Search {
        operations,
        orphans: orphans(operations),
    };
    let mut seen = FxHashSet::default();
    let mut left = vec![State {
        first: 0,
        done: vec![false; operations.len()],
        names: Names::default(),
    }];
    let mut longest = (0, String::new());
    while let Some(mut state) = left.pop() {
        search.take_looks(&mut state);
        search.skip_done(&mut state);
        let Some(first) = operations.get(state.first) else {
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
            longest = (count, format!("{first}, where there is {names:?}"));
        }
        left.extend(search.after_one_change(&state));
    }
    Err(longest.1)
}

/// Files that were seen and whose creation has no answer.
fn orphans(operations: &[Operation]) -> Vec<InodeId> {
    let mut created = FxHashSet::default();
    let mut seen = Vec::new();
    for operation in operations {
        let Some((_, Answer::File(file))) = operation.answered else {
            continue;
        };
        match operation.action {
            Action::Create(..) => _ = created.insert(file),
            Action::Look(_)
            | Action::Unlink(_)
            | Action::Rename(_)
            | Action::List
            | Action::Link(..)
            | Action::SetMode(..)
            | Action::SetSize(..)
            | Action::SetXattr(..)
            | Action::Show(_)
            | Action::ShowXattr(_) => seen.push(file),
        }
    }
    seen.sort_unstable();
    seen.dedup();
    seen.retain(|file| !created.contains(file));
    seen
}

struct Search<'a> {
    operations: &'a [Operation],
    orphans: Vec<InodeId>,
}

impl Search<'_> {
    /// Advances `first` to the first operation that was answered and is not in the order yet.
    fn skip_done(&self, state: &mut State) {
        let rest = self.operations.iter().zip(&state.done).skip(state.first);
        let done = rest.take_while(|(operation, done)| **done || operation.answered.is_none());
        state.first += done.count();
    }

    /// The operations that may come next.
    fn next(&self, state: &State) -> Vec<usize> {
        // Before `first`, only operations with no known outcome are left.
        let before = self.unknown_before(state);
        let mut next: Vec<usize> = before.filter(|number| !state.done[*number]).collect();
        // The earliest end of the operations that are not in the order yet: of changes, of any, and of each viewer.
        let mut change_ended = Duration::MAX;
        let mut any_ended = Duration::MAX;
        let mut viewer_ended: Vec<(Viewer, Duration)> = Vec::new();
        let rest = self.operations.iter().enumerate().skip(state.first);
        for (number, operation) in rest {
            if operation.began > change_ended {
                break;
            }
            if state.done[number] {
                continue;
            }
            let viewer = operation.viewer();
            let mut of_viewer = viewer_ended.iter().filter(|it| it.0 == viewer);
            let is_blocked = operation.is_change() && operation.began > any_ended
                || of_viewer.any(|(_, ended)| operation.began > *ended);
            if !is_blocked {
                next.push(number);
            }
            if let Some((ended, _)) = operation.answered {
                any_ended = any_ended.min(ended);
                viewer_ended.push((viewer, ended));
                if operation.is_change() {
                    change_ended = change_ended.min(ended);
                }
            }
        }
        next
    }

    fn unknown_before(&self, state: &State) -> impl Iterator<Item = usize> {
        let unknown = self.operations[..state.first].iter().enumerate();
        unknown.filter_map(|(number, operation)| operation.answered.is_none().then_some(number))
    }

    /// Adds reads whose answers match the current names as early as possible, since they change nothing.
    fn take_looks(&self, state: &mut State) {
        loop {
            let next = self.next(state);
            let mut any = false;
            for number in next {
                let operation = &self.operations[number];
                if let Some((_, answer)) = operation.answered
                    && !operation.is_change()
                    && state.names.explain(operation, answer)
                {
                    state.done[number] = true;
                    any = true;
                }
            }
            if !any {
                return;
            }
            self.skip_done(state);
        }
    }

    /// The states in which one more change is done.
    fn after_one_change(&self, state: &State) -> Vec<State> {
        let mut states = Vec::new();
        for number in self.next(state) {
            let operation = &self.operations[number];
            if !operation.is_change() {
                continue;
            }
            for names in state.names.after(number, operation, &self.orphans) {
                let mut after = State {
                    names,
                    ..state.clone()
                };
                after.done[number] = true;
                states.push(after);
            }
        }
        states
    }
}

/// A viewer whose reads are in order. On a mount, names and attributes are two views, as they are in the kernel: while
/// a program there waits for `unlink` to return, another one may see that the file has one name fewer, and then still
/// see that name.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Viewer {
    actor: Actor,
    is_of_attributes: bool,
}

impl Operation {
    fn viewer(&self) -> Viewer {
        let is_mount = matches!(self.actor, Actor::Mount(_));
        let is_of_attributes = matches!(self.action, Action::Show(_) | Action::ShowXattr(_));
        Viewer {
            actor: self.actor,
            is_of_attributes: is_mount && is_of_attributes,
        }
    }

    /// Whether the operation changed something, or may have.
    fn is_change(&self) -> bool {
        match self.answered {
            Some((_, Answer::Refused(_))) => false,
            Some(_) | None => self.action.changes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{MOUNT_MODE, ROOT, Refusal, Shown};
    use super::*;

    const FILE: InodeId = InodeId(7);
    const CREATE: Action = Action::Create(0, MOUNT_MODE);
    const NOT_FOUND: Answer = Answer::Refused(Refusal::NotFound);

    fn operation(actor: u8, action: Action, ms: (u64, u64), answer: Answer) -> Operation {
        Operation {
            actor: Actor::Client(actor),
            uid: ROOT,
            action,
            began: Duration::from_millis(ms.0),
            answered: Some((Duration::from_millis(ms.1), answer)),
        }
    }

    fn created() -> Operation {
        operation(0, CREATE, (1, 2), Answer::File(FILE))
    }

    #[test]
    fn a_look_shows_what_had_returned_before_it() {
        let other = Answer::File(InodeId(8));
        for (answer, is_right) in [
            (Answer::File(FILE), true),
            (other, false),
            (NOT_FOUND, false),
        ] {
            let look = operation(1, Action::Look(0), (3, 4), answer);
            assert_eq!(find(&[created(), look]).is_ok(), is_right, "{answer:?}");
        }
    }

    #[test]
    fn on_a_mount_attributes_may_show_a_change_before_names_do() {
        let unlink = Operation {
            answered: None,
            ..operation(0, Action::Unlink(0), (3, 4), Answer::Done)
        };
        let gone = Answer::Refused(Refusal::Gone);
        for (actor, is_right) in [(Actor::Mount(0), true), (Actor::Client(0), false)] {
            let by = |action, ms, answer| Operation {
                actor,
                ..operation(0, action, ms, answer)
            };
            let show = by(Action::Show(FILE), (5, 6), gone);
            let look = by(Action::Look(0), (7, 8), Answer::File(FILE));
            assert_eq!(
                find(&[created(), unlink, show, look]).is_ok(),
                is_right,
                "{actor:?}"
            );
            // Each view by itself moves only forward.
            let none = by(Action::Look(0), (5, 6), NOT_FOUND);
            assert!(find(&[created(), unlink, none, look]).is_err());
        }
    }

    #[test]
    fn looks_of_different_clients_may_overtake_a_change_that_has_not_returned() {
        let create = operation(0, CREATE, (1, 9), Answer::File(FILE));
        let new = operation(1, Action::Look(0), (2, 3), Answer::File(FILE));
        let old = |actor| operation(actor, Action::Look(0), (4, 5), NOT_FOUND);
        assert_eq!(find(&[create, new, old(2)]), Ok(Found::Order));
        assert!(find(&[create, new, old(1)]).is_err(), "of the same client");
    }

    #[test]
    fn of_two_that_create_a_name_one_wins() {
        let both = [0, 1].map(|it| {
            let file = Answer::File(InodeId(u64::from(it)));
            operation(it, CREATE, (1, 3), file)
        });
        assert!(find(&both).is_err());
    }

    #[test]
    fn what_has_no_known_outcome_may_happen_at_any_time_or_never() {
        let rename = Operation {
            answered: None,
            ..operation(1, Action::Rename(0), (1, 1), NOT_FOUND)
        };
        for answer in [Answer::File(FILE), NOT_FOUND] {
            let looks = [50, 90].map(|at| operation(2, Action::Look(0), (at, at + 1), answer));
            let history = [created(), rename, looks[0], looks[1]];
            assert_eq!(find(&history), Ok(Found::Order), "{answer:?}");
        }
        let back = [(50, NOT_FOUND), (90, Answer::File(FILE))]
            .map(|(at, answer)| operation(2, Action::Look(0), (at, at + 1), answer));
        assert!(find(&[created(), rename, back[0], back[1]]).is_err());
    }

    #[test]
    fn what_was_created_without_an_answer_is_one_file() {
        let create = Operation {
            answered: None,
            ..created()
        };
        let look = |at, file| operation(2, Action::Look(0), (at, at + 1), Answer::File(file));
        let same = [create, look(50, FILE), look(60, FILE)];
        assert_eq!(find(&same), Ok(Found::Order));
        assert!(find(&[create, look(50, FILE), look(60, InodeId(8))]).is_err());
    }

    #[test]
    fn attributes_are_of_the_file_whatever_its_name() {
        let shown = |mode, nlink| {
            Answer::Shown(Shown {
                uid: ROOT,
                mode,
                size_bytes: 0,
                nlink,
            })
        };
        let link = operation(0, Action::Link(FILE, 1), (3, 4), Answer::Done);
        let unlink = operation(1, Action::Unlink(0), (5, 6), Answer::Done);
        let set = operation(1, Action::SetMode(FILE, 0o600), (7, 8), Answer::Done);
        for (mode, nlink, is_right) in [
            (0o600, 1, true),
            (0o644, 1, false),
            (0o600, 2, false),
            (0o600, 0, false),
        ] {
            let show = operation(2, Action::Show(FILE), (9, 10), shown(mode, nlink));
            let history = [created(), link, unlink, set, show];
            assert_eq!(find(&history).is_ok(), is_right, "{mode:o}, {nlink}");
        }
    }

    #[test]
    fn modes_decide_who_may() {
        let user = |operation| Operation {
            uid: 1_001,
            ..operation
        };
        let denied = Answer::Refused(Refusal::Denied);
        for (action, answer, is_right) in [
            (Action::Unlink(0), denied, true),
            (Action::Unlink(0), Answer::Done, false),
            (Action::Rename(0), Answer::Done, false),
            (Action::SetMode(FILE, 0), Answer::Done, false),
            (Action::SetSize(FILE, 1), denied, true),
            (Action::SetXattr(FILE, Some(1)), Answer::Done, false),
            (Action::ShowXattr(FILE), denied, false),
            (
                Action::ShowXattr(FILE),
                Answer::Refused(Refusal::NoAttribute),
                true,
            ),
        ] {
            let asked = user(operation(1, action, (3, 4), answer));
            let found = find(&[created(), asked]);
            assert_eq!(found.is_ok(), is_right, "{action:?}, {answer:?}");
        }
    }
}
