//! Block tokens: the right to read or write one block, signed by the namenode with a key that it shares only with the
//! datanodes (HMAC-SHA256 truncated to 128 bits, RFC 2104).

use ring::hmac;
use serde::{Deserialize, Serialize};

use crate::error::DataError;
use crate::ids::BlockId;

const MAC_BYTES: usize = 16;

/// What a token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Right {
    /// To read the block.
    Read,
    /// To create, append to, seal and read the block.
    Write,
}

/// The right to access one block until a point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockToken {
    block: BlockId,
    right: Right,
    /// Time of expiry in milliseconds since 1970.
    expires_unix_ms: u64,
    key_id: u32,
    mac: [u8; MAC_BYTES],
}

impl BlockToken {
    /// Returns when it expires, in milliseconds since 1970.
    #[must_use]
    pub fn expires_unix_ms(&self) -> u64 {
        self.expires_unix_ms
    }
}

/// A signing key as the namenode hands it to datanodes. Never printed.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenKey {
    /// The key's id, which tokens contain.
    pub key_id: u32,
    /// The secret.
    pub secret: [u8; 32],
}

impl std::fmt::Debug for TokenKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TokenKey({}, secret)", self.key_id)
    }
}

/// Signs and verifies tokens.
#[derive(Debug)]
pub struct TokenSigner {
    key_id: u32,
    key: hmac::Key,
}

impl TokenSigner {
    /// Creates a signer for one key.
    #[must_use]
    pub fn new(key: &TokenKey) -> Self {
        Self {
            key_id: key.key_id,
            key: hmac::Key::new(hmac::HMAC_SHA256, &key.secret),
        }
    }

    /// Returns the id of its key.
    #[must_use]
    pub fn key_id(&self) -> u32 {
        self.key_id
    }

    /// Signs a token.
    #[must_use]
    pub fn sign(&self, block: BlockId, right: Right, expires_unix_ms: u64) -> BlockToken {
        let tag = hmac::sign(
            &self.key,
            &message(block, right, expires_unix_ms, self.key_id),
        );
        let mut mac = [0; MAC_BYTES];
        mac.copy_from_slice(&tag.as_ref()[..MAC_BYTES]);
        BlockToken {
            block,
            right,
            expires_unix_ms,
            key_id: self.key_id,
            mac,
        }
    }

    fn matches(&self, token: &BlockToken) -> bool {
        let expected = self.sign(token.block, token.right, token.expires_unix_ms);
        // Constant time: the comparison must not reveal how much of a guess is right.
        expected
            .mac
            .iter()
            .zip(token.mac)
            .fold(0, |difference, (a, b)| difference | (a ^ b))
            == 0
    }
}

/// The keys that a datanode accepts.
#[derive(Debug, Default)]
pub struct TokenVerifier {
    signers: Vec<TokenSigner>,
}

impl TokenVerifier {
    /// Creates a verifier that accepts these keys and no others.
    #[must_use]
    pub fn new(keys: &[TokenKey]) -> Self {
        Self {
            signers: keys.iter().map(TokenSigner::new).collect(),
        }
    }

    /// Checks that `token` gives `right` to `block` at `now_unix_ms`. The right to write includes
    /// the right to read.
    ///
    /// # Errors
    /// [`DataError::BadToken`] or [`DataError::TokenExpired`].
    pub fn verify(
        &self,
        token: &BlockToken,
        block: BlockId,
        right: Right,
        now_unix_ms: u64,
    ) -> Result<(), DataError> {
        let signer = self
            .signers
            .iter()
            .find(|signer| signer.key_id == token.key_id)
            .ok_or_else(|| DataError::BadToken("signed with an unknown key".into()))?;
        if !signer.matches(token) {
            return Err(DataError::BadToken("the signature does not match".into()));
        }
        if token.block != block {
            return Err(DataError::BadToken("it is for another block".into()));
        }
        if right == Right::Write && token.right == Right::Read {
            return Err(DataError::BadToken("it allows to read only".into()));
        }
        if now_unix_ms >= token.expires_unix_ms {
            return Err(DataError::TokenExpired);
        }
        Ok(())
    }
}

fn message(block: BlockId, right: Right, expires_unix_ms: u64, key_id: u32) -> [u8; 21] {
    let mut bytes = [0; 21];
    bytes[..8].copy_from_slice(&block.0.to_le_bytes());
    bytes[8] = match right {
        Right::Read => 0,
        Right::Write => 1,
    };
    bytes[9..17].copy_from_slice(&expires_unix_ms.to_le_bytes());
    bytes[17..].copy_from_slice(&key_id.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(key_id: u32) -> TokenKey {
        TokenKey {
            key_id,
            secret: [key_id as u8; 32],
        }
    }

    #[test]
    fn verifies_its_own_and_refuses_the_rest() {
        let signer = TokenSigner::new(&key(1));
        let verifier = TokenVerifier::new(&[key(1), key(2)]);
        let block = BlockId(9);
        let token = signer.sign(block, Right::Read, 1_000);

        assert_eq!(verifier.verify(&token, block, Right::Read, 999), Ok(()));
        assert_eq!(
            verifier.verify(&token, block, Right::Read, 1_000),
            Err(DataError::TokenExpired)
        );
        for (block, right) in [(BlockId(8), Right::Read), (block, Right::Write)] {
            assert!(matches!(
                verifier.verify(&token, block, right, 0),
                Err(DataError::BadToken(_))
            ));
        }
        let mut longer = token;
        longer.expires_unix_ms += 1;
        let mut other_key = token;
        other_key.key_id = 2;
        let mut unknown_key = token;
        unknown_key.key_id = 3;
        for forged in [longer, other_key, unknown_key] {
            assert!(matches!(
                verifier.verify(&forged, block, Right::Read, 0),
                Err(DataError::BadToken(_))
            ));
        }
    }

    #[test]
    fn the_right_to_write_reads_too() {
        let token = TokenSigner::new(&key(1)).sign(BlockId(1), Right::Write, 10);
        let verifier = TokenVerifier::new(&[key(1)]);
        assert_eq!(verifier.verify(&token, BlockId(1), Right::Read, 0), Ok(()));
        assert_eq!(verifier.verify(&token, BlockId(1), Right::Write, 0), Ok(()));
    }

    #[test]
    fn a_key_does_not_print_its_secret() {
        assert_eq!(format!("{:?}", key(7)), "TokenKey(7, secret)");
    }
}
