//! Telling peers at once that the process they spoke with is gone.
//!
//! A process that was killed says no goodbye, and the one that takes its port can't read the packets that still come.
//! QUIC's answer is the stateless reset: 16 bytes made from a secret key and the connection id of the packet. The peer
//! was given the same bytes when it connected, recognises them, and ends the connection. That works only if the key
//! outlives the process, hence [`ResetKey`].
//!
//! The sender of a packet to an id that is not in use is told that id's bytes. So ids must never come twice under one
//! key: a stranger could collect the bytes of many ids and end the connections that get them later. quinn's own ids
//! have 24 random bits, which is too few for a key that stays; [`ConnectionIds`] have 80. They also carry a seal, so
//! that packets to ids which no server with this key gave out are dropped and not answered.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::{hmac, rand};
use quinn::{ConnectionId, ConnectionIdGenerator, EndpointConfig};
use quinn_proto::InvalidCid;
use zeroize::Zeroizing;

/// No pause between resets. A fleet sends at the same instant and repeats itself ever more slowly, so any pause leaves
/// some to their idle timeout. It is the seal that keeps garbage from being answered, and each reset is shorter than the
/// packet that asked for it.
const RESET_INTERVAL: Duration = Duration::ZERO;

/// Bytes of a connection id that never come again.
const UNIQUE_BYTES: usize = 10;
/// Bytes of it that prove who gave it out. A guess that hits one time in 2^48 gains a packet of no use.
const SEAL_BYTES: usize = 6;
const ID_BYTES: usize = UNIQUE_BYTES + SEAL_BYTES;

/// One key is kept, and one is made of it for each use.
const RESET_USE: &[u8] = b"mvm stateless reset";
const SEAL_USE: &[u8] = b"mvm connection id seal";

/// The system gave no random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("could not read random bytes from the system")]
pub struct NoRandomness;

/// What makes a server's resets believable. Kept across restarts, secret, and used by one server at a time: another that
/// had it would end the first one's connections whenever their packets came its way.
#[derive(Clone)]
pub struct ResetKey(Zeroizing<[u8; Self::BYTES]>);

impl ResetKey {
    pub const BYTES: usize = 32;

    pub fn generate() -> Result<Self, NoRandomness> {
        let mut bytes = Zeroizing::new([0; Self::BYTES]);
        rand::fill(&mut *bytes).map_err(|_| NoRandomness)?;
        Ok(Self(bytes))
    }

    /// The key that [`ResetKey::expose`] gave; `None` when the length is another.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let mut key = Zeroizing::new([0; Self::BYTES]);
        (bytes.len() == Self::BYTES).then(|| {
            key.copy_from_slice(bytes);
            Self(key)
        })
    }

    /// The secret itself, to be kept where only its owner reads it.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &*self.0
    }

    fn for_use(&self, what: &[u8]) -> hmac::Key {
        let kept = hmac::Key::new(hmac::HMAC_SHA256, self.expose());
        hmac::Key::new(hmac::HMAC_SHA256, hmac::sign(&kept, what).as_ref())
    }
}

impl fmt::Debug for ResetKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ResetKey(..)")
    }
}

/// The settings of an endpoint whose resets are made with `key`.
pub(crate) fn endpoint_config(key: &ResetKey) -> Result<EndpointConfig, NoRandomness> {
    let mut seed = Zeroizing::new([0; ResetKey::BYTES]);
    rand::fill(&mut *seed).map_err(|_| NoRandomness)?;
    let seal = key.for_use(SEAL_USE);
    let mut config = EndpointConfig::new(Arc::new(key.for_use(RESET_USE)));
    config
        .min_reset_interval(RESET_INTERVAL)
        .cid_generator(move || Box::new(ConnectionIds::new(&*seed, seal.clone())));
    Ok(config)
}

/// Connection ids that can't be guessed and do not come again, in this process or the next: a keyed hash of a
/// counter, with a key of this process's own. Making one can't fail.
struct ConnectionIds {
    unique: hmac::Key,
    made: u64,
    seal: hmac::Key,
}

impl ConnectionIds {
    fn new(seed: &[u8], seal: hmac::Key) -> Self {
        Self { unique: hmac::Key::new(hmac::HMAC_SHA256, seed), made: 0, seal }
    }
}

impl ConnectionIdGenerator for ConnectionIds {
    fn generate_cid(&mut self) -> ConnectionId {
        self.made += 1;
        let unique = hmac::sign(&self.unique, &self.made.to_be_bytes());
        let unique = &unique.as_ref()[..UNIQUE_BYTES];
        let mut id = [0; ID_BYTES];
        id[..UNIQUE_BYTES].copy_from_slice(unique);
        id[UNIQUE_BYTES..].copy_from_slice(&hmac::sign(&self.seal, unique).as_ref()[..SEAL_BYTES]);
        ConnectionId::new(&id)
    }

    fn validate(&self, id: &ConnectionId) -> Result<(), InvalidCid> {
        let (unique, seal) = id.split_at_checked(UNIQUE_BYTES).ok_or(InvalidCid)?;
        // The time that this takes tells nothing: a seal is no secret to who was given the id.
        let right = hmac::sign(&self.seal, unique).as_ref()[..SEAL_BYTES] == *seal;
        right.then_some(()).ok_or(InvalidCid)
    }

    fn cid_len(&self) -> usize {
        ID_BYTES
    }

    fn cid_lifetime(&self) -> Option<Duration> {
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_key_comes_back_from_its_bytes_and_never_shows_in_logs() {
        let key = ResetKey::from_bytes(&[7; ResetKey::BYTES]).expect("a key");
        assert_eq!(key.expose(), [7; ResetKey::BYTES]);
        assert_eq!(format!("{key:?}"), "ResetKey(..)");
        assert_ne!(ResetKey::generate().expect("one").expose(), ResetKey::generate().expect("two").expose());
    }

    #[test]
    fn bytes_of_another_length_are_no_key() {
        for length in [0, ResetKey::BYTES - 1, ResetKey::BYTES + 1] {
            assert!(ResetKey::from_bytes(&vec![7; length]).is_none(), "{length}");
        }
    }

    fn ids(seed: u8, key: u8) -> ConnectionIds {
        let key = ResetKey::from_bytes(&[key; ResetKey::BYTES]).expect("a key");
        ConnectionIds::new(&[seed; 32], key.for_use(SEAL_USE))
    }

    #[test]
    fn connection_ids_differ_within_a_process_and_between_processes() {
        let (mut one, mut two) = (ids(1, 7), ids(2, 7));
        let made: HashSet<ConnectionId> =
            (0..1000).flat_map(|_| [one.generate_cid(), two.generate_cid()]).collect();
        assert_eq!(made.len(), 2000);
        assert!(made.iter().all(|id| id.len() == one.cid_len()));
    }

    #[test]
    fn ids_of_the_process_before_are_known_and_no_others() {
        let mut before = ids(1, 7);
        let id = before.generate_cid();
        assert!(ids(2, 7).validate(&id).is_ok());
        assert!(ids(2, 8).validate(&id).is_err(), "another key");
        let mut forged = id.to_vec();
        forged[0] ^= 1;
        assert!(ids(2, 7).validate(&ConnectionId::new(&forged)).is_err());
        assert!(ids(2, 7).validate(&ConnectionId::new(&id[..UNIQUE_BYTES])).is_err());
        assert!(ids(2, 7).validate(&ConnectionId::new(&[])).is_err());
    }
}
