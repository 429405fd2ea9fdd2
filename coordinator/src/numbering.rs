//! Which numbers the next document of a node gets, and what a node's word about its ledger calls for. Pure.
//!
//! A node's claim moves only that node's numbers: a compromised one can exhaust only its own.

use mvm_proto::status::Mark;

use crate::records::{Assigned, Numbers};

/// Numbers in documents stay below 2^53, where JSON readers of every language still count exactly.
pub(crate) const MAX_NUMBER: u64 = (1 << 53) - 1;

/// A node's numbers can't grow any more; only a new trust root that resets them helps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no document number is left for this node")]
pub(crate) struct Exhausted;

/// The numbers above everything known: this process's epoch, the stored document, what the node reported.
pub(crate) fn next(
    epoch: u64,
    stored: Option<Numbers>,
    reported: Option<Numbers>,
) -> Result<Numbers, Exhausted> {
    let known = [stored, reported].into_iter().flatten();
    let highest = known.fold(Numbers { epoch, generation: 0 }, |high, numbers| Numbers {
        epoch: high.epoch.max(numbers.epoch),
        generation: high.generation.max(numbers.generation),
    });
    if highest.epoch > MAX_NUMBER || highest.generation >= MAX_NUMBER {
        return Err(Exhausted);
    }
    Ok(Numbers { epoch: highest.epoch, generation: highest.generation + 1 })
}

/// What to do after a node said what its ledger holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterHello {
    /// The node has what is stored, or there is nothing at all.
    Nothing,
    /// The stored document is newer than the node's.
    Send,
    /// The node is past the stored document: newer ones were lost here (a restored backup). The older content must not
    /// replace what the node runs by itself; remember how far the node is, and leave the choice to an operator.
    StoredOlder,
    /// The same numbers were given to other content: by this store since it parted from the one that the node heard of,
    /// so the stored content is the newest word. Number it anew, above the node's.
    Renumber,
    /// The node holds a document and none is stored: remember how far it is.
    Remember,
}

pub(crate) fn after_hello(stored: Option<&Assigned>, reported: Option<&Mark>) -> AfterHello {
    let (stored, reported) = match (stored, reported) {
        (None, None) => return AfterHello::Nothing,
        (None, Some(_)) => return AfterHello::Remember,
        (Some(_), None) => return AfterHello::Send,
        (Some(stored), Some(reported)) => (stored, reported),
    };
    match Numbers::from(reported).cmp(&stored.numbers) {
        std::cmp::Ordering::Less => AfterHello::Send,
        std::cmp::Ordering::Equal if reported.digest == stored.digest.to_string() => AfterHello::Nothing,
        std::cmp::Ordering::Equal => AfterHello::Renumber,
        std::cmp::Ordering::Greater => AfterHello::StoredOlder,
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::{Digest, Timestamp};

    use super::*;

    fn numbers(epoch: u64, generation: u64) -> Numbers {
        Numbers { epoch, generation }
    }

    fn stored(epoch: u64, generation: u64) -> Assigned {
        let at = Timestamp::from_unix_ms(0);
        Assigned {
            numbers: numbers(epoch, generation),
            digest: Digest::of(b"x"),
            issued_at: at,
            expires_at: at,
            content: None,
        }
    }

    fn mark(epoch: u64, generation: u64, content: &[u8]) -> Mark {
        Mark::new(epoch, generation, Digest::of(content))
    }

    #[test]
    fn the_first_document_is_generation_one_of_this_epoch() {
        assert_eq!(next(3, None, None), Ok(numbers(3, 1)));
    }

    #[test]
    fn numbers_go_above_both_the_store_and_the_node() {
        assert_eq!(next(3, Some(numbers(2, 7)), None), Ok(numbers(3, 8)));
        assert_eq!(next(3, Some(numbers(2, 7)), Some(numbers(9, 40))), Ok(numbers(9, 41)));
        assert_eq!(next(12, Some(numbers(2, 50)), Some(numbers(9, 40))), Ok(numbers(12, 51)));
    }

    #[test]
    fn exhausted_numbers_are_an_error_and_not_a_wrap() {
        assert_eq!(next(1, None, Some(numbers(1, MAX_NUMBER))), Err(Exhausted));
        assert_eq!(next(1, None, Some(numbers(u64::MAX, 1))), Err(Exhausted));
        assert_eq!(next(1, None, Some(numbers(1, u64::MAX))), Err(Exhausted));
    }

    #[test]
    fn a_node_behind_or_new_is_sent_the_document() {
        assert_eq!(after_hello(Some(&stored(2, 5)), None), AfterHello::Send);
        assert_eq!(after_hello(Some(&stored(2, 5)), Some(&mark(2, 4, b"y"))), AfterHello::Send);
        assert_eq!(after_hello(Some(&stored(2, 5)), Some(&mark(1, 9, b"y"))), AfterHello::Send);
    }

    #[test]
    fn a_node_that_has_the_document_is_sent_nothing() {
        assert_eq!(after_hello(Some(&stored(2, 5)), Some(&mark(2, 5, b"x"))), AfterHello::Nothing);
        assert_eq!(after_hello(None, None), AfterHello::Nothing);
    }

    #[test]
    fn a_node_past_the_store_is_left_as_it_is() {
        assert_eq!(after_hello(Some(&stored(2, 5)), Some(&mark(2, 6, b"x"))), AfterHello::StoredOlder);
        assert_eq!(after_hello(Some(&stored(2, 5)), Some(&mark(3, 1, b"x"))), AfterHello::StoredOlder);
    }

    #[test]
    fn other_content_under_the_same_numbers_is_replaced_under_new_ones() {
        assert_eq!(after_hello(Some(&stored(2, 5)), Some(&mark(2, 5, b"other"))), AfterHello::Renumber);
    }

    #[test]
    fn a_node_with_a_document_unknown_here_is_remembered() {
        assert_eq!(after_hello(None, Some(&mark(1, 1, b"x"))), AfterHello::Remember);
    }
}
