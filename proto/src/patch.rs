//! What changed between two texts that are alike, as pieces: copy so much of the old one, then insert these bytes.
//!
//! A node's documents differ from one to the next by their numbers and times and by a few counts. The coordinator sends the
//! pieces, and the agent makes the very bytes that were signed of them and of what it has. Pure; a patch is believed in nothing:
//! what it makes is bounded here, and is held against its digest and its signatures by the caller.

/// One piece: bytes of the old text, and then new ones.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Piece {
    pub from: usize,
    pub length: usize,
    pub insert: Vec<u8>,
}

/// The most pieces of a patch: one with more saves nothing.
pub const MAX_PIECES: usize = 256;

/// How many equal bytes make both texts go on together again. Fewer are met by chance.
const ANCHOR: usize = 16;
/// How far apart anchors are tried in the old text, and how far both texts may go on differently.
const STEP: usize = 8;
const REACH: usize = 4096;
/// Twice as many as there are anchors within reach.
const SLOT_BITS: u32 = 10;

/// Why a patch makes nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PatchError {
    #[error("a piece is outside of the old text")]
    Outside,
    #[error("it makes more than {limit} bytes")]
    TooLong { limit: usize },
    #[error("it has more than {MAX_PIECES} pieces")]
    TooMany,
}

/// The pieces that make `new` of `old`. None when they would not be shorter than half of `new`.
#[must_use]
pub fn diff(old: &[u8], new: &[u8]) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    let (mut at_old, mut at_new) = (0, 0);
    let mut inserted = 0;
    while at_new < new.len() {
        let length = common(&old[at_old..], &new[at_new..]);
        let from = at_old;
        (at_old, at_new) = (at_old + length, at_new + length);
        let (skip, take) = resume(&old[at_old..], &new[at_new..]);
        let insert = new[at_new..at_new + take].to_vec();
        (at_old, at_new) = (at_old + skip, at_new + take);
        inserted += insert.len() + size_of::<u64>();
        if inserted * 2 > new.len() || pieces.len() == MAX_PIECES {
            return None;
        }
        pieces.push(Piece { from, length, insert });
    }
    Some(pieces)
}

/// What a patch makes of `old`, at most `limit` bytes.
pub fn apply(old: &[u8], pieces: &[Piece], limit: usize) -> Result<Vec<u8>, PatchError> {
    if pieces.len() > MAX_PIECES {
        return Err(PatchError::TooMany);
    }
    let mut new = Vec::with_capacity(old.len().min(limit));
    for Piece { from, length, insert } in pieces {
        let end = from.checked_add(*length).ok_or(PatchError::Outside)?;
        let copied = old.get(*from..end).ok_or(PatchError::Outside)?;
        if new.len() + copied.len() + insert.len() > limit {
            return Err(PatchError::TooLong { limit });
        }
        new.extend_from_slice(copied);
        new.extend_from_slice(insert);
    }
    Ok(new)
}

/// How many bytes both begin with.
fn common(a: &[u8], b: &[u8]) -> usize {
    const BLOCK: usize = 32;
    let blocks = a.chunks_exact(BLOCK).zip(b.chunks_exact(BLOCK)).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[blocks * BLOCK..], &b[blocks * BLOCK..]);
    blocks * BLOCK + a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// How much of each is passed over until they are alike again; all of it if they are not within reach. Looks once at each byte,
/// whatever the texts are.
fn resume(old: &[u8], new: &[u8]) -> (usize, usize) {
    const NOWHERE: u16 = u16::MAX;
    let (near_old, near_new) = (&old[..old.len().min(REACH)], &new[..new.len().min(REACH)]);
    // Where in the old text an anchor is, by its first bytes: the first of several.
    let mut places = [NOWHERE; 1 << SLOT_BITS];
    for (place, anchor) in near_old.windows(ANCHOR).enumerate().step_by(STEP).rev() {
        places[slot(anchor)] = u16::try_from(place).unwrap_or(NOWHERE);
    }
    for (mut take, anchor) in near_new.windows(ANCHOR).enumerate() {
        let mut skip = usize::from(places[slot(anchor)]);
        if near_old.get(skip..skip + ANCHOR) != Some(anchor) {
            continue;
        }
        // What is alike before the anchor is copied too.
        while skip > 0 && take > 0 && old[skip - 1] == new[take - 1] {
            (skip, take) = (skip - 1, take - 1);
        }
        return (skip, take);
    }
    (old.len(), new.len())
}

/// Which of the slots an anchor belongs to.
fn slot(anchor: &[u8]) -> usize {
    let first = anchor.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    // Multiplied by a large odd number, the upper bits are of all the bytes.
    usize::try_from(first.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - SLOT_BITS)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn made(old: &[u8], new: &[u8]) -> Option<Vec<u8>> {
        diff(old, new).map(|pieces| apply(old, &pieces, new.len()).expect("a patch of ours applies"))
    }

    #[test]
    fn numbers_and_a_count_are_three_small_pieces() {
        let text = |generation: u32, count: u32| {
            let pools: String =
                (0..40).map(|n| format!(r#"{{"pool_id":"pool-{n}","running":{count},"of":{n}}},"#)).collect();
            format!(r#"{{"schema_version":1,"epoch":3,"generation":{generation},"tenants":[{pools}]}}"#)
                .into_bytes()
        };
        let (old, new) = (text(9, 4), text(10, 4));
        let pieces = diff(&old, &new).unwrap();
        assert!(
            pieces.len() <= 2 && pieces.iter().map(|piece| piece.insert.len()).sum::<usize>() < 32,
            "{pieces:?}"
        );
        assert_eq!(made(&old, &new).unwrap(), new);
    }

    #[test]
    fn what_has_little_in_common_is_no_patch() {
        assert_eq!(diff(&[1; 4000], &[2; 4000]), None);
        assert_eq!(diff(b"", b"something"), None);
    }

    #[test]
    fn a_patch_reaches_neither_outside_the_old_text_nor_beyond_the_limit() {
        let piece = |from, length| Piece { from, length, insert: Vec::new() };
        for outside in [piece(4, 1), piece(0, 5), piece(usize::MAX, 2), piece(2, usize::MAX)] {
            assert_eq!(apply(b"text", &[outside], 100), Err(PatchError::Outside));
        }
        let twice = [piece(0, 4), piece(0, 4)];
        assert_eq!(apply(b"text", &twice, 7), Err(PatchError::TooLong { limit: 7 }));
        assert_eq!(apply(b"text", &twice, 8).unwrap(), b"texttext");
        assert_eq!(apply(b"text", &vec![piece(0, 0); MAX_PIECES + 1], 8), Err(PatchError::TooMany));
    }

    proptest! {
        #[test]
        fn a_patch_makes_the_new_text_again(
            old in prop::collection::vec(0_u8..4, 0..600),
            edits in prop::collection::vec((any::<prop::sample::Index>(), prop::collection::vec(0_u8..4, 0..40), 0_usize..40), 0..6),
        ) {
            let mut new = old.clone();
            for (at, insert, remove) in edits {
                let at = at.index(new.len() + 1);
                let end = (at + remove).min(new.len());
                new.splice(at..end, insert);
            }
            if let Some(made) = made(&old, &new) {
                prop_assert_eq!(made, new);
            }
        }
    }
}
