//! Which certificates of one identity are good, when it may be removed and come back.
//!
//! While an identity is removed, none of its certificates is. Once it is back, those from before are still in date;
//! until the last of them has expired, only those that were issued since are good. The list names what is good and not
//! what is bad, so that no bound on it can let a bad one through.

use std::time::Duration;

use mvm_proto::{Digest, Timestamp};
use serde::{Deserialize, Serialize};

/// Certificates that an identity which came back may hold at once. A node uses one, or two around a renewal, an
/// operator one per machine; the oldest is dropped, and so refused, when renewals come faster than expiries.
pub(crate) const MAX_READMITTED: usize = 16;
/// How long past their expiry old certificates are still looked at: TLS counts whole seconds, and clocks are set back.
pub(crate) const EXPIRY_MARGIN: Duration = Duration::from_secs(60);

/// One certificate that was issued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IssuedRecord {
    pub(crate) serial: String,
    /// Of the certificate, as in audit logs.
    pub(crate) fingerprint: Digest,
    pub(crate) issued_at: Timestamp,
    pub(crate) not_after: Timestamp,
    /// The root that its chain leads to. Absent: it was issued by a version that did not note it, or is known only from
    /// having been presented.
    #[serde(default)]
    pub(crate) root: Option<Digest>,
}

/// Part of the records of nodes and operators.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Membership {
    #[serde(default)]
    pub(crate) removed_at: Option<Timestamp>,
    /// When the last certificate that was ever issued expires, as far as is known.
    #[serde(default)]
    pub(crate) last_expiry: Option<Timestamp>,
    #[serde(default)]
    pub(crate) readmission: Option<Readmission>,
}

/// A removed identity came back: for a while its certificates are told apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Readmission {
    /// From here on every certificate from before has expired.
    pub(crate) until: Timestamp,
    /// Fingerprints of what was issued since, oldest first.
    pub(crate) certificates: Vec<Digest>,
}

/// Certificates that are refused although they are in date.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refused<'a> {
    /// From here on all of them have expired.
    pub(crate) until: Timestamp,
    /// The good ones.
    pub(crate) except: &'a [Digest],
}

impl Membership {
    /// The removal, or none, is over: what is issued from now on is good, and what was before is not.
    pub(crate) fn readmit(&mut self) {
        if self.removed_at.take().is_none() {
            return;
        }
        let until = self.last_expiry.map(|expiry| expiry + EXPIRY_MARGIN);
        let earlier = self.readmission.as_ref().map(|readmission| readmission.until);
        self.readmission = until.max(earlier).map(|until| Readmission { until, certificates: Vec::new() });
    }

    /// Notes one more certificate.
    pub(crate) fn issued(&mut self, certificate: &IssuedRecord, now: Timestamp) {
        self.expires_with(certificate.not_after);
        self.readmission.take_if(|readmission| now >= readmission.until);
        if let Some(Readmission { certificates, .. }) = &mut self.readmission
            && !certificates.contains(&certificate.fingerprint)
        {
            certificates.push(certificate.fingerprint);
            let surplus = certificates.len().saturating_sub(MAX_READMITTED);
            certificates.drain(..surplus);
        }
    }

    /// Some certificate may live until then.
    pub(crate) fn expires_with(&mut self, not_after: Timestamp) {
        self.last_expiry = self.last_expiry.max(Some(not_after));
    }

    /// Whether a certificate of this identity, in date and of our authority, is good.
    pub(crate) fn accepts(&self, fingerprint: Option<&Digest>, now: Timestamp) -> bool {
        let known = |readmission: &Readmission| {
            now >= readmission.until || fingerprint.is_some_and(|it| readmission.certificates.contains(it))
        };
        self.removed_at.is_none() && self.readmission.as_ref().is_none_or(known)
    }

    /// What others have to refuse on the coordinator's word, if anything.
    pub(crate) fn refused(&self, now: Timestamp) -> Option<Refused<'_>> {
        let refused = match (self.removed_at, &self.readmission) {
            (Some(_), _) => Refused { until: self.last_expiry? + EXPIRY_MARGIN, except: &[] },
            (None, Some(Readmission { until, certificates })) => {
                Refused { until: *until, except: certificates }
            }
            (None, None) => return None,
        };
        (now < refused.until).then_some(refused)
    }
}
