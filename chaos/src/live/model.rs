//! What was promised to a client: the names and bytes that were acknowledged.

use std::collections::BTreeMap;
use std::fmt::Write;

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

/// The contents of a file, generated from a seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// Decides the bytes.
    pub seed: u64,
    /// The number of bytes.
    pub len: usize,
}

impl Content {
    /// The bytes.
    pub fn bytes(self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        SmallRng::seed_from_u64(self.seed).fill(&mut bytes[..]);
        bytes
    }
}

/// What is promised of a name, depending on whether its last change was acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Promise {
    /// It has these contents.
    Holds(Content),
    /// An unlink was not answered: it has these contents, or is removed.
    HoldsOrGone(Content),
    /// A write was not answered: nothing is promised.
    Anything,
}

/// Two names, of which one has the contents.
pub(crate) type Either = (String, String, Content);

/// The names in one client's directory.
#[derive(Debug, Default)]
pub(crate) struct Model {
    names: BTreeMap<String, Promise>,
    /// Renames that were not answered: exactly one of the two names has the contents.
    either: Vec<Either>,
    /// All writes, acknowledged or not, to identify what was read instead of the expected contents.
    written: Vec<(String, Content)>,
}

impl Model {
    /// Fewer bytes could match several contents by chance.
    const TELLING_BYTES: usize = 8;

    /// Notes a write, and whether it was acknowledged.
    pub fn wrote(&mut self, name: &str, content: Content, acknowledged: bool) {
        let promise = if acknowledged {
            Promise::Holds(content)
        } else {
            Promise::Anything
        };
        self.names.insert(name.to_owned(), promise);
        self.written.push((name.to_owned(), content));
    }

    /// How the bytes read differ from the expected ones; `None` if they do not.
    pub fn difference(&self, expected: Content, read: &[u8]) -> Option<String> {
        let wanted = expected.bytes();
        if read == wanted {
            return None;
        }
        let same = read.iter().zip(&wanted).take_while(|(a, b)| a == b);
        let (same, zeros) = (same.count(), read.iter().filter(|&&byte| byte == 0).count());
        let mut text = format!(
            "{} bytes instead of {}, other ones from {same} on, {zeros} of all zero",
            read.len(),
            wanted.len()
        );
        let known = self.written.iter().enumerate().find(|(_, (_, content))| {
            read.len() >= Self::TELLING_BYTES && content.bytes().starts_with(read)
        });
        if let Some((index, (name, _))) = known {
            let _ = write!(
                text,
                "; that is write {} of {}, to {name}",
                index + 1,
                self.written.len()
            );
        }
        Some(text)
    }

    /// Notes an unlink of a name that [`Model::files`] lists, and whether it was acknowledged.
    pub fn unlinked(&mut self, name: &str, acknowledged: bool) {
        if acknowledged {
            self.names.remove(name);
        } else if let Some(Promise::Holds(content)) = self.names.get(name).copied() {
            self.names
                .insert(name.to_owned(), Promise::HoldsOrGone(content));
        }
    }

    /// Notes a rename of a name that [`Model::files`] lists to an unused name, and whether it was acknowledged.
    pub fn renamed(&mut self, from: &str, to: &str, acknowledged: bool) {
        if let Some(Promise::Holds(content)) = self.names.remove(from) {
            if acknowledged {
                self.names.insert(to.to_owned(), Promise::Holds(content));
            } else {
                self.either.push((from.to_owned(), to.to_owned(), content));
            }
        }
    }

    /// The names with known contents.
    pub fn files(&self) -> Vec<(String, Content)> {
        let holds = |(name, promise): (&String, &Promise)| match promise {
            Promise::Holds(content) => Some((name.clone(), *content)),
            _ => None,
        };
        self.names.iter().filter_map(holds).collect()
    }

    /// The promises of names, and contents that must be under one of two names.
    pub fn promises(&self) -> (&BTreeMap<String, Promise>, &[Either]) {
        (&self.names, &self.either)
    }

    /// Whether this name may exist.
    pub fn may_exist(&self, name: &str) -> bool {
        let either = self.either.iter();
        self.names.contains_key(name) || either.clone().any(|(a, b, _)| a == name || b == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_instead_is_told() {
        let mut model = Model::default();
        let [a, b] = [1, 2].map(|seed| Content { seed, len: 100 });
        model.wrote("a", a, true);
        model.wrote("b", b, true);
        assert_eq!(model.difference(a, &a.bytes()), None);
        let of_b = model.difference(a, &b.bytes()).unwrap();
        assert!(of_b.ends_with("; that is write 2 of 2, to b"), "{of_b}");
        let mut damaged = a.bytes();
        damaged[7] ^= 1;
        let damaged = model.difference(a, &damaged).unwrap();
        assert!(damaged.contains("other ones from 7 on"), "{damaged}");
        assert!(!damaged.contains("that is write"), "{damaged}");
        let empty = model.difference(a, &[]).unwrap();
        assert!(empty.starts_with("0 bytes instead of 100"), "{empty}");
    }

    #[test]
    fn only_what_was_acknowledged_is_promised() {
        let content = Content { seed: 1, len: 10 };
        assert_eq!(content.bytes(), content.bytes());
        assert_ne!(content.bytes(), Content { seed: 2, len: 10 }.bytes());
        let mut model = Model::default();
        model.wrote("a", content, true);
        model.wrote("b", content, false);
        assert_eq!(model.files(), [("a".to_owned(), content)]);
        model.renamed("a", "c", true);
        assert!(!model.may_exist("a") && model.may_exist("b"));
        model.renamed("c", "d", false);
        assert!(model.may_exist("c") && model.may_exist("d") && model.files().is_empty());
        assert_eq!(model.promises().1.len(), 1);
        model.wrote("e", content, true);
        model.unlinked("e", false);
        assert_eq!(model.promises().0["e"], Promise::HoldsOrGone(content));
        model.wrote("f", content, true);
        model.unlinked("f", true);
        assert!(!model.may_exist("f"));
    }
}
