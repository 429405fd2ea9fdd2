//! A document as what changed of the one before: made of two payloads, and made into an envelope again.

use super::session::v1::{DocumentDelta, DocumentPiece, DocumentSignature};
use crate::Digest;
use crate::document::{DOCUMENT_PAYLOAD_TYPE, MAX_DOCUMENT_BYTES};
use crate::envelope::{Envelope, MAX_LABEL_BYTES, MAX_SIGNATURE_BYTES, MAX_SIGNATURES, Signature};
use crate::patch::{self, PatchError, Piece};

/// The largest delta: more than this of a document changed, and it is sent whole.
pub const MAX_DELTA_BYTES: usize = 256 * 1024;

/// Why a delta makes no envelope. The document is to be asked for whole then.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DeltaError {
    #[error("it is of another document than the one that is here")]
    OtherBase,
    #[error("its pieces do not fit")]
    Pieces(#[from] PatchError),
    #[error("it makes another payload than it says")]
    OtherDigest,
    #[error("its signatures are too many or too long")]
    Signatures,
}

impl DocumentDelta {
    /// What is to be sent to a node that has the payload `old`; none where the whole document is about as short. With each comes the
    /// digest of its payload.
    #[must_use]
    pub fn between((old, base): (&[u8], Digest), (new, digest): (&Envelope, Digest)) -> Option<Self> {
        let number = |number: usize| u32::try_from(number).ok();
        let pieces = patch::diff(old, &new.payload)?;
        let pieces: Option<Vec<_>> = pieces
            .into_iter()
            .map(|Piece { from, length, insert }| {
                Some(DocumentPiece { from: number(from)?, length: number(length)?, insert })
            })
            .collect();
        let signatures = new.signatures.iter().map(|signature| DocumentSignature {
            key_id: signature.key_id.clone(),
            signature: signature.bytes.clone(),
        });
        let delta = Self {
            base: base.to_string(),
            digest: digest.to_string(),
            pieces: pieces?,
            signatures: signatures.collect(),
            traceparent: String::new(),
        };
        (prost::Message::encoded_len(&delta) <= MAX_DELTA_BYTES).then_some(delta)
    }

    /// The envelope that was signed, made of the payload `old`. Says nothing about who signed it.
    pub fn envelope(self, old: &[u8]) -> Result<Envelope, DeltaError> {
        if !names(&self.base, old) {
            return Err(DeltaError::OtherBase);
        }
        let fits = |signature: &DocumentSignature| {
            signature.key_id.len() <= MAX_LABEL_BYTES && signature.signature.len() <= MAX_SIGNATURE_BYTES
        };
        if self.signatures.len() > MAX_SIGNATURES || !self.signatures.iter().all(fits) {
            return Err(DeltaError::Signatures);
        }
        let wide = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let pieces: Vec<Piece> = self
            .pieces
            .into_iter()
            .map(|piece| Piece { from: wide(piece.from), length: wide(piece.length), insert: piece.insert })
            .collect();
        let payload = patch::apply(old, &pieces, MAX_DOCUMENT_BYTES)?;
        if !names(&self.digest, &payload) {
            return Err(DeltaError::OtherDigest);
        }
        let signatures = self
            .signatures
            .into_iter()
            .map(|signature| Signature { key_id: signature.key_id, bytes: signature.signature })
            .collect();
        Ok(Envelope { payload_type: DOCUMENT_PAYLOAD_TYPE.to_owned(), payload, signatures })
    }
}

fn names(digest: &str, payload: &[u8]) -> bool {
    digest.parse::<Digest>().is_ok_and(|digest| digest == Digest::of(payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(payload: &[u8]) -> Envelope {
        let signature = Signature { key_id: "k".to_owned(), bytes: vec![7; 64] };
        Envelope {
            payload_type: DOCUMENT_PAYLOAD_TYPE.to_owned(),
            payload: payload.to_vec(),
            signatures: vec![signature],
        }
    }

    fn between(old: &[u8], new: &[u8]) -> DocumentDelta {
        DocumentDelta::between((old, Digest::of(old)), (&envelope(new), Digest::of(new))).unwrap()
    }

    fn texts() -> (Vec<u8>, Vec<u8>) {
        let text =
            |number: u32| format!("{{\"generation\":{number},{}}}", "\"pool\":1,".repeat(300)).into_bytes();
        (text(1), text(22))
    }

    #[test]
    fn a_delta_makes_the_very_envelope_that_was_signed() {
        let (old, new) = texts();
        let delta = between(&old, &new);
        assert!(prost::Message::encoded_len(&delta) < 400);
        assert_eq!(delta.envelope(&old).unwrap(), envelope(&new));
    }

    #[test]
    fn a_delta_of_another_document_or_to_another_one_makes_nothing() {
        let (old, new) = texts();
        let delta = between(&old, &new);
        assert_eq!(delta.clone().envelope(&new), Err(DeltaError::OtherBase));
        let mut changed = delta.clone();
        changed.pieces[0].insert.push(b'!');
        assert_eq!(changed.envelope(&old), Err(DeltaError::OtherDigest));
        let mut signed_often = delta.clone();
        signed_often.signatures = vec![delta.signatures[0].clone(); MAX_SIGNATURES + 1];
        assert_eq!(signed_often.envelope(&old), Err(DeltaError::Signatures));
        let mut outside = delta;
        outside.pieces[0].from = u32::MAX;
        assert_eq!(outside.envelope(&old), Err(DeltaError::Pieces(PatchError::Outside)));
    }
}
