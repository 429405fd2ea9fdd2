//! An operator: what was issued under its name, and whether it still may operate the cluster.

use mvm_proto::control::OperatorState;
use mvm_proto::{Digest, Timestamp};
use serde::{Deserialize, Serialize};

use super::membership::{EXPIRY_MARGIN, IssuedRecord, Membership};

/// Certificates that are listed of one operator; one per machine that shares it, and two around a renewal.
const MAX_LISTED: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct OperatorRecord {
    pub(crate) name: String,
    /// When it was first made, or first seen.
    pub(crate) since: Timestamp,
    pub(crate) renewed_at: Option<Timestamp>,
    /// The newest certificates that are in date, oldest first.
    pub(crate) certificates: Vec<IssuedRecord>,
    #[serde(flatten)]
    pub(crate) membership: Membership,
}

/// A certificate that was made from the coordinator's files, for the coordinator to take into its records: it may be
/// running, and then the store is its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct IssuedOffline {
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) certificate: IssuedRecord,
}

impl OperatorRecord {
    pub(crate) fn new(name: &str, since: Timestamp) -> Self {
        Self {
            name: name.to_owned(),
            since,
            renewed_at: None,
            certificates: Vec::new(),
            membership: Membership::default(),
        }
    }

    pub(crate) fn knows(&self, fingerprint: &Digest) -> bool {
        self.certificates.iter().any(|certificate| certificate.fingerprint == *fingerprint)
    }

    /// Notes a certificate that was made from the coordinator's files. One that was made after a removal ends it.
    pub(crate) fn made(&mut self, certificate: IssuedRecord, now: Timestamp) {
        if self.membership.removed_at.is_some_and(|removed_at| certificate.issued_at > removed_at) {
            self.membership.readmit();
        }
        self.issued(certificate, now);
    }

    /// Notes a certificate.
    pub(crate) fn issued(&mut self, certificate: IssuedRecord, now: Timestamp) {
        self.membership.issued(&certificate, now);
        self.certificates.retain(|known| now < known.not_after + EXPIRY_MARGIN);
        if !self.knows(&certificate.fingerprint) {
            self.certificates.push(certificate);
        }
        let surplus = self.certificates.len().saturating_sub(MAX_LISTED);
        self.certificates.drain(..surplus);
    }

    /// When the last of its certificates ends; absent: none is known.
    pub(crate) fn not_after(&self) -> Option<Timestamp> {
        self.certificates.iter().map(|certificate| certificate.not_after).max()
    }

    /// Whether it can be used to operate the cluster now, as far as is known.
    pub(crate) fn is_usable(&self, now: Timestamp) -> bool {
        let in_date = |certificate: &IssuedRecord| {
            now < certificate.not_after && self.membership.accepts(Some(&certificate.fingerprint), now)
        };
        self.certificates.iter().any(in_date)
    }

    pub(crate) fn state(&self, now: Timestamp) -> OperatorState {
        match (self.membership.removed_at, self.is_usable(now)) {
            (Some(_), _) => OperatorState::Removed,
            (None, true) => OperatorState::Active,
            (None, false) => OperatorState::Expired,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(seconds * 1000)
    }

    fn certificate(name: &str, issued: i64, life: i64) -> IssuedRecord {
        IssuedRecord {
            serial: name.to_owned(),
            fingerprint: Digest::of(name.as_bytes()),
            issued_at: at(issued),
            not_after: at(issued + life),
            root: None,
        }
    }

    fn accepts(record: &OperatorRecord, name: &str, now: i64) -> bool {
        record.membership.accepts(Some(&Digest::of(name.as_bytes())), at(now))
    }

    #[test]
    fn an_operator_made_again_after_a_removal_is_let_in_and_its_old_certificates_are_not() {
        let mut record = OperatorRecord::new("alice", at(0));
        record.issued(certificate("lost", 0, 1000), at(0));
        record.membership.removed_at = Some(at(10));
        assert_eq!((record.state(at(11)), accepts(&record, "lost", 11)), (OperatorState::Removed, false));
        // What was made before the removal and is heard of only now changes nothing.
        record.made(certificate("late", 5, 1000), at(12));
        assert!(!accepts(&record, "late", 12));
        record.made(certificate("new", 20, 1000), at(20));
        assert_eq!(record.state(at(21)), OperatorState::Active);
        let good: Vec<_> =
            ["lost", "late", "new"].into_iter().filter(|it| accepts(&record, it, 21)).collect();
        assert_eq!(good, ["new"]);
        let refused = record.membership.refused(at(21)).unwrap();
        assert_eq!((refused.until, refused.except), (at(1005) + EXPIRY_MARGIN, &[Digest::of(b"new")][..]));
        assert_eq!(record.membership.refused(at(2000)), None);
    }

    #[test]
    fn a_record_lists_what_is_in_date_and_no_more_than_its_bound() {
        let mut record = OperatorRecord::new("alice", at(0));
        record.issued(certificate("old", 0, 10), at(0));
        for count in 0..40 {
            record.issued(certificate(&count.to_string(), 100, 1000), at(100));
        }
        assert_eq!(record.certificates.len(), MAX_LISTED);
        assert!(record.knows(&Digest::of(b"39")) && !record.knows(&Digest::of(b"old")));
        assert_eq!(
            (record.state(at(100)), record.state(at(1100))),
            (OperatorState::Active, OperatorState::Expired)
        );
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<OperatorRecord>(&text).unwrap(), record);
    }
}
