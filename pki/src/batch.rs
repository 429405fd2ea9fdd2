//! One signature over many payloads of one type: their digests are the leaves of a tree, and what is signed is its root.
//! The coordinator signs the documents of a change this way; nodes check theirs with one signature and a few digests.
//!
//! A leaf is `SHA-256(00, LEAF, DSSE's encoding of the type and the payload's digest, number of leaves, position)`, a node
//! `SHA-256(01, left, right)`; one that is alone on its level moves up. What the key signs is DSSE's encoding of
//! [`BATCH_TYPE`], the number of leaves and the root: no envelope has that type, so neither is ever taken for the other. The
//! signature of one payload is `01, number of leaves, position, way to the root, ed25519`, with numbers of two bytes, the higher
//! first. Number and position say how long the way is, so there is one encoding; a signature of its own is shorter than
//! all of these.

use aws_lc_rs::digest::{Context, SHA256};
use mvm_proto::Digest;
use mvm_proto::envelope::{Signed, pre_authentication_encoding};

/// The type of what a key signs for a batch.
pub const BATCH_TYPE: &str = "application/vnd.mvm.batch.v1";
/// More than any transaction has documents. It bounds the way to the root, which every document carries, to ten digests.
pub const MAX_BATCH: usize = 1024;

const LEAF: &[u8] = b"mvm batch leaf v1 ";
const LEAF_TAG: u8 = 0;
const NODE_TAG: u8 = 1;
const FORMAT: u8 = 1;
/// Format, number of leaves, position.
const HEAD_BYTES: usize = 5;
const HASH_BYTES: usize = 32;
/// Of ed25519.
const OWN_BYTES: usize = 64;

type Hash = [u8; HASH_BYTES];

/// Whether a signature claims to be of a batch.
#[must_use]
pub fn is_of_batch(signature: &[u8]) -> bool {
    signature.len() > OWN_BYTES
}

/// The signatures of payloads with these digests, in their order. `sign` is asked once for every [`MAX_BATCH`] of them.
pub(crate) fn sign(payload_type: &str, digests: &[Digest], sign: impl Fn(&[u8]) -> Vec<u8>) -> Vec<Vec<u8>> {
    digests.chunks(MAX_BATCH).flat_map(|some| sign_some(payload_type, some, &sign)).collect()
}

fn sign_some(payload_type: &str, digests: &[Digest], sign: &impl Fn(&[u8]) -> Vec<u8>) -> Vec<Vec<u8>> {
    let count = number(digests.len());
    let leaves =
        (0..count).zip(digests).map(|(position, digest)| leaf(payload_type, digest, count, position));
    let mut levels: Vec<Vec<Hash>> = vec![leaves.collect()];
    while let Some(level) = levels.last().filter(|level| level.len() > 1) {
        let above = level.chunks(2).map(|pair| match pair {
            [left, right] => node(left, right),
            alone => alone[0],
        });
        let above = above.collect();
        levels.push(above);
    }
    let Some(root) = levels.last().and_then(|top| top.first()) else { return Vec::new() };
    let own = sign(&signed_root(count, root));
    let signature = |position: u16| {
        let mut bytes = vec![FORMAT];
        bytes.extend(count.to_be_bytes());
        bytes.extend(position.to_be_bytes());
        let mut at = usize::from(position);
        for level in &levels {
            bytes.extend(level.get(at ^ 1).into_iter().flatten());
            at /= 2;
        }
        bytes.extend(&own);
        bytes
    };
    (0..count).map(signature).collect()
}

/// Whether the signature is of a batch in which this payload has the place that it names; `verifies` is asked whether the
/// key signed the batch.
pub(crate) fn verifies(
    signed: &Signed<'_>,
    signature: &[u8],
    verifies: impl Fn(&[u8], &[u8]) -> bool,
) -> bool {
    let Some(place) = Place::read(signature) else { return false };
    let mut hash = leaf(signed.payload_type, &signed.digest, place.count, place.position);
    let (mut at, mut width) = (usize::from(place.position), usize::from(place.count));
    let mut way = place.way.iter();
    while width > 1 {
        if at ^ 1 < width {
            // As many as there are levels with a neighbour: the length was checked.
            let Some(beside) = way.next() else { return false };
            hash = if at & 1 == 0 { node(&hash, beside) } else { node(beside, &hash) };
        }
        (at, width) = (at / 2, width.div_ceil(2));
    }
    way.next().is_none() && verifies(&signed_root(place.count, &hash), place.own)
}

/// What a signature says of a payload's place.
struct Place<'a> {
    count: u16,
    position: u16,
    way: &'a [Hash],
    own: &'a [u8],
}

impl<'a> Place<'a> {
    /// Reads the one encoding that there is.
    fn read(signature: &'a [u8]) -> Option<Self> {
        let (&[format, c0, c1, p0, p1], rest) = signature.split_first_chunk::<HEAD_BYTES>()?;
        let (count, position) = (u16::from_be_bytes([c0, c1]), u16::from_be_bytes([p0, p1]));
        if format != FORMAT || usize::from(count) > MAX_BATCH || position >= count {
            return None;
        }
        let (way, own) = rest.split_at_checked(rest.len().checked_sub(OWN_BYTES)?)?;
        let (way, odd) = way.as_chunks::<HASH_BYTES>();
        (odd.is_empty() && way.len() == way_length(count, position)).then_some(Self {
            count,
            position,
            way,
            own,
        })
    }
}

/// On how many levels a leaf has a neighbour.
fn way_length(count: u16, position: u16) -> usize {
    let (mut at, mut width, mut length) = (usize::from(position), usize::from(count), 0);
    while width > 1 {
        length += usize::from(at ^ 1 < width);
        (at, width) = (at / 2, width.div_ceil(2));
    }
    length
}

fn signed_root(count: u16, root: &Hash) -> Vec<u8> {
    pre_authentication_encoding(BATCH_TYPE, &[&count.to_be_bytes()[..], root].concat())
}

fn leaf(payload_type: &str, digest: &Digest, count: u16, position: u16) -> Hash {
    let encoding = pre_authentication_encoding(payload_type, digest.as_bytes());
    hash(&[&[LEAF_TAG], LEAF, &encoding, &count.to_be_bytes(), &position.to_be_bytes()])
}

fn node(left: &Hash, right: &Hash) -> Hash {
    hash(&[&[NODE_TAG], left, right])
}

fn hash(parts: &[&[u8]]) -> Hash {
    let mut context = Context::new(&SHA256);
    parts.iter().for_each(|part| context.update(part));
    let mut hash = [0; HASH_BYTES];
    hash.copy_from_slice(context.finish().as_ref());
    hash
}

/// Never cut: a batch has at most [`MAX_BATCH`] payloads.
fn number(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

#[cfg(test)]
mod tests {
    use mvm_proto::envelope::MAX_SIGNATURE_BYTES;
    use proptest::prelude::*;

    use super::*;

    const TYPE: &str = "application/vnd.mvm.test";

    fn payloads(count: usize) -> Vec<Vec<u8>> {
        (0..count).map(|number| format!("payload {number}").into_bytes()).collect()
    }

    fn signed<'a>(payload_type: &'a str, payload: &'a [u8]) -> Signed<'a> {
        Signed { payload_type, payload, digest: Digest::of(payload) }
    }

    /// Stands for a key: what it signs is the digest, twice.
    fn own(root: &[u8]) -> Vec<u8> {
        Digest::of(root).as_bytes().repeat(2)
    }

    fn is_good(payload_type: &str, payload: &[u8], signature: &[u8]) -> bool {
        verifies(&signed(payload_type, payload), signature, |root, bytes| own(root) == bytes)
    }

    fn sign_all(payloads: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let digests: Vec<_> = payloads.iter().map(|payload| Digest::of(payload)).collect();
        sign(TYPE, &digests, own)
    }

    #[test]
    fn every_payload_of_every_small_batch_verifies_in_its_own_place_and_in_no_other() {
        for count in 1..=18 {
            let payloads = payloads(count);
            let signatures = sign_all(&payloads);
            assert_eq!(signatures.len(), count);
            for (at, payload) in payloads.iter().enumerate() {
                for (place, signature) in signatures.iter().enumerate() {
                    assert!(is_of_batch(signature));
                    assert_eq!(is_good(TYPE, payload, signature), at == place, "{at} in {place} of {count}");
                }
            }
        }
    }

    #[test]
    fn a_larger_set_is_signed_as_several_batches_and_the_longest_signature_fits() {
        let payloads = payloads(MAX_BATCH + 1);
        let signatures = sign_all(&payloads);
        assert!(payloads.iter().zip(&signatures).all(|(payload, by)| is_good(TYPE, payload, by)));
        let longest = signatures.iter().map(Vec::len).max().unwrap();
        assert_eq!(longest, HEAD_BYTES + 10 * HASH_BYTES + OWN_BYTES);
        assert!(longest <= MAX_SIGNATURE_BYTES);
        assert_eq!(signatures[MAX_BATCH].len(), HEAD_BYTES + OWN_BYTES);
        assert!(sign_all(&[]).is_empty());
    }

    #[test]
    fn the_tree_is_the_one_that_is_described() {
        let payloads = payloads(3);
        let hash = |parts: &[&[u8]]| *Digest::of(&parts.concat()).as_bytes();
        let leaf = |position: u8| {
            let digest = Digest::of(&payloads[usize::from(position)]);
            let head = format!("DSSEv1 {} {TYPE} 32 ", TYPE.len());
            hash(&[b"\0mvm batch leaf v1 ", head.as_bytes(), digest.as_bytes(), &[0, 3, 0, position]])
        };
        let pair = hash(&[&[1], &leaf(0), &leaf(1)]);
        let root = hash(&[&[1], &pair, &leaf(2)]);
        let of_root = own(&[b"DSSEv1 28 application/vnd.mvm.batch.v1 34 \0\x03", &root[..]].concat());
        let expected = [
            [&[1, 0, 3, 0, 0], &leaf(1)[..], &leaf(2), &of_root].concat(),
            [&[1, 0, 3, 0, 1], &leaf(0)[..], &leaf(2), &of_root].concat(),
            [&[1, 0, 3, 0, 2], &pair[..], &of_root].concat(),
        ];
        assert_eq!(sign_all(&payloads), expected);
    }

    #[test]
    fn a_node_of_the_tree_is_no_leaf_of_a_smaller_one() {
        let payloads = payloads(4);
        let signature = &sign_all(&payloads)[0];
        // The batch of two whose leaves are the nodes above the four.
        let mut shorter = signature.clone();
        shorter[2] = 2;
        shorter.drain(HEAD_BYTES..HEAD_BYTES + HASH_BYTES);
        let inner =
            [leaf(TYPE, &Digest::of(&payloads[0]), 4, 0), leaf(TYPE, &Digest::of(&payloads[1]), 4, 1)];
        for forged in [inner.concat(), [&[NODE_TAG], inner.concat().as_slice()].concat()] {
            assert!(!is_good(TYPE, &forged, &shorter));
        }
        assert!(!is_good(TYPE, &payloads[0], &shorter));
    }

    proptest! {
        #[test]
        fn every_flipped_bit_of_a_signature_or_a_payload_is_refused(count in 1_usize..70, at in any::<prop::sample::Index>()) {
            let payloads = payloads(count);
            let at = at.index(count);
            let signature = &sign_all(&payloads)[at];
            prop_assert!(is_good(TYPE, &payloads[at], signature));
            for bit in 0..signature.len() * 8 {
                let mut flipped = signature.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(!is_good(TYPE, &payloads[at], &flipped), "bit {}", bit);
            }
            for bit in 0..payloads[at].len() * 8 {
                let mut flipped = payloads[at].clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                prop_assert!(!is_good(TYPE, &flipped, signature), "bit {}", bit);
            }
            prop_assert!(!is_good("application/vnd.mvm.tess", &payloads[at], signature));
            prop_assert!(!is_good(BATCH_TYPE, &payloads[at], signature));
        }

        #[test]
        fn a_signature_that_is_cut_or_lengthened_is_refused(count in 1_usize..40, cut in 0_usize..400, more in prop::collection::vec(any::<u8>(), 1..80)) {
            let payloads = payloads(count);
            for (payload, signature) in payloads.iter().zip(sign_all(&payloads)) {
                let cut = cut % signature.len();
                prop_assert!(!is_good(TYPE, payload, &signature[..cut]));
                prop_assert!(!is_good(TYPE, payload, &signature[cut + 1..]));
                let mut longer = signature.clone();
                longer.splice(HEAD_BYTES..HEAD_BYTES, more.iter().copied());
                prop_assert!(!is_good(TYPE, payload, &longer));
                prop_assert!(!is_good(TYPE, payload, &[&signature[..], &more].concat()));
            }
        }

        #[test]
        fn no_bytes_make_it_panic(signature in prop::collection::vec(any::<u8>(), 0..500)) {
            prop_assert!(!is_good(TYPE, b"payload", &signature));
        }
    }
}
