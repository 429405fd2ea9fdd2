//! What is durable, held in memory: reads and watches are answered from here and never touch the disk.
//!
//! Only the writer changes it, and only after the disk has confirmed. So nothing that could still be lost is
//! ever shown, and after a failed write readers go on with the last durable state. The price is memory: every
//! value is held once, and the change log holds older values up to `Settings::log_bytes`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;
use std::time::Duration;

use bytes::Bytes;

use super::group::Delta;
use crate::{Entry, Event, LeaseId, Listing, StoreError};

/// A key's value with what belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) value: Bytes,
    pub(super) version: u64,
    pub(super) lease: Option<LeaseId>,
    /// How many items its record takes in sled.
    pub(super) chunks: usize,
}

/// The changes of one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogRecord {
    pub(super) revision: u64,
    /// The revision of the record before it. What lies between changed nothing that can be watched.
    pub(super) previous: u64,
    pub(super) events: Vec<Event>,
    pub(super) bytes: usize,
    pub(super) chunks: usize,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    pub(super) revision: u64,
    /// The log holds everything after this revision that can be watched, and nothing up to it.
    pub(super) compacted: u64,
    pub(super) last_lease: u64,
    pub(super) entries: BTreeMap<String, Held>,
    pub(super) leases: BTreeMap<LeaseId, Duration>,
    pub(super) leased_keys: BTreeMap<LeaseId, BTreeSet<String>>,
    pub(super) log: VecDeque<LogRecord>,
    pub(super) log_bytes: usize,
}

impl State {
    pub(super) fn get(&self, key: &str) -> Option<Entry> {
        self.entries.get(key).map(|held| entry(key, held))
    }

    pub(super) fn list(&self, prefix: &str) -> Listing {
        let entries = self
            .entries
            .range::<str, _>((Bound::Included(prefix), Bound::Unbounded))
            .take_while(|(key, _)| key.starts_with(prefix))
            .map(|(key, held)| entry(key, held))
            .collect();
        Listing { entries, revision: self.revision }
    }

    /// The changes after `cursor` under `prefix`, of at most `limit` transactions, and where to go on.
    pub(super) fn changes(
        &self,
        prefix: &str,
        cursor: u64,
        limit: usize,
    ) -> Result<(Vec<Event>, u64), StoreError> {
        if cursor < self.compacted {
            return Err(StoreError::Compacted { after: cursor, oldest: self.compacted });
        }
        let first = self.log.partition_point(|record| record.revision <= cursor);
        let mut events = Vec::new();
        let mut next = cursor;
        for record in self.log.range(first..).take(limit) {
            events.extend(record.events.iter().filter(|event| event.key().starts_with(prefix)).cloned());
            next = record.revision;
        }
        Ok((events, next))
    }

    /// The revision of the newest record of the log, also of one that is no longer in it.
    pub(super) fn last_logged(&self) -> u64 {
        self.log.back().map_or(self.compacted, |record| record.revision)
    }

    /// Takes over what a flush has made durable.
    pub(super) fn apply(&mut self, delta: Delta) {
        for (key, held) in delta.entries {
            self.set_entry(key, held);
        }
        for (lease, ttl) in delta.leases {
            match ttl {
                Some(ttl) => {
                    self.leases.insert(lease, ttl);
                }
                None => {
                    self.leases.remove(&lease);
                    self.leased_keys.remove(&lease);
                }
            }
        }
        for record in delta.log {
            self.push_log(record);
        }
        for record in self.log.drain(..delta.trimmed) {
            self.log_bytes -= record.bytes;
            self.compacted = record.revision;
        }
        self.revision = delta.revision;
        self.last_lease = delta.last_lease;
    }

    pub(super) fn set_entry(&mut self, key: String, held: Option<Held>) {
        let new_lease = held.as_ref().and_then(|held| held.lease);
        let old = match held {
            Some(held) => self.entries.insert(key.clone(), held),
            None => self.entries.remove(&key),
        };
        if let Some(lease) = old.and_then(|old| old.lease)
            && let Some(keys) = self.leased_keys.get_mut(&lease)
        {
            keys.remove(&key);
        }
        if let Some(lease) = new_lease {
            self.leased_keys.entry(lease).or_default().insert(key);
        }
    }

    pub(super) fn push_log(&mut self, record: LogRecord) {
        self.log_bytes += record.bytes;
        self.log.push_back(record);
    }
}

fn entry(key: &str, held: &Held) -> Entry {
    Entry { key: key.to_owned(), value: held.value.clone(), version: held.version }
}
