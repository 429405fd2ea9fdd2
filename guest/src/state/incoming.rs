//! Secrets on their way in.

use std::fs::File;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The bundle on its way in.
#[derive(Debug, Default)]
pub(crate) struct Incoming(pub(crate) Mutex<Option<Bundle>>);

#[derive(Debug)]
pub(crate) struct Bundle {
    pub(crate) file: File,
    pub(crate) written: u64,
}

impl Incoming {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Option<Bundle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
