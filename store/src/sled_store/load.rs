//! Reads everything at opening, and believes nothing that does not fit together.

use std::time::Duration;

use bytes::Bytes;
use prost::Message;

use super::group::event_bytes;
use super::record::{self, Reader};
use super::schema::{FORMAT, Name, StoredChanges, StoredEntry, StoredLease, StoredMeta};
use super::state::{Held, LogRecord, State};
use crate::{LeaseId, check_key};

#[derive(Debug)]
pub(super) enum LoadError {
    Damaged(String),
    UnknownFormat { found: u32, known: u32 },
}

/// The whole state, or `None` if nothing was ever written.
pub(super) fn load(db: &sled::Db) -> Result<Option<State>, LoadError> {
    let mut reader = Reader::default();
    let mut loading = Loading::default();
    for item in db.iter() {
        let (key, chunk) = item.map_err(|error| LoadError::Damaged(error.to_string()))?;
        if let Some((name, payload)) = reader.item(&key, &chunk).map_err(bad)? {
            loading.take(&name, payload)?;
        }
    }
    if let Some((name, payload)) = reader.finish().map_err(bad)? {
        loading.take(&name, payload)?;
    }
    loading.finish()
}

/// Writes the first record, so that an initialised directory can be told from an emptied one.
pub(super) fn initialise(db: &sled::Db, state: &State) -> Result<(), sled::Error> {
    let State { revision, compacted, last_lease, .. } = *state;
    let meta = StoredMeta { format: FORMAT, revision, compacted, last_lease };
    let mut batch = sled::Batch::default();
    record::put(&mut batch, &Name::Meta.to_bytes(), &meta.encode_to_vec(), 0);
    db.apply_batch(batch)?;
    db.flush()?;
    Ok(())
}

#[derive(Default)]
struct Loading {
    state: State,
    meta: Option<StoredMeta>,
    records: usize,
}

impl Loading {
    fn take(&mut self, name: &[u8], payload: Bytes) -> Result<(), LoadError> {
        self.records += 1;
        let chunks = record::chunks_of(payload.len());
        match Name::parse(name) {
            Some(Name::Meta) => {
                let meta = StoredMeta::decode(payload).map_err(bad)?;
                if meta.format != FORMAT {
                    return Err(LoadError::UnknownFormat { found: meta.format, known: FORMAT });
                }
                self.meta = Some(meta);
            }
            Some(Name::Data(key)) => {
                check_key(&key).map_err(bad)?;
                let StoredEntry { version, lease, value } = StoredEntry::decode(payload).map_err(bad)?;
                let lease = (lease != 0).then(|| LeaseId::from_raw(lease));
                self.state.set_entry(key, Some(Held { value, version, lease, chunks }));
            }
            Some(Name::Lease(lease)) => {
                let StoredLease { ttl_ms } = StoredLease::decode(payload).map_err(bad)?;
                self.state.leases.insert(lease, Duration::from_millis(ttl_ms));
            }
            Some(Name::Log(revision)) => {
                let events = StoredChanges::decode(payload).map_err(bad)?.into_events(revision);
                let bytes = events.iter().map(event_bytes).sum();
                self.state.push_log(LogRecord { revision, events, bytes, chunks });
            }
            None => return Err(LoadError::Damaged("a record with an unknown name".into())),
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Option<State>, LoadError> {
        let Some(meta) = self.meta else {
            return if self.records == 0 { Ok(None) } else { Err(misfit("its head record is missing")) };
        };
        self.state.revision = meta.revision;
        self.state.compacted = meta.compacted;
        self.state.last_lease = meta.last_lease;
        check(&self.state)?;
        Ok(Some(self.state))
    }
}

/// What every state that was ever committed has in common.
fn check(state: &State) -> Result<(), LoadError> {
    if state.entries.values().any(|held| held.version == 0 || held.version > state.revision) {
        return Err(misfit("a key is newer than the newest revision"));
    }
    if state.leased_keys.keys().any(|lease| !state.leases.contains_key(lease)) {
        return Err(misfit("a key is attached to a lease that does not exist"));
    }
    if state.leases.keys().any(|lease| lease.raw() > state.last_lease) {
        return Err(misfit("a lease is newer than the newest one granted"));
    }
    // One revision is one record, so the log must count from `compacted` to `revision` without a gap.
    let counted = state.log.iter().map(|record| record.revision);
    if !counted.eq(state.compacted + 1..=state.revision) {
        return Err(misfit("the change log has a gap"));
    }
    Ok(())
}

fn misfit(problem: &str) -> LoadError {
    LoadError::Damaged(problem.to_owned())
}

fn bad(error: impl std::fmt::Display) -> LoadError {
    LoadError::Damaged(error.to_string())
}
