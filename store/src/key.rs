//! What a key may look like.
//!
//! A key is a path of one or more segments: `nodes/n-1/status`. The rule is narrow on purpose: keys end up in
//! logs, error messages and other stores, and none of these should ever have to escape them.

use crate::StoreError;

/// Long enough for every path of ids that mvm makes, short enough for an error message.
pub const MAX_KEY_BYTES: usize = 512;

/// A key is non-empty printable ASCII without spaces, in segments parted by single slashes.
pub fn check_key(key: &str) -> Result<(), StoreError> {
    let refuse = |reason| Err(StoreError::InvalidKey { key: shortened(key), reason });
    if key.is_empty() {
        return refuse("it is empty");
    }
    if key.len() > MAX_KEY_BYTES {
        return refuse("it is longer than 512 bytes");
    }
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return refuse("it has a byte that is not printable ASCII");
    }
    if key.split('/').any(str::is_empty) {
        return refuse("it has an empty segment (a slash at an end, or two in a row)");
    }
    if key.split('/').any(|segment| segment == "." || segment == "..") {
        return refuse("it has a segment . or ..");
    }
    Ok(())
}

/// A prefix is the beginning of a key, or empty; it may end anywhere.
pub fn check_prefix(prefix: &str) -> Result<(), StoreError> {
    let refuse = |reason| Err(StoreError::InvalidKey { key: shortened(prefix), reason });
    if prefix.len() > MAX_KEY_BYTES {
        return refuse("it is longer than 512 bytes");
    }
    if !prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
        return refuse("it has a byte that is not printable ASCII");
    }
    if prefix.starts_with('/') || prefix.contains("//") {
        return refuse("it has an empty segment (a slash at the start, or two in a row)");
    }
    Ok(())
}

/// A hostile key of many megabytes must not become an error message of many megabytes.
fn shortened(key: &str) -> String {
    const SHOWN_CHARS: usize = 64;
    match key.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{}...", &key[..cut]),
        None => key.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_printable_segments_are_keys() {
        for key in ["a", "nodes/n-1", "a/b/c.d_e~f", "tokens/0123abcd", &"k".repeat(MAX_KEY_BYTES)] {
            assert!(check_key(key).is_ok(), "{key}");
        }
    }

    #[test]
    fn odd_keys_are_refused() {
        for key in ["", "/", "/a", "a/", "a//b", "a b", "a\n", "a\0", "é", "..", "a/../b", "."] {
            assert!(matches!(check_key(key), Err(StoreError::InvalidKey { .. })), "{key:?}");
        }
        assert!(check_key(&"k".repeat(MAX_KEY_BYTES + 1)).is_err());
    }

    #[test]
    fn a_prefix_may_end_within_or_after_a_segment() {
        for prefix in ["", "n", "nodes/", "nodes/n-"] {
            assert!(check_prefix(prefix).is_ok(), "{prefix:?}");
        }
        for prefix in ["/", "a//", " ", "\u{7f}"] {
            assert!(check_prefix(prefix).is_err(), "{prefix:?}");
        }
    }

    #[test]
    fn a_huge_bad_key_makes_a_short_message() {
        let message = check_key(&"é".repeat(1 << 20)).unwrap_err().to_string();
        assert!(message.len() < 400, "{}", message.len());
    }
}
