//! Trust as it travels and as it is stored: envelopes only, so that every reader verifies it all again.

use mvm_proto::Envelope;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

/// Everything that another party needs to come to the same trust: the roots from the first on, the newest statement
/// of images. As JSON `{"roots":[envelope…],"images":[envelope?]}`. Holds no secret.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustBundle {
    /// Oldest first, without gaps.
    #[serde(with = "envelopes")]
    pub roots: Vec<Envelope>,
    #[serde(with = "at_most_one")]
    pub images: Option<Envelope>,
}

/// An envelope's JSON form inside other JSON.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Form {
    #[serde(rename = "payloadType")]
    payload_type: String,
    payload: String,
    signatures: Vec<FormSignature>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FormSignature {
    keyid: String,
    sig: String,
}

impl Form {
    fn of<E: ser::Error>(envelope: &Envelope) -> Result<Self, E> {
        serde_json::from_slice(&envelope.to_json()).map_err(E::custom)
    }

    fn envelope<E: de::Error>(&self) -> Result<Envelope, E> {
        let text = serde_json::to_vec(self).map_err(E::custom)?;
        Envelope::from_json(&text).map_err(E::custom)
    }
}

mod envelopes {
    use super::{Deserialize, Deserializer, Envelope, Form, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(envelopes: &[Envelope], to: S) -> Result<S::Ok, S::Error> {
        envelopes.iter().map(Form::of).collect::<Result<Vec<_>, S::Error>>()?.serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Envelope>, D::Error> {
        Vec::<Form>::deserialize(from)?.iter().map(Form::envelope).collect()
    }
}

mod at_most_one {
    use super::{Deserializer, Envelope, Serializer, de, envelopes};

    pub(super) fn serialize<S: Serializer>(envelope: &Option<Envelope>, to: S) -> Result<S::Ok, S::Error> {
        envelopes::serialize(envelope.as_slice(), to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Envelope>, D::Error> {
        let mut found = envelopes::deserialize(from)?;
        let one = found.pop();
        if found.is_empty() { Ok(one) } else { Err(de::Error::custom("at most one statement of images")) }
    }
}
