//! The search for the leading namenode: which one to dial and ask next, and when.
//!
//! If there are several, each is asked whether it leads, with a request that opens no session. So
//! all can be asked concurrently, and one that hangs delays no other, while only one at a time is
//! asked to open a session. Connections to those that do not lead are kept: asking again costs only
//! a round trip.
//!
//! A deposed leader that does not know it needs no special treatment: it cannot commit the journal
//! record that the answer to `OpenSession` waits for.

use std::time::{Duration, Instant};

/// Head start of the candidate that is likely to lead: as a rule it answers within this time, and
/// the client spares the others a handshake.
const HEAD_START: Duration = Duration::from_millis(30);
/// Deadline for dialling and the exchange of versions. Lost handshake packets are retransmitted at
/// doubling intervals; a new attempt begins with short ones, for a namenode that has just started.
const DIAL_DEADLINE_MIN: Duration = Duration::from_millis(500);
pub(crate) const DIAL_DEADLINE: Duration = Duration::from_secs(3);
/// Pause before a candidate that failed is dialled again.
const FAILURE_PAUSE_MIN: Duration = Duration::from_millis(20);
const FAILURE_PAUSE_MAX: Duration = Duration::from_secs(1);
/// Pause before a candidate that does not lead is asked again, before randomization. An election
/// takes a few hundred milliseconds, and all clients wait for it: pauses grow slowly, or the last
/// one would be most of the outage that programs notice.
const ASK_PAUSE_MIN: Duration = Duration::from_millis(8);
const ASK_PAUSE_MAX: Duration = Duration::from_millis(240);
/// After this many answers the pause doubles.
const ASKS_OF_ONE_PAUSE: u32 = 4;
/// How long a candidate may take to open a session while another one claims to lead.
const OPEN_PATIENCE: Duration = Duration::from_millis(500);

/// The state of a search.
pub(crate) struct Search {
    candidates: Vec<Candidate>,
    /// There is only one namenode, which leads.
    is_only: bool,
}

struct Candidate {
    state: State,
    /// When the state began.
    since: Instant,
    /// When the next step is due, in a state that waits for one.
    due: Instant,
    was_dialled: bool,
    /// Consecutive failures.
    failures: u32,
    /// Consecutive answers that it does not lead.
    refusals: u32,
    /// Whether the last failure will repeat.
    hopeless: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits to be dialled.
    Away,
    Dialling,
    /// Connected, and waits to be asked whether it leads.
    Standing,
    Asking,
    /// Claims to lead, and waits to be asked for a session.
    Leading,
    Opening,
}

/// The next step with a candidate. Its previous step is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Dial {
        deadline: Duration,
    },
    /// Ask it whether it leads.
    Ask,
    /// It leads: ask it for a session.
    Open,
    /// Close the connection: another candidate claims to lead, and this one does not open a session.
    Leave,
}

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Connected,
    Leads,
    /// It does not lead, but perhaps this other candidate does.
    Stands {
        leader: Option<usize>,
    },
    /// The connection was lost, or none was made. `hopeless`: another attempt will fail too.
    Failed {
        hopeless: bool,
    },
}

impl Search {
    /// Searches for the only namenode.
    pub(crate) fn for_only(now: Instant) -> Self {
        Self {
            is_only: true,
            ..Self::among(1, None, now)
        }
    }

    /// Searches among several namenodes, of which one is likely to lead.
    pub(crate) fn among(candidates: usize, likely: Option<usize>, now: Instant) -> Self {
        let candidate = |index| {
            Candidate::new(match likely {
                Some(likely) if likely != index => now + HEAD_START,
                _ => now,
            })
        };
        Self {
            candidates: (0..candidates).map(candidate).collect(),
            is_only: false,
        }
    }

    /// Adds a namenode that is reported as leader. Returns its index.
    pub(crate) fn add(&mut self, now: Instant) -> usize {
        self.is_only = false;
        self.candidates.push(Candidate::new(now));
        self.candidates.len() - 1
    }

    /// Whether every candidate has failed in a way that will repeat.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.candidates.iter().all(|candidate| candidate.hopeless)
    }

    /// Returns the next step that is due. To be called until there is none.
    pub(crate) fn next(&mut self, now: Instant) -> Option<(usize, Step)> {
        let is_only = self.is_only;
        if self.first(State::Leading).is_some()
            && let Some(opening) = self.first(State::Opening)
            && now >= self.candidates[opening].since + OPEN_PATIENCE
        {
            self.candidates[opening].failed(now);
            return Some((opening, Step::Leave));
        }
        let may_open = self.first(State::Opening).is_none();
        for (index, candidate) in self.candidates.iter_mut().enumerate() {
            let is_due = now >= candidate.due;
            let step = match candidate.state {
                State::Away if is_due => {
                    candidate.was_dialled = true;
                    candidate.enter(State::Dialling, now);
                    Step::Dial {
                        deadline: candidate.dial_deadline(is_only),
                    }
                }
                State::Standing if is_due => {
                    candidate.enter(State::Asking, now);
                    Step::Ask
                }
                State::Leading if may_open => {
                    candidate.enter(State::Opening, now);
                    Step::Open
                }
                State::Away
                | State::Dialling
                | State::Standing
                | State::Asking
                | State::Leading
                | State::Opening => continue,
            };
            return Some((index, step));
        }
        None
    }

    /// Returns when the next step is due, if nothing happens before.
    pub(crate) fn due(&self) -> Option<Instant> {
        let waiting = self.candidates.iter().filter_map(|it| match it.state {
            State::Away | State::Standing => Some(it.due),
            State::Dialling | State::Asking | State::Leading | State::Opening => None,
        });
        let other_leads = self.first(State::Leading).is_some();
        let opening = self.first(State::Opening).filter(|_| other_leads);
        let opening = opening.map(|index| self.candidates[index].since + OPEN_PATIENCE);
        waiting.chain(opening).min()
    }

    /// Handles the outcome of the last step with a candidate. `chance`, from 0 to 1, spreads the
    /// clients that wait for the same election.
    pub(crate) fn came(&mut self, index: usize, outcome: Outcome, chance: f64, now: Instant) {
        let is_only = self.is_only;
        let candidate = &mut self.candidates[index];
        match outcome {
            Outcome::Connected => {
                candidate.hopeless = false;
                candidate.due = now;
                let state = if is_only {
                    State::Leading
                } else {
                    State::Standing
                };
                candidate.enter(state, now);
            }
            Outcome::Leads => {
                candidate.answered();
                candidate.enter(State::Leading, now);
            }
            Outcome::Stands { leader } => {
                candidate.answered();
                let doublings = (candidate.refusals / ASKS_OF_ONE_PAUSE).min(16);
                candidate.refusals += 1;
                let pause = (ASK_PAUSE_MIN * 2_u32.pow(doublings)).min(ASK_PAUSE_MAX);
                candidate.due = now + pause.mul_f64(0.5 + chance);
                candidate.enter(State::Standing, now);
                match leader.filter(|leader| *leader != index) {
                    Some(leader) => self.candidates[leader].hinted(now),
                    None => self.end_head_start(now),
                }
            }
            Outcome::Failed { hopeless } => {
                candidate.hopeless = hopeless;
                candidate.failed(now);
                self.end_head_start(now);
            }
        }
    }

    fn first(&self, state: State) -> Option<usize> {
        self.candidates.iter().position(|it| it.state == state)
    }

    fn end_head_start(&mut self, now: Instant) {
        for candidate in self.candidates.iter_mut().filter(|it| !it.was_dialled) {
            candidate.due = candidate.due.min(now);
        }
    }
}

impl Candidate {
    /// Creates a candidate that is to be dialled at this time.
    fn new(due: Instant) -> Self {
        Self {
            state: State::Away,
            since: due,
            due,
            was_dialled: false,
            failures: 0,
            refusals: 0,
            hopeless: false,
        }
    }

    fn enter(&mut self, state: State, now: Instant) {
        self.state = state;
        self.since = now;
    }

    fn answered(&mut self) {
        self.failures = 0;
        self.hopeless = false;
    }

    fn failed(&mut self, now: Instant) {
        let doublings = self.failures.min(16);
        self.failures += 1;
        self.refusals = 0;
        self.due = now + (FAILURE_PAUSE_MIN * 2_u32.pow(doublings)).min(FAILURE_PAUSE_MAX);
        self.enter(State::Away, now);
    }

    /// Notes that another candidate reports this one as leader.
    fn hinted(&mut self, now: Instant) {
        let soon = if self.was_dialled {
            self.since + FAILURE_PAUSE_MIN
        } else {
            now
        };
        self.due = self.due.min(soon.max(now));
    }

    fn dial_deadline(&self, is_only: bool) -> Duration {
        if is_only {
            return DIAL_DEADLINE;
        }
        (DIAL_DEADLINE_MIN * 2_u32.pow(self.failures.min(16))).min(DIAL_DEADLINE)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::some_time;

    const MS: Duration = Duration::from_millis(1);

    fn steps(search: &mut Search, now: Instant) -> Vec<(usize, Step)> {
        std::iter::from_fn(|| search.next(now)).collect()
    }

    fn dial(deadline: Duration) -> Step {
        Step::Dial { deadline }
    }

    const FIRST_DIAL: Step = Step::Dial {
        deadline: DIAL_DEADLINE_MIN,
    };

    #[test]
    fn a_single_namenode_is_not_asked_whether_it_leads() {
        let now = some_time();
        let mut search = Search::for_only(now);
        assert_eq!(steps(&mut search, now), [(0, dial(DIAL_DEADLINE))]);
        search.came(0, Outcome::Connected, 0.5, now);
        assert_eq!(steps(&mut search, now), [(0, Step::Open)]);
        assert_eq!(search.due(), None);
        search.came(0, Outcome::Failed { hopeless: true }, 0.5, now);
        assert!(search.is_hopeless());
        assert_eq!(search.due(), Some(now + FAILURE_PAUSE_MIN));
    }

    #[test]
    fn the_likely_one_is_ahead_and_its_hint_is_followed_at_once() {
        let now = some_time();
        let mut search = Search::among(3, Some(1), now);
        assert_eq!(steps(&mut search, now), [(1, FIRST_DIAL)]);
        search.came(1, Outcome::Connected, 0.5, now);
        assert_eq!(steps(&mut search, now), [(1, Step::Ask)]);
        let stands = Outcome::Stands { leader: Some(2) };
        search.came(1, stands, 0.5, now);
        assert_eq!(steps(&mut search, now), [(2, FIRST_DIAL)]);
        assert_eq!(search.due(), Some(now + ASK_PAUSE_MIN), "the first one");
        assert_eq!(
            steps(&mut search, now + ASK_PAUSE_MIN),
            [(1, Step::Ask)],
            "it is asked again"
        );
        assert_eq!(search.due(), Some(now + HEAD_START), "the last one");
        search.came(2, Outcome::Connected, 0.5, now);
        assert_eq!(steps(&mut search, now), [(2, Step::Ask)]);
        search.came(2, Outcome::Leads, 0.5, now);
        assert_eq!(steps(&mut search, now), [(2, Step::Open)]);
    }

    #[test]
    fn the_only_one_may_name_another_one() {
        let now = some_time();
        let mut search = Search::for_only(now);
        assert_eq!(steps(&mut search, now), [(0, dial(DIAL_DEADLINE))]);
        search.came(0, Outcome::Connected, 0.5, now);
        assert_eq!(steps(&mut search, now), [(0, Step::Open)]);
        let other = search.add(now);
        let stands = Outcome::Stands {
            leader: Some(other),
        };
        search.came(0, stands, 0.5, now);
        assert_eq!(steps(&mut search, now), [(other, FIRST_DIAL)]);
        search.came(other, Outcome::Connected, 0.5, now);
        assert_eq!(steps(&mut search, now), [(other, Step::Ask)]);
        search.came(other, Outcome::Leads, 0.5, now);
        assert_eq!(steps(&mut search, now), [(other, Step::Open)]);
    }

    #[test]
    fn one_that_hangs_holds_up_nobody() {
        let start = some_time();
        let mut search = Search::among(3, Some(0), start);
        assert_eq!(steps(&mut search, start), [(0, FIRST_DIAL)]);
        let now = start + HEAD_START;
        assert_eq!(search.due(), Some(now));
        assert_eq!(steps(&mut search, now), [(1, FIRST_DIAL), (2, FIRST_DIAL)]);
        search.came(2, Outcome::Connected, 0.0, now);
        steps(&mut search, now);
        search.came(2, Outcome::Leads, 0.0, now);
        assert_eq!(steps(&mut search, now), [(2, Step::Open)]);
        // It hangs too, and the previous leader leads again.
        search.came(0, Outcome::Connected, 0.0, now);
        steps(&mut search, now);
        search.came(0, Outcome::Leads, 0.0, now);
        assert_eq!(steps(&mut search, now), []);
        let later = now + OPEN_PATIENCE;
        assert_eq!(search.due(), Some(later));
        assert_eq!(
            steps(&mut search, later),
            [(2, Step::Leave), (0, Step::Open)]
        );
    }

    #[test]
    fn during_an_election_those_that_stand_are_asked_again_on_their_connections() {
        let mut now = some_time();
        let mut search = Search::among(2, None, now);
        assert_eq!(steps(&mut search, now), [(0, FIRST_DIAL), (1, FIRST_DIAL)]);
        for index in 0..2 {
            search.came(index, Outcome::Connected, 0.0, now);
        }
        let mut pauses = Vec::new();
        for _ in 0..16 {
            assert_eq!(steps(&mut search, now), [(0, Step::Ask), (1, Step::Ask)]);
            for index in 0..2 {
                search.came(index, Outcome::Stands { leader: None }, 0.5, now);
            }
            let due = search.due().unwrap();
            pauses.push(due - now);
            now = due;
        }
        let expected = [8, 16, 32, 64].map(|ms| [MS * ms; ASKS_OF_ONE_PAUSE as usize]);
        assert_eq!(pauses, expected.concat());
    }

    #[derive(Clone, Copy, Debug)]
    enum Namenode {
        Leads,
        Stands,
        Hangs,
        Refuses,
    }

    fn namenode() -> impl Strategy<Value = Namenode> {
        prop_oneof![
            1 => Just(Namenode::Leads),
            3 => Just(Namenode::Stands),
            1 => Just(Namenode::Hangs),
            1 => Just(Namenode::Refuses),
        ]
    }

    /// The states of the namenodes, and for how many milliseconds they last.
    fn era() -> impl Strategy<Value = (Vec<Namenode>, u64)> {
        (prop::collection::vec(namenode(), 5), 1u64..800)
    }

    proptest! {
        /// In virtual time: whatever the namenodes do before, once one leads permanently it opens a
        /// session soon after earlier steps are over; never are two asked for a session
        /// concurrently; none is asked without pauses.
        #[test]
        fn the_leader_is_found_and_only_one_opens(
            count in 2usize..=5,
            before in prop::collection::vec(era(), 0..12),
            leader in 0usize..5,
            likely in prop::option::of(0usize..5),
            hints in any::<bool>(),
            chance in 0.0f64..1.0,
        ) {
            let leader = leader % count;
            let start = some_time();
            let mut now = start;
            let mut search = Search::among(count, likely.map(|it| it % count), now);
            let for_good: Vec<Namenode> = (0..count)
                .map(|index| if index == leader { Namenode::Leads } else { Namenode::Stands })
                .collect();
            let mut eras = before.into_iter();
            let (mut current, mut ends) = (for_good.clone(), None);
            let mut settled = Some(start);
            if let Some((who, ms)) = eras.next() {
                (current, ends, settled) = (who, Some(now + Duration::from_millis(ms)), None);
            }
            // The pending outcome of each candidate's step, and when it arrives.
            let mut coming: Vec<Option<(Instant, Outcome, Step)>> = vec![None; count];
            let mut counts = vec![0u32; count];
            let mut has_opened = false;
            while !has_opened {
                while let Some((index, step)) = search.next(now) {
                    if step == Step::Leave {
                        coming[index] = None;
                        continue;
                    }
                    counts[index] += 1;
                    let mut opening = coming.iter().flatten().filter(|it| it.2 == Step::Open);
                    prop_assert!(step != Step::Open || opening.next().is_none(), "two at once");
                    prop_assert!(coming[index].is_none(), "two steps with one");
                    let leads = |it: &Namenode| matches!(it, Namenode::Leads);
                    let hint = current.iter().take(count).position(leads).filter(|_| hints);
                    let deadline = match step {
                        Step::Dial { deadline } => deadline,
                        Step::Ask | Step::Open | Step::Leave => Duration::from_secs(2),
                    };
                    let failed = Outcome::Failed { hopeless: false };
                    let (after, outcome) = match (current[index], step) {
                        (Namenode::Hangs, _) => (deadline, failed),
                        (Namenode::Refuses, _) => (MS, failed),
                        (_, Step::Dial { .. }) => (MS * 2, Outcome::Connected),
                        (Namenode::Leads, _) => (MS, Outcome::Leads),
                        (Namenode::Stands, _) => (MS, Outcome::Stands { leader: hint }),
                    };
                    coming[index] = Some((now + after, outcome, step));
                }
                let soonest = coming.iter().flatten().map(|it| it.0);
                let next = soonest.chain(search.due()).min().unwrap();
                if let Some(end) = ends.filter(|end| *end <= next) {
                    now = now.max(end);
                    match eras.next() {
                        Some((who, ms)) => {
                            (current, ends) = (who, Some(now + Duration::from_millis(ms)));
                        }
                        None => (current, ends, settled) = (for_good.clone(), None, Some(now)),
                    }
                    continue;
                }
                now = now.max(next);
                for (index, coming) in coming.iter_mut().enumerate() {
                    if let Some((_, outcome, step)) = coming.take_if(|it| it.0 <= now) {
                        has_opened |= (step, outcome) == (Step::Open, Outcome::Leads);
                        search.came(index, outcome, chance, now);
                    }
                }
                let waited = settled.map_or(Duration::ZERO, |since| now - since);
                // A step that was begun with one that hung then ends by its deadline.
                prop_assert!(waited < DIAL_DEADLINE + FAILURE_PAUSE_MAX + MS * 600, "{waited:?}");
            }
            let total = (now - start).as_millis();
            for count in counts {
                prop_assert!(u128::from(count) <= 10 + total / 8, "{count} in {total} ms");
            }
        }
    }
}
