//! Operators: records of the certificates issued to each, removal, and what agents are told of it.
//!
//! Every request of an operator is held against its record, which is kept in memory beside the store; the store is
//! written first. An operator is made from the files alone, also while the coordinator runs, so each certificate that
//! is made leaves a note in a directory ([`note_issued`]), which is taken into the records when the certificate is first
//! used, when operators are listed or removed, and at start. A certificate of an operator without a record is from
//! before records were kept: its first use makes the record.
//!
//! Agents trust certificates without asking here, so sessions tell them which are refused although in date.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use mvm_pki::{Identity, Issued, LeafProfile, Role};
use mvm_proto::wire::control::v1::{Operator, OperatorCertificate};
use mvm_proto::wire::session::v1::{RemovedOperator, RemovedOperators};
use mvm_proto::{Digest, NodeId, Problem, Timestamp};
use mvm_store::{Store, Transaction};
use parking_lot::RwLock;
use tokio::sync::Mutex;

use crate::enrolment::{issue, issued_record};
use crate::offline_notes::{note_path, read_note};
use crate::records::{IssuedOffline, IssuedRecord, OPERATORS, OperatorRecord, operator_key};
use crate::state::State;
use crate::stored::{Backend, StateError, encode, load_all};
use crate::{refuse, tokens};

/// Operators whose certificates agents are told to refuse, at once. More removals in the life of an issuing authority
/// are refused, because dropping one from the list would let it in again.
const MAX_REFUSED: usize = 256;
/// Of those, names that were never seen: an operator whose credential was stolen can invent any number of them, and must
/// not keep its own removal from having a place.
const MAX_REFUSED_UNSEEN: usize = MAX_REFUSED / 2;
/// Notes that are read at once; the rest is read the next time.
const MAX_NOTES: usize = 1024;

/// The records, as the store has them.
#[derive(Debug)]
pub(crate) struct Operators {
    known: RwLock<BTreeMap<String, OperatorRecord>>,
    /// Held while a record is changed: the store is written before the table.
    changing: Mutex<()>,
    notes: PathBuf,
}

impl OperatorRecord {
    fn check(&self, certificate: Option<&Digest>, now: Timestamp) -> Result<(), Problem> {
        if self.membership.accepts(certificate, now) {
            return Ok(());
        }
        tracing::warn!(operator = self.name, ?certificate, "refused a removed operator");
        Err(refuse::removed_operator(&self.name, self.membership.removed_at.is_some()))
    }
}

impl Operators {
    pub(crate) async fn open(store: &Backend, notes: PathBuf) -> Result<Self, StateError> {
        let records = load_all::<OperatorRecord>(store, OPERATORS).await?;
        let known = records.into_iter().map(|(name, record)| (name, record.value)).collect();
        Ok(Self { known: RwLock::new(known), changing: Mutex::new(()), notes })
    }

    fn get(&self, name: &str) -> Option<OperatorRecord> {
        self.known.read().get(name).cloned()
    }

    fn all(&self) -> Vec<OperatorRecord> {
        self.known.read().values().cloned().collect()
    }

    /// Whether this certificate of an operator is good. Other roles are not judged here.
    pub(crate) fn check(
        &self,
        identity: &Identity,
        certificate: Option<&Digest>,
        now: Timestamp,
    ) -> Result<(), Problem> {
        if identity.role() != Role::Operator {
            return Ok(());
        }
        let known = self.known.read();
        known.get(identity.name()).map_or(Ok(()), |record| record.check(certificate, now))
    }

    /// Whether this operator was removed at this time or later.
    pub(crate) fn removed_since(&self, name: &str, at: Timestamp) -> bool {
        self.get(name).and_then(|record| record.membership.removed_at).is_some_and(|removed| removed >= at)
    }

    /// When the last certificate of each operator ends that was not removed, by name.
    pub(crate) fn expiries(&self) -> Vec<(String, Timestamp)> {
        let known = self.known.read();
        let kept = known.values().filter(|record| record.membership.removed_at.is_none());
        kept.filter_map(|record| Some((record.name.clone(), record.not_after()?))).collect()
    }

    /// What agents have to refuse.
    pub(crate) fn refused(&self, now: Timestamp) -> RemovedOperators {
        let known = self.known.read();
        let entry = |record: &OperatorRecord| {
            let refused = record.membership.refused(now)?;
            Some(RemovedOperator {
                name: record.name.clone(),
                until: refused.until.to_string(),
                except: refused.except.iter().map(Digest::to_string).collect(),
            })
        };
        RemovedOperators { operators: known.values().filter_map(entry).collect() }
    }

    /// Changes one record: the store first. The caller holds `changing`.
    async fn put(&self, store: &Backend, record: OperatorRecord) -> Result<(), StateError> {
        store.commit(Transaction::new().put(operator_key(&record.name), encode(&record))).await?;
        let mut known = self.known.write();
        known.insert(record.name.clone(), record);
        Ok(())
    }
}

/// Changes one operator's record by `change`, or makes it, and tells the agents if that is of use to them.
async fn change(
    state: &State,
    name: &str,
    since: Timestamp,
    now: Timestamp,
    change: impl FnOnce(&mut OperatorRecord) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let operators = &state.operators;
    let _changing = operators.changing.lock().await;
    let old = operators.get(name);
    let mut record = old.clone().unwrap_or_else(|| OperatorRecord::new(name, since));
    let before = operators.refused(now);
    change(&mut record)?;
    // A peer that connects again and again causes no writes.
    if old.as_ref() == Some(&record) {
        return Ok(());
    }
    operators.put(&state.store, record).await?;
    if operators.refused(now) != before {
        state.fleet.operators_changed();
    }
    Ok(())
}

/// Takes a note into the records and then removes it; one that was taken already changes nothing.
async fn take_note(state: &State, path: &Path, now: Timestamp) -> Result<(), Problem> {
    let Some(note) = read_note(path) else { return Ok(()) };
    // The name is a key of the store; notes are the coordinator's own files, but a key must be an id.
    let IssuedOffline { name, certificate } = note;
    if name.parse::<NodeId>().is_err() {
        return Ok(());
    }
    let since = certificate.issued_at;
    change(state, &name, since, now, |record| {
        record.made(certificate, now);
        Ok(())
    })
    .await?;
    if let Err(error) = std::fs::remove_file(path) {
        tracing::warn!(path = %path.display(), %error, "could not remove the note of a certificate");
    }
    Ok(())
}

/// Takes all notes into the records.
pub(crate) async fn take_notes(state: &State, now: Timestamp) -> Result<(), Problem> {
    let Ok(entries) = std::fs::read_dir(&state.operators.notes) else { return Ok(()) };
    for entry in entries.flatten().take(MAX_NOTES) {
        take_note(state, &entry.path(), now).await?;
    }
    Ok(())
}

/// Brings the record up to date with a certificate that was just presented.
pub(crate) async fn note_use(
    state: &State,
    identity: &Identity,
    presented: &IssuedRecord,
    now: Timestamp,
) -> Result<(), Problem> {
    if identity.role() != Role::Operator {
        return Ok(());
    }
    let record = state.operators.get(identity.name());
    if record.as_ref().is_some_and(|record| record.knows(&presented.fingerprint)) {
        return Ok(());
    }
    take_note(state, &note_path(&state.operators.notes, &presented.fingerprint), now).await?;
    change(state, identity.name(), presented.issued_at, now, |record| {
        // What a removal refuses stays out of the record.
        if record.membership.accepts(Some(&presented.fingerprint), now) {
            record.issued(presented.clone(), now);
        }
        Ok(())
    })
    .await
}

/// Whether an operator showed a certificate that is good now. One that was made with `operator create` counts from here on.
pub(crate) async fn admitted(
    state: &State,
    identity: &Identity,
    presented: Option<&Digest>,
    now: Timestamp,
) -> Result<(), Problem> {
    if let Some(fingerprint) = presented {
        take_note(state, &note_path(&state.operators.notes, fingerprint), now).await?;
    }
    state.operators.check(identity, presented, now)
}

/// A fresh certificate for an operator that holds a good one.
pub(crate) async fn renew(
    state: &State,
    identity: &Identity,
    presented: Option<&Digest>,
    csr_der: &[u8],
    now: Timestamp,
) -> Result<Issued, Problem> {
    let life = state.settings.operator_life;
    let profile = LeafProfile { identity: identity.clone(), dns: Vec::new(), ips: Vec::new(), life };
    let mut renewed = None;
    // Judged and issued while no removal can come between.
    change(state, identity.name(), now, now, |record| {
        record.check(presented, now)?;
        let issued = issue(state, csr_der, &profile, now)?;
        record.issued(issued_record(state, &issued, now), now);
        record.renewed_at = Some(now);
        renewed = Some(issued);
        Ok(())
    })
    .await?;
    renewed.ok_or_else(|| refuse::too_busy("the operator"))
}

pub(crate) async fn list(state: &State, now: Timestamp) -> Result<Vec<Operator>, Problem> {
    take_notes(state, now).await?;
    Ok(state.operators.all().iter().map(|record| message(record, now)).collect())
}

/// Takes an operator out: its certificates are refused from here on, here and on the agents. The last one that can
/// be used stays, unless `force`.
pub(crate) async fn remove(
    state: &State,
    name: &str,
    force: bool,
    now: Timestamp,
) -> Result<Operator, Problem> {
    let name: NodeId = name.parse().map_err(|error| refuse::bad_request(format!("name {error}")))?;
    let name = name.as_str();
    take_notes(state, now).await?;
    let operators = &state.operators;
    let changing = operators.changing.lock().await;
    let mut record = match operators.get(name) {
        Some(record) => record,
        None if force => OperatorRecord::new(name, now),
        None => return Err(refuse::unknown_operator(name)),
    };
    if record.membership.removed_at.is_some() {
        return Ok(message(&record, now));
    }
    let another = operators.all().iter().any(|other| other.name != name && other.is_usable(now));
    if !another && !force {
        return Err(refuse::last_operator(name));
    }
    let limit = if record.certificates.is_empty() { MAX_REFUSED_UNSEEN } else { MAX_REFUSED };
    if operators.refused(now).operators.len() >= limit && record.membership.refused(now).is_none() {
        return Err(refuse::too_many_removed(limit));
    }
    record.membership.removed_at = Some(now);
    // Certificates from before records were kept may live as long as the authority that signed them.
    record.membership.expires_with(state.authority.not_after());
    operators.put(&state.store, record.clone()).await?;
    drop(changing);
    tracing::info!(operator = name, "removed an operator");
    state.fleet.operators_changed();
    state.revoked();
    // What it handed out must not outlast it. One that is being made at this moment is refused when it is used.
    tokens::revoke_of(&state.store, name, now).await?;
    Ok(message(&record, now))
}

fn message(record: &OperatorRecord, now: Timestamp) -> Operator {
    let text = |at: Option<Timestamp>| at.map(|at| at.to_string()).unwrap_or_default();
    let certificate = |certificate: &IssuedRecord| OperatorCertificate {
        serial: certificate.serial.clone(),
        fingerprint: certificate.fingerprint.to_string(),
        issued_at: certificate.issued_at.to_string(),
        not_after: certificate.not_after.to_string(),
    };
    Operator {
        name: record.name.clone(),
        state: record.state(now).to_string(),
        since: record.since.to_string(),
        not_after: text(record.not_after()),
        renewed_at: text(record.renewed_at),
        removed_at: text(record.membership.removed_at),
        certificates: record.certificates.iter().map(certificate).collect(),
    }
}
