//! The payloads of records and the names they lie under. Protobuf, so that a field can be added later.

use bytes::Bytes;

use crate::{Entry, Event, LeaseId};

/// The layout of names and payloads in this file and in `record.rs`. Raise it when an older mvm can't read them.
pub(super) const FORMAT: u32 = 2;
/// In the first format each revision had a record in the log.
pub(super) const OLDEST_FORMAT: u32 = 1;

const DATA: &[u8] = b"data/";
const LEASE: &[u8] = b"lease/";
const LOG: &[u8] = b"log/";
const META: &[u8] = b"meta/";

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StoredMeta {
    #[prost(uint32, tag = "1")]
    pub(super) format: u32,
    #[prost(uint64, tag = "2")]
    pub(super) revision: u64,
    /// Changes up to this revision are no longer in the log.
    #[prost(uint64, tag = "3")]
    pub(super) compacted: u64,
    #[prost(uint64, tag = "4")]
    pub(super) last_lease: u64,
    /// The revision of the newest record of the log.
    #[prost(uint64, optional, tag = "5")]
    pub(super) last_logged: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StoredEntry {
    #[prost(uint64, tag = "1")]
    pub(super) version: u64,
    /// 0 is no lease.
    #[prost(uint64, tag = "2")]
    pub(super) lease: u64,
    #[prost(bytes = "bytes", tag = "3")]
    pub(super) value: Bytes,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StoredLease {
    #[prost(uint64, tag = "1")]
    pub(super) ttl_ms: u64,
}

/// All changes of one transaction.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StoredChanges {
    #[prost(message, repeated, tag = "1")]
    pub(super) changes: Vec<StoredChange>,
    /// The revision of the record before this one.
    #[prost(uint64, optional, tag = "2")]
    pub(super) previous: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct StoredChange {
    #[prost(string, tag = "1")]
    pub(super) key: String,
    /// Absent for a delete.
    #[prost(bytes = "bytes", optional, tag = "2")]
    pub(super) value: Option<Bytes>,
}

impl StoredChanges {
    pub(super) fn of(events: &[Event], previous: u64) -> Self {
        let change = |event: &Event| match event {
            Event::Put(entry) => StoredChange { key: entry.key.clone(), value: Some(entry.value.clone()) },
            Event::Delete { key, .. } => StoredChange { key: key.clone(), value: None },
        };
        Self { changes: events.iter().map(change).collect(), previous: Some(previous) }
    }

    pub(super) fn into_events(self, version: u64) -> Vec<Event> {
        let event = |change: StoredChange| match change.value {
            Some(value) => Event::Put(Entry { key: change.key, value, version }),
            None => Event::Delete { key: change.key, version },
        };
        self.changes.into_iter().map(event).collect()
    }
}

/// What a record is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Name {
    Meta,
    Data(String),
    Lease(LeaseId),
    Log(u64),
}

impl Name {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Meta => [META, b"state"].concat(),
            Self::Data(key) => [DATA, key.as_bytes()].concat(),
            Self::Lease(lease) => [LEASE, &lease.raw().to_be_bytes()[..]].concat(),
            Self::Log(revision) => [LOG, &revision.to_be_bytes()[..]].concat(),
        }
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let number = |bytes: &[u8]| bytes.try_into().ok().map(u64::from_be_bytes);
        if let Some(key) = bytes.strip_prefix(DATA) {
            Some(Self::Data(String::from_utf8(key.to_vec()).ok()?))
        } else if let Some(lease) = bytes.strip_prefix(LEASE) {
            Some(Self::Lease(LeaseId::from_raw(number(lease)?)))
        } else if let Some(revision) = bytes.strip_prefix(LOG) {
            Some(Self::Log(number(revision)?))
        } else {
            (bytes == Self::Meta.to_bytes()).then_some(Self::Meta)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_read_back() {
        let names =
            [Name::Meta, Name::Data("a/b".into()), Name::Lease(LeaseId::from_raw(7)), Name::Log(u64::MAX)];
        for name in names {
            assert_eq!(Name::parse(&name.to_bytes()), Some(name));
        }
        assert_eq!(Name::parse(b"meta/other"), None);
        assert_eq!(Name::parse(b"log/short"), None);
    }
}
