//! Join tokens: `mvmj2.<id>.<secret>.<root fingerprint>.<trust root digest>`, a one-time permission to enrol one node.
//!
//! The coordinator makes one, shows it once and keeps only its id and the secret's hash. The joiner learns from the
//! fingerprint which coordinator to trust, before it sends the secret, and from the digest which trust root to pin. To which node a token is bound and until when is
//! kept beside the hash, in the coordinator's store.

use std::fmt;

use aws_lc_rs::rand;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use mvm_proto::{Digest, digest};
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

/// Names the format, and makes a token easy to find for scanners that look for leaked secrets.
const PREFIX: &str = "mvmj2";
/// Tokens that named no trust root.
const FIRST_PREFIX: &str = "mvmj1";
const ID_BYTES: usize = 8;
const SECRET_BYTES: usize = 32;
/// The length of every token: prefix, id, secret, fingerprint and digest with four dots between them.
const TOKEN_LEN: usize = PREFIX.len() + 1 + 2 * ID_BYTES + 1 + SECRET_TEXT_LEN + 1 + 64 + 1 + 64;
const SECRET_TEXT_LEN: usize = 43;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error(
        "this is not a join token; copy it whole, it starts with `{PREFIX}.` and is {TOKEN_LEN} characters long"
    )]
    Shape,
    #[error(
        "this join token is of an older version and does not name the trust root to pin; make a new one with \
         `mvm coordinator token create`"
    )]
    Old,
    #[error("could not read random bytes from the system")]
    Random,
}

/// Fills `bytes` with random ones from the system.
pub fn random_bytes(bytes: &mut [u8]) -> Result<(), TokenError> {
    rand::fill(bytes).map_err(|_| TokenError::Random)
}

pub struct JoinToken {
    id: String,
    secret: Zeroizing<[u8; SECRET_BYTES]>,
    fingerprint: Digest,
    trust_root: Digest,
}

impl JoinToken {
    /// A new token for joiners that shall find the root certificate with this fingerprint and the trust root with this
    /// digest.
    pub fn generate(root_fingerprint: Digest, trust_root: Digest) -> Result<Self, TokenError> {
        let (mut id, mut secret) = ([0; ID_BYTES], Zeroizing::new([0; SECRET_BYTES]));
        rand::fill(&mut id).map_err(|_| TokenError::Random)?;
        rand::fill(&mut *secret).map_err(|_| TokenError::Random)?;
        Ok(Self { id: digest::hex(&id), secret, fingerprint: root_fingerprint, trust_root })
    }

    /// Reads the text of [`JoinToken::expose`]; white space around it is forgiven, because people paste.
    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let parts: Vec<&str> = text.trim().split('.').collect();
        if parts.first() == Some(&FIRST_PREFIX) {
            return Err(TokenError::Old);
        }
        let [PREFIX, id, secret, fingerprint, trust_root] = parts.as_slice() else {
            return Err(TokenError::Shape);
        };
        digest::from_hex::<ID_BYTES>(id).ok_or(TokenError::Shape)?;
        let fingerprint = digest::from_hex(fingerprint).ok_or(TokenError::Shape)?;
        let trust_root = digest::from_hex(trust_root).ok_or(TokenError::Shape)?;
        if secret.len() != SECRET_TEXT_LEN {
            return Err(TokenError::Shape);
        }
        let decoded = URL_SAFE_NO_PAD.decode(secret).map(Zeroizing::new).map_err(|_| TokenError::Shape)?;
        let secret = <[u8; SECRET_BYTES]>::try_from(decoded.as_slice()).map_err(|_| TokenError::Shape)?;
        Ok(Self {
            id: (*id).to_owned(),
            secret: Zeroizing::new(secret),
            fingerprint: Digest::from_bytes(fingerprint),
            trust_root: Digest::from_bytes(trust_root),
        })
    }

    /// The whole token as text: the only way to see the secret.
    #[must_use]
    pub fn expose(&self) -> Zeroizing<String> {
        let mut secret = Zeroizing::new([0; SECRET_TEXT_LEN]);
        // The buffer has exactly the encoded length, so encoding can't fail.
        let length = URL_SAFE_NO_PAD.encode_slice(*self.secret, &mut *secret).unwrap_or(0);
        let mut text = Zeroizing::new(String::with_capacity(TOKEN_LEN));
        for part in [PREFIX, ".", &self.id, "."] {
            text.push_str(part);
        }
        text.extend(secret[..length].iter().copied().map(char::from));
        text.push('.');
        text.push_str(&self.fingerprint.hex());
        text.push('.');
        text.push_str(&self.trust_root.hex());
        text
    }

    /// 16 hexadecimal digits; not secret.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The fingerprint of the root that the joiner must find at the other end.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        self.fingerprint
    }

    /// The digest of the trust root that the joiner must find in the chain that it is given, and pins.
    #[must_use]
    pub fn trust_root(&self) -> Digest {
        self.trust_root
    }

    /// What is stored in place of the secret. The secret is 32 random bytes, so a plain digest can't be guessed.
    #[must_use]
    pub fn secret_hash(&self) -> Digest {
        Digest::of(&*self.secret)
    }

    /// Whether `stored` is this token's hash; takes equally long for any answer.
    #[must_use]
    pub fn check(&self, stored: &Digest) -> bool {
        self.secret_hash().as_bytes().ct_eq(stored.as_bytes()).into()
    }
}

impl fmt::Debug for JoinToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JoinToken").field("id", &self.id).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token() -> JoinToken {
        JoinToken::generate(Digest::of(b"root"), Digest::of(b"trust")).unwrap()
    }

    #[test]
    fn a_token_reads_back_from_its_own_text_and_opens_only_its_own_hash() {
        let token = token();
        let text = token.expose();
        assert_eq!(text.len(), TOKEN_LEN);
        let read = JoinToken::parse(&format!(" {}\n", *text)).unwrap();
        assert_eq!((read.id(), read.fingerprint()), (token.id(), Digest::of(b"root")));
        assert_eq!(read.trust_root(), Digest::of(b"trust"));
        assert!(read.check(&token.secret_hash()));
        assert!(!read.check(&super::tests::token().secret_hash()));
    }

    #[test]
    fn a_token_with_any_character_changed_or_missing_opens_nothing() {
        let token = token();
        let (text, hash) = (token.expose(), token.secret_hash());
        for at in 0..text.len() {
            let mut changed = text.as_bytes().to_vec();
            changed[at] = if changed[at] == b'a' { b'b' } else { b'a' };
            let changed = JoinToken::parse(std::str::from_utf8(&changed).unwrap());
            let same = |read: &JoinToken| {
                read.check(&hash)
                    && read.id() == token.id()
                    && read.fingerprint() == token.fingerprint()
                    && read.trust_root() == token.trust_root()
            };
            assert!(!changed.is_ok_and(|read| same(&read)), "character {at}");
            assert!(JoinToken::parse(&text[..at]).is_err());
        }
    }

    #[test]
    fn a_token_that_names_no_trust_root_is_told_to_be_old() {
        let text = token().expose();
        let (rest, _digest) = text.rsplit_once('.').unwrap();
        let old = rest.replacen(PREFIX, FIRST_PREFIX, 1);
        assert_eq!(JoinToken::parse(&old).unwrap_err(), TokenError::Old);
        assert_eq!(JoinToken::parse(rest).unwrap_err(), TokenError::Shape);
    }

    #[test]
    fn the_secret_is_in_no_debug_output() {
        let token = token();
        let secret = token.expose().split('.').nth(2).unwrap().to_owned();
        assert!(!format!("{token:?} {token:#?}").contains(&secret));
        assert!(!format!("{token:?}").contains(&token.secret_hash().hex()));
    }
}
