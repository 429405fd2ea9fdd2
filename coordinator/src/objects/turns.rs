//! Writers of one key take turns, so that a thousand of them need a thousand transactions and not a million.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use tokio::sync::{Mutex, MutexGuard};

/// So many keys may be written at the same time at most; the store's own guards are what keeps writes apart.
const TURNS: usize = 256;

#[derive(Debug)]
pub(crate) struct Turns(Vec<Mutex<()>>);

impl Default for Turns {
    fn default() -> Self {
        Self((0..TURNS).map(|_| Mutex::new(())).collect())
    }
}

impl Turns {
    /// Waits for the turn at this key; it ends when the guard is dropped.
    pub(crate) async fn take(&self, key: &str) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        let at = usize::try_from(hasher.finish() % TURNS as u64).unwrap_or(0);
        self.0[at].lock().await
    }
}
