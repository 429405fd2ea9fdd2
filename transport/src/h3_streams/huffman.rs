//! The Huffman code of HTTP header strings (RFC 7541, appendix B).

/// Bits of each byte's code. The code is canonical: within a length, codes count up with the bytes.
#[rustfmt::skip]
const LENGTHS: [u8; 256] = [
    13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28,
    6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10,
    13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6,
    15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5, 6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28,
    20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23, 24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24,
    22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23, 21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23,
    26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25, 19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27,
    20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23, 26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26,
];
const LONGEST: usize = 30;

/// How many codes there are of each length; the end-of-string mark, the last of the longest, is not among them.
const COUNTS: [usize; LONGEST + 1] = {
    let mut counts = [0; LONGEST + 1];
    let mut byte = 0;
    while byte < LENGTHS.len() {
        counts[LENGTHS[byte] as usize] += 1;
        byte += 1;
    }
    counts
};

/// All bytes in the order of their codes.
const IN_ORDER: [u8; 256] = {
    let mut sorted = [0; 256];
    let (mut length, mut at) = (1, 0);
    while length <= LONGEST {
        let mut byte = 0_u8;
        loop {
            if LENGTHS[byte as usize] as usize == length {
                sorted[at] = byte;
                at += 1;
            }
            if byte == u8::MAX {
                break;
            }
            byte += 1;
        }
        length += 1;
    }
    sorted
};

/// What `coded` stands for; `None` where it is not the one encoding of any string.
pub(super) fn decode(coded: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(coded.len() * 8 / 5);
    // The bits since the last whole code; and of the codes as long as these, the first, and its place in the order.
    let (mut code, mut length, mut first, mut place) = (0, 0, 0, 0);
    for bit in coded.iter().flat_map(|byte| (0..8).rev().map(move |shift| usize::from(byte >> shift & 1))) {
        (code, length, first) = (code << 1 | bit, length + 1, first << 1);
        let count = *COUNTS.get(length)?;
        if code < first + count {
            text.push(*IN_ORDER.get(place + code - first)?);
            (code, length, first, place) = (0, 0, 0, 0);
        } else {
            (first, place) = (first + count, place + count);
        }
    }
    // The rest of the last byte is the beginning of the end-of-string mark: ones.
    (length < 8 && code == (1 << length) - 1).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::decode;

    #[test]
    fn the_examples_of_the_specification_are_read() {
        // RFC 7541, appendix C.4 and C.6.
        let examples: [(&[u8], &str); 4] = [
            (&[0xf1, 0xe3, 0xc2, 0xe5, 0xf2, 0x3a, 0x6b, 0xa0, 0xab, 0x90, 0xf4, 0xff], "www.example.com"),
            (&[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbf], "no-cache"),
            (&[0x64, 0x02], "302"),
            (&[0xae, 0xc3, 0x77, 0x1a, 0x4b], "private"),
        ];
        for (coded, text) in examples {
            assert_eq!(decode(coded).as_deref(), Some(text.as_bytes()), "{text}");
        }
    }

    #[test]
    fn a_string_has_one_encoding_only() {
        // Padding of a whole byte, padding with a zero, and the end-of-string mark itself.
        for coded in [
            &[0x64, 0x02, 0xff][..],
            &[0x64, 0x00, 0x0e],
            &[0xff, 0xff, 0xff, 0xff],
            &[0xa8, 0xeb, 0x10, 0x64, 0x9c, 0xbe],
        ] {
            assert_eq!(decode(coded), None, "{coded:x?}");
        }
    }

    #[test]
    fn every_byte_is_read_back() {
        // Encoded by walking the same tables the other way: shows that no byte is lost or met twice.
        for wanted in 0..=u8::MAX {
            let (mut code, mut length) = (0_u64, 1);
            let mut place = super::IN_ORDER.iter().position(|byte| *byte == wanted).expect("a place");
            while place >= super::COUNTS[length] {
                place -= super::COUNTS[length];
                code = (code + super::COUNTS[length] as u64) << 1;
                length += 1;
            }
            code += place as u64;
            let padding = (8 - length % 8) % 8;
            let bits = (code << padding) | ((1 << padding) - 1);
            let bytes = &bits.to_be_bytes()[8 - (length + padding) / 8..];
            assert_eq!(decode(bytes), Some(vec![wanted]), "{wanted}");
        }
    }
}
