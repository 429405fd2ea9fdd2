//! An enrolled node: what was issued to it, and which of its certificates are good after it came back.

use std::net::IpAddr;
use std::ops::Deref;

use mvm_proto::{NodeId, Timestamp};
use serde::{Deserialize, Serialize};

use super::Numbers;
use super::membership::{IssuedRecord, Membership};
use crate::numbering;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeRecord {
    pub(crate) node_id: NodeId,
    pub(crate) enrolled_at: Timestamp,
    pub(crate) certificate: IssuedRecord,
    /// What certificates may name, fixed when the node enrolled; records of older versions do not say.
    #[serde(default)]
    pub(crate) names: Option<FixedNames>,
    #[serde(flatten)]
    pub(crate) membership: Membership,
    /// Numbers that the node is known to be past, without a stored document at or above them.
    #[serde(default)]
    pub(crate) floor: Option<Numbers>,
}

impl Deref for NodeRecord {
    type Target = Membership;
    fn deref(&self) -> &Membership {
        &self.membership
    }
}

/// DNS names in lower case, and addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FixedNames {
    pub(crate) dns: Vec<String>,
    pub(crate) ips: Vec<IpAddr>,
}

impl NodeRecord {
    /// The record of a node that just got a certificate by token. One known before keeps when it first came and its
    /// numbers: its ledger still holds them.
    pub(crate) fn enrolled(
        before: Option<Self>,
        node_id: &NodeId,
        certificate: IssuedRecord,
        now: Timestamp,
    ) -> Self {
        let mut record = match before {
            None => Self {
                node_id: node_id.clone(),
                enrolled_at: now,
                certificate: certificate.clone(),
                names: None,
                membership: Membership::default(),
                floor: None,
            },
            Some(known) if known.removed_at.is_none() => known,
            // Numbers that leave no room for a next document are a lie of the node from before; honest ones stay.
            Some(removed) => {
                let floor = removed.floor.filter(|floor| numbering::next(0, Some(*floor), None).is_ok());
                Self { enrolled_at: now, floor, ..removed }
            }
        };
        // Records of older versions do not say; lives were equal then, so the newest certificate expired last.
        record.membership.expires_with(record.certificate.not_after);
        record.membership.readmit();
        record.issued(certificate, now)
    }

    /// The record with one more certificate.
    pub(crate) fn issued(mut self, certificate: IssuedRecord, now: Timestamp) -> Self {
        self.membership.expires_with(self.certificate.not_after);
        self.membership.issued(&certificate, now);
        self.certificate = certificate;
        self
    }

    /// The record of the node once it is removed.
    pub(crate) fn removed(mut self, now: Timestamp) -> Self {
        self.membership.removed_at = Some(now);
        self
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::Digest;

    use super::super::membership::{EXPIRY_MARGIN, MAX_READMITTED};
    use super::*;

    const LIFE: i64 = 1000;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_unix_ms(seconds * 1000)
    }

    fn print(name: &str) -> Digest {
        Digest::of(name.as_bytes())
    }

    fn certificate(name: &str, issued: i64, life: i64) -> IssuedRecord {
        IssuedRecord {
            serial: name.to_owned(),
            fingerprint: print(name),
            issued_at: at(issued),
            not_after: at(issued + life),
            root: None,
        }
    }

    fn enrol(before: Option<NodeRecord>, name: &str, now: i64) -> NodeRecord {
        NodeRecord::enrolled(before, &"n1".parse().unwrap(), certificate(name, now, LIFE), at(now))
    }

    fn renew(record: NodeRecord, name: &str, now: i64) -> NodeRecord {
        record.issued(certificate(name, now, LIFE), at(now))
    }

    fn remove(record: NodeRecord, now: i64) -> NodeRecord {
        record.removed(at(now))
    }

    fn accepted<'a>(record: &NodeRecord, names: &[&'a str], now: i64) -> Vec<&'a str> {
        names.iter().copied().filter(|name| record.accepts(Some(&print(name)), at(now))).collect()
    }

    #[test]
    fn a_node_that_was_never_removed_may_use_any_certificate_that_is_in_date() {
        let record = renew(enrol(None, "a", 0), "b", 500);
        assert_eq!(accepted(&record, &["a", "b", "lost"], 600), ["a", "b", "lost"]);
        assert_eq!(record.readmission, None);
    }

    #[test]
    fn after_a_removal_only_certificates_issued_since_are_good_until_the_old_ones_expired() {
        let removed = remove(renew(enrol(None, "a", 0), "b", 500), 600);
        assert!(accepted(&removed, &["a", "b"], 600).is_empty());
        let back = renew(enrol(Some(removed), "c", 700), "d", 1200);
        assert_eq!(accepted(&back, &["a", "b", "c", "d"], 1499), ["c", "d"]);
        assert!(!back.accepts(None, at(1499)), "no certificate is none of those");
        assert!(accepted(&back, &["b"], 1501).is_empty(), "TLS may still take it");
        assert_eq!(renew(back, "e", 1700).readmission, None);
    }

    #[test]
    fn a_second_removal_ends_what_the_first_return_was_given() {
        let back = enrol(Some(remove(enrol(None, "a", 0), 10)), "b", 20);
        let again = enrol(Some(remove(back, 30)), "c", 40);
        assert_eq!(accepted(&again, &["a", "b", "c"], 900), ["c"]);
        assert_eq!(again.readmission.as_ref().unwrap().until, at(20 + LIFE) + EXPIRY_MARGIN);
    }

    #[test]
    fn a_certificate_that_outlives_newer_ones_is_waited_for() {
        let long = NodeRecord::enrolled(None, &"n1".parse().unwrap(), certificate("a", 0, 9000), at(0));
        let back = enrol(Some(remove(renew(long, "b", 10), 20)), "c", 30);
        assert_eq!(accepted(&back, &["a", "b", "c"], 8999), ["c"]);
    }

    #[test]
    fn a_token_for_a_node_that_came_back_adds_to_its_certificates() {
        let back = enrol(Some(remove(enrol(None, "a", 0), 10)), "b", 20);
        assert_eq!(accepted(&enrol(Some(back), "c", 30), &["a", "b", "c"], 40), ["b", "c"]);
    }

    #[test]
    fn too_many_renewals_drop_the_oldest_and_never_let_an_old_one_in() {
        let mut record = enrol(Some(remove(enrol(None, "old", 0), 10)), "0", 20);
        for renewal in 1..=MAX_READMITTED {
            record = renew(record, &renewal.to_string(), 20);
        }
        assert_eq!(record.readmission.as_ref().unwrap().certificates.len(), MAX_READMITTED);
        assert_eq!(accepted(&record, &["old", "0", "1", "16"], 30), ["1", "16"]);
    }

    #[test]
    fn records_of_older_versions_are_read_and_their_certificates_end_with_a_removal() {
        let text = format!(
            r#"{{"node_id":"n1","enrolled_at":"{0}","removed_at":"{0}","certificate":{{"serial":"a",
            "fingerprint":"{1}","issued_at":"{0}","not_after":"{2}"}}}}"#,
            at(0),
            print("a"),
            at(LIFE)
        );
        let old: NodeRecord = serde_json::from_str(&text).unwrap();
        assert_eq!((old.last_expiry, &old.readmission), (None, &None));
        let back = enrol(Some(old), "b", 10);
        assert_eq!(accepted(&back, &["before a", "a", "b"], 900), ["b"]);
        let text = serde_json::to_string(&back).unwrap();
        assert_eq!(serde_json::from_str::<NodeRecord>(&text).unwrap(), back);
    }
}
