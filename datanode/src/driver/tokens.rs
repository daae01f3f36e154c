//! Verification of tokens: each namenode signs with its own keys.

use harvestfs_protocol::error::DataError;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenVerifier};

use crate::engine::link::LinkId;

/// By link: verifiers with the keys last sent by the namenode; without a namenode, no keys. Two namenodes may use the
/// same key numbers.
#[derive(Debug)]
pub struct Tokens {
    verifiers: Vec<TokenVerifier>,
}

impl Tokens {
    /// Accepts no tokens at first, with at most so many links at a time.
    pub fn new(links_max: usize) -> Self {
        Self {
            verifiers: std::iter::repeat_with(TokenVerifier::default)
                .take(links_max)
                .collect(),
        }
    }

    /// Accepts tokens signed with these keys of the namenode on a link, and with no other keys of that namenode.
    pub fn set_keys(&mut self, LinkId(link): LinkId, keys: &[TokenKey]) {
        self.verifiers[link] = TokenVerifier::new(keys);
    }

    /// Checks the right to a block, whichever namenode granted it.
    ///
    /// # Errors
    /// As [`TokenVerifier::verify`].
    pub fn verify(
        &self,
        token: &BlockToken,
        block: BlockId,
        right: Right,
        now_unix_ms: u64,
    ) -> Result<(), DataError> {
        let mut refusal = None;
        for verifier in &self.verifiers {
            match verifier.verify(token, block, right, now_unix_ms) {
                Ok(()) => return Ok(()),
                // Only the verifier with the signing key reports this; the others do not know the key.
                Err(DataError::TokenExpired) => return Err(DataError::TokenExpired),
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        let none = || DataError::BadToken("there is no namenode".into());
        Err(refusal.unwrap_or_else(none))
    }
}

#[cfg(test)]
mod tests {
    use harvestfs_protocol::token::TokenSigner;

    use super::*;

    fn key(key_id: u32, secret: u8) -> TokenKey {
        TokenKey {
            key_id,
            secret: [secret; 32],
        }
    }

    #[test]
    fn keys_of_each_namenode_are_accepted_until_it_replaces_them() {
        let block = BlockId(9);
        let sign = |key: &TokenKey| TokenSigner::new(key).sign(block, Right::Read, 1_000);
        let mut tokens = Tokens::new(2);
        let (one, two, next) = (key(1, 1), key(1, 2), key(2, 1));
        let check = |tokens: &Tokens, key: &TokenKey, is_good: bool| {
            let token = sign(key);
            let result = tokens.verify(&token, block, Right::Read, 999);
            match is_good {
                true => assert_eq!(result, Ok(())),
                false => assert!(matches!(result, Err(DataError::BadToken(_))), "{result:?}"),
            }
            let write = tokens.verify(&token, block, Right::Write, 999);
            assert!(matches!(write, Err(DataError::BadToken(_))), "{write:?}");
            let late = tokens.verify(&token, block, Right::Read, 1_000);
            assert_eq!(late == Err(DataError::TokenExpired), is_good, "{late:?}");
        };
        check(&tokens, &one, false);
        tokens.set_keys(LinkId(0), std::slice::from_ref(&one));
        check(&tokens, &one, true);
        check(&tokens, &two, false);
        tokens.set_keys(LinkId(1), std::slice::from_ref(&two));
        check(&tokens, &one, true);
        check(&tokens, &two, true);
        tokens.set_keys(LinkId(0), std::slice::from_ref(&next));
        check(&tokens, &one, false);
        check(&tokens, &two, true);
        check(&tokens, &next, true);
    }
}
