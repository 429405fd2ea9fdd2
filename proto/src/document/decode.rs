//! Reading documents.
use super::{DesiredState, DocumentErrors, SignedDocument};

pub(super) fn local(_bytes: &[u8]) -> Result<DesiredState, DocumentErrors> {
    todo!()
}

pub(super) fn signed(_bytes: &[u8]) -> Result<SignedDocument, DocumentErrors> {
    todo!()
}
