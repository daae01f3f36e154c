//! The facts in the table of operations agree with the effects of each mutation.

use super::*;

/// The calling session invalidates what the table names, and nothing else; the effects are announced
/// to the others. Changes in the trash and in snapshots are announced to the caller, too.
pub fn check(namespace: &Namespace, mutation: &Mutation, reply: &Outcome, effects: &Effects) {
    let is_reported_as_others = effects
        .inodes
        .iter()
        .any(|&ino| namespace.is_part_of_trash(ino) || namespace.is_frozen(ino))
        || effects
            .entries
            .iter()
            .any(|(dir, _)| namespace.is_frozen(*dir));
    if is_reported_as_others {
        return;
    }
    let facts = mutation.facts();
    let entries: Vec<_> = facts.entries.into_iter().flatten().collect();
    for (dir, name) in &effects.entries {
        assert!(
            entries.contains(&(*dir, name)),
            "{mutation:?} changes {name:?} in {dir}, which its facts do not say"
        );
    }
    for &(dir, name) in &entries {
        assert!(
            effects.entries.is_empty() || effects.entries.contains(&(dir, name.clone())),
            "{mutation:?} leaves {name:?} in {dir} as it is, against its facts"
        );
    }
    let in_reply: Vec<_> = match reply {
        Outcome::Meta(reply) => reply.attrs().map(|attr| attr.ino).collect(),
        _ => Vec::new(),
    };
    let named: Vec<_> = facts.inodes.iter().collect();
    for ino in &effects.inodes {
        let is_known = entries.iter().any(|(dir, _)| dir == ino)
            || named.contains(ino)
            || in_reply.contains(ino);
        assert!(
            is_known,
            "{mutation:?} changes {ino}, which neither its facts nor {reply:?} say"
        );
    }
}
