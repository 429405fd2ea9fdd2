//! What a Secret has: its values, and the random bytes that keep what is told of them from being guessed.

use std::collections::BTreeMap;

use aws_lc_rs::hmac;
use mvm_proto::Digest;
use mvm_proto::digest::hex;
use mvm_proto::object::{GivenValue, SecretValue};
use zeroize::Zeroizing;

use super::SecretsError;
use super::keys::SecretKeys;

const KEY_BYTES: usize = 32;
/// Of a digest that is shown: enough to tell values apart, and no more than is read easily.
const DIGEST_BYTES: usize = 12;

/// Some values by their names.
pub(crate) type StoredValues = BTreeMap<String, GivenValue>;

/// What a Secret has. Wiped when it is dropped.
#[derive(Clone)]
pub(crate) struct Contents {
    /// Of the digests that are shown; the Secret's own for as long as it lives, so that a digest changes with its value alone.
    digest_key: Zeroizing<[u8; KEY_BYTES]>,
    /// Goes into bundles, and so into their digests; another one with every change.
    pub(super) salt: Zeroizing<[u8; KEY_BYTES]>,
    pub(super) values: StoredValues,
}

impl std::fmt::Debug for Contents {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Contents {{ {} values }}", self.values.len())
    }
}

fn random() -> Result<Zeroizing<[u8; KEY_BYTES]>, SecretsError> {
    let mut bytes = Zeroizing::new([0; KEY_BYTES]);
    mvm_pki::random_bytes(&mut *bytes).map_err(|_| SecretsError::Random)?;
    Ok(bytes)
}

impl Contents {
    /// Those of a Secret that becomes one with these values.
    pub(crate) fn with(before: Option<&Self>, values: StoredValues) -> Result<Self, SecretsError> {
        let (digest_key, salt) = match before {
            Some(before) if before.values == values => (before.digest_key.clone(), before.salt.clone()),
            Some(before) => (before.digest_key.clone(), random()?),
            None => (random()?, random()?),
        };
        Ok(Self { digest_key, salt, values })
    }

    pub(crate) fn value(&self, name: &str) -> Option<&GivenValue> {
        self.values.get(name)
    }

    /// A digest of the values that tells nothing of them without the coordinator's key.
    pub(crate) fn tag(&self, keys: &SecretKeys) -> Digest {
        // The same values have the same tag: what is random is left out.
        keys.tag(&self.to_bytes()[2 * KEY_BYTES..])
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.values.values().map(|value| value.bytes.len() as u64).sum()
    }

    /// What is told of a value.
    pub(crate) fn shown(&self, name: &str) -> Option<SecretValue> {
        let value = self.values.get(name)?;
        let mut digest = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, &*self.digest_key));
        digest.update(&(name.len() as u64).to_be_bytes());
        digest.update(name.as_bytes());
        digest.update(&[u8::from(value.is_text)]);
        digest.update(&value.bytes);
        let tag = digest.sign();
        Some(SecretValue::stored(value.bytes.len() as u64, hex(&tag.as_ref()[..DIGEST_BYTES])))
    }

    /// All of it in one buffer, to be encrypted.
    pub(super) fn to_bytes(&self) -> Zeroizing<Vec<u8>> {
        let of_value = |(name, value): (&String, &GivenValue)| 4 + name.len() + 1 + 4 + value.bytes.len();
        let length = 2 * KEY_BYTES + self.values.iter().map(of_value).sum::<usize>();
        // Of its full size at once: a buffer that grows leaves copies behind.
        let mut bytes = Zeroizing::new(Vec::with_capacity(length));
        bytes.extend_from_slice(&*self.digest_key);
        bytes.extend_from_slice(&*self.salt);
        let part = |bytes: &mut Vec<u8>, part: &[u8]| {
            bytes.extend_from_slice(&u32::try_from(part.len()).unwrap_or(u32::MAX).to_be_bytes());
            bytes.extend_from_slice(part);
        };
        for (name, value) in &self.values {
            part(&mut bytes, name.as_bytes());
            bytes.push(u8::from(value.is_text));
            part(&mut bytes, &value.bytes);
        }
        debug_assert_eq!(bytes.len(), length);
        bytes
    }

    /// None of bytes that are none of these.
    pub(super) fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        let (digest_key, salt) = (cut(&mut bytes, KEY_BYTES)?, cut(&mut bytes, KEY_BYTES)?);
        let key = |bytes: &[u8]| bytes.try_into().ok().map(Zeroizing::new);
        let mut values = StoredValues::new();
        while !bytes.is_empty() {
            let name = std::str::from_utf8(part(&mut bytes)?).ok()?.to_owned();
            let is_text = match cut(&mut bytes, 1)? {
                [0] => false,
                [1] => true,
                _ => return None,
            };
            let value = GivenValue { bytes: Zeroizing::new(part(&mut bytes)?.to_vec()), is_text };
            values.insert(name, value);
        }
        Some(Self { digest_key: key(digest_key)?, salt: key(salt)?, values })
    }
}

fn cut<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (front, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(front)
}

fn part<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = u32::from_be_bytes(cut(bytes, 4)?.try_into().ok()?);
    cut(bytes, usize::try_from(length).ok()?)
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(in crate::secrets) fn values(pairs: &[(&str, &[u8], bool)]) -> StoredValues {
        let value = |bytes: &[u8], is_text| GivenValue { bytes: Zeroizing::new(bytes.to_vec()), is_text };
        pairs.iter().map(|(name, bytes, is_text)| ((*name).to_owned(), value(bytes, *is_text))).collect()
    }

    #[test]
    fn a_digest_changes_with_its_value_and_with_nothing_else() {
        let first = Contents::with(None, values(&[("a", b"x", true), ("b", b"x", true)])).unwrap();
        let digest = |of: &Contents, name: &str| of.shown(name).unwrap().digest;
        assert_ne!(digest(&first, "a"), digest(&first, "b"), "equal values don't look alike");
        let next = Contents::with(Some(&first), values(&[("a", b"x", true), ("b", b"y", true)])).unwrap();
        assert_eq!(digest(&first, "a"), digest(&next, "a"));
        assert_ne!(digest(&first, "b"), digest(&next, "b"));
        assert_ne!(*first.salt, *next.salt);
        let as_bytes = Contents::with(Some(&first), values(&[("a", b"x", false)])).unwrap();
        assert_ne!(digest(&first, "a"), digest(&as_bytes, "a"));
        let other = Contents::with(None, first.values.clone()).unwrap();
        assert_ne!(digest(&first, "a"), digest(&other, "a"), "of another Secret");
        let same = Contents::with(Some(&first), first.values.clone()).unwrap();
        assert_eq!(*first.salt, *same.salt);
        assert!(!format!("{first:?}").contains('x'));
    }

    proptest! {
        #[test]
        fn what_is_put_into_bytes_comes_out_again(
            pairs in proptest::collection::btree_map("[a-z]{1,9}", (proptest::collection::vec(any::<u8>(), 0..40), any::<bool>()), 0..5),
            cut in any::<prop::sample::Index>(),
        ) {
            let of = |(name, (bytes, is_text)): (&String, &(Vec<u8>, bool))| {
                (name.clone(), GivenValue { bytes: Zeroizing::new(bytes.clone()), is_text: *is_text })
            };
            let contents = Contents::with(None, pairs.iter().map(of).collect()).unwrap();
            let bytes = contents.to_bytes();
            let again = Contents::from_bytes(&bytes).unwrap();
            prop_assert_eq!(&again.values, &contents.values);
            prop_assert_eq!((&*again.salt, &*again.digest_key), (&*contents.salt, &*contents.digest_key));
            // What was cut off never reads as more or other values than were there.
            let part = cut.index(bytes.len());
            if let Some(less) = Contents::from_bytes(&bytes[..part]) {
                prop_assert!(less.values.iter().all(|(name, value)| contents.values.get(name) == Some(value)));
            }
        }
    }
}
