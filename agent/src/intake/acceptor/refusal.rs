//! Each refusal with its own code, status and way out.

use mvm_pki::trust::{TrustError, TrustRole, TrustStore};
use mvm_proto::envelope::{EnvelopeError, MAX_ENVELOPE_BYTES};
use mvm_proto::{DesiredState, Envelope, Problem};

use super::{HardLimits, wanted};
use crate::intake::ledger::LedgerError;

pub(super) fn too_large(found: usize) -> Problem {
    let detail = format!("the envelope is {found} bytes long, the limit is {MAX_ENVELOPE_BYTES}");
    Problem::new(413, "document_too_large", detail, "spread the pools over more nodes")
}

pub(super) fn broken_envelope(error: &EnvelopeError) -> Problem {
    match error {
        EnvelopeError::TooLarge { found } => too_large(*found),
        _ => Problem::new(
            400,
            "bad_envelope",
            error.to_string(),
            "send a DSSE envelope as JSON, as it was signed",
        ),
    }
}

/// What kept a document from being verified, or its images from being known.
pub(super) fn trust_problem(trust: &TrustStore, envelope: &Envelope, error: &TrustError) -> Problem {
    let general = error.to_problem();
    let (status, code) = match error {
        TrustError::NotEnoughSignatures { .. } if envelope.signatures.is_empty() => (403, "unsigned"),
        TrustError::NotEnoughSignatures { .. } if signed_in_another_role(trust, envelope) => {
            (403, "wrong_key_role")
        }
        TrustError::NotEnoughSignatures { .. } => (403, "bad_signature"),
        _ => return general,
    };
    Problem::new(status, code, general.detail, general.remediation).with_errors(general.errors)
}

/// A key that the root names, but not for documents.
fn signed_in_another_role(trust: &TrustStore, envelope: &Envelope) -> bool {
    let signed = envelope.signed_bytes();
    let others = [TrustRole::Root, TrustRole::Image].into_iter().flat_map(|role| trust.keys(role));
    others.into_iter().any(|key| envelope.signatures.iter().any(|by| key.verifies(&signed, &by.bytes)))
}

pub(super) fn refuse_limits(desired: &DesiredState, limits: &HardLimits) -> Result<(), Problem> {
    let refuse = |what: &str, found: usize, limit: usize| {
        let detail = format!("the document asks for {found} {what}, this node's own limit is {limit}");
        Err(Problem::new(
            422,
            "over_node_limit",
            detail,
            "spread them over more nodes, or raise the node's limit",
        ))
    };
    if desired.tenants.len() > limits.max_tenants {
        return refuse("tenants", desired.tenants.len(), limits.max_tenants);
    }
    let instances = wanted(desired);
    if instances > limits.max_instances {
        return refuse("instances", instances, limits.max_instances);
    }
    Ok(())
}

pub(super) fn ledger_problem(error: &LedgerError) -> Problem {
    let detail = mvm_proto::text::chain(error);
    match error {
        LedgerError::Io { cause, .. } if is_full(cause) => Problem::new(
            507,
            "storage_full",
            detail,
            "free space on the node's disk; the last accepted state is kept",
        ),
        LedgerError::Io { .. } => Problem::new(
            500,
            "storage_failed",
            detail,
            "check the node's disk; the last accepted state is kept",
        ),
        LedgerError::Damaged { .. } => Problem::new(
            500,
            "ledger_damaged",
            detail,
            "restore the file from a backup, or move it away and publish a root that resets high-water marks",
        ),
    }
}

fn is_full(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded)
}
