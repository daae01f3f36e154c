//! The keys that sign block tokens: kept in a file that only its owner may read, rotated, and distributed to
//! datanodes.
//!
//! A new key signs only after every datanode that is alive has had time to receive it, and stays valid until the last
//! token that it signed has expired. So neither a rotation nor a restart of the namenode ever makes a token invalid
//! early.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use harvestfs_protocol::durable;
use harvestfs_protocol::ids::BlockId;
use harvestfs_protocol::token::{BlockToken, Right, TokenKey, TokenSigner};
use rand::Rng;
use serde::{Deserialize, Serialize};

/// How long a new key waits before it signs: several heartbeats, with which datanodes receive it.
const ACTIVATION_MS: u64 = 30_000;

const FORMAT_VERSION: u8 = 1;

/// Largest file of keys that is read: a handful of keys take far less.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// Why the keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenKeyError {
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// Others may read the keys.
    #[error("{} can be read by others (mode {mode:03o}): run `chmod 600` on it", path.display())]
    Exposed {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The content differs from what was written.
    #[error(
        "{} is damaged ({reason}): remove it, and new keys are made; clients then ask again for \
         the tokens they have",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

/// One key and when it was made.
#[derive(Clone, Serialize, Deserialize)]
struct StoredKey {
    key: TokenKey,
    made_unix_ms: u64,
}

/// The keys, and a signer with one of them.
pub(crate) struct TokenKeys {
    path: PathBuf,
    lifetime_ms: u64,
    /// Oldest first; never empty.
    keys: Vec<StoredKey>,
    signer: TokenSigner,
}

impl TokenKeys {
    /// Loads the keys, or makes the first one. Tokens are valid for `lifetime_ms`, and a key signs
    /// for as long.
    pub(crate) fn open(
        path: PathBuf,
        lifetime_ms: u64,
        now_unix_ms: u64,
        rng: &mut impl Rng,
    ) -> Result<Self, TokenKeyError> {
        let mut keys = load(&path)?;
        if keys.is_empty() {
            keys.push(new_key(1, now_unix_ms, rng));
            save(&path, &keys)?;
        }
        let signer = TokenSigner::new(&signing_key(&keys, now_unix_ms).key);
        let mut this = Self {
            path,
            lifetime_ms,
            keys,
            signer,
        };
        this.rotate(now_unix_ms, rng)?;
        Ok(this)
    }

    /// When it is time, makes the next key and drops keys without valid tokens.
    pub(crate) fn rotate(
        &mut self,
        now_unix_ms: u64,
        rng: &mut impl Rng,
    ) -> Result<(), TokenKeyError> {
        let mut keys = self.keys.clone();
        let newest = &keys[keys.len() - 1];
        if newest.made_unix_ms + self.lifetime_ms <= now_unix_ms {
            let key_id = newest.key.key_id.wrapping_add(1);
            keys.push(new_key(key_id, now_unix_ms, rng));
        }
        // A key signs until the next one is active; its last token is valid for a lifetime after that.
        while keys.len() > 1
            && keys[1].made_unix_ms + ACTIVATION_MS + self.lifetime_ms <= now_unix_ms
        {
            keys.remove(0);
        }
        let changed =
            keys.len() != self.keys.len() || keys[0].key.key_id != self.keys[0].key.key_id;
        if changed {
            save(&self.path, &keys)?;
            self.keys = keys;
        }
        let signing = &signing_key(&self.keys, now_unix_ms).key;
        if signing.key_id != self.signer.key_id() {
            self.signer = TokenSigner::new(signing);
        }
        Ok(())
    }

    /// Returns a token that is valid for the whole lifetime from now on.
    pub(crate) fn sign(&self, block: BlockId, right: Right, now_unix_ms: u64) -> BlockToken {
        self.signer
            .sign(block, right, now_unix_ms + self.lifetime_ms)
    }

    /// All keys that tokens may be signed with, for datanodes.
    pub(crate) fn all(&self) -> Vec<TokenKey> {
        self.keys.iter().map(|stored| stored.key.clone()).collect()
    }
}

/// The newest key that datanodes have had time to receive; the oldest if none is old enough.
fn signing_key(keys: &[StoredKey], now_unix_ms: u64) -> &StoredKey {
    keys.iter()
        .rev()
        .find(|stored| stored.made_unix_ms + ACTIVATION_MS <= now_unix_ms)
        .unwrap_or(&keys[0])
}

fn new_key(key_id: u32, made_unix_ms: u64, rng: &mut impl Rng) -> StoredKey {
    let mut secret = [0; 32];
    rng.fill_bytes(&mut secret);
    StoredKey {
        key: TokenKey { key_id, secret },
        made_unix_ms,
    }
}

fn load(path: &Path) -> Result<Vec<StoredKey>, TokenKeyError> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("inspect", path, error)),
    };
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(TokenKeyError::Exposed {
            path: path.to_owned(),
            mode,
        });
    }
    let damaged = |reason: String| TokenKeyError::Damaged {
        path: path.to_owned(),
        reason,
    };
    if metadata.len() > FILE_BYTES_MAX {
        return Err(damaged(format!("larger than {FILE_BYTES_MAX} bytes")));
    }
    let bytes = fs::read(path).map_err(|error| io_error("read", path, error))?;
    let Some((body, checksum)) = bytes.split_last_chunk::<4>() else {
        return Err(damaged("too short".to_owned()));
    };
    if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
        return Err(damaged("the checksum does not match".to_owned()));
    }
    let (version, keys): (u8, Vec<StoredKey>) =
        postcard::from_bytes(body).map_err(|error| damaged(error.to_string()))?;
    if version != FORMAT_VERSION {
        return Err(damaged(format!("format version {version} is not known")));
    }
    if keys.is_empty() {
        return Err(damaged("no key in it".to_owned()));
    }
    Ok(keys)
}

fn save(path: &Path, keys: &[StoredKey]) -> Result<(), TokenKeyError> {
    let mut bytes = postcard::to_stdvec(&(FORMAT_VERSION, keys))
        .map_err(|error| io_error("encode", path, io::Error::other(error)))?;
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    durable::replace_file(path, &bytes, 0o600).map_err(|error| io_error("write", path, error))
}

fn io_error(action: &'static str, path: &Path, source: io::Error) -> TokenKeyError {
    TokenKeyError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use harvestfs_protocol::token::TokenVerifier;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    const HOUR_MS: u64 = 3_600_000;
    const BLOCK: BlockId = BlockId(1);

    fn open(path: &Path, now_unix_ms: u64) -> Result<TokenKeys, TokenKeyError> {
        let mut rng = StdRng::seed_from_u64(now_unix_ms);
        TokenKeys::open(path.to_owned(), HOUR_MS, now_unix_ms, &mut rng)
    }

    fn accepts(keys: &TokenKeys, token: &BlockToken, now_unix_ms: u64) -> bool {
        TokenVerifier::new(&keys.all())
            .verify(token, BLOCK, Right::Read, now_unix_ms)
            .is_ok()
    }

    #[test]
    fn tokens_outlive_restarts_and_rotations_until_they_expire() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token-keys");
        let mut now_ms = 1_000;
        let mut issued = Vec::new();
        for _ in 0..60 {
            let keys = open(&path, now_ms).unwrap();
            assert!(keys.all().len() <= 3);
            issued.push(keys.sign(BLOCK, Right::Read, now_ms));
            for token in &issued {
                let valid = token.expires_unix_ms() > now_ms;
                assert_eq!(accepts(&keys, token, now_ms), valid, "at {now_ms}");
            }
            now_ms += HOUR_MS / 10;
        }
    }

    #[test]
    fn a_new_key_signs_only_when_datanodes_know_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token-keys");
        let mut keys = open(&path, 0).unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        let known = keys.all();
        keys.rotate(HOUR_MS, &mut rng).unwrap();
        assert_eq!(keys.all().len(), 2);
        let token = keys.sign(BLOCK, Right::Read, HOUR_MS);
        let old = TokenVerifier::new(&known);
        assert_eq!(old.verify(&token, BLOCK, Right::Read, HOUR_MS), Ok(()));
        keys.rotate(HOUR_MS + ACTIVATION_MS, &mut rng).unwrap();
        let token = keys.sign(BLOCK, Right::Read, HOUR_MS);
        assert!(old.verify(&token, BLOCK, Right::Read, HOUR_MS).is_err());
        assert!(accepts(&keys, &token, HOUR_MS));
    }

    #[test]
    fn the_file_is_for_the_owner_only_and_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token-keys");
        open(&path, 0).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode, 0o600);

        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(matches!(open(&path, 0), Err(TokenKeyError::Exposed { .. })));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();

        let good = fs::read(&path).unwrap();
        for length in 0..good.len() {
            fs::write(&path, &good[..length]).unwrap();
            assert!(matches!(open(&path, 0), Err(TokenKeyError::Damaged { .. })));
        }
        for byte in 0..good.len() {
            let mut bad = good.clone();
            bad[byte] ^= 0x40;
            fs::write(&path, &bad).unwrap();
            assert!(matches!(open(&path, 0), Err(TokenKeyError::Damaged { .. })));
        }
    }
}
