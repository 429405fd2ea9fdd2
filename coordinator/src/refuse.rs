//! Problems that this crate answers with, and how a problem travels over gRPC.
//!
//! Every refusal is one function with its stable code, so that the same cause reads the same over HTTP/3 and gRPC.

use mvm_proto::object::Kind;
use mvm_proto::problem::PROBLEM_METADATA;
use mvm_proto::{NodeId, Problem, TenantId};
use mvm_telemetry::current;
use tonic::metadata::MetadataValue;
use tonic::{Code, Status};

/// A problem's JSON longer than this does not fit into gRPC trailers; its list of errors is cut.
const MAX_TRAILER_BYTES: usize = 6 * 1024;

pub(crate) fn internal(error: &(dyn std::error::Error + 'static)) -> Problem {
    tracing::error!(error = %mvm_proto::text::chain(error), "could not serve a request");
    Problem::new(
        500,
        "internal",
        "the coordinator failed to carry out the request",
        "Look for the cause in the coordinator's log, then try again.",
    )
}

/// Another process opened the store since: only it places.
pub(crate) fn not_leading() -> Problem {
    let detail = "another coordinator opened the store since this one did";
    Problem::new(409, "not_leading", detail, "Stop one of the two: a store has one coordinator.")
}

/// Whether a document is refused because its node does not exist any more.
pub(crate) fn is_no_node(problem: &Problem) -> bool {
    matches!(problem.code.as_str(), "node_unknown" | "node_removed")
}

pub(crate) fn bad_request(detail: impl Into<String>) -> Problem {
    Problem::new(400, "bad_request", detail, "Correct the request.")
}

/// Said alike of what is not there and of what the caller may not see.
pub(crate) fn no_object(kind: &Kind, tenant: Option<&TenantId>, name: &str) -> Problem {
    let of = tenant.map(|tenant| format!(" of tenant {tenant}")).unwrap_or_default();
    let (lower, short) = (kind.name.to_lowercase(), kind.short);
    let detail = match name {
        "" => format!("there are no {}{of} that you may see", kind.plural),
        name => format!("there is no {lower} {}{of}", mvm_proto::json::quote(name)),
    };
    Problem::new(404, "not_found", detail, format!("List what there is: `mvm get {short}`."))
}

pub(crate) fn unknown_tenant(tenant: &TenantId) -> Problem {
    let advice = format!("Declare it first: `mvm apply` a Tenant named {tenant}.");
    Problem::new(422, "tenant_unknown", format!("there is no tenant {tenant}"), advice)
}

pub(crate) fn already_exists(object: &str) -> Problem {
    let advice = "Change it with `mvm apply`, or choose another name.";
    Problem::new(409, "already_exists", format!("{object} is there already"), advice)
}

pub(crate) fn being_deleted(object: &str) -> Problem {
    let detail = format!("{object} is being deleted");
    Problem::new(
        409,
        "being_deleted",
        detail,
        "Wait until it is gone (`mvm wait OBJECT --for=delete`), then declare it again.",
    )
}

pub(crate) fn stale(object: &str, seen: &str, newest: &str) -> Problem {
    let detail = format!("{object} was changed since: it is at version {newest}, not {seen}");
    Problem::new(
        412,
        "stale",
        detail,
        "Get it again, make the change again, and send it with the new version.",
    )
}

pub(crate) fn invalid(object: &str) -> Problem {
    Problem::new(
        422,
        "invalid",
        format!("{object} can't be stored as it is declared"),
        "Correct the fields that are named.",
    )
}

pub(crate) fn unknown_node(node: &NodeId) -> Problem {
    Problem::new(
        404,
        "node_unknown",
        format!("no node {node} is enrolled"),
        format!(
            "List nodes with `mvm node list`, or enrol it: `mvm coordinator token create --node {node}`."
        ),
    )
}

pub(crate) fn removed_node(node: &NodeId) -> Problem {
    Problem::new(
        403,
        "node_removed",
        format!("node {node} was removed from the cluster"),
        format!("To bring it back, make a new token: `mvm coordinator token create --node {node}`."),
    )
}

pub(crate) fn revoked_certificate(node: &NodeId) -> Problem {
    Problem::new(
        403,
        "certificate_revoked",
        format!("this certificate of node {node} is from before the node was removed"),
        format!(
            "Use the certificate of its newest enrolment, or make a new token: `mvm coordinator token create \
             --node {node}`."
        ),
    )
}

pub(crate) fn unknown_operator(name: &str) -> Problem {
    Problem::new(
        404,
        "operator_unknown",
        format!("no operator {name} was made or seen here"),
        "List them: `mvm coordinator operator list`. One whose certificate was made before records were kept and \
         not used since is removed with --force.",
    )
}

pub(crate) fn token_of_removed_operator() -> Problem {
    Problem::new(
        403,
        "token_revoked",
        "the operator who made this join token was removed",
        "Have another operator make one: `mvm coordinator token create --node NODE`.",
    )
}

/// `wholly`: no certificate of it counts; else only those from before it came back do not.
pub(crate) fn removed_operator(name: &str, wholly: bool) -> Problem {
    let advice =
        format!("Make a new one on the coordinator's machine: `mvm coordinator operator create {name}`.");
    match wholly {
        true => Problem::new(403, "operator_removed", format!("operator {name} was removed"), advice),
        false => Problem::new(
            403,
            "certificate_revoked",
            format!("this certificate of operator {name} is from before the operator was removed"),
            advice,
        ),
    }
}

pub(crate) fn last_operator(name: &str) -> Problem {
    Problem::new(
        409,
        "last_operator",
        format!("{name} is the last operator with a certificate that can be used"),
        "Make another first: `mvm coordinator operator create NAME --out DIR` on the coordinator's machine; or \
         repeat with --force.",
    )
}

pub(crate) fn too_many_removed(limit: usize) -> Problem {
    Problem::new(
        409,
        "too_many_removed_operators",
        format!("agents are told of at most {limit} removed operators"),
        "Replace the issuing authority and the root (`mvm coordinator root`), which ends every certificate.",
    )
}

pub(crate) fn wrong_role(found: &str, needed: &str) -> Problem {
    Problem::new(
        403,
        "wrong_role",
        format!("the role {found} may not make this request"),
        format!("Use a certificate of the role {needed}."),
    )
}

pub(crate) fn no_certificate() -> Problem {
    Problem::new(
        401,
        "certificate_required",
        "the request came without a client certificate",
        "Connect with the certificate that enrolment gave.",
    )
}

pub(crate) fn expired_certificate() -> Problem {
    Problem::new(
        401,
        "certificate_expired",
        "the certificate that the connection was made with has expired",
        "Connect again with a certificate that is in date.",
    )
}

pub(crate) fn no_credential() -> Problem {
    Problem::new(
        401,
        "credential_required",
        "the request came without a client certificate and without an API key",
        "Connect with an operator's certificate, or send `Authorization: Bearer mvm_...`.",
    )
}

pub(crate) fn not_connected(node: &NodeId) -> Problem {
    Problem::new(
        503,
        "node_not_connected",
        format!("node {node} has no session to this coordinator"),
        "Check that its agent runs and reaches the coordinator, then try again.",
    )
}

pub(crate) fn too_busy(what: &str) -> Problem {
    Problem::new(409, "conflict", format!("other requests kept changing {what}"), "Try again.")
}

/// The code of a stream that broke off, and can be attached to again.
pub(crate) const STREAM_LOST: &str = "stream_lost";

pub(crate) fn stopping() -> Problem {
    Problem::new(503, "stopping", "the coordinator is stopping", "Try again when it is back.")
}

/// The gRPC form: a code for programs that know gRPC only, the whole problem in a trailer for ours.
pub(crate) fn status(problem: &Problem) -> Status {
    let code = match problem.status {
        400 | 413 | 422 => Code::InvalidArgument,
        401 => Code::Unauthenticated,
        403 => Code::PermissionDenied,
        404 => Code::NotFound,
        409 => Code::Aborted,
        410 | 412 => Code::FailedPrecondition,
        429 => Code::ResourceExhausted,
        503 => Code::Unavailable,
        504 => Code::DeadlineExceeded,
        _ => Code::Internal,
    };
    current::fail(&problem.code);
    let mut status = Status::new(code, problem.detail.clone());
    let value = MetadataValue::from_bytes(&trailer_json(&of_request(problem.clone())));
    status.metadata_mut().insert_bin(PROBLEM_METADATA, value);
    status
}

/// A problem with the ids of the request that is refused with it.
pub(crate) fn of_request(problem: Problem) -> Problem {
    let trace_id = current::context().map(|context| context.trace_id());
    Problem { request_id: current::request_id(), trace_id, ..problem }
}

fn trailer_json(problem: &Problem) -> Vec<u8> {
    let json = |problem: &Problem| serde_json::to_vec(problem).unwrap_or_default();
    let full = json(problem);
    if full.len() <= MAX_TRAILER_BYTES {
        return full;
    }
    let mut cut = problem.clone();
    let total = cut.errors.len();
    while !cut.errors.is_empty() && json(&cut).len() > MAX_TRAILER_BYTES {
        cut.errors.truncate(cut.errors.len() / 2);
    }
    cut.detail.push_str(&format!(" (the first {} of {total} errors are shown)", cut.errors.len()));
    json(&cut)
}

#[cfg(test)]
mod tests {
    use mvm_proto::FieldError;

    use super::*;

    #[test]
    fn a_problem_survives_the_way_through_a_status() {
        let problem = unknown_node(&"n1".parse().unwrap());
        let status = status(&problem);
        let value = status.metadata().get_bin(PROBLEM_METADATA).unwrap().to_bytes().unwrap();
        assert_eq!(status.code(), Code::NotFound);
        assert_eq!(serde_json::from_slice::<Problem>(&value).unwrap(), problem);
    }

    #[test]
    fn a_problem_with_thousands_of_errors_is_cut_to_fit_a_trailer() {
        let error = FieldError { path: "tenants[0]".into(), expected: "an id".into(), found: "7".into() };
        let problem = bad_request("bad").with_errors(vec![error; 5000]);
        let status = status(&problem);
        let value = status.metadata().get_bin(PROBLEM_METADATA).unwrap().to_bytes().unwrap();
        let back: Problem = serde_json::from_slice(&value).unwrap();
        assert!(value.len() <= MAX_TRAILER_BYTES + 100 && !back.errors.is_empty());
        assert!(back.detail.contains("of 5000 errors"));
    }
}
