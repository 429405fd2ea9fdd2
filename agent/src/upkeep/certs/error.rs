//! What can go wrong with a node's certificates, and what to do about each.

use std::path::PathBuf;
use std::time::Duration;

use mvm_pki::{BoxError, CredentialError, Refusal, TrustError};
use mvm_proto::{ClusterId, Digest, Problem, Timestamp};
use mvm_transport::{ConnectError, RequestError, ResolveError, Target};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CertsError {
    #[error("this node has no certificate in {dir}")]
    NotEnrolled { dir: PathBuf },
    #[error("could not read {path}")]
    Damaged {
        path: PathBuf,
        #[source]
        cause: BoxError,
    },
    #[error("{path} holds no root certificate")]
    NotARoot {
        path: PathBuf,
        #[source]
        cause: BoxError,
    },
    #[error("another root is already pinned in {path}")]
    OtherRootPinned { path: PathBuf },
    #[error("the token pins root {token}, which is not among the roots in {path}")]
    TokenForOtherRoot { token: Digest, path: PathBuf },
    #[error("{coordinator} does not have the root that the token pins")]
    RootNotThere {
        coordinator: Target,
        #[source]
        cause: CredentialError,
    },
    #[error("{coordinator} does not have the trust root that the token pins ({})", cause.code())]
    TrustRootNotThere {
        coordinator: Target,
        #[source]
        cause: TrustError,
    },
    #[error("could not write to {dir}")]
    Write {
        dir: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("could not create a key and a certificate request")]
    Key(#[source] BoxError),
    #[error("the certificate expired at {not_after}")]
    Expired { not_after: Timestamp },
    #[error("no coordinator is configured")]
    NoCoordinator,
    #[error("could not resolve {coordinator}")]
    Resolve {
        coordinator: Target,
        #[source]
        cause: ResolveError,
    },
    #[error("could not reach {coordinator}")]
    Connect {
        coordinator: Target,
        #[source]
        cause: Box<ConnectError>,
    },
    #[error("could not read the answer of {coordinator}")]
    NoAnswer {
        coordinator: Target,
        #[source]
        cause: RequestError,
    },
    #[error("{coordinator} did not answer within {waited:?}")]
    TimedOut { coordinator: Target, waited: Duration },
    #[error("{coordinator} refused: {problem}")]
    Refused { coordinator: Target, problem: Box<Problem> },
    #[error("{coordinator} sent an invalid answer: {detail}")]
    BadAnswer { coordinator: Target, detail: String },
    #[error("{coordinator} belongs to cluster {found}, this node to {expected}")]
    OtherCluster { coordinator: Target, expected: ClusterId, found: ClusterId },
    #[error("the coordinator's signing keys do not follow from the ones that this node trusts")]
    Trust(#[source] TrustError),
}

/// What to do about a certificate that was refused; of the coordinator's name the certificate itself has told.
fn refused(coordinator: &Target, refusal: &Refusal) -> String {
    match refusal {
        Refusal::WrongName { .. } => format!(
            "Use one of the names that the certificate has; or start the coordinator with \
             `mvm coordinator serve --san {}`, which adds this one.",
            coordinator.host()
        ),
        other => format!("To mend it: {}.", other.remediation()),
    }
}

impl CertsError {
    /// Whether no connection to the coordinator came about, or it gave no answer.
    #[must_use]
    pub fn is_unreachable(&self) -> bool {
        matches!(
            self,
            Self::Resolve { .. } | Self::Connect { .. } | Self::NoAnswer { .. } | Self::TimedOut { .. }
        )
    }

    /// What to do next.
    #[must_use]
    pub fn remediation(&self) -> String {
        match self {
            Self::NotEnrolled { .. } => {
                "Run `mvm coordinator token create --node NODE` on the coordinator, then \
                 `mvm agent certs request --coordinator https://HOST:4433 --token TOKEN` here."
                    .to_owned()
            }
            Self::Damaged { path, .. } => format!(
                "Restore {} from a backup, or remove it and enrol again with a new token.",
                path.display()
            ),
            Self::NotARoot { .. } => {
                "Copy the coordinator's `pki/root/ca.crt` here and name that file.".to_owned()
            }
            Self::OtherRootPinned { path } => format!(
                "If the cluster really has a new root, repeat with --force, or remove {} first.",
                path.display()
            ),
            Self::TokenForOtherRoot { path, .. } => format!(
                "Ask for a token of this node's cluster; or, to join another one, remove {}.",
                path.display()
            ),
            Self::RootNotThere { .. } => {
                "Someone else answers at that address, or the token is of another cluster: check both."
                    .to_owned()
            }
            Self::TrustRootNotThere { .. } => {
                "Compare the digest with `mvm trust get` of an operator who has pinned the trust. If it is right, the \
                 coordinator serves signing keys of someone else: treat this as an attack. Otherwise make a new token."
                    .to_owned()
            }
            Self::Write { dir, .. } => {
                format!("Check the owner, the free space and the mode of {}.", dir.display())
            }
            Self::Key(_) => "Report this: keys are made from the system's random bytes alone.".to_owned(),
            Self::Expired { .. } => {
                "A certificate past its expiry can't renew itself: make a new token with \
                 `mvm coordinator token create` and run `mvm agent certs request` again."
                    .to_owned()
            }
            Self::NoCoordinator => "Name it: --coordinator https://HOST:4433.".to_owned(),
            Self::Resolve { .. } => "Check the host name and this machine's DNS.".to_owned(),
            Self::Connect { coordinator, cause } => match cause.refusal() {
                Some(refusal) => refused(coordinator, refusal),
                None => "Check that the coordinator runs and that UDP to its port is let through.".to_owned(),
            },
            Self::NoAnswer { .. } | Self::TimedOut { .. } => {
                "Check that the coordinator runs and that UDP to its port is let through.".to_owned()
            }
            Self::Refused { problem, .. } => problem.remediation.clone(),
            Self::BadAnswer { .. } => {
                "Check that coordinator and agent are of compatible versions.".to_owned()
            }
            Self::OtherCluster { .. } => "Use the address of this node's own coordinator.".to_owned(),
            Self::Trust(_) => {
                "If the cluster was set up anew, remove `trust.json` from the certificates directory \
                 and enrol again; otherwise treat this as an attack."
                    .to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_without_the_dialled_name_is_answered_with_its_names_and_how_to_add_this_one() {
        let refusal = Refusal::WrongName {
            expected: "192.0.2.2".to_owned(),
            presented: vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
        };
        let cause = ConnectError::PeerRefused { address: "192.0.2.2:4433".parse().unwrap(), refusal };
        let coordinator = "https://192.0.2.2:4433".parse().unwrap();
        let error = CertsError::Connect { coordinator, cause: Box::new(cause) };
        assert!(error.is_unreachable());
        assert!(mvm_proto::text::chain(&error).contains("but for localhost, 127.0.0.1"));
        let advice = error.remediation();
        assert!(
            advice.contains("mvm coordinator serve --san 192.0.2.2") && !advice.contains("UDP"),
            "{advice}"
        );
    }
}
