//! One line of an audit log, and how it is bound to the line before it.
//!
//! A line is a JSON object on a line of its own. Its last field is the SHA-256 of the object without that field,
//! byte for byte as it stands in the file, and the field before names the previous line's hash. So no line can be
//! changed, taken out, put in or moved without the next one showing it, and any tool can check a log.

use mvm_proto::{Digest, InstanceId, PoolId, TenantId, Timestamp};
use serde::{Deserialize, Serialize};

use super::Entry;

/// No reason or outcome is longer than this in a log; drivers and guests may say more than anyone reads.
const MAX_TEXT_BYTES: usize = 4096;
/// Far above the longest line that is ever written.
pub(crate) const MAX_LINE_BYTES: usize = 64 * 1024;

const HASH_FIELD: &str = ",\"hash\":\"";
const DIGEST_BYTES: usize = "sha256:".len() + 64;
const HASH_END: &str = "\"}";

/// Everything a line says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Line {
    /// From 1, without gaps, over all of a tenant's files.
    pub seq: u64,
    pub at: Timestamp,
    pub tenant: TenantId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<InstanceId>,
    pub actor: String,
    pub action: String,
    pub reason: String,
    pub outcome: String,
    /// The hash of the line before; of the first line, [`beginning`].
    pub prev: Digest,
    pub hash: Digest,
}

/// A line's fields but for its hash, in the order in which they are written.
#[derive(Debug, Serialize)]
struct Content<'a> {
    seq: u64,
    at: Timestamp,
    tenant: &'a TenantId,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<&'a PoolId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    instance: Option<&'a InstanceId>,
    actor: &'a str,
    action: &'a str,
    reason: &'a str,
    outcome: &'a str,
    prev: Digest,
}

/// Why a line can't be read.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    #[error("the line is not an audit entry")]
    NotALine(#[source] serde_json::Error),
    #[error("the line does not end with its hash")]
    NoHash,
    #[error("the line's hash does not match its content")]
    OtherContent,
}

/// What the first line of a tenant's log names as the line before it.
#[must_use]
pub fn beginning(tenant: &TenantId) -> Digest {
    Digest::of(format!("mvm audit log 1 of {tenant}").as_bytes())
}

/// The line for `entry`, with its line feed, and its hash.
pub(crate) fn write(entry: &Entry, seq: u64, prev: Digest) -> Result<(String, Digest), serde_json::Error> {
    let (actor, action) = (bounded(&entry.actor), bounded(&entry.action));
    let (reason, outcome) = (bounded(&entry.reason), bounded(&entry.outcome));
    let content = Content {
        seq,
        at: entry.at,
        tenant: &entry.tenant,
        pool: entry.pool.as_ref(),
        instance: entry.instance.as_ref(),
        actor: &actor,
        action: &action,
        reason: &reason,
        outcome: &outcome,
        prev,
    };
    let mut text = serde_json::to_string(&content)?;
    let hash = Digest::of(text.as_bytes());
    text.pop();
    text.push_str(HASH_FIELD);
    text.push_str(&hash.to_string());
    text.push_str(HASH_END);
    text.push('\n');
    Ok((text, hash))
}

/// Reads a line, without its line feed, and checks that it says what was written.
pub(crate) fn read(bytes: &[u8]) -> Result<Line, LineError> {
    let suffix = HASH_FIELD.len() + DIGEST_BYTES + HASH_END.len();
    let split = bytes.len().checked_sub(suffix).ok_or(LineError::NoHash)?;
    let (content, hash) = bytes.split_at(split);
    if !hash.starts_with(HASH_FIELD.as_bytes()) || !hash.ends_with(HASH_END.as_bytes()) {
        return Err(LineError::NoHash);
    }
    let line: Line = serde_json::from_slice(bytes).map_err(LineError::NotALine)?;
    let whole = [content, b"}"].concat();
    if Digest::of(&whole) != line.hash {
        return Err(LineError::OtherContent);
    }
    Ok(line)
}

fn bounded(text: &str) -> std::borrow::Cow<'_, str> {
    if text.len() <= MAX_TEXT_BYTES {
        return text.into();
    }
    let end = text.floor_char_boundary(MAX_TEXT_BYTES);
    format!("{} ({} bytes more)", &text[..end], text.len() - end).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(reason: &str) -> Entry {
        Entry {
            at: Timestamp::from_unix_ms(1_800_000_000_000),
            tenant: "acme".parse().unwrap(),
            pool: Some("web".parse().unwrap()),
            instance: None,
            actor: "reconcile".to_owned(),
            action: "create".to_owned(),
            reason: reason.to_owned(),
            outcome: "done".to_owned(),
        }
    }

    #[test]
    fn a_line_is_read_as_it_was_written() {
        let prev = beginning(&"acme".parse().unwrap());
        let (text, hash) = write(&entry("running 0 of 1\n\"}\u{7f}"), 1, prev).unwrap();
        let line = read(text.trim_end_matches('\n').as_bytes()).unwrap();
        assert_eq!((line.seq, line.prev, line.hash), (1, prev, hash));
        assert_eq!(line.reason, "running 0 of 1\n\"}\u{7f}");
        assert_eq!(text.matches('\n').count(), 1, "a line feed in a reason is escaped");
    }

    #[test]
    fn every_changed_byte_is_noticed() {
        let (text, _) = write(&entry("why"), 7, Digest::of(b"before")).unwrap();
        let good = text.trim_end_matches('\n').as_bytes();
        for index in 0..good.len() {
            for flip in [1, 0x20, 0x80] {
                let mut bad = good.to_vec();
                bad[index] ^= flip;
                assert!(read(&bad).is_err(), "{}", String::from_utf8_lossy(&bad));
            }
        }
    }

    #[test]
    fn an_endless_reason_is_cut_and_says_so() {
        let (text, _) = write(&entry(&"ä".repeat(100_000)), 1, Digest::of(b"")).unwrap();
        assert!(text.len() < MAX_LINE_BYTES);
        let line = read(text.trim_end_matches('\n').as_bytes()).unwrap();
        assert!(line.reason.ends_with("(195904 bytes more)"), "{}", line.reason.len());
    }
}
