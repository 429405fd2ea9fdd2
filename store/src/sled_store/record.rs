//! How one record lies in sled: checksummed, and cut into chunks.
//!
//! sled moves a tree page that outgrows a quarter of a segment into a file of its own, which it never syncs.
//! A page holds up to 20 items, so items must stay small for pages to stay in the log that is synced. Hence
//! chunks: `name 00 index` -> bytes, where the first chunk begins with the checksum and the length of the whole.

use bytes::{BufMut, Bytes, BytesMut};

/// Twenty items of this size and their keys stay under sled's 128 KiB for a page in the log.
const CHUNK_BYTES: usize = 4096;

/// Checksum and length, before the payload.
const HEADER_BYTES: usize = 8;

/// A zero byte and the chunk's number, after the name.
const SUFFIX_BYTES: usize = 3;

/// What was found instead of a whole record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("record {name:?}: {problem}")]
pub(super) struct RecordError {
    pub(super) name: String,
    pub(super) problem: &'static str,
}

/// How many items a record with a payload of this length takes.
pub(super) fn chunks_of(payload_bytes: usize) -> usize {
    (HEADER_BYTES + payload_bytes).div_ceil(CHUNK_BYTES)
}

/// Writes a record over an older one of `old_chunks` items (0 if there is none).
pub(super) fn put(batch: &mut sled::Batch, name: &[u8], payload: &[u8], old_chunks: usize) {
    let mut whole = BytesMut::with_capacity(HEADER_BYTES + payload.len());
    whole.put_u32(checksum(name, payload));
    whole.put_u32(u32::try_from(payload.len()).unwrap_or(u32::MAX));
    whole.put_slice(payload);
    for (index, chunk) in whole.chunks(CHUNK_BYTES).enumerate() {
        batch.insert(chunk_key(name, index), chunk);
    }
    for index in chunks_of(payload.len())..old_chunks {
        batch.remove(chunk_key(name, index));
    }
}

/// Removes a record of `chunks` items.
pub(super) fn remove(batch: &mut sled::Batch, name: &[u8], chunks: usize) {
    for index in 0..chunks {
        batch.remove(chunk_key(name, index));
    }
}

fn chunk_key(name: &[u8], index: usize) -> Vec<u8> {
    // MAX_TRANSACTION_BYTES keeps the number of chunks far below what two bytes can count.
    let index = u16::try_from(index).unwrap_or(u16::MAX);
    [name, &[0], &index.to_be_bytes()].concat()
}

fn checksum(name: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(name);
    hasher.update(payload);
    hasher.finalize()
}

/// Puts records together from items in key order.
#[derive(Debug, Default)]
pub(super) struct Reader {
    name: Vec<u8>,
    whole: BytesMut,
    next_index: u16,
}

/// A record's name and its payload.
pub(super) type Record = (Vec<u8>, Bytes);

impl Reader {
    /// Takes the next item. Returns the record before it when this one begins another.
    pub(super) fn item(&mut self, key: &[u8], chunk: &[u8]) -> Result<Option<Record>, RecordError> {
        let Some((name, suffix)) = key.split_last_chunk::<SUFFIX_BYTES>() else {
            return Err(error(key, "the key of an item is too short"));
        };
        let index = u16::from_be_bytes([suffix[1], suffix[2]]);
        let finished = if name == self.name { None } else { self.finish()? };
        if finished.is_some() || self.next_index == 0 {
            self.name = name.to_vec();
        }
        if suffix[0] != 0 || index != self.next_index {
            return Err(error(name, "a part is missing"));
        }
        self.next_index += 1;
        self.whole.extend_from_slice(chunk);
        Ok(finished)
    }

    /// The last record, once there are no more items.
    pub(super) fn finish(&mut self) -> Result<Option<Record>, RecordError> {
        if self.next_index == 0 {
            return Ok(None);
        }
        let name = std::mem::take(&mut self.name);
        let whole = std::mem::take(&mut self.whole).freeze();
        self.next_index = 0;
        let (Some(sum), Some(length)) = (number(&whole, 0), number(&whole, 4)) else {
            return Err(error(&name, "its header is cut off"));
        };
        let payload = whole.slice(HEADER_BYTES..);
        if usize::try_from(length).ok() != Some(payload.len()) {
            return Err(error(&name, "its length is wrong"));
        }
        if sum != checksum(&name, &payload) {
            return Err(error(&name, "its checksum is wrong"));
        }
        Ok(Some((name, payload)))
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn error(name: &[u8], problem: &'static str) -> RecordError {
    RecordError { name: String::from_utf8_lossy(name).into_owned(), problem }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    type Items = BTreeMap<Vec<u8>, Vec<u8>>;

    fn items(name: &[u8], payload: &[u8]) -> Items {
        let db = sled::Config::new().temporary(true).open().unwrap();
        let mut batch = sled::Batch::default();
        put(&mut batch, name, payload, 0);
        db.apply_batch(batch).unwrap();
        db.iter().map(|item| item.map(|(k, v)| (k.to_vec(), v.to_vec())).unwrap()).collect()
    }

    fn read(items: &Items) -> Result<Vec<Record>, RecordError> {
        let mut reader = Reader::default();
        let mut records = Vec::new();
        for (key, chunk) in items {
            records.extend(reader.item(key, chunk)?);
        }
        records.extend(reader.finish()?);
        Ok(records)
    }

    #[test]
    fn records_of_every_size_around_a_chunk_read_back() {
        for size in [0, 1, CHUNK_BYTES - 9, CHUNK_BYTES - 8, CHUNK_BYTES - 7, 3 * CHUNK_BYTES, 1 << 20] {
            let payload = vec![7; size];
            let items = items(b"data/a", &payload);
            assert_eq!(items.len(), chunks_of(size));
            assert_eq!(read(&items).unwrap(), [(b"data/a".to_vec(), Bytes::from(payload))]);
        }
    }

    #[test]
    fn neighbours_whose_names_begin_alike_stay_apart() {
        let mut both = items(b"data/a", &[1; 5000]);
        both.extend(items(b"data/a/b", &[2; 5000]));
        both.extend(items(b"data/a!", &[3; 10]));
        assert_eq!(read(&both).unwrap().len(), 3);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_flipped_bit_or_lost_item_is_found(size in 0..10_000_usize, pick: prop::sample::Index, bit in 0..8_u8) {
            let whole = items(b"data/key", &vec![0x5a; size]);
            let mut flipped = whole.clone();
            let (_, chunk) = flipped.iter_mut().nth(pick.index(whole.len())).unwrap();
            let at = pick.index(chunk.len());
            chunk[at] ^= 1 << bit;
            prop_assert!(read(&flipped).is_err());
            let mut lost = whole.clone();
            let key = whole.keys().nth(pick.index(whole.len())).unwrap();
            lost.remove(key);
            prop_assert!(lost.is_empty() || read(&lost).is_err());
        }
    }
}
