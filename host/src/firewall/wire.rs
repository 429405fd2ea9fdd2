//! Netlink messages as bytes: attributes written and read, without a C library in between.

use std::collections::BTreeMap;

use nftnl_sys::libc;

/// A netlink header and netfilter's own after it.
pub(super) const HEADER_BYTES: usize = 20;
const NETLINK_HEADER_BYTES: usize = 16;
const ATTRIBUTE_HEADER_BYTES: usize = 4;
/// The two highest bits of an attribute's type say how its value is made.
const TYPE_MASK: u16 = 0x3fff;
const NESTED: u16 = 0x8000;

/// Numbers of attributes, from the kernel's `nf_tables.h`.
pub(super) mod attribute {
    pub(in super::super) const GENERATION_ID: u16 = 1;
    pub(in super::super) const LIST_ELEMENT: u16 = 1;
    pub(in super::super) const EXPR_NAME: u16 = 1;
    pub(in super::super) const EXPR_DATA: u16 = 2;
    pub(in super::super) const TABLE_NAME: u16 = 1;
    pub(in super::super) const TABLE_FLAGS: u16 = 2;
    pub(in super::super) const CHAIN_TABLE: u16 = 1;
    pub(in super::super) const CHAIN_NAME: u16 = 3;
    pub(in super::super) const CHAIN_HOOK: u16 = 4;
    pub(in super::super) const CHAIN_POLICY: u16 = 5;
    pub(in super::super) const CHAIN_TYPE: u16 = 7;
    pub(in super::super) const HOOK_NUMBER: u16 = 1;
    pub(in super::super) const HOOK_PRIORITY: u16 = 2;
    pub(in super::super) const RULE_TABLE: u16 = 1;
    pub(in super::super) const RULE_CHAIN: u16 = 2;
    pub(in super::super) const RULE_EXPRESSIONS: u16 = 4;
    pub(in super::super) const SET_TABLE: u16 = 1;
    pub(in super::super) const SET_NAME: u16 = 2;
    pub(in super::super) const SET_FLAGS: u16 = 3;
    pub(in super::super) const SET_KEY_TYPE: u16 = 4;
    pub(in super::super) const SET_KEY_LEN: u16 = 5;
    pub(in super::super) const SET_DATA_TYPE: u16 = 6;
    pub(in super::super) const SET_DATA_LEN: u16 = 7;
    pub(in super::super) const SET_ID: u16 = 10;
    pub(in super::super) const SET_USERDATA: u16 = 13;
    pub(in super::super) const SET_EXPR: u16 = 17;
    pub(in super::super) const SET_EXPRESSIONS: u16 = 18;
    pub(in super::super) const ELEMENTS_TABLE: u16 = 1;
    pub(in super::super) const ELEMENTS_SET: u16 = 2;
    pub(in super::super) const ELEMENTS_LIST: u16 = 3;
    pub(in super::super) const ELEMENT_KEY: u16 = 1;
    pub(in super::super) const ELEMENT_DATA: u16 = 2;
    pub(in super::super) const ELEMENT_FLAGS: u16 = 3;
    pub(in super::super) const ELEMENT_EXPR: u16 = 7;
    pub(in super::super) const DATA_VALUE: u16 = 1;
    pub(in super::super) const DATA_VERDICT: u16 = 2;
    pub(in super::super) const VERDICT_CODE: u16 = 1;
    pub(in super::super) const VERDICT_CHAIN: u16 = 2;
    pub(in super::super) const OBJECT_TABLE: u16 = 1;
    pub(in super::super) const OBJECT_NAME: u16 = 2;
    pub(in super::super) const OBJECT_TYPE: u16 = 3;
    pub(in super::super) const OBJECT_DATA: u16 = 4;
    pub(in super::super) const COUNTER_BYTES: u16 = 1;
    pub(in super::super) const COUNTER_PACKETS: u16 = 2;
}

/// Attributes being written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Writer(Vec<u8>);

impl Writer {
    pub(super) fn u32(self, number: u16, value: u32) -> Self {
        self.bytes(number, &value.to_be_bytes())
    }

    pub(super) fn text(self, number: u16, text: &str) -> Self {
        let mut bytes = text.as_bytes().to_vec();
        bytes.push(0);
        self.bytes(number, &bytes)
    }

    pub(super) fn nest(self, number: u16, inner: &Self) -> Self {
        self.bytes(number | NESTED, &inner.0)
    }

    pub(super) fn bytes(mut self, number: u16, value: &[u8]) -> Self {
        // What is too long here would be refused by the kernel for its missing end; callers split long lists.
        let length = u16::try_from(ATTRIBUTE_HEADER_BYTES + value.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(number.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

/// A request that stands alone: batches are built by nftnl.
pub(super) fn request(message: i32, family: u8, flags: i32, sequence: u32, attributes: &Writer) -> Vec<u8> {
    let length = (HEADER_BYTES + attributes.0.len()) as u32;
    let kind = (libc::NFNL_SUBSYS_NFTABLES << 8 | message) as u16;
    let mut bytes = Vec::with_capacity(length as usize);
    bytes.extend(length.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend((flags as u16).to_ne_bytes());
    bytes.extend(sequence.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend([family, 0, 0, 0]);
    bytes.extend(&attributes.0);
    bytes
}

/// A message from the kernel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reply<'a> {
    pub(super) kind: i32,
    pub(super) flags: i32,
    pub(super) sequence: u32,
    /// After the netlink header.
    payload: &'a [u8],
}

impl<'a> Reply<'a> {
    /// All messages of one datagram; what is cut off is left out.
    pub(super) fn all(datagram: &'a [u8]) -> Vec<Self> {
        let mut rest = datagram;
        let mut replies = Vec::new();
        while let Some(header) = rest.get(..NETLINK_HEADER_BYTES) {
            let length = u32_of(&header[..4]) as usize;
            let Some(payload) = rest.get(NETLINK_HEADER_BYTES..length) else { break };
            let half = |at: usize| i32::from(u16::from_ne_bytes([header[at], header[at + 1]]));
            replies.push(Self { kind: half(4), flags: half(6), sequence: u32_of(&header[8..12]), payload });
            rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
        }
        replies
    }

    /// The error number of an answer to a request: zero is the word that it was carried out.
    pub(super) fn errno(&self) -> Option<i32> {
        (self.kind == libc::NLMSG_ERROR)
            .then(|| self.payload.get(..4).map_or(libc::EBADMSG, |code| -(u32_of(code) as i32)))
    }

    pub(super) fn family(&self) -> u8 {
        self.payload.first().copied().unwrap_or_default()
    }

    pub(super) fn attributes(&self) -> Attributes<'a> {
        Attributes::read(self.payload.get(4..).unwrap_or_default())
    }
}

/// In the machine's own order, as netlink's headers are.
fn u32_of(bytes: &[u8]) -> u32 {
    bytes.try_into().map(u32::from_ne_bytes).unwrap_or_default()
}

/// Attributes by number; each number once.
#[derive(Debug, Clone, Default)]
pub(super) struct Attributes<'a>(BTreeMap<u16, &'a [u8]>);

impl<'a> Attributes<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Self {
        Self(list(bytes).into_iter().collect())
    }

    pub(super) fn numbers(&self) -> impl Iterator<Item = u16> {
        self.0.keys().copied()
    }

    pub(super) fn bytes(&self, number: u16) -> Option<&'a [u8]> {
        self.0.get(&number).copied()
    }

    pub(super) fn u32(&self, number: u16) -> Option<u32> {
        self.bytes(number)?.try_into().ok().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&self, number: u16) -> Option<u64> {
        self.bytes(number)?.try_into().ok().map(u64::from_be_bytes)
    }

    pub(super) fn text(&self, number: u16) -> Option<String> {
        let bytes = self.bytes(number)?;
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
    }

    pub(super) fn nest(&self, number: u16) -> Option<Attributes<'a>> {
        self.bytes(number).map(Attributes::read)
    }

    /// The entries of a list of things that are themselves made of attributes.
    pub(super) fn entries(&self, number: u16) -> Vec<Attributes<'a>> {
        let entries = self.bytes(number).map(list).unwrap_or_default();
        entries.into_iter().map(|(_, bytes)| Attributes::read(bytes)).collect()
    }
}

fn list(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    while let Some(header) = bytes.get(..ATTRIBUTE_HEADER_BYTES) {
        let length = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let number = u16::from_ne_bytes([header[2], header[3]]) & TYPE_MASK;
        let Some(value) = bytes.get(ATTRIBUTE_HEADER_BYTES..length) else { break };
        found.push((number, value));
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back_and_what_is_cut_off_is_left_out() {
        let inner = Writer::default().u32(1, 7).text(2, "abc");
        let bytes = request(3, 1, 0, 9, &Writer::default().nest(5, &inner).bytes(6, &[1, 2, 3]));
        let [reply] = Reply::all(&bytes)[..] else { panic!("one message") };
        assert_eq!((reply.sequence, reply.family(), reply.errno()), (9, 1, None));
        let attributes = reply.attributes();
        let nested = attributes.nest(5).unwrap();
        assert_eq!((nested.u32(1), nested.text(2)), (Some(7), Some("abc".to_owned())));
        assert_eq!(attributes.bytes(6), Some(&[1, 2, 3][..]));
        for length in 0..bytes.len() {
            assert!(Reply::all(&bytes[..length]).is_empty());
        }
    }
}
