//! Stateless resets: they let a peer notice immediately that a process was killed and started again.
//!
//! A peer that receives a packet of an unknown connection answers with a *stateless reset* (RFC 9000, section 10.3),
//! which the sender accepts only if its token was announced on that connection. So the tokens must survive a restart:
//! they are made with a key that is derived from the identity's own. Without it, a peer would notice only when its
//! idle timeout expires.

use quinn::{ConnectionId, ConnectionIdGenerator};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use ring::hmac;

use crate::identity::Identity;

/// The same length as quinn's own ids.
const CONNECTION_ID_BYTES: usize = 8;

/// Returns the key that makes the tokens of an identity.
pub fn reset_key(identity: &Identity) -> hmac::Key {
    let own = identity.clone_key();
    let own = hmac::Key::new(hmac::HMAC_SHA256, own.secret_der());
    let derived = hmac::sign(&own, b"harvestfs stateless reset");
    hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref())
}

/// Connection ids without a mark of the process that generated them: with the ids of quinn's own generator, a new
/// process could not answer for its predecessor.
#[derive(Debug)]
pub struct RandomConnectionIds(StdRng);

impl RandomConnectionIds {
    /// Creates a generator; equal seeds give equal ids.
    pub fn new(seed: [u8; 32]) -> Self {
        Self(StdRng::from_seed(seed))
    }
}

impl ConnectionIdGenerator for RandomConnectionIds {
    fn generate_cid(&mut self) -> ConnectionId {
        let mut id = [0; CONNECTION_ID_BYTES];
        self.0.fill_bytes(&mut id);
        ConnectionId::new(&id)
    }

    fn cid_len(&self) -> usize {
        CONNECTION_ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<std::time::Duration> {
        None
    }
}
