//! One session from its holder's side: take, copy out, bring back, release.

use mvm_proto::Timestamp;

use super::PersistError;
use super::blob_store::BlobStore;
use super::bring_back::bring_back;
use super::copy_out::{CopyOut, Memory};
use super::guest_files::GuestFiles;
use super::head::{Choice, FolderContent, Found, Head, Holder, VERSION, choose};
use super::held::Held;
use super::index::Index;
use super::session_store::SessionStore;

/// Others may take the sessions that are looked at. After this many times it is no accident.
const TRIES: usize = 8;

/// A session in memory is its index, what was read of each file, and what the store has.
const VERSIONS_REMEMBERED: u64 = 3;

/// What a copy came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CopyReport {
    /// Files that changed all the time: their last version stands.
    pub(crate) unsettled: Vec<String>,
    pub(crate) skipped: usize,
    pub(crate) sent_bytes: u64,
}

/// A session that this node holds for one of its instances.
#[derive(Debug)]
pub(crate) struct Session<S> {
    pub(crate) slot: u32,
    held: Held<S>,
    index: Index,
    memory: Memory,
    /// The store may have content that the index does not name: of a copy that did not end, here or elsewhere.
    leftovers: bool,
}

impl<S: BlobStore> Session<S> {
    /// Takes a session for `me`: see [`choose`].
    pub(crate) async fn take(
        store: SessionStore<S>,
        me: &Holder,
        has: FolderContent,
        every_seconds: u64,
    ) -> Result<Self, PersistError> {
        for _ in 0..TRIES {
            // Before the heads are read: one that is renewed meanwhile is newer than this.
            let now = store.time(me).await?;
            let (slot, before) = match choose(&store.heads().await?, me, has, now) {
                Choice::Take(Found { slot, head, .. }) => (slot, Some(head)),
                Choice::New { slot } => (slot, None),
                Choice::None => break,
            };
            match Self::hold(store.clone(), slot, before, me, every_seconds).await {
                // Another was faster.
                Err(PersistError::Taken(_)) => {}
                held => return held,
            }
        }
        Err(PersistError::NoneFree(store.name(0)))
    }

    /// Goes on with the session that `me` holds, or held as one of `before`, on other nodes; absent: it is another's by now.
    pub(crate) async fn resume(
        store: SessionStore<S>,
        slot: u32,
        me: &Holder,
        before: &[Holder],
        every_seconds: u64,
    ) -> Result<Option<Self>, PersistError> {
        let found = store.head(slot).await?;
        let mine = |holder: &Holder| holder == me || before.contains(holder);
        let Some(head) = found.map(|found| found.head).filter(|head| head.holder.as_ref().is_some_and(mine))
        else {
            return Ok(None);
        };
        match Self::hold(store, slot, Some(head), me, every_seconds).await {
            Err(PersistError::Taken(_)) => Ok(None),
            held => held.map(Some),
        }
    }

    async fn hold(
        store: SessionStore<S>,
        slot: u32,
        before: Option<Head>,
        me: &Holder,
        every_seconds: u64,
    ) -> Result<Self, PersistError> {
        let (number, index, taken_at) =
            before.map_or((0, None, None), |head| (head.number, head.index, head.taken_at));
        let head = Head {
            version: VERSION,
            number: number + 1,
            holder: Some(me.clone()),
            index,
            taken_at,
            every_seconds,
        };
        let held = Held::begin(store, slot, head).await?;
        let index = match &held.head().index {
            Some(digest) => held.store.index(slot, digest).await?,
            None => Index::default(),
        };
        let memory = Memory::of(&index);
        Ok(Self { slot, held, index, memory, leftovers: true })
    }

    pub(crate) fn name(&self) -> String {
        self.held.store.name(self.slot)
    }

    /// When what the store has was so; absent: it has nothing.
    pub(crate) fn taken_at(&self) -> Option<Timestamp> {
        self.held.head().taken_at
    }

    /// About what this takes in memory.
    pub(crate) fn remembered_bytes(&self) -> u64 {
        self.index.weight().saturating_mul(VERSIONS_REMEMBERED)
    }

    pub(crate) async fn bring_back<F: GuestFiles>(
        &mut self,
        files: &F,
        root: &str,
    ) -> Result<(), PersistError> {
        let store = self.held.store.clone();
        self.held.during(bring_back(&store, self.slot, &self.index, files, root)).await
    }

    /// Copies the guest's folder out. Until the last write the store has the session as it was.
    pub(crate) async fn copy_folder<F: GuestFiles>(
        &mut self,
        files: &F,
        root: &str,
        every_seconds: u64,
        now: Timestamp,
    ) -> Result<CopyReport, PersistError> {
        let store = self.held.store.clone();
        store.measure_once().await?;
        if self.leftovers {
            // Else every copy that does not end would add to what the store has.
            self.collect().await?;
        }
        self.leftovers = true;
        let copy = CopyOut {
            store: &store,
            slot: self.slot,
            files,
            root,
            before: &self.index,
            memory: &mut self.memory,
            now,
        };
        let copied = self.held.during(copy.run()).await?;
        let known = self.held.head().index.filter(|_| copied.index == self.index);
        let index = match known {
            Some(index) => index,
            None => store.put_index(self.slot, &copied.index).await?,
        };
        let next = |head: &mut Head| {
            (head.index, head.taken_at, head.every_seconds) = (Some(index), Some(now), every_seconds);
        };
        self.held.write(next).await?;
        self.index = copied.index;
        if known.is_none() || copied.sent_bytes > 0 {
            match self.collect().await {
                Err(error @ PersistError::Taken(_)) => return Err(error),
                // The copy is whole; the next one tries again.
                Err(error) => {
                    let error = mvm_proto::text::chain(&error);
                    tracing::warn!(session = %self.name(), error, "could not remove what an older copy left behind");
                }
                Ok(()) => {}
            }
        } else {
            self.leftovers = false;
        }
        Ok(CopyReport { unsettled: copied.unsettled, skipped: copied.skipped, sent_bytes: copied.sent_bytes })
    }

    /// Says that the session is still held, without a new copy.
    pub(crate) async fn renew(&mut self, every_seconds: u64) -> Result<(), PersistError> {
        self.held.write(|head| head.every_seconds = every_seconds).await
    }

    /// Gives it back: the next instance that starts may have it.
    pub(crate) async fn release(mut self) -> Result<(), PersistError> {
        self.held.write(|head| head.holder = None).await
    }

    /// Removes what the newest index does not name.
    async fn collect(&mut self) -> Result<(), PersistError> {
        let chunks = self.index.chunks();
        let mut named = chunks.clone();
        named.extend(self.held.head().index);
        // Also if it fails: how far it came is not known.
        self.memory.keep_only(chunks);
        self.leftovers = true;
        for key in self.held.store.unnamed(self.slot, &named).await? {
            self.held.remove(&key).await?;
        }
        self.leftovers = false;
        Ok(())
    }
}
