//! Clients that are cut off right after they renewed their lease, which is when they trust their cache the longest:
//! they still use it while others change files and the namenode waits for the end of the same lease.
//!
//! The fault requests a cut-off; the client reports that its keepalive is about to be sent and that it was sent; then
//! the fault cuts the network.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use super::part::Part;

/// The progress of a cut-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The machine is to be cut off.
    Asked,
    /// The machine sends nothing but keepalives until it is cut off.
    Silent,
    /// The next keepalive is about to be sent.
    Renewing,
    /// The next keepalive is about to be sent, and its answer will be late.
    Late,
    /// The keepalive was sent.
    Renewed,
    /// Nothing gets to the machine, or from it.
    Cut,
}

/// What the fault has to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Delay what the namenode sends, by at most this.
    Delay(Duration),
    /// Cut the machine off for this long.
    Cut(Duration),
}

#[derive(Debug)]
struct CutOff {
    stage: Stage,
    late: Option<Duration>,
    lasts: Duration,
}

/// All cut-offs in progress, by machine. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct CutOffs(Rc<RefCell<BTreeMap<Part, CutOff>>>);

impl CutOffs {
    /// Requests that a machine be cut off for `lasts`, after an answer that is delayed by at most `late`, if given.
    pub fn ask(&self, part: Part, late: Option<Duration>, lasts: Duration) {
        let stage = Stage::Asked;
        let cut_off = CutOff { stage, late, lasts };
        self.0.borrow_mut().insert(part, cut_off);
    }

    /// Removes the cut-off of a machine, which is over or will not happen.
    pub fn end(&self, part: Part) {
        self.0.borrow_mut().remove(&part);
    }

    /// The progress of the cut-off of a machine.
    pub fn stage(&self, part: Part) -> Option<Stage> {
        self.0.borrow().get(&part).map(|it| it.stage)
    }

    /// Whether a machine is to send nothing that it can omit.
    pub fn is_silent(&self, part: Part) -> bool {
        let stage = self.stage(part);
        stage.is_some_and(|stage| stage != Stage::Cut)
    }

    /// Advances the cut-off of a client to the given stage.
    pub fn go_on(&self, part: Part, stage: Stage) {
        if let Some(it) = self.0.borrow_mut().get_mut(&part) {
            it.stage = stage;
        }
    }

    /// Takes what is due, which the caller has to do.
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
