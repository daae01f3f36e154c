//! Clients that are cut off right after they renewed their lease, when they believe what they have cached the longest: they
//! look at it still, while others change it and the namenode waits for the end of the same lease.
//!
//! The fault asks for it, the client says when its keepalive is about to be sent and when it was, and the fault cuts.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::part::Part;

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The machine is to be cut off.
    Asked,
    /// It sends nothing but keepalives until it is.
    Silent,
    /// The next one is about to be sent.
    Renewing,
    /// So it is, and its answer will be late.
    Late,
    /// It was sent.
    Renewed,
    /// Nothing gets to the machine, or from it.
    Cut,
}

/// What the fault has to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// What the namenode sends takes longer, by so much at most.
    Delay(Duration),
    /// Nothing gets through for so long.
    Cut(Duration),
}

#[derive(Debug)]
struct CutOff {
    stage: Stage,
    late: Option<Duration>,
    lasts: Duration,
}

/// All that are under way, by machine. Copies are of the same.
#[derive(Clone, Debug, Default)]
pub struct CutOffs(Rc<RefCell<BTreeMap<Part, CutOff>>>);

impl CutOffs {
    /// A machine is to be cut off for so long, after an answer that may be late.
    pub fn ask(&self, part: Part, late: Option<Duration>, lasts: Duration) {
        let stage = Stage::Asked;
        let cut_off = CutOff { stage, late, lasts };
        self.0.borrow_mut().insert(part, cut_off);
    }

    /// It is over, or does not come to it.
    pub fn end(&self, part: Part) {
        self.0.borrow_mut().remove(&part);
    }

    /// How far it is with a machine.
    pub fn stage(&self, part: Part) -> Option<Stage> {
        self.0.borrow().get(&part).map(|it| it.stage)
    }

    /// Whether a machine is to send nothing that it can leave.
    pub fn is_silent(&self, part: Part) -> bool {
        let stage = self.stage(part);
        stage.is_some_and(|stage| stage != Stage::Cut)
    }

    /// The client is so far.
    pub fn go_on(&self, part: Part, stage: Stage) {
        if let Some(it) = self.0.borrow_mut().get_mut(&part) {
            it.stage = stage;
        }
    }

    /// What is due, which the caller does.
    pub fn take_due(&self) -> Vec<(Part, Due)> {
        let mut due = Vec::new();
        for (part, it) in self.0.borrow_mut().iter_mut() {
            match (it.stage, it.late) {
                (Stage::Renewing, Some(late)) => {
                    it.stage = Stage::Late;
                    due.push((*part, Due::Delay(late)));
                }
                (Stage::Renewed, _) => {
                    it.stage = Stage::Cut;
                    due.push((*part, Due::Cut(it.lasts)));
                }
                _ => {}
            }
        }
        due
    }
}
