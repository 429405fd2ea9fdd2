//! Reads a request's header section as it was sent, and refuses what HTTP/3 calls malformed and h3 lets pass.
//!
//! h3 turns the section into a map: of a pseudo-header field that comes twice it keeps the last, and where the fields
//! stood is lost. So the section is read here first, as far as that is needed: names, and the path. What can still be
//! seen in the map afterwards is checked there (`server::request_head`).
//!
//! This side offers no dynamic table (QPACK, RFC 9204), so a section refers to the static table only.

use super::huffman;

/// What a header section is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Head,
    Trailers,
}

/// Why a section is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("the header section can't be decoded")]
    Unreadable,
    #[error("{0}")]
    Malformed(&'static str),
}

const LATE: Fault = Fault::Malformed("a pseudo-header field follows a header field");
const TWICE: Fault = Fault::Malformed("a pseudo-header field is repeated");
const FOREIGN: Fault = Fault::Malformed("a pseudo-header field is not one of a request");
const IN_TRAILERS: Fault = Fault::Malformed("a pseudo-header field is in the trailers");
const INCOMPLETE: Fault = Fault::Malformed("a request needs a method, a scheme and a path");
const BAD_PATH: Fault = Fault::Malformed("the path is not that of a request");

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    Method,
    Scheme,
    Authority,
    Path,
    /// One of a response, of an extension that is not spoken here, or of none.
    OtherPseudo,
    Field,
}

impl Name {
    fn of(text: &[u8]) -> Self {
        match text {
            b":method" => Self::Method,
            b":scheme" => Self::Scheme,
            b":authority" => Self::Authority,
            b":path" => Self::Path,
            [b':', ..] => Self::OtherPseudo,
            _ => Self::Field,
        }
    }

    /// By its index in the static table.
    fn of_static(index: u64) -> Option<Self> {
        Some(match index {
            0 => Self::Authority,
            1 => Self::Path,
            15..=21 => Self::Method,
            22..=23 => Self::Scheme,
            24..=28 | 63..=71 => Self::OtherPseudo,
            2..=98 => Self::Field,
            _ => return None,
        })
    }
}

/// Checks a whole section.
pub(super) fn check(section: &[u8], part: Part) -> Result<(), Fault> {
    let mut lines = Lines::new(section).ok_or(Fault::Unreadable)?;
    let mut seen = Vec::with_capacity(4);
    let mut fields = false;
    while !lines.rest.is_empty() {
        let (name, value) = lines.next().ok_or(Fault::Unreadable)?;
        match name {
            Name::Field => {
                fields = true;
                continue;
            }
            _ if part == Part::Trailers => return Err(IN_TRAILERS),
            Name::OtherPseudo => return Err(FOREIGN),
            _ if fields => return Err(LATE),
            _ if seen.contains(&name) => return Err(TWICE),
            Name::Path => check_path(&value.decoded().ok_or(Fault::Unreadable)?)?,
            Name::Method | Name::Scheme | Name::Authority => {}
        }
        seen.push(name);
    }
    let complete = [Name::Method, Name::Scheme, Name::Path].iter().all(|name| seen.contains(name));
    if part == Part::Trailers || complete { Ok(()) } else { Err(INCOMPLETE) }
}

/// A path with its query, in visible ASCII. A fragment is never sent; h3 would cut it off.
fn check_path(path: &[u8]) -> Result<(), Fault> {
    let rooted = path.starts_with(b"/") || path == b"*";
    if rooted && path.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'#') {
        Ok(())
    } else {
        Err(BAD_PATH)
    }
}

/// A string as it was sent.
#[derive(Debug, Clone, Copy)]
struct Text<'a> {
    bytes: &'a [u8],
    huffman: bool,
}

impl Text<'_> {
    fn decoded(&self) -> Option<Vec<u8>> {
        if self.huffman { huffman::decode(self.bytes) } else { Some(self.bytes.to_vec()) }
    }
}

/// The lines of a section that are still to be read.
struct Lines<'a> {
    rest: &'a [u8],
}

impl<'a> Lines<'a> {
    fn new(section: &'a [u8]) -> Option<Self> {
        let mut lines = Self { rest: section };
        let required_inserts = lines.integer(8)?;
        let _base = lines.integer(7)?;
        (required_inserts == 0).then_some(lines)
    }

    fn next(&mut self) -> Option<(Name, Text<'a>)> {
        const STATIC_INDEXED: u8 = 0b1100_0000;
        const STATIC_NAME: u8 = 0b0101_0000;
        let first = *self.rest.first()?;
        if first & 0b1000_0000 != 0 {
            let index = self.integer(6)?;
            let name = Name::of_static(index).filter(|_| first & STATIC_INDEXED == STATIC_INDEXED)?;
            // Of the values in the static table only the path's is looked at.
            return Some((name, Text { bytes: b"/", huffman: false }));
        }
        if first & 0b0100_0000 != 0 {
            let index = self.integer(4)?;
            let name = Name::of_static(index).filter(|_| first & STATIC_NAME == STATIC_NAME)?;
            return Some((name, self.text(7)?));
        }
        if first & 0b0010_0000 != 0 {
            let name = Name::of(&self.text(3)?.decoded()?);
            return Some((name, self.text(7)?));
        }
        None
    }

    /// An integer that begins in the last `bits` of the next byte.
    fn integer(&mut self, bits: u32) -> Option<u64> {
        const MOST_BYTES: u32 = 5;
        let full = (1_u64 << bits) - 1;
        let mut value = u64::from(self.byte()?) & full;
        if value < full {
            return Some(value);
        }
        for index in 0..MOST_BYTES {
            let byte = self.byte()?;
            value += u64::from(byte & 0x7f) << (7 * index);
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    /// A string whose length begins in the last `bits` of the next byte, behind the flag of its encoding.
    fn text(&mut self, bits: u32) -> Option<Text<'a>> {
        let huffman = self.rest.first()? >> bits & 1 == 1;
        let length = usize::try_from(self.integer(bits)?).ok()?;
        let (bytes, rest) = self.rest.split_at_checked(length)?;
        self.rest = rest;
        Some(Text { bytes, huffman })
    }

    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(*byte)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A section of lines in all encodings that the static table allows.
    fn section(lines: &[&[u8]]) -> Vec<u8> {
        [&[0, 0][..], &lines.concat()].concat()
    }

    fn head(lines: &[&[u8]]) -> Result<(), Fault> {
        check(&section(lines), Part::Head)
    }

    // Indexed lines of the static table.
    const GET: &[u8] = &[0xc0 | 17];
    const HTTPS: &[u8] = &[0xc0 | 23];
    const ROOT: &[u8] = &[0xc0 | 1];
    const STATUS_200: &[u8] = &[0xc0 | 25];
    const ACCEPT: &[u8] = &[0xc0 | 29];
    /// `:authority: a`, its name by reference.
    const AUTHORITY: &[u8] = &[0x50, 1, b'a'];
    /// `:path: /`, its name as a Huffman-coded literal.
    const PATH_CODED: &[u8] = &[0x28 | 4, 0xb9, 0x58, 0xd3, 0x3f, 1, b'/'];

    #[test]
    fn a_request_is_read_in_every_encoding() {
        assert_eq!(head(&[GET, HTTPS, AUTHORITY, ROOT, ACCEPT]), Ok(()));
        assert_eq!(head(&[GET, HTTPS, AUTHORITY, PATH_CODED, ACCEPT]), Ok(()));
        // A literal name of 20 bytes: its length continues in a second byte.
        let long = [&[0x27, 13][..], b"x-a-rather-long-name", &[0]].concat();
        assert_eq!(head(&[GET, HTTPS, ROOT, &long]), Ok(()));
    }

    #[test]
    fn pseudo_header_fields_come_once_and_first_and_are_a_requests() {
        for (lines, fault) in [
            (vec![GET, HTTPS, ROOT, PATH_CODED], TWICE),
            (vec![GET, GET, HTTPS, ROOT], TWICE),
            (vec![GET, HTTPS, AUTHORITY, AUTHORITY, ROOT], TWICE),
            (vec![GET, HTTPS, ACCEPT, ROOT], LATE),
            (vec![GET, HTTPS, ROOT, ACCEPT, PATH_CODED], LATE),
            (vec![GET, HTTPS, ROOT, STATUS_200], FOREIGN),
            (vec![GET, HTTPS, ROOT, &[0x22, b':', b'x', 0]], FOREIGN),
            (vec![GET, HTTPS], INCOMPLETE),
            (vec![HTTPS, ROOT], INCOMPLETE),
            (vec![GET, ROOT], INCOMPLETE),
        ] {
            assert_eq!(head(&lines), Err(fault), "{lines:x?}");
        }
        assert_eq!(check(&section(&[ACCEPT]), Part::Trailers), Ok(()));
        assert_eq!(check(&section(&[ACCEPT, ROOT]), Part::Trailers), Err(IN_TRAILERS));
    }

    #[test]
    fn a_path_is_visible_ascii_without_a_fragment() {
        let with = |path: &str| {
            let length = u8::try_from(path.len()).expect("short");
            head(&[GET, HTTPS, &[&[0x51, length], path.as_bytes()].concat()])
        };
        for path in ["/", "*", "/a/b?c=%20&d"] {
            assert_eq!(with(path), Ok(()), "{path}");
        }
        for path in ["", "a", "/a#b", "#", "/a b", "/\u{e9}", "/a\n", "https://a/"] {
            assert_eq!(with(path), Err(BAD_PATH), "{path:?}");
        }
    }

    #[test]
    fn what_can_not_be_read_is_not_let_through() {
        let unreadable: [&[u8]; 9] = [
            &[],
            &[0],
            // Refers to a dynamic table: in its prefix, by index, by name, behind the base.
            &[1, 0, 0xc0 | 17],
            &[0, 0, 0x80 | 17],
            &[0, 0, 0x40, 1, b'a'],
            &[0, 0, 0x10],
            // Beyond the static table, and strings that are cut off or too long to be meant.
            &[0, 0, 0xff, 36],
            &[0, 0, 0x50, 9, b'a'],
            &[0, 0, 0x50, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        ];
        for section in unreadable {
            assert_eq!(check(section, Part::Head), Err(Fault::Unreadable), "{section:x?}");
        }
    }

    #[test]
    fn no_bytes_make_it_panic() {
        let mut random = fastrand::Rng::with_seed(11);
        for _ in 0..20_000 {
            let bytes: Vec<u8> = (0..random.usize(0..40)).map(|_| random.u8(..)).collect();
            let _any_verdict = check(&section(&[&bytes]), Part::Head);
        }
    }
}
