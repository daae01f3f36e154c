//! What lets a peer notice at once that a process was killed and started again.
//!
//! A peer that gets a packet of a connection that it does not know answers with a *stateless reset*
//! (RFC 9000, section 10.3), which the sender accepts only if its token was announced on that
//! connection. So the tokens must survive a restart: they are made with a key that is derived from
//! the identity's own. Without it, a peer finds out when its idle timeout is over.

use quinn::{ConnectionId, ConnectionIdGenerator};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use ring::hmac;

use crate::identity::Identity;

/// As long as quinn's own.
const CONNECTION_ID_BYTES: usize = 8;

/// The key that makes the tokens of an identity.
pub fn reset_key(identity: &Identity) -> hmac::Key {
    let own = identity.clone_key();
    let own = hmac::Key::new(hmac::HMAC_SHA256, own.secret_der());
    let derived = hmac::sign(&own, b"harvestfs stateless reset");
    hmac::Key::new(hmac::HMAC_SHA256, derived.as_ref())
}

/// Connection ids that carry no mark of the process that made them: quinn's own generator does not
/// let the next process answer for the last one's.
#[derive(Debug)]
pub struct RandomConnectionIds(StdRng);

impl RandomConnectionIds {
    /// The same ones with the same seed.
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
