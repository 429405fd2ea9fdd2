//! What a pool's guests are given: one JSON text with the values of the Secrets that it names.
//!
//! ```text
//! {
//!   "_salt": "…",
//!   "db": {
//!     "PASSWORD": "hunter2",
//!     "key.der": { "base64": "AAE=" }
//!   }
//! }
//! ```
//! A document names it by its digest. The salt, which is of random bytes, is in the text: no digest tells a value by being
//! guessed. The same values give the same bytes, whichever process makes them. Pure.

use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_proto::guest::MAX_SECRETS_BYTES;
use mvm_proto::{Digest, TenantId};
use zeroize::Zeroizing;

use super::Contents;
use super::keys::push_hex;

/// Before the first value and after the last.
const AROUND: usize = 128;
/// Around a value: quotes, indents, `{ "base64": }`.
const AROUND_VALUE: usize = 48;
/// What a byte of a text takes at most: `\u0000`.
const PER_BYTE: usize = 6;

/// The text and its digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bundle {
    pub(crate) bytes: Zeroizing<Vec<u8>>,
    pub(crate) digest: Digest,
}

/// The bundle of these Secrets of a tenant, in the order of their names. None where it is larger than a guest takes, which the
/// limits of a tenant's Secrets leave no room for.
pub(crate) fn bundle(tenant: &TenantId, secrets: &[(&str, Contents)]) -> Option<Bundle> {
    let of_secret = |(name, contents): &(&str, Contents)| {
        let values = contents
            .values
            .iter()
            .map(|(name, value)| name.len() + PER_BYTE * value.bytes.len() + AROUND_VALUE);
        name.len() + AROUND_VALUE + values.sum::<usize>()
    };
    // Of its full size at once: a buffer that grows leaves copies behind.
    let most = AROUND + secrets.iter().map(of_secret).sum::<usize>();
    let mut text = Zeroizing::new(String::with_capacity(most));
    text.push_str("{\n  \"_salt\": \"");
    push_hex(&mut text, salt(tenant, secrets).as_bytes());
    text.push('"');
    for (name, contents) in secrets {
        // A name of DNS, and names of values have nothing that JSON escapes.
        let _ = write!(text, ",\n  \"{name}\": {{");
        for (at, (name, value)) in contents.values.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            let _ = write!(text, "{comma}\n    \"{name}\": ");
            match std::str::from_utf8(&value.bytes) {
                Ok(value) if contents.values[name].is_text => push_text(&mut text, value),
                _ => {
                    text.push_str("{ \"base64\": \"");
                    STANDARD.encode_string(&*value.bytes, &mut text);
                    text.push_str("\" }");
                }
            }
        }
        text.push_str("\n  }");
    }
    text.push_str("\n}\n");
    debug_assert!(text.len() <= most);
    if text.len() as u64 > MAX_SECRETS_BYTES {
        return None;
    }
    let bytes = Zeroizing::new(std::mem::take(&mut *text).into_bytes());
    Some(Bundle { digest: Digest::of(&bytes), bytes })
}

fn salt(tenant: &TenantId, secrets: &[(&str, Contents)]) -> Digest {
    let mut all = Zeroizing::new(Vec::with_capacity(64 + secrets.len() * 128));
    all.extend_from_slice(tenant.as_str().as_bytes());
    for (name, contents) in secrets {
        all.push(0);
        all.extend_from_slice(name.as_bytes());
        all.push(0);
        all.extend_from_slice(&*contents.salt);
    }
    Digest::of(&all)
}

/// As JSON has it, with as few escapes as it asks for.
fn push_text(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        match c {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            c if u32::from(c) < 0x20 => {
                let _ = write!(text, "\\u{:04x}", u32::from(c));
            }
            c => text.push(c),
        }
    }
    text.push('"');
}

/// What a pool names in place of a bundle that can't be made: the digest of no bundle. Its instances wait as for one that is on
/// its way, and what runs is not stopped.
pub(crate) fn waiting(tenant: &TenantId, names: impl IntoIterator<Item = impl AsRef<str>>) -> Digest {
    let mut text = format!("mvm: no bundle yet\0{tenant}");
    for name in names {
        let _ = write!(text, "\0{}", name.as_ref());
    }
    Digest::of(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::contents::tests::values;
    use super::*;

    fn contents(pairs: &[(&str, &[u8], bool)]) -> Contents {
        Contents::with(None, values(pairs)).unwrap()
    }

    fn of(secrets: &[(&str, Contents)]) -> Bundle {
        bundle(&"acme".parse().unwrap(), secrets).unwrap()
    }

    #[test]
    fn a_bundle_has_each_secret_s_values_by_their_names() {
        let db = contents(&[("PASSWORD", b"hunter2", true), ("key.der", &[0, 1], false)]);
        let made = of(&[("db", db), ("empty", contents(&[]))]);
        let mut read: Value = serde_json::from_slice(&made.bytes).unwrap();
        assert_eq!(read.as_object_mut().unwrap().remove("_salt").unwrap().as_str().unwrap().len(), 64);
        assert_eq!(
            read,
            json!({ "db": { "PASSWORD": "hunter2", "key.der": { "base64": "AAE=" } }, "empty": {} })
        );
        // One value to a line, for those that read it without a parser.
        let text = std::str::from_utf8(&made.bytes).unwrap();
        assert!(text.lines().any(|line| line == "    \"PASSWORD\": \"hunter2\","), "{text}");
        assert_eq!(made.digest, Digest::of(&made.bytes));
    }

    #[test]
    fn its_digest_is_of_what_it_has_and_can_t_be_guessed() {
        let db = contents(&[("a", b"1", true)]);
        let made = of(&[("db", db.clone())]);
        assert_eq!(of(&[("db", db.clone())]), made, "the same, whoever makes it");
        assert_ne!(of(&[("db", contents(&[("a", b"1", true)]))]).digest, made.digest, "salted");
        let changed = Contents::with(Some(&db), values(&[("a", b"2", true)])).unwrap();
        assert_ne!(of(&[("db", changed)]).digest, made.digest);
        assert_ne!(bundle(&"other".parse().unwrap(), &[("db", db)]).unwrap().digest, made.digest);
        assert_ne!(waiting(&"acme".parse().unwrap(), ["db"]), made.digest);
    }

    #[test]
    fn all_that_a_tenant_may_have_fits_a_guest() {
        use mvm_proto::object::{MAX_SECRET_BYTES, MAX_TENANT_SECRET_BYTES};
        let worst = vec![0; MAX_SECRET_BYTES];
        let count = usize::try_from(MAX_TENANT_SECRET_BYTES).unwrap() / MAX_SECRET_BYTES;
        let names: Vec<String> = (0..count).map(|n| format!("s{n}")).collect();
        let secrets: Vec<_> =
            names.iter().map(|name| (name.as_str(), contents(&[("a", &worst, true)]))).collect();
        assert!(bundle(&"acme".parse().unwrap(), &secrets).is_some());
    }

    proptest! {
        #[test]
        fn every_text_comes_out_as_it_went_in(text in any::<String>(), bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let made = of(&[("s", contents(&[("t", text.as_bytes(), true), ("b", &bytes, false)]))]);
            let read: Value = serde_json::from_slice(&made.bytes).unwrap();
            prop_assert_eq!(read["s"]["t"].as_str().unwrap(), text.as_str());
            prop_assert_eq!(STANDARD.decode(read["s"]["b"]["base64"].as_str().unwrap()).unwrap(), bytes);
        }
    }
}
