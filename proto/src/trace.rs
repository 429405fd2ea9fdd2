//! Where a request belongs in a trace, as W3C's Trace Context writes it: `00-<trace id>-<parent id>-<flags>`.
//!
//! Callers send it as the header `traceparent`; coordinators hand it on with documents and streams. It decides nothing: what
//! does not read as one is dropped, and a trace begins where it was read. `tracestate` is neither read nor handed on.

use std::fmt;

/// The name of the header, over HTTP and gRPC.
pub const TRACEPARENT: &str = "traceparent";
/// The name of the variable that programs find their context in.
pub const TRACEPARENT_VARIABLE: &str = "TRACEPARENT";

/// The version that is written here, and its length.
const VERSION_0_BYTES: usize = 55;
/// The longest of a later version that is looked at.
const MAX_BYTES: usize = 128;
const SAMPLED: u8 = 1;

/// A place in a trace. Neither id is zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    trace: u128,
    span: u64,
    /// Whether the caller records the trace.
    pub is_sampled: bool,
}

impl TraceContext {
    /// None where an id is zero, which means none.
    #[must_use]
    pub fn new(trace: u128, span: u64, is_sampled: bool) -> Option<Self> {
        (trace != 0 && span != 0).then_some(Self { trace, span, is_sampled })
    }

    /// Reads a header's value as strictly as W3C asks for: lower-case hexadecimal, no id of zeros, version `ff` never. Of a
    /// later version the part that all versions share is read.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = text.as_bytes();
        if bytes.len() < VERSION_0_BYTES || bytes.len() > MAX_BYTES {
            return None;
        }
        let dashes = [2, 35, 52].iter().all(|at| bytes[*at] == b'-');
        let version = hex(&bytes[..2])?;
        let ends = match version {
            0 => bytes.len() == VERSION_0_BYTES,
            0xff => false,
            _ => bytes.get(VERSION_0_BYTES).is_none_or(|next| *next == b'-'),
        };
        if !dashes || !ends {
            return None;
        }
        let (trace, span, flags) = (hex(&bytes[3..35])?, hex(&bytes[36..52])?, hex(&bytes[53..55])?);
        let span = u64::try_from(span).ok()?;
        Self::new(trace, span, flags & u128::from(SAMPLED) != 0)
    }

    #[must_use]
    pub fn trace(&self) -> u128 {
        self.trace
    }

    #[must_use]
    pub fn span(&self) -> u64 {
        self.span
    }

    /// The id of the trace, as people and headers write it.
    #[must_use]
    pub fn trace_id(&self) -> String {
        format!("{:032x}", self.trace)
    }

    /// The id of the span, as people and headers write it.
    #[must_use]
    pub fn span_id(&self) -> String {
        format!("{:016x}", self.span)
    }
}

/// Lower-case digits alone.
fn hex(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |value: u128, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(value << 4 | u128::from(digit))
    })
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace, self.span, u8::from(self.is_sampled) * SAMPLED)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const SPAN: &str = "00f067aa0ba902b7";

    #[test]
    fn a_context_is_read_as_w3c_writes_it_and_nothing_else_is_one() {
        let read = TraceContext::parse(&format!("00-{TRACE}-{SPAN}-01")).unwrap();
        assert_eq!((read.trace_id().as_str(), read.span_id().as_str()), (TRACE, SPAN));
        assert!(read.is_sampled);
        // Other flags are no concern of ours.
        assert!(!TraceContext::parse(&format!("00-{TRACE}-{SPAN}-02")).unwrap().is_sampled);
        assert!(TraceContext::parse(&format!("00-{TRACE}-{SPAN}-03")).unwrap().is_sampled);
        let (no_trace, no_span) = ("0".repeat(32), "0".repeat(16));
        let long = "x".repeat(MAX_BYTES);
        for other in [
            String::new(),
            format!("00-{TRACE}-{SPAN}"),
            format!("00-{TRACE}-{SPAN}-01-more"),
            format!("00-{TRACE}-{SPAN}-01 "),
            format!("00-{}-{SPAN}-01", TRACE.to_uppercase()),
            format!("00-{no_trace}-{SPAN}-01"),
            format!("00-{TRACE}-{no_span}-01"),
            format!("ff-{TRACE}-{SPAN}-01"),
            format!("00_{TRACE}-{SPAN}-01"),
            format!("00-{TRACE}-{SPAN}-0g"),
            format!("00-+{}-{SPAN}-01", &TRACE[1..]),
            format!("01-{TRACE}-{SPAN}-01{long}"),
            format!("01-{TRACE}-{SPAN}-01-{long}"),
            format!("00-{}\n-{SPAN}-01", &TRACE[1..]),
        ] {
            assert_eq!(TraceContext::parse(&other), None, "{other:?}");
        }
    }

    #[test]
    fn of_a_later_version_the_part_that_all_share_is_read() {
        for later in [format!("01-{TRACE}-{SPAN}-01"), format!("cc-{TRACE}-{SPAN}-01-what-comes")] {
            assert_eq!(TraceContext::parse(&later).unwrap().trace_id(), TRACE, "{later}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back_and_no_text_makes_it_panic(
            trace in 1..u128::MAX, span in 1..u64::MAX, is_sampled: bool, text in ".{0,160}",
        ) {
            let context = TraceContext::new(trace, span, is_sampled).unwrap();
            prop_assert_eq!(TraceContext::parse(&context.to_string()), Some(context));
            let _ = TraceContext::parse(&text);
        }
    }
}
