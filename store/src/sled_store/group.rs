//! Decides what a group of requests does to the state, before anything is written.
//!
//! The writer takes all requests that wait, runs them one after the other against the durable state and what
//! the earlier ones of the group did, and gets one [`Delta`] and one sled batch, which needs one flush. Pure:
//! neither the state nor the disk is touched here.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use prost::Message;

use super::record;
use super::schema::{FORMAT, Name, StoredChanges, StoredEntry, StoredLease, StoredMeta};
use super::state::{Held, LogRecord, State};
use crate::{Change, Committed, Entry, Event, Guard, LeaseId, StoreError, Transaction};

/// What an event costs in memory beside its key and value; an estimate, so that many tiny ones count too.
const EVENT_OVERHEAD_BYTES: usize = 96;

/// What a group changes. `None` means removed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Delta {
    pub(super) entries: BTreeMap<String, Option<Held>>,
    pub(super) leases: BTreeMap<LeaseId, Option<Duration>>,
    pub(super) log: Vec<LogRecord>,
    /// How many of the oldest log records go, counted over the state's and the delta's.
    pub(super) trimmed: usize,
    pub(super) revision: u64,
    pub(super) last_lease: u64,
}

#[derive(Debug)]
pub(super) struct Group<'a> {
    base: &'a State,
    watched: &'a [String],
    delta: Delta,
}

impl<'a> Group<'a> {
    pub(super) fn new(base: &'a State, watched: &'a [String]) -> Self {
        let delta = Delta { revision: base.revision, last_lease: base.last_lease, ..Delta::default() };
        Self { base, watched, delta }
    }

    pub(super) fn commit(&mut self, transaction: &Transaction) -> Result<Committed, StoreError> {
        transaction.check()?;
        for (key, guard) in transaction.guards() {
            let found = self.held(key).map(|held| held.version);
            let holds = match guard {
                Guard::Absent => found.is_none(),
                Guard::Version(version) => found == Some(*version),
                Guard::Exists => found.is_some(),
            };
            if !holds {
                return Err(StoreError::Conflict { key: key.clone() });
            }
        }
        for change in transaction.changes() {
            if let Change::Put { lease: Some(lease), .. } = change {
                self.check_lease(*lease)?;
            }
        }
        let revision = self.delta.revision + 1;
        let events =
            transaction.changes().iter().filter_map(|change| self.change(change, revision)).collect();
        self.log(revision, events);
        Ok(Committed { revision: self.delta.revision })
    }

    pub(super) fn grant(&mut self, ttl: Duration) -> LeaseId {
        self.delta.last_lease += 1;
        let lease = LeaseId::from_raw(self.delta.last_lease);
        self.delta.leases.insert(lease, Some(ttl));
        lease
    }

    pub(super) fn end(&mut self, lease: LeaseId) -> Result<(), StoreError> {
        self.check_lease(lease)?;
        let revision = self.delta.revision + 1;
        let events = self
            .keys_of(lease)
            .into_iter()
            .filter_map(|key| self.change(&Change::Delete { key }, revision))
            .collect();
        self.log(revision, events);
        self.delta.leases.insert(lease, None);
        Ok(())
    }

    fn held(&self, key: &str) -> Option<&Held> {
        match self.delta.entries.get(key) {
            Some(changed) => changed.as_ref(),
            None => self.base.entries.get(key),
        }
    }

    fn check_lease(&self, lease: LeaseId) -> Result<(), StoreError> {
        let lives = match self.delta.leases.get(&lease) {
            Some(changed) => changed.is_some(),
            None => self.base.leases.contains_key(&lease),
        };
        if lives { Ok(()) } else { Err(StoreError::LeaseNotFound { lease }) }
    }

    fn keys_of(&self, lease: LeaseId) -> BTreeSet<String> {
        let before = self.base.leased_keys.get(&lease).into_iter().flatten();
        let here = self.delta.entries.keys();
        let attached = |key: &&String| self.held(key).is_some_and(|held| held.lease == Some(lease));
        before.chain(here).filter(attached).cloned().collect()
    }

    /// Makes one change; `None` if there is nothing to change.
    fn change(&mut self, change: &Change, version: u64) -> Option<Event> {
        match change {
            Change::Put { key, value, lease } => {
                let stored = stored_entry(value.clone(), version, *lease);
                let chunks = record::chunks_of(stored.encoded_len());
                let held = Held { value: value.clone(), version, lease: *lease, chunks };
                self.delta.entries.insert(key.clone(), Some(held));
                Some(Event::Put(Entry { key: key.clone(), value: value.clone(), version }))
            }
            Change::Delete { key } => {
                self.held(key)?;
                self.delta.entries.insert(key.clone(), None);
                Some(Event::Delete { key: key.clone(), version })
            }
        }
    }

    fn log(&mut self, revision: u64, mut events: Vec<Event>) {
        if events.is_empty() {
            return;
        }
        self.delta.revision = revision;
        events.retain(|event| self.watched.iter().any(|prefix| event.key().starts_with(prefix)));
        if events.is_empty() {
            return;
        }
        let previous = self.last_logged();
        let chunks = record::chunks_of(StoredChanges::of(&events, previous).encoded_len());
        let bytes = events.iter().map(event_bytes).sum();
        self.delta.log.push(LogRecord { revision, previous, events, bytes, chunks });
    }

    /// The revision of the newest record of the log.
    fn last_logged(&self) -> u64 {
        self.delta.log.last().map_or_else(|| self.base.last_logged(), |record| record.revision)
    }

    /// The whole group as one delta and one batch; `None` if it changes nothing.
    pub(super) fn finish(mut self, log_limit_bytes: usize) -> Option<(Delta, sled::Batch)> {
        if self.delta.entries.is_empty() && self.delta.leases.is_empty() {
            return None;
        }
        self.trim(log_limit_bytes);
        let batch = self.batch();
        Some((self.delta, batch))
    }

    /// The newest record always stays, so that a watcher who keeps up sees every change.
    fn trim(&mut self, limit_bytes: usize) {
        let records = || self.base.log.iter().chain(&self.delta.log);
        let here: usize = self.delta.log.iter().map(|record| record.bytes).sum();
        let mut bytes = self.base.log_bytes + here;
        let mut trimmed = 0;
        for record in records().take((self.base.log.len() + self.delta.log.len()).saturating_sub(1)) {
            if bytes <= limit_bytes {
                break;
            }
            bytes -= record.bytes;
            trimmed += 1;
        }
        self.delta.trimmed = trimmed;
    }

    fn batch(&self) -> sled::Batch {
        let Delta { entries, leases, log, trimmed, revision, last_lease } = &self.delta;
        let mut batch = sled::Batch::default();
        for (key, held) in entries {
            let name = Name::Data(key.clone()).to_bytes();
            let old_chunks = self.base.entries.get(key).map_or(0, |old| old.chunks);
            match held {
                Some(held) => {
                    let stored = stored_entry(held.value.clone(), held.version, held.lease);
                    record::put(&mut batch, &name, &stored.encode_to_vec(), old_chunks);
                }
                None => record::remove(&mut batch, &name, old_chunks),
            }
        }
        for (lease, ttl) in leases {
            let name = Name::Lease(*lease).to_bytes();
            let ttl_ms = |ttl: &Duration| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
            let stored = ttl.as_ref().map(|ttl| StoredLease { ttl_ms: ttl_ms(ttl) });
            match stored {
                Some(stored) => record::put(&mut batch, &name, &stored.encode_to_vec(), 0),
                None => record::remove(&mut batch, &name, 1),
            }
        }
        for record in self.base.log.iter().take(*trimmed) {
            record::remove(&mut batch, &Name::Log(record.revision).to_bytes(), record.chunks);
        }
        for record in log.iter().skip(trimmed.saturating_sub(self.base.log.len())) {
            let stored = StoredChanges::of(&record.events, record.previous).encode_to_vec();
            record::put(&mut batch, &Name::Log(record.revision).to_bytes(), &stored, 0);
        }
        let last_trimmed = self.base.log.iter().chain(log).take(*trimmed).last();
        let compacted = last_trimmed.map_or(self.base.compacted, |record| record.revision);
        let last_logged = Some(self.last_logged());
        let meta = StoredMeta {
            format: FORMAT,
            revision: *revision,
            compacted,
            last_lease: *last_lease,
            last_logged,
        };
        record::put(&mut batch, &Name::Meta.to_bytes(), &meta.encode_to_vec(), 1);
        batch
    }
}

fn stored_entry(value: bytes::Bytes, version: u64, lease: Option<LeaseId>) -> StoredEntry {
    StoredEntry { version, lease: lease.map_or(0, LeaseId::raw), value }
}

pub(super) fn event_bytes(event: &Event) -> usize {
    let value_bytes = match event {
        Event::Put(entry) => entry.value.len(),
        Event::Delete { .. } => 0,
    };
    EVENT_OVERHEAD_BYTES + event.key().len() + value_bytes
}
