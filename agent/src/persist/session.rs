//! One session as its holder sees it: taken, copied out, brought back, given back.

use std::collections::BTreeSet;

use mvm_proto::{Digest, Timestamp};

use super::PersistError;
use super::bring_back::bring_back;
use super::copy_out::{CopyOut, Memory};
use super::guest_files::GuestFiles;
use super::head::{Choice, Found, Has, Head, Holder, VERSION, choose};
use super::index::Index;
use super::shelf::Shelf;
use super::vault::Vault;

/// Others may take the sessions that are looked at. After this many times it is no accident.
const TRIES: usize = 8;

/// What a copy came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Kept {
    /// Files that changed all the time: their last version stands.
    pub(crate) unsettled: Vec<String>,
    pub(crate) skipped: usize,
    pub(crate) sent_bytes: u64,
}

/// A session that this node holds for one of its instances.
#[derive(Debug)]
pub(crate) struct Session<S> {
    vault: Vault<S>,
    pub(crate) slot: u32,
    head: Head,
    index: Index,
    memory: Memory,
}

impl<S: Shelf> Session<S> {
    /// Takes a session for `me`: see [`choose`].
    pub(crate) async fn take(
        vault: Vault<S>,
        me: &Holder,
        has: Has,
        every_seconds: u64,
        now: Timestamp,
    ) -> Result<Self, PersistError> {
        for _ in 0..TRIES {
            let (slot, before) = match choose(&vault.heads().await?, me, has, now) {
                Choice::Take(Found { slot, head, .. }) => (slot, Some(head)),
                Choice::New { slot } => (slot, None),
                Choice::None => break,
            };
            match Self::hold(vault.clone(), slot, before, me, every_seconds).await {
                // Another was faster.
                Err(PersistError::Taken(_)) => {}
                held => return held,
            }
        }
        Err(PersistError::NoneFree(vault.name(0)))
    }

    /// Goes on with the session that `me` holds, or held as one of `before`, on other nodes; absent: it is another's by now.
    pub(crate) async fn resume(
        vault: Vault<S>,
        slot: u32,
        me: &Holder,
        before: &[Holder],
        every_seconds: u64,
    ) -> Result<Option<Self>, PersistError> {
        let found = vault.head(slot).await?;
        let mine = |holder: &Holder| holder == me || before.contains(holder);
        let Some(head) = found.map(|found| found.head).filter(|head| head.holder.as_ref().is_some_and(mine))
        else {
            return Ok(None);
        };
        match Self::hold(vault, slot, Some(head), me, every_seconds).await {
            Err(PersistError::Taken(_)) => Ok(None),
            held => held.map(Some),
        }
    }

    async fn hold(
        vault: Vault<S>,
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
        vault.put_head(slot, &head).await?;
        let index = match &head.index {
            Some(digest) => vault.index(slot, digest).await?,
            None => Index::default(),
        };
        let memory = Memory::of(&index);
        Ok(Self { vault, slot, head, index, memory })
    }

    pub(crate) fn name(&self) -> String {
        self.vault.name(self.slot)
    }

    /// When what the store has was so; absent: it has nothing.
    pub(crate) fn taken_at(&self) -> Option<Timestamp> {
        self.head.taken_at
    }

    pub(crate) async fn bring_back<F: GuestFiles>(&self, files: &F, root: &str) -> Result<(), PersistError> {
        bring_back(&self.vault, self.slot, &self.index, files, root).await
    }

    /// Copies the guest's folder out. Until the last write the store has the session as it was.
    pub(crate) async fn keep<F: GuestFiles>(
        &mut self,
        files: &F,
        root: &str,
        every_seconds: u64,
        now: Timestamp,
    ) -> Result<Kept, PersistError> {
        let copy = CopyOut {
            vault: &self.vault,
            slot: self.slot,
            files,
            root,
            before: &self.index,
            memory: &mut self.memory,
            now,
        };
        let copied = copy.run().await?;
        let changed = self.head.index.is_none() || copied.index != self.index;
        let index = match self.head.index {
            Some(index) if !changed => index,
            _ => self.vault.put_index(self.slot, &copied.index).await?,
        };
        let head = Head { index: Some(index), taken_at: Some(now), every_seconds, ..self.next() };
        self.vault.put_head(self.slot, &head).await?;
        self.head = head;
        self.index = copied.index;
        if changed {
            self.collect(index).await;
        }
        Ok(Kept { unsettled: copied.unsettled, skipped: copied.skipped, sent_bytes: copied.sent_bytes })
    }

    /// Says that the session is still held, without a new copy.
    pub(crate) async fn renew(&mut self, every_seconds: u64) -> Result<(), PersistError> {
        let head = Head { every_seconds, ..self.next() };
        self.vault.put_head(self.slot, &head).await?;
        self.head = head;
        Ok(())
    }

    /// Gives it back: the next instance that starts may have it.
    pub(crate) async fn release(mut self) -> Result<(), PersistError> {
        self.head = Head { holder: None, ..self.next() };
        self.vault.put_head(self.slot, &self.head).await
    }

    fn next(&self) -> Head {
        Head { number: self.head.number + 1, ..self.head.clone() }
    }

    /// Removes what the newest index does not name. What is left behind now goes with the next copy that changes
    /// anything.
    async fn collect(&mut self, index: Digest) {
        let chunks: BTreeSet<Digest> = self.index.chunks();
        let mut keep = chunks.clone();
        keep.insert(index);
        match self.vault.collect(self.slot, &keep).await {
            Ok(_) => {}
            Err(error) => {
                let error = crate::text::chain(&error);
                tracing::warn!(session = %self.name(), error, "could not remove what an older copy left");
            }
        }
        // Also after a failure: nobody knows how far it came.
        self.memory.keep_only(chunks);
    }
}
