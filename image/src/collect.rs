//! Removes images that nothing needs. What an instance needs is never removed; the rest stays by the rules.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use mvm_proto::{Digest, Timestamp};
use serde::Serialize;

use super::error::ImageError;
use super::refs::Built;
use super::store::Store;

/// What stays although no instance needs it.
#[derive(Debug, Clone)]
pub struct KeepRules {
    /// Images that a reference names and that were built this long ago or less.
    pub references_for: Duration,
    /// Images made this long ago or less, whatever names them: a pool may be about to use one.
    pub young_for: Duration,
    /// Remove nothing, only tell.
    pub dry_run: bool,
}

impl Default for KeepRules {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(86_400);
        Self { references_for: 7 * DAY, young_for: Duration::from_secs(3600), dry_run: false }
    }
}

/// Why an image stayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kept {
    InUse,
    Pinned,
    Referenced,
    Young,
}

impl Kept {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Kept::InUse => "in use",
            Kept::Pinned => "pinned",
            Kept::Referenced => "built lately under a name",
            Kept::Young => "made just now",
        }
    }
}

/// What a collection did, or would do.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Collected {
    /// With their sizes in bytes.
    pub removed: Vec<(Digest, u64)>,
    pub kept: Vec<(Digest, Kept)>,
}

impl Collected {
    #[must_use]
    pub fn freed_bytes(&self) -> u64 {
        self.removed.iter().map(|(_, size)| size).sum()
    }
}

/// Collects the store's garbage. `referenced` is added to what the agent wrote down as in use.
pub fn collect(
    store: &Store,
    referenced: &BTreeSet<Digest>,
    rules: &KeepRules,
) -> Result<Collected, ImageError> {
    // Held throughout, so that no image comes into use between the check and the removal.
    let lock = store.lock()?;
    let in_use = store.in_use()?;
    let references = store.references()?;
    let now = Timestamp::from(SystemTime::now());
    let mut collected = Collected::default();
    // Removed after the lock is given back: large files take a while.
    let mut detached = Vec::new();
    for digest in store.list()? {
        let reason = if referenced.contains(&digest) || in_use.contains(&digest) {
            Some(Kept::InUse)
        } else {
            kept_by_rules(store, &digest, &references, rules, now)
        };
        if let Some(reason) = reason {
            collected.kept.push((digest, reason));
            continue;
        }
        // One that is damaged is garbage too; its size is only for telling.
        let size = store.manifest(&digest).map_or(0, |manifest| manifest.size());
        if !rules.dry_run {
            for built in references.iter().filter(|built| built.digest == digest) {
                store.drop_reference(&lock, built)?;
            }
            detached.push(store.detach(&lock, &digest)?);
        }
        collected.removed.push((digest, size));
    }
    drop(lock);
    drop(detached);
    Ok(collected)
}

fn kept_by_rules(
    store: &Store,
    digest: &Digest,
    references: &[Built],
    rules: &KeepRules,
    now: Timestamp,
) -> Option<Kept> {
    let named = || references.iter().filter(|built| built.digest == *digest);
    let within = |at: Timestamp, limit: Duration| now.since(at) < limit;
    if named().any(|built| built.pinned) {
        Some(Kept::Pinned)
    } else if named().any(|built| within(built.built_at, rules.references_for)) {
        Some(Kept::Referenced)
    } else if store.made_at(digest).is_some_and(|at| within(at, rules.young_for)) {
        Some(Kept::Young)
    } else {
        None
    }
}

/// Removes one image and the references to it. One that is in use is only removed by force.
pub fn remove(store: &Store, digest: &Digest, force: bool) -> Result<(), ImageError> {
    let lock = store.lock()?;
    if !force && store.in_use()?.contains(digest) {
        return Err(ImageError::InUse { digest: *digest, by: "instances on this node".to_owned() });
    }
    for built in store.references()?.iter().filter(|built| built.digest == *digest) {
        store.drop_reference(&lock, built)?;
    }
    let detached = store.detach(&lock, digest)?;
    drop(lock);
    drop(detached);
    Ok(())
}
