//! What to write, and what must hold for it to be written.

use bytes::Bytes;

use crate::{LeaseId, StoreError, check_key};

/// etcd's default for operations in one transaction; a larger step is several transactions by nature.
pub const MAX_CHANGES: usize = 128;

/// The largest signed envelope (8 MiB) fits, with room for what is kept beside it.
pub const MAX_VALUE_BYTES: usize = 9 * 1024 * 1024;

/// Bounds what one caller can make the writer hold at once.
pub const MAX_TRANSACTION_BYTES: usize = 2 * MAX_VALUE_BYTES;

/// What must hold for a key when the transaction is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Guard {
    /// The key does not exist.
    Absent,
    /// The key exists, and this revision was the last to write it.
    Version(u64),
    /// The key exists, at any version.
    Exists,
}

/// One write of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    Put { key: String, value: Bytes, lease: Option<LeaseId> },
    Delete { key: String },
}

impl Change {
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Put { key, .. } | Self::Delete { key } => key,
        }
    }
}

/// Guards and changes, applied together or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[must_use = "a transaction does nothing until it is committed"]
pub struct Transaction {
    guards: Vec<(String, Guard)>,
    changes: Vec<Change>,
}

impl Transaction {
    pub fn new() -> Self {
        Self::default()
    }

    /// Requires `guard` of `key`. All guards are checked before any change is made.
    pub fn guard(mut self, key: impl Into<String>, guard: Guard) -> Self {
        self.guards.push((key.into(), guard));
        self
    }

    /// Writes `key`. A key that was attached to a lease no longer is.
    pub fn put(self, key: impl Into<String>, value: impl Into<Bytes>) -> Self {
        self.change(Change::Put { key: key.into(), value: value.into(), lease: None })
    }

    /// Writes `key`, to vanish when `lease` ends.
    pub fn put_leased(self, key: impl Into<String>, value: impl Into<Bytes>, lease: LeaseId) -> Self {
        self.change(Change::Put { key: key.into(), value: value.into(), lease: Some(lease) })
    }

    /// Deletes `key`; an absent key stays absent and is no error. Guard it if it must exist.
    pub fn delete(self, key: impl Into<String>) -> Self {
        self.change(Change::Delete { key: key.into() })
    }

    fn change(mut self, change: Change) -> Self {
        self.changes.push(change);
        self
    }

    #[must_use]
    pub fn guards(&self) -> &[(String, Guard)] {
        &self.guards
    }

    #[must_use]
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    /// For implementations: the rules that need no look at the data.
    pub fn check(&self) -> Result<(), StoreError> {
        let invalid = |reason: String| Err(StoreError::InvalidTransaction { reason });
        if self.changes.len() > MAX_CHANGES || self.guards.len() > MAX_CHANGES {
            return invalid(format!(
                "{} guards and {} changes, and each may be at most {MAX_CHANGES}",
                self.guards.len(),
                self.changes.len()
            ));
        }
        for (key, _) in &self.guards {
            check_key(key)?;
        }
        let mut seen = std::collections::BTreeSet::new();
        let mut total_bytes = 0;
        for change in &self.changes {
            check_key(change.key())?;
            if !seen.insert(change.key()) {
                return invalid(format!("{} is changed twice", change.key()));
            }
            if let Change::Put { key, value, .. } = change {
                if value.len() > MAX_VALUE_BYTES {
                    let (key, bytes, limit) = (key.clone(), value.len(), MAX_VALUE_BYTES);
                    return Err(StoreError::ValueTooLarge { key, bytes, limit });
                }
                total_bytes += value.len();
            }
        }
        if total_bytes > MAX_TRANSACTION_BYTES {
            return invalid(format!(
                "{total_bytes} bytes of values, and at most {MAX_TRANSACTION_BYTES} may be"
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_changed_twice_is_refused() {
        let twice = Transaction::new().put("a", "1").delete("a");
        assert!(matches!(twice.check(), Err(StoreError::InvalidTransaction { .. })));
    }

    #[test]
    fn too_many_changes_are_refused() {
        let many = |count: usize| (0..count).fold(Transaction::new(), |all, n| all.delete(format!("k{n}")));
        assert!(many(MAX_CHANGES).check().is_ok());
        assert!(matches!(many(MAX_CHANGES + 1).check(), Err(StoreError::InvalidTransaction { .. })));
    }

    #[test]
    fn values_and_their_sum_are_bounded() {
        let largest = Bytes::from(vec![0; MAX_VALUE_BYTES]);
        let two = Transaction::new().put("a", largest.clone()).put("b", largest);
        assert!(two.check().is_ok());
        assert!(matches!(two.put("c", "x").check(), Err(StoreError::InvalidTransaction { .. })));
        let over = Transaction::new().put("a", vec![0; MAX_VALUE_BYTES + 1]);
        assert!(matches!(over.check(), Err(StoreError::ValueTooLarge { .. })));
    }

    #[test]
    fn guard_keys_obey_the_key_rule_too() {
        let odd = Transaction::new().guard("a b", Guard::Absent);
        assert!(matches!(odd.check(), Err(StoreError::InvalidKey { .. })));
    }
}
