//! Join tokens: `mvmj1.<id>.<secret>.<root fingerprint>`.

use mvm_proto::Digest;
use zeroize::Zeroizing;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    #[error("not a join token")]
    Shape,
    #[error("the system gave no random bytes")]
    Random,
}

/// A one-time permission to enrol one node.
#[derive(Debug)]
pub struct JoinToken {}

impl JoinToken {
    pub fn generate(root_fingerprint: Digest) -> Result<Self, TokenError> {
        let _ = root_fingerprint;
        todo!()
    }

    pub fn parse(text: &str) -> Result<Self, TokenError> {
        let _ = text;
        todo!()
    }

    /// The whole token as text: the only way to see the secret.
    #[must_use]
    pub fn expose(&self) -> Zeroizing<String> {
        todo!()
    }

    /// 16 hexadecimal digits; not secret.
    #[must_use]
    pub fn id(&self) -> &str {
        todo!()
    }

    /// The fingerprint of the root that the joiner must find at the other end.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        todo!()
    }

    /// What is stored in place of the secret.
    #[must_use]
    pub fn secret_hash(&self) -> Digest {
        todo!()
    }

    /// Whether `stored` is this token's hash; takes equally long for any answer.
    #[must_use]
    pub fn check(&self, stored: &Digest) -> bool {
        let _ = stored;
        todo!()
    }
}
