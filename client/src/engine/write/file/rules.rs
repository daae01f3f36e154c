//! The placement rules of a file's blocks, as far as they are known.
//!
//! An answer may still be in flight when an attribute is set, or when a later query is answered.
//! The answer to an earlier query is older than what was learned since, and must not replace it.

use std::time::Instant;

use harvestfs_protocol::types::PlacementRules;

use super::DirtyFile;
use crate::error::ClientError;

/// Numbers the queries for the rules of one file, and the updates without a query.
pub(crate) type Question = u64;

/// The known placement rules of a file.
#[derive(Default)]
pub(super) struct Rules {
    known: Option<PlacementRules>,
    /// The last query, and the query or update that `known` results from.
    asked: Question,
    told: Question,
    /// Whether the query of [`super::Actions::needs_rules`] is unanswered.
    are_awaited: bool,
}

impl DirtyFile {
    pub(crate) fn rules(&self) -> Option<PlacementRules> {
        self.rules.known
    }

    /// Sets the placement rules; `None` if they are not known any more. Answers to earlier queries are ignored.
    pub(crate) fn set_rules(&mut self, rules: Option<PlacementRules>) {
        self.rules.told = self.ask_rules();
        self.rules.known = rules;
    }

    /// Numbers a query that is about to be sent.
    pub(crate) fn ask_rules(&mut self) -> Question {
        self.rules.asked += 1;
        self.rules.asked
    }

    /// Notes the answer to a query.
    pub(crate) fn rules_answered(&mut self, question: Question, rules: PlacementRules) {
        if question > self.rules.told {
            self.rules.told = question;
            self.rules.known = Some(rules);
        }
    }

    /// Returns a new query if data waits for the rules and no query is in flight.
    pub(super) fn needed_rules(&mut self) -> Option<Question> {
        if self.rules.known.is_some() || self.rules.are_awaited || !self.has_wanted() {
            return None;
        }
        self.rules.are_awaited = true;
        Some(self.ask_rules())
    }

    /// Continues with what waits for the rules, or lets it fail. If the rules were reset meanwhile,
    /// they are queried again.
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
