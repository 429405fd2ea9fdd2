//! Operators' certificates that are refused although they are in date.
//!
//! The coordinator tells which over the session; what it told last is kept in a file, so that it holds across restarts
//! and while the coordinator is away. Each entry ends by itself once every certificate that it is about has expired.

use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use mvm_pki::files::write_atomic;
use mvm_pki::{Identity, Role};
use mvm_proto::wire::session::v1::RemovedOperators as Told;
use mvm_proto::{Digest, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// Entries that are kept: more than a coordinator ever sends.
const MAX_ENTRIES: usize = 1024;
/// Certificates that one entry lets through; as above.
const MAX_EXCEPT: usize = 64;
const MODE: u32 = 0o600;

/// One operator whose certificates are refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    name: String,
    until: Timestamp,
    /// Certificates that were issued since the operator came back.
    #[serde(default)]
    except: Vec<Digest>,
}

impl Entry {
    fn refuses(&self, name: &str, certificate: Option<&Digest>, now: Timestamp) -> bool {
        let good = certificate.is_some_and(|certificate| self.except.contains(certificate));
        self.name == name && now < self.until && !good
    }
}

/// The entries in force.
#[derive(Debug)]
pub struct RemovedOperators {
    path: PathBuf,
    entries: watch::Sender<Vec<Entry>>,
}

impl RemovedOperators {
    /// Reads what was kept; nothing when there is no file yet.
    pub fn load(path: &Path) -> io::Result<Self> {
        let entries = match std::fs::read(path) {
            Ok(bytes) => serde_json::from_slice(&bytes)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        Ok(Self { path: path.to_owned(), entries: watch::Sender::new(entries) })
    }

    /// How many entries are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.borrow().len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Replaces the entries by what the coordinator told, and keeps them. They are in force also when they could not be
    /// written. What can't be read, or is too much, changes nothing.
    pub fn replace(&self, told: &Told) -> io::Result<()> {
        let unreadable = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if told.operators.len() > MAX_ENTRIES {
            return Err(unreadable(format!("a list of more than {MAX_ENTRIES} removed operators")));
        }
        let mut entries = Vec::with_capacity(told.operators.len());
        for operator in &told.operators {
            if operator.except.len() > MAX_EXCEPT {
                return Err(unreadable(format!("an operator with more than {MAX_EXCEPT} certificates")));
            }
            let until = operator.until.parse().map_err(|error| unreadable(format!("a time that {error}")))?;
            let except = operator.except.iter().map(|digest| digest.parse()).collect::<Result<_, _>>();
            let except = except.map_err(|error| unreadable(format!("a digest that {error}")))?;
            entries.push(Entry { name: operator.name.clone(), until, except });
        }
        if *self.entries.borrow() == entries {
            return Ok(());
        }
        let json = serde_json::to_vec_pretty(&entries)?;
        self.entries.send_replace(entries);
        write_atomic(&self.path, &json, MODE)
    }

    /// Whether this verified certificate is to be refused.
    #[must_use]
    pub fn refuses(&self, identity: &Identity, certificate: Option<&Digest>) -> bool {
        let now = Timestamp::from(SystemTime::now());
        identity.role() == Role::Operator
            && self.entries.borrow().iter().any(|entry| entry.refuses(identity.name(), certificate, now))
    }

    /// Waits until this certificate is refused.
    pub async fn refused(&self, identity: Identity, certificate: Option<Digest>) {
        let mut changes = self.entries.subscribe();
        while !self.refuses(&identity, certificate.as_ref()) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mvm_proto::wire::session::v1::RemovedOperator;

    use super::*;

    fn identity(role: Role, name: &str) -> Identity {
        Identity::new("demo".parse().unwrap(), role, name).unwrap()
    }

    fn told(name: &str, until: Timestamp, except: &[Digest]) -> Told {
        let except = except.iter().map(Digest::to_string).collect();
        Told { operators: vec![RemovedOperator { name: name.into(), until: until.to_string(), except }] }
    }

    fn now() -> Timestamp {
        Timestamp::from(SystemTime::now())
    }

    #[test]
    fn a_removed_operator_is_refused_also_after_a_restart_until_its_certificates_have_expired() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("removed.json");
        let list = RemovedOperators::load(&path).unwrap();
        let alice = identity(Role::Operator, "alice");
        assert!(!list.refuses(&alice, None));
        let (old, new) = (Digest::of(b"old"), Digest::of(b"new"));
        list.replace(&told("alice", now() + Duration::from_secs(3600), &[new])).unwrap();
        let again = RemovedOperators::load(&path).unwrap();
        for list in [&list, &again] {
            assert!(list.refuses(&alice, Some(&old)) && list.refuses(&alice, None));
            assert!(!list.refuses(&alice, Some(&new)));
            assert!(!list.refuses(&identity(Role::Operator, "bob"), Some(&old)));
            assert!(!list.refuses(&identity(Role::Coordinator, "alice"), Some(&old)));
        }
        list.replace(&told("alice", now() - Duration::from_secs(1), &[])).unwrap();
        assert!(!list.refuses(&alice, Some(&old)));
        list.replace(&Told::default()).unwrap();
        assert!(RemovedOperators::load(&path).unwrap().is_empty());
    }

    #[test]
    fn a_list_that_can_not_be_read_or_is_too_long_leaves_the_last_one_in_force() {
        let dir = tempfile::tempdir().unwrap();
        let list = RemovedOperators::load(&dir.path().join("removed.json")).unwrap();
        let alice = identity(Role::Operator, "alice");
        list.replace(&told("alice", now() + Duration::from_secs(3600), &[])).unwrap();
        let mut odd = told("bob", now(), &[]);
        odd.operators[0].until = "tomorrow".into();
        assert!(list.replace(&odd).is_err());
        let flood = Told { operators: vec![RemovedOperator::default(); MAX_ENTRIES + 1] };
        assert!(list.replace(&flood).is_err());
        assert!(list.refuses(&alice, None));
    }
}
