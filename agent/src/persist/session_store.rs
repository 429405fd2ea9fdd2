//! One pool's sessions in a store: numbered heads, and content named by its digest. See [`super::head`].
//!
//! ```text
//! <tenant>/<pool>/heads/<session>/<number>      who holds it, and which index is the newest
//! <tenant>/<pool>/content/<session>/<sha256>    an index, or a piece of a file
//! <tenant>/<pool>/clocks/<holder>               written to learn the store's time, and removed
//! ```

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use mvm_proto::{Digest, PoolId, TenantId, Timestamp};

use super::PersistError;
use super::blob_store::BlobStore;
use super::copy_out::index_too_long;
use super::head::{Found, Head, Holder, VERSION};
use super::index::{CHUNK_BYTES, Index, MAX_INDEX_BYTES, MAX_STORED_INDEX_BYTES};
use super::limits::SessionLimits;
use super::space::{TenantSpace, object_bytes};
use crate::crash;

/// A head is a few hundred bytes.
const MAX_HEAD_BYTES: u64 = 64 * 1024;

/// A head that was listed may be gone when it is read, for a newer one came. After this many times it is no accident.
const LOOKS: usize = 5;

#[derive(Debug, Clone)]
pub(crate) struct SessionStore<S> {
    blobs: S,
    /// Ids have neither slashes nor dots: no pool's keys lead into another's.
    pool: String,
    tenant: TenantId,
    max_bytes: u64,
    /// Absent: the store is not on this machine's disk.
    space: Option<TenantSpace>,
}

impl<S: BlobStore> SessionStore<S> {
    pub(crate) fn new(blobs: S, tenant: &TenantId, pool: &PoolId) -> Self {
        let max_bytes = SessionLimits::default().max_bytes;
        Self { blobs, pool: format!("{tenant}/{pool}"), tenant: tenant.clone(), max_bytes, space: None }
    }

    /// The same with these limits.
    pub(crate) fn limited(self, max_bytes: u64, space: Option<TenantSpace>) -> Self {
        Self { max_bytes, space, ..self }
    }

    /// How much one session may have.
    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// How a session is called by people.
    pub(crate) fn name(&self, slot: u32) -> String {
        format!("{}/{slot}", self.pool)
    }

    fn heads_key(&self, slot: u32) -> String {
        format!("{}/heads/{slot}", self.pool)
    }

    fn head_key(&self, slot: u32, number: u64) -> String {
        format!("{}/{number:020}", self.heads_key(slot))
    }

    fn content_key(&self, slot: u32, digest: &Digest) -> String {
        format!("{}/content/{slot}/{}", self.pool, digest.hex())
    }

    /// The store's own time. Heads are dated by it, and no two clocks agree.
    pub(crate) async fn time(&self, me: &Holder) -> Result<Timestamp, PersistError> {
        let clocks = format!("{}/clocks", self.pool);
        let key = format!("{clocks}/{}-{}", me.node, me.instance);
        self.blobs.put(&key, Bytes::new()).await?;
        let listed = self.blobs.list(&clocks).await?.into_iter().find(|listed| listed.key == key);
        self.blobs.delete(&key).await?;
        let time = listed.map(|listed| listed.written_at);
        time.ok_or_else(|| PersistError::Damaged(format!("{key} was written but is missing")))
    }

    /// The newest head of every session that the pool has.
    pub(crate) async fn heads(&self) -> Result<Vec<Found>, PersistError> {
        self.newest_below(&format!("{}/heads", self.pool)).await
    }

    /// The newest head of one session.
    pub(crate) async fn head(&self, slot: u32) -> Result<Option<Found>, PersistError> {
        Ok(self.newest_below(&self.heads_key(slot)).await?.pop())
    }

    async fn newest_below(&self, below: &str) -> Result<Vec<Found>, PersistError> {
        'look: for _ in 0..LOOKS {
            let mut newest: BTreeMap<u32, (u64, Timestamp)> = BTreeMap::new();
            for listed in self.blobs.list(below).await? {
                let Some((slot, number)) = self.parse_head_key(&listed.key) else { continue };
                let known = newest.entry(slot).or_insert((number, listed.written_at));
                if number >= known.0 {
                    *known = (number, listed.written_at);
                }
            }
            let mut found = Vec::with_capacity(newest.len());
            for (slot, (number, written_at)) in newest {
                let key = self.head_key(slot, number);
                let Some(bytes) = self.blobs.get(&key, MAX_HEAD_BYTES).await? else { continue 'look };
                found.push(Found { slot, head: parse_head(&key, &bytes, number)?, written_at });
            }
            return Ok(found);
        }
        Err(PersistError::Damaged(format!("the heads below {below} change faster than they can be read")))
    }

    fn parse_head_key(&self, key: &str) -> Option<(u32, u64)> {
        let rest = key.strip_prefix(&self.pool)?.strip_prefix("/heads/")?;
        let (slot, number) = rest.split_once('/')?;
        let parsed = (slot.parse().ok()?, number.parse().ok()?);
        // Only what this would have written: `+1` and `01` are numbers too.
        (self.head_key(parsed.0, parsed.1) == key).then_some(parsed)
    }

    /// Makes this the session's newest head. Fails with [`PersistError::Taken`] when another holder wrote it.
    pub(crate) async fn put_head(&self, slot: u32, head: &Head) -> Result<(), PersistError> {
        let key = self.head_key(slot, head.number);
        // Ids, numbers and times always serialise.
        let bytes = Bytes::from(serde_json::to_vec(head).unwrap_or_default());
        if !self.blobs.put_new(&key, bytes.clone()).await? {
            // A store may have taken it and said nothing; then what is there is ours.
            let there = self.blobs.get(&key, MAX_HEAD_BYTES).await?;
            if there.as_ref() != Some(&bytes) {
                return Err(PersistError::Taken(self.name(slot)));
            }
        }
        crash::point("persist.head");
        // Numbers that were collected can be written again by one who was away for long.
        let mut older = Vec::new();
        for listed in self.blobs.list(&self.heads_key(slot)).await? {
            match self.parse_head_key(&listed.key) {
                Some((_, number)) if number > head.number => {
                    self.blobs.delete(&key).await?;
                    return Err(PersistError::Taken(self.name(slot)));
                }
                Some((_, number)) if number < head.number => older.push(listed.key),
                _ => {}
            }
        }
        for key in older {
            self.blobs.delete(&key).await?;
        }
        Ok(())
    }

    pub(crate) async fn put_index(&self, slot: u32, index: &Index) -> Result<Digest, PersistError> {
        let bytes =
            index.to_bytes(MAX_INDEX_BYTES).ok_or_else(|| PersistError::TooLarge(index_too_long()))?;
        let digest = Digest::of(&bytes);
        self.put_content(slot, &digest, bytes).await?;
        crash::point("persist.index");
        Ok(digest)
    }

    pub(crate) async fn index(&self, slot: u32, digest: &Digest) -> Result<Index, PersistError> {
        let bytes = self.content(slot, digest, MAX_STORED_INDEX_BYTES).await?;
        Index::from_bytes(&bytes)
            .map_err(|why| PersistError::Damaged(format!("the index {digest} of {}: {why}", self.name(slot))))
    }

    pub(crate) async fn put_content(
        &self,
        slot: u32,
        digest: &Digest,
        bytes: Vec<u8>,
    ) -> Result<(), PersistError> {
        if let Some(space) = &self.space
            && space.take(bytes.len() as u64).is_err()
        {
            // What was removed since the last look is not known.
            self.measure(space).await?;
            space.take(bytes.len() as u64)?;
        }
        self.blobs.put(&self.content_key(slot, digest), bytes.into()).await?;
        Ok(())
    }

    pub(crate) async fn chunk(&self, slot: u32, digest: &Digest) -> Result<Bytes, PersistError> {
        self.content(slot, digest, CHUNK_BYTES).await
    }

    async fn content(&self, slot: u32, digest: &Digest, limit: u64) -> Result<Bytes, PersistError> {
        let damaged = |what: &str| PersistError::Damaged(format!("{digest} of {} {what}", self.name(slot)));
        let found = self.blobs.get(&self.content_key(slot, digest), limit).await?;
        let bytes = found.ok_or_else(|| damaged("is not there"))?;
        if Digest::of(&bytes) == *digest { Ok(bytes) } else { Err(damaged("is something else")) }
    }

    /// Makes sure that what the tenant has in this store is known.
    pub(crate) async fn measure_once(&self) -> Result<(), PersistError> {
        match &self.space {
            Some(space) if !space.is_measured() => self.measure(space).await,
            _ => Ok(()),
        }
    }

    async fn measure(&self, space: &TenantSpace) -> Result<(), PersistError> {
        let listed = self.blobs.list(self.tenant.as_str()).await?;
        let sizes = listed.iter().map(|listed| object_bytes(listed.bytes));
        space.set_measured(sizes.fold(0, u64::saturating_add));
        Ok(())
    }

    /// The keys of all content of a session but this.
    pub(crate) async fn unnamed(
        &self,
        slot: u32,
        named: &BTreeSet<Digest>,
    ) -> Result<Vec<String>, PersistError> {
        let named: BTreeSet<String> = named.iter().map(|digest| self.content_key(slot, digest)).collect();
        let listed = self.blobs.list(&format!("{}/content/{slot}", self.pool)).await?;
        Ok(listed.into_iter().map(|listed| listed.key).filter(|key| !named.contains(key)).collect())
    }

    /// Removes content that [`Self::unnamed`] found. Only for who has just written the session's newest head.
    pub(crate) async fn remove(&self, key: &str) -> Result<(), PersistError> {
        Ok(self.blobs.delete(key).await?)
    }
}

fn parse_head(key: &str, bytes: &[u8], number: u64) -> Result<Head, PersistError> {
    let damaged = |why: String| PersistError::Damaged(format!("{key}: {why}"));
    let head: Head = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
    if (head.version, head.number) != (VERSION, number) {
        return Err(damaged(format!("version {}, number {}", head.version, head.number)));
    }
    Ok(head)
}
