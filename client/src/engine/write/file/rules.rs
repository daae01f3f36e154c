//! How the blocks of a file are to be placed, as far as that is known.
//!
//! An answer may still be on its way when an attribute is set, or when a later question is answered. What was asked for
//! earlier says less than what was told since, and is not to replace it.

use std::time::Instant;

use harvestfs_protocol::types::PlacementRules;

use super::DirtyFile;
use crate::error::ClientError;

/// Numbers the questions of one file, and the times at which it was told without one.
pub(crate) type Question = u64;

/// See the module.
#[derive(Default)]
pub(super) struct Rules {
    known: Option<PlacementRules>,
    /// The last question, and the one that what is known answers.
    asked: Question,
    told: Question,
    /// What [`super::Actions::needs_rules`] asked for is not answered yet.
    are_awaited: bool,
}

impl DirtyFile {
    pub(crate) fn rules(&self) -> Option<PlacementRules> {
        self.rules.known
    }

    /// How its blocks are to be placed; none: it is not known any more. Whatever was asked for before does not count.
    pub(crate) fn set_rules(&mut self, rules: Option<PlacementRules>) {
        self.rules.told = self.ask_rules();
        self.rules.known = rules;
    }

    /// How its blocks are to be placed is asked for from now on.
    pub(crate) fn ask_rules(&mut self) -> Question {
        self.rules.asked += 1;
        self.rules.asked
    }

    /// The answer to a question.
    pub(crate) fn rules_answered(&mut self, question: Question, rules: PlacementRules) {
        if question > self.rules.told {
            self.rules.told = question;
            self.rules.known = Some(rules);
        }
    }

    /// A question, if something waits for its answer and none is under way.
    pub(super) fn needed_rules(&mut self) -> Option<Question> {
        if self.rules.known.is_some() || self.rules.are_awaited || !self.has_wanted() {
            return None;
        }
        self.rules.are_awaited = true;
        Some(self.ask_rules())
    }

    /// What waits for how blocks are to be placed goes on, or has failed. Where that was changed meanwhile, it is asked for
    /// again.
    pub(crate) fn rules_found(
        &mut self,
        question: Question,
        found: Result<PlacementRules, ClientError>,
        now: Instant,
    ) {
        self.rules.are_awaited = false;
        match found {
            Ok(rules) => self.rules_answered(question, rules),
            Err(error) if self.rules.known.is_none() && self.has_wanted() => {
                self.failed(&error, now);
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::ids::InodeId;
    use harvestfs_protocol::types::Durability;

    use super::*;

    fn rules(replication: u8) -> PlacementRules {
        PlacementRules {
            replication,
            durability: Durability::Strict,
            class: None,
        }
    }

    #[test]
    fn an_answer_counts_unless_something_newer_was_told() {
        let mut file = DirtyFile::new(InodeId(7));
        let (first, second) = (file.ask_rules(), file.ask_rules());
        file.rules_answered(second, rules(2));
        file.rules_answered(first, rules(1));
        assert_eq!(file.rules(), Some(rules(2)));

        let before = file.ask_rules();
        file.set_rules(None);
        file.rules_answered(before, rules(2));
        assert_eq!(file.rules(), None, "an attribute was set since");
        let after = file.ask_rules();
        file.rules_answered(after, rules(3));
        assert_eq!(file.rules(), Some(rules(3)));
    }
}
