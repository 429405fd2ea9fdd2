//! What the kernel says about links, as bytes: asked for and taken apart here.
//!
//! The library's own reader writes out every attribute as text in case it should have to complain of it, which takes most
//! of a millisecond a link. Links are read in every pass over a node, so that they are read without it.

use std::convert::Infallible;

use rtnetlink::packet_core::{
    NLM_F_DUMP, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage, NetlinkPayload,
    NetlinkSerializable,
};

const RTM_GETLINK: u16 = 18;

/// `struct ifinfomsg`: what comes before a link's attributes.
const HEADER: usize = 16;

/// The two upper bits of an attribute's kind say how it is written.
const KIND_MASK: u16 = 0x3fff;

const EXT_MASK: u16 = 29;
const SKIP_STATS: u32 = 1 << 3;

/// A question about links or an answer to one.
#[derive(Debug, Clone)]
pub(super) struct Words(pub(super) Vec<u8>);

/// All links, with their counters.
pub(super) fn about_all() -> NetlinkMessage<Words> {
    question(NLM_F_REQUEST | NLM_F_DUMP, vec![0; HEADER])
}

/// The link whose attribute of this kind, a name of it, is `name`; without its counters.
pub(super) fn about(kind: u16, name: &str) -> NetlinkMessage<Words> {
    let mut bytes = vec![0; HEADER];
    for (kind, value) in
        [(kind, [name.as_bytes(), &[0]].concat()), (EXT_MASK, SKIP_STATS.to_ne_bytes().to_vec())]
    {
        // Names have at most 127 bytes.
        let length = u16::try_from(value.len() + 4).unwrap_or(u16::MAX);
        bytes.extend([length.to_ne_bytes(), kind.to_ne_bytes()].concat());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    question(NLM_F_REQUEST, bytes)
}

fn question(flags: u16, bytes: Vec<u8>) -> NetlinkMessage<Words> {
    let mut header = NetlinkHeader::default();
    header.flags = flags;
    let mut message = NetlinkMessage::new(header, NetlinkPayload::InnerMessage(Words(bytes)));
    message.finalize();
    message
}

impl Words {
    /// The link's index, its flags and its attributes.
    pub(super) fn link(&self) -> (u32, u32, &[u8]) {
        let number = |at| self.0.get(at..).and_then(first_u32).unwrap_or_default();
        (number(4), number(8), self.0.get(HEADER..).unwrap_or_default())
    }
}

/// One attribute after the other, each with its kind; what is not one ends it.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let [l0, l1, k0, k1, ..] = *bytes else { return None };
        let length = usize::from(u16::from_ne_bytes([l0, l1]));
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes([k0, k1]) & KIND_MASK, value))
    })
}

/// A text, without the zero at its end.
pub(super) fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value.strip_suffix(&[0]).unwrap_or(value)).into_owned()
}

/// A number of whatever size the kernel gives this attribute.
pub(super) fn number(value: &[u8]) -> u32 {
    match *value {
        [byte] => byte.into(),
        [a, b] => u16::from_ne_bytes([a, b]).into(),
        _ => first_u32(value).unwrap_or_default(),
    }
}

pub(super) fn first_u32(value: &[u8]) -> Option<u32> {
    value.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

pub(super) fn first_u64(value: &[u8]) -> Option<u64> {
    value.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
}

impl NetlinkSerializable for Words {
    fn message_type(&self) -> u16 {
        RTM_GETLINK
    }

    fn buffer_len(&self) -> usize {
        self.0.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.0);
    }
}

impl NetlinkDeserializable for Words {
    type Error = Infallible;

    fn deserialize(_header: &NetlinkHeader, payload: &[u8]) -> Result<Self, Infallible> {
        Ok(Self(payload.to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_are_cut_short_or_lie_about_their_length_end_the_reading() {
        let whole = [6, 0, 3, 0, b'x', 0, 0, 0, 5, 0, 4, 0x80, 7, 0, 0, 0];
        let read =
            |bytes: &[u8]| attributes(bytes).map(|(kind, value)| (kind, value.to_vec())).collect::<Vec<_>>();
        assert_eq!(read(&whole), [(3, vec![b'x', 0]), (4, vec![7])]);
        for cut in 0..whole.len() {
            assert!(read(&whole[..cut]).len() <= 2);
        }
        for length in [0, 1, 3, 200] {
            let mut lying = whole;
            lying[0] = length;
            assert_eq!(read(&lying), [], "{length}");
        }
        assert_eq!((text(b"abc\0"), number(&[5]), number(&7_u32.to_ne_bytes())), ("abc".to_owned(), 5, 7));
    }
}
