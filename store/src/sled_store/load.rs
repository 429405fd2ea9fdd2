//! Reads everything at opening, and believes nothing that does not fit together.

use std::time::Duration;

use bytes::Bytes;
use prost::Message;

use super::group::event_bytes;
use super::record::{self, Reader};
use super::schema::{FORMAT, Name, OLDEST_FORMAT, StoredChanges, StoredEntry, StoredLease, StoredMeta};
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
    let last_logged = Some(state.last_logged());
    let meta = StoredMeta { format: FORMAT, revision, compacted, last_lease, last_logged };
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
                if !(OLDEST_FORMAT..=FORMAT).contains(&meta.format) {
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
                let changes = StoredChanges::decode(payload).map_err(bad)?;
                let previous = changes.previous.unwrap_or(revision.saturating_sub(1));
                let events = changes.into_events(revision);
                let bytes = events.iter().map(event_bytes).sum();
                self.state.push_log(LogRecord { revision, previous, events, bytes, chunks });
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
        check(&self.state, meta.last_logged.unwrap_or(meta.revision))?;
        Ok(Some(self.state))
    }
}

/// What every state that was ever committed has in common.
fn check(state: &State, last_logged: u64) -> Result<(), LoadError> {
    if state.entries.values().any(|held| held.version == 0 || held.version > state.revision) {
        return Err(misfit("a key is newer than the newest revision"));
    }
    if state.leased_keys.keys().any(|lease| !state.leases.contains_key(lease)) {
        return Err(misfit("a key is attached to a lease that does not exist"));
    }
    if state.leases.keys().any(|lease| lease.raw() > state.last_lease) {
        return Err(misfit("a lease is newer than the newest one granted"));
    }
    // Each record names the one before it, so the log must lead from `compacted` to its newest record without a gap.
    let chained = state.log.iter().try_fold(state.compacted, |before, record| {
        (record.previous == before && record.revision > before).then_some(record.revision)
    });
    if chained != Some(last_logged) || last_logged > state.revision {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Event;
    use crate::sled_store::schema::OLDEST_FORMAT;

    /// What is left of a store whose log has these records, each with the revision that it says was before it.
    fn load(
        format: u32,
        revision: u64,
        last_logged: Option<u64>,
        log: &[(u64, Option<u64>)],
    ) -> Result<State, LoadError> {
        let mut loading = Loading::default();
        let meta = StoredMeta { format, revision, compacted: 0, last_lease: 0, last_logged };
        loading.take(&Name::Meta.to_bytes(), meta.encode_to_vec().into())?;
        for (revision, previous) in log {
            let event = Event::Delete { key: "a".to_owned(), version: *revision };
            let changes = StoredChanges { previous: *previous, ..StoredChanges::of(&[event], 0) };
            loading.take(&Name::Log(*revision).to_bytes(), changes.encode_to_vec().into())?;
        }
        Ok(loading.finish()?.expect("there is a head record"))
    }

    #[test]
    fn a_log_of_the_first_format_counts_every_revision() {
        assert_eq!(load(OLDEST_FORMAT, 2, None, &[(1, None), (2, None)]).unwrap().log.len(), 2);
        assert!(load(OLDEST_FORMAT, 3, None, &[(1, None), (3, None)]).is_err());
        assert!(load(OLDEST_FORMAT, 3, None, &[(1, None), (2, None)]).is_err());
    }

    #[test]
    fn a_record_of_the_log_that_is_missing_is_found() {
        let whole = [(2, Some(0)), (5, Some(2)), (6, Some(5))];
        assert_eq!(load(FORMAT, 9, Some(6), &whole).unwrap().last_logged(), 6);
        assert!(load(FORMAT, 9, Some(6), &whole[1..]).is_err());
        assert!(load(FORMAT, 9, Some(6), &whole[..2]).is_err());
        assert!(load(FORMAT, 9, Some(6), &[whole[0], whole[2]]).is_err());
        assert!(load(FORMAT, 5, Some(6), &whole).is_err());
    }
}
