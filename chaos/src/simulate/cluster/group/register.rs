//! A number that an operator sets all the time and reads from every namenode. No session lease and no cache are
//! involved, so a namenode that answers although it no longer leads is caught within milliseconds.
//!
//! The number is the limit of replicas that may be moved to a better place in a while (`moves_per_node`). Each attempt
//! to set it uses a larger number than the one before. The attempts are made one after another, and one that is not
//! answered is soon given up: it may still take effect at any time, even after later ones, or never.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use harvestfs_protocol::placement::RepairChange;

use crate::live::admin::Admin;
use crate::simulate::cluster::journal::Journal;
use crate::simulate::cluster::part::Part;
use crate::simulate::cluster::world::World;

/// How often each namenode is asked, and how long to wait for its answer.
const READ: Duration = Duration::from_millis(15);
const READ_WITHIN: Duration = Duration::from_secs(2);
/// The pause between two attempts, and when an attempt is given up.
const WRITE: Duration = Duration::from_millis(20);
const WRITE_WITHIN: Duration = Duration::from_millis(250);
/// How often the number is set and read once all faults are over.
const LATER: Duration = Duration::from_secs(1);
/// All numbers that are set are above this, and so above that of a new cluster.
const FIRST: u32 = 1_000;

/// What is known about the number.
#[derive(Debug)]
struct Register {
    /// The last number that was attempted.
    begun: u32,
    /// The numbers that were set before the next attempt began.
    acknowledged: BTreeSet<u32>,
    /// The largest number that an answer has shown to be set.
    newest: u32,
}

impl Register {
    fn new() -> Self {
        Self {
            begun: FIRST,
            acknowledged: BTreeSet::new(),
            newest: 0,
        }
    }

    /// Begins the next attempt and returns its number.
    fn begin(&mut self) -> u32 {
        self.begun += 1;
        self.begun
    }

    fn acknowledge(&mut self, number: u32) {
        self.acknowledged.insert(number);
        self.newest = self.newest.max(number);
    }

    /// Judges the answer `number` of a namenode that was asked when `newest` was the newest. Returns what is wrong with
    /// it.
    fn found(&mut self, number: u32, newest: u32) -> Option<String> {
        self.newest = self.newest.max(number);
        // An attempt that was given up may take effect late.
        let is_over = number <= FIRST || self.acknowledged.contains(&number);
        (is_over && number < newest)
            .then(|| format!("{number} is set, and was replaced by {newest} before"))
    }
}

/// Starts the operator that sets and reads the number.
///
/// # Errors
/// When no identity can be issued.
pub fn start(world: &World, journal: &Journal, is_calm: &Rc<Cell<bool>>) -> io::Result<()> {
    let register = Rc::new(RefCell::new(Register::new()));
    let (_, bind, identity) = world.outside_operator()?;
    let connect = move |part: Part| {
        Admin::with_identity(&identity, bind, part.namenode_addr()).expect("a free port")
    };
    let namenodes = world.namenodes();
    for &part in &namenodes {
        let (connect, journal) = (connect.clone(), journal.clone());
        let (register, is_calm) = (Rc::clone(&register), Rc::clone(is_calm));
        world.spawn_outside(async move {
            read((connect(part), part), register, journal, is_calm).await;
        });
    }
    let is_calm = Rc::clone(is_calm);
    world.spawn_outside(async move {
        let admins = namenodes.into_iter().map(connect).collect();
        write(admins, register, is_calm).await;
    });
    Ok(())
}

async fn write(mut admins: Vec<Admin>, register: Rc<RefCell<Register>>, is_calm: Rc<Cell<bool>>) {
    let pause = || tokio::time::sleep(if is_calm.get() { LATER } else { WRITE });
    loop {
        for admin in &mut admins {
            loop {
                let number = register.borrow_mut().begin();
                let change = RepairChange {
                    moves_per_node: Some(number),
                    ..RepairChange::default()
                };
                let set = tokio::time::timeout(WRITE_WITHIN, admin.repair(change)).await;
                if !matches!(set, Ok(Some(_))) {
                    break;
                }
                register.borrow_mut().acknowledge(number);
                pause().await;
            }
        }
        pause().await;
    }
}

async fn read(
    (mut admin, part): (Admin, Part),
    register: Rc<RefCell<Register>>,
    journal: Journal,
    is_calm: Rc<Cell<bool>>,
) {
    loop {
        tokio::time::sleep(if is_calm.get() { LATER } else { READ }).await;
        let newest = register.borrow().newest;
        let asked = admin.repair(RepairChange::default());
        let Ok(Some(limits)) = tokio::time::timeout(READ_WITHIN, asked).await else {
            continue;
        };
        let wrong = register.borrow_mut().found(limits.moves_per_node, newest);
        if let Some(wrong) = wrong {
            journal.broken(format!("{part} says that {wrong}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_replaced_is_not_set_any_more() {
        let mut register = Register::new();
        assert_eq!(register.found(30, 0), None);
        let first = register.begin();
        register.acknowledge(first);
        assert_eq!(register.found(first, first), None);
        assert!(register.found(30, first).is_some());
        let given_up = register.begin();
        // It may take effect late.
        assert_eq!(register.found(given_up, first), None);
        let third = register.begin();
        register.acknowledge(third);
        // The namenode was asked before that.
        assert!(register.found(first, given_up).is_some());
        assert_eq!(register.found(first, first), None);
        assert_eq!(register.found(given_up, third), None);
        assert!(register.found(first, third).is_some());
    }
}
