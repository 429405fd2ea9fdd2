//! DSSE envelopes: the bytes that are signed are the bytes that are sent, and only verified bytes are parsed.
//!
//! [`Unverified`] is what arrives. [`Unverified::verify`] is the only way to a [`Verified`], which is all that a
//! ledger or a planner takes: a check leaves a type behind.

use std::borrow::Cow;
use std::marker::PhantomData;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use crate::Digest;
use crate::json::shorten;

/// The largest envelope anyone accepts, as JSON text. A 1,000-pool document is about 0.6 MiB; this is ten times that.
pub const MAX_ENVELOPE_BYTES: usize = 8 * 1024 * 1024;

/// The longest payload type or key id: both are repeated in messages, so they may not be anything at all.
pub const MAX_LABEL_BYTES: usize = 128;

/// The longest signature: ed25519 of a batch of documents with the way to its root (`mvm_pki::batch`), rounded up.
pub const MAX_SIGNATURE_BYTES: usize = 512;

/// More signatures than any threshold in use, few enough that checking them all is cheap.
pub const MAX_SIGNATURES: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Which key is said to have signed. Only a hint: the verifier looks it up among the keys that it trusts.
    pub key_id: String,
    pub bytes: Vec<u8>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    pub payload_type: String,
    pub payload: Vec<u8>,
    pub signatures: Vec<Signature>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    #[error("the envelope is {found} bytes long, the limit is {MAX_ENVELOPE_BYTES}")]
    TooLarge { found: usize },
    #[error("the envelope is not a DSSE envelope: {0}")]
    Shape(String),
    #[error("the envelope's {0} is not base64")]
    Base64(&'static str),
    #[error("the envelope's {0} is longer than {MAX_LABEL_BYTES} bytes or not printable ASCII")]
    Label(&'static str),
    #[error("the envelope carries {found} signatures, the limit is {MAX_SIGNATURES}")]
    TooManySignatures { found: usize },
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonEnvelope<'a> {
    #[serde(rename = "payloadType", borrow)]
    payload_type: Cow<'a, str>,
    /// Base64 holds nothing that JSON escapes, so the payload's text is not copied before it is decoded.
    #[serde(borrow)]
    payload: Cow<'a, str>,
    #[serde(borrow)]
    signatures: Vec<JsonSignature<'a>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonSignature<'a> {
    #[serde(borrow)]
    keyid: Cow<'a, str>,
    #[serde(borrow)]
    sig: Cow<'a, str>,
}

impl Envelope {
    /// Reads the JSON form; says nothing about who signed it.
    pub fn from_json(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        if bytes.len() > MAX_ENVELOPE_BYTES {
            return Err(EnvelopeError::TooLarge { found: bytes.len() });
        }
        let raw: JsonEnvelope<'_> = serde_json::from_slice(bytes)
            .map_err(|cause| EnvelopeError::Shape(shorten(&cause.to_string())))?;
        if raw.signatures.len() > MAX_SIGNATURES {
            return Err(EnvelopeError::TooManySignatures { found: raw.signatures.len() });
        }
        check_label("payloadType", &raw.payload_type)?;
        raw.signatures.iter().try_for_each(|s| check_label("keyid", &s.keyid))?;
        let decode = |what, text: &str| STANDARD.decode(text).map_err(|_| EnvelopeError::Base64(what));
        let signatures = raw
            .signatures
            .into_iter()
            .map(|s| Ok(Signature { bytes: decode("signature", &s.sig)?, key_id: s.keyid.into_owned() }))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            payload: decode("payload", &raw.payload)?,
            payload_type: raw.payload_type.into_owned(),
            signatures,
        })
    }

    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let signatures = self
            .signatures
            .iter()
            .map(|s| JsonSignature { keyid: Cow::Borrowed(&s.key_id), sig: STANDARD.encode(&s.bytes).into() })
            .collect();
        let raw = JsonEnvelope {
            payload_type: Cow::Borrowed(&self.payload_type),
            payload: STANDARD.encode(&self.payload).into(),
            signatures,
        };
        // Strings and lists of strings always serialise.
        serde_json::to_vec(&raw).unwrap_or_default()
    }

    /// What a signature of its own is of: DSSE's pre-authentication encoding of type and payload.
    #[must_use]
    pub fn signed_bytes(&self) -> Vec<u8> {
        pre_authentication_encoding(&self.payload_type, &self.payload)
    }

    /// What its signatures are held against.
    #[must_use]
    pub fn signed(&self) -> Signed<'_> {
        Signed { payload_type: &self.payload_type, payload: &self.payload, digest: Digest::of(&self.payload) }
    }
}

fn check_label(what: &'static str, text: &str) -> Result<(), EnvelopeError> {
    let fits = text.len() <= MAX_LABEL_BYTES && text.bytes().all(|b| b.is_ascii_graphic());
    if fits { Ok(()) } else { Err(EnvelopeError::Label(what)) }
}

/// `DSSEv1 <len> <type> <len> <payload>`: the lengths keep type and payload from running into each other.
#[must_use]
pub fn pre_authentication_encoding(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {} {} ", payload_type.len(), payload_type, payload.len());
    let mut out = Vec::with_capacity(head.len() + payload.len());
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(payload);
    out
}

/// What an envelope may carry.
pub trait Payload: Sized {
    const PAYLOAD_TYPE: &'static str;
    type Error;
    /// Reads the payload's bytes. Called on verified bytes only, once.
    fn parse(bytes: &[u8]) -> Result<Self, Self::Error>;
}

/// Type and payload of an envelope, and the payload's digest, which is worked out once.
#[derive(Debug, Clone, Copy)]
pub struct Signed<'a> {
    pub payload_type: &'a str,
    pub payload: &'a [u8],
    pub digest: Digest,
}

impl Signed<'_> {
    /// What a signature of its own is of.
    #[must_use]
    pub fn encoding(&self) -> Vec<u8> {
        pre_authentication_encoding(self.payload_type, self.payload)
    }
}

/// Decides whether these signatures over `signed` suffice. Implemented by `mvm_pki` for each role.
pub trait CheckSignatures {
    type Error;
    fn check(&self, signed: &Signed<'_>, signatures: &[Signature]) -> Result<(), Self::Error>;
}

#[derive(Debug, thiserror::Error)]
pub enum VerifyError<S, P> {
    #[error("the envelope holds {found:?}, not {expected}")]
    PayloadType { expected: &'static str, found: String },
    #[error("the signatures do not suffice")]
    Signatures(#[source] S),
    #[error("the signed payload is not valid")]
    Payload(#[source] P),
}

/// An envelope that claims to hold a `T`.
#[derive(Debug, Clone)]
pub struct Unverified<T> {
    envelope: Envelope,
    claims: PhantomData<fn() -> T>,
}

/// A `T` that was read from bytes whose signatures sufficed.
#[derive(Debug, Clone)]
pub struct Verified<T> {
    value: T,
    envelope: Envelope,
    digest: Digest,
}

impl<T: Payload> Unverified<T> {
    #[must_use]
    pub fn new(envelope: Envelope) -> Self {
        Self { envelope, claims: PhantomData }
    }

    pub fn from_json(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        Envelope::from_json(bytes).map(Self::new)
    }

    /// The payload before any check, for bootstrapping trust from itself and for error messages; never for acting on.
    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    /// Checks type, then signatures, and only then reads the payload.
    pub fn verify<C: CheckSignatures>(
        self,
        check: &C,
    ) -> Result<Verified<T>, VerifyError<C::Error, T::Error>> {
        if self.envelope.payload_type != T::PAYLOAD_TYPE {
            let found = self.envelope.payload_type.chars().take(100).collect();
            return Err(VerifyError::PayloadType { expected: T::PAYLOAD_TYPE, found });
        }
        let signed = self.envelope.signed();
        let digest = signed.digest;
        check.check(&signed, &self.envelope.signatures).map_err(VerifyError::Signatures)?;
        let value = T::parse(&self.envelope.payload).map_err(VerifyError::Payload)?;
        Ok(Verified { value, envelope: self.envelope, digest })
    }
}

impl<T> Verified<T> {
    #[must_use]
    pub fn get(&self) -> &T {
        &self.value
    }

    #[must_use]
    pub fn into_inner(self) -> T {
        self.value
    }

    #[must_use]
    pub fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    /// The digest of the signed payload: the document's name for its content.
    #[must_use]
    pub fn digest(&self) -> Digest {
        self.digest
    }
}
