//! The contract of [`crate::Store`], sentence by sentence, as code that any implementation must pass.

use std::future::Future;

use crate::Store;

/// Runs every check, each on a fresh empty store from `make`. Panics at the first broken promise.
pub async fn suite<S, F, Fut>(_make: F)
where
    S: Store + Clone,
    F: Fn() -> Fut,
    Fut: Future<Output = S>,
{
    todo!()
}
