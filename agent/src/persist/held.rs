//! The head of a session that this node holds: writes each next number, often enough that no other holder takes the session.

use std::pin::pin;
use std::time::Duration;

use tokio::time::Instant;

use super::PersistError;
use super::blob_store::BlobStore;
use super::head::Head;
use super::session_store::SessionStore;

/// For this long after its newest head a holder may remove content without asking again. A session can be taken only
/// once its head is 30 seconds old: a process that stood still for longer finds that out before it removes anything.
const SURE_FOR: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Held<S> {
    pub(crate) store: SessionStore<S>,
    pub(crate) slot: u32,
    head: Head,
    /// When the write of the head began.
    since: Instant,
}

impl<S: BlobStore> Held<S> {
    /// Writes the session's next head. Fails with [`PersistError::Taken`] if the session is another's.
    pub(crate) async fn begin(store: SessionStore<S>, slot: u32, head: Head) -> Result<Self, PersistError> {
        let since = Instant::now();
        store.put_head(slot, &head).await?;
        Ok(Self { store, slot, head, since })
    }

    pub(crate) fn head(&self) -> &Head {
        &self.head
    }

    /// Writes the head with the next number, changed like this.
    pub(crate) async fn write(&mut self, change: impl FnOnce(&mut Head)) -> Result<(), PersistError> {
        let mut head = Head { number: self.head.number + 1, ..self.head.clone() };
        change(&mut head);
        let since = Instant::now();
        self.store.put_head(self.slot, &head).await?;
        (self.head, self.since) = (head, since);
        Ok(())
    }

    /// Says that the session is still held.
    pub(crate) async fn renew(&mut self) -> Result<(), PersistError> {
        self.write(|_| {}).await
    }

    /// Does `work`, and says at every interval that the session is still held. A renewal that began is waited for, so
    /// that the newest number is always known.
    pub(crate) async fn during<T>(
        &mut self,
        work: impl Future<Output = Result<T, PersistError>>,
    ) -> Result<T, PersistError> {
        let mut work = pin!(work);
        loop {
            let due = self.since + Duration::from_secs(self.head.every_seconds.max(1));
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep_until(due) => {}
            }
            let mut renewal = pin!(self.renew());
            tokio::select! {
                renewed = &mut renewal => renewed?,
                done = &mut work => {
                    renewal.await?;
                    return done;
                }
            }
        }
    }

    /// Removes content, if the session is still held.
    pub(crate) async fn remove(&mut self, key: &str) -> Result<(), PersistError> {
        if self.since.elapsed() > SURE_FOR {
            self.renew().await?;
        }
        let removed = tokio::time::timeout(SURE_FOR, self.store.remove(key)).await;
        removed.unwrap_or(Err(PersistError::TooSlow(SURE_FOR)))
    }
}
