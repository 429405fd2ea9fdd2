//! Follows the frames of an HTTP/3 stream, stops one that is too long to gather, and has header sections of requests
//! checked. Keeps nothing but a header section that came in pieces, until it is whole.

use super::Stopped;
use super::field_section::{self, Part};

/// Body data: passed on piece by piece, so its frames may be of any length.
const DATA: u64 = 0x0;
/// A header section: the head of a message, or its trailers.
const HEADERS: u64 = 0x1;
/// The one kind of unidirectional stream that carries frames.
const CONTROL_STREAM: u64 = 0x0;

/// Where in a stream the next byte stands.
#[derive(Debug, Clone, Copy)]
enum Position {
    /// In the type of a unidirectional stream.
    StreamType,
    /// In a frame's type.
    FrameType,
    /// In a frame's length.
    Length { frame: u64 },
    /// In a frame's payload.
    Payload { left: u64 },
    /// In a header section that is to be checked.
    Section { left: u64 },
    /// In a stream without frames, which h3 does not read, so that flow control bounds it.
    Unframed,
}

#[derive(Debug)]
pub(super) struct FrameGuard {
    limit: u64,
    position: Position,
    number: Number,
    /// What the next header section is, where they are checked.
    part: Option<Part>,
    /// What has arrived of a header section that came in pieces.
    section: Vec<u8>,
}

impl FrameGuard {
    /// For a request that a peer sends, from its first byte.
    pub(super) fn request(limit: u64) -> Self {
        Self { part: Some(Part::Head), ..Self::at(Position::FrameType, limit) }
    }

    /// For the answer to a request of ours.
    pub(super) fn response(limit: u64) -> Self {
        Self::at(Position::FrameType, limit)
    }

    /// For a stream that begins by saying what it is.
    pub(super) fn unidirectional(limit: u64) -> Self {
        Self::at(Position::StreamType, limit)
    }

    fn at(position: Position, limit: u64) -> Self {
        Self { limit, position, number: Number::default(), part: None, section: Vec::new() }
    }

    /// Looks at the next bytes of the stream.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) -> Result<(), Stopped> {
        while let Some((first, rest)) = bytes.split_first() {
            match self.position {
                Position::Unframed => return Ok(()),
                Position::Payload { left } => {
                    let (skipped, rest) = split(bytes, left);
                    self.position = match left - skipped.len() as u64 {
                        0 => Position::FrameType,
                        left => Position::Payload { left },
                    };
                    bytes = rest;
                }
                Position::Section { left } => {
                    let (piece, rest) = split(bytes, left);
                    match left - piece.len() as u64 {
                        0 => self.check(piece)?,
                        left => {
                            self.section.extend_from_slice(piece);
                            self.position = Position::Section { left };
                        }
                    }
                    bytes = rest;
                }
                position => {
                    if let Some(number) = self.number.push(*first) {
                        self.position = self.after(position, number)?;
                    }
                    bytes = rest;
                }
            }
        }
        Ok(())
    }

    /// A header section is whole with this piece.
    fn check(&mut self, last: &[u8]) -> Result<(), Stopped> {
        self.position = Position::FrameType;
        let Some(part) = self.part else { return Ok(()) };
        self.part = Some(Part::Trailers);
        if self.section.is_empty() {
            return Ok(field_section::check(last, part)?);
        }
        let mut section = std::mem::take(&mut self.section);
        section.extend_from_slice(last);
        Ok(field_section::check(&section, part)?)
    }

    /// Where the stream goes on after the number that ends at this place.
    fn after(&mut self, position: Position, number: u64) -> Result<Position, Stopped> {
        let Self { limit, part, .. } = *self;
        Ok(match position {
            Position::StreamType if number == CONTROL_STREAM => Position::FrameType,
            Position::StreamType | Position::Unframed => Position::Unframed,
            Position::FrameType => Position::Length { frame: number },
            Position::Length { frame } if frame != DATA && number > limit => {
                return Err(Stopped::TooLong { claimed: number, limit });
            }
            Position::Length { frame: HEADERS } if part.is_some() && number == 0 => {
                self.check(&[])?;
                Position::FrameType
            }
            Position::Length { frame: HEADERS } if part.is_some() => Position::Section { left: number },
            _ if number == 0 => Position::FrameType,
            _ => Position::Payload { left: number },
        })
    }
}

/// The next `most` bytes at most, and the others.
fn split(bytes: &[u8], most: u64) -> (&[u8], &[u8]) {
    bytes.split_at(usize::try_from(most).map_or(bytes.len(), |most| most.min(bytes.len())))
}

/// A QUIC variable-length integer that arrives byte by byte.
#[derive(Debug, Default)]
struct Number {
    value: u64,
    missing: u8,
    begun: bool,
}

impl Number {
    /// The number, once its last byte is here.
    fn push(&mut self, byte: u8) -> Option<u64> {
        if self.begun {
            self.value = self.value << 8 | u64::from(byte);
            self.missing -= 1;
        } else {
            *self = Self { value: u64::from(byte & 0x3f), missing: (1 << (byte >> 6)) - 1, begun: true };
        }
        (self.missing == 0).then(|| std::mem::take(self).value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADERS: u8 = 0x1;
    /// A small request: QPACK's prefix, then `:method: GET`, `:scheme: https`, `:path: /`.
    const HEAD: [u8; 5] = [0, 0, 0xc0 | 17, 0xc0 | 23, 0xc0 | 1];

    fn pass_in_pieces(mut guard: FrameGuard, stream: &[u8], size: usize) -> Result<(), Stopped> {
        stream.chunks(size).try_for_each(|piece| guard.pass(piece))
    }

    #[test]
    fn frames_within_the_limit_and_data_of_any_length_pass() {
        let mut stream = vec![HEADERS, 5];
        stream.extend(HEAD);
        // Data of 70,000 bytes: a length of four bytes.
        stream.extend([0, 0x80, 0x01, 0x11, 0x70]);
        stream.extend(std::iter::repeat_n(0xff, 70_000));
        stream.extend([HEADERS, 2, 0, 0, 0x21, 1, 9]);
        for size in [1, 2, 3, 1000, stream.len()] {
            assert!(pass_in_pieces(FrameGuard::request(5), &stream, size).is_ok(), "in pieces of {size}");
        }
    }

    #[test]
    fn a_header_section_above_the_limit_is_stopped_at_its_length() {
        let stream = [HEADERS, 0x44, 0x01];
        for size in [1, 3] {
            let stopped = pass_in_pieces(FrameGuard::request(1024), &stream, size);
            assert!(matches!(stopped, Err(Stopped::TooLong { claimed: 1025, limit: 1024 })));
        }
    }

    #[test]
    fn a_header_section_is_checked_in_one_piece_or_many() {
        let twice = [HEADERS, 6, 0, 0, 0xc0 | 17, 0xc0 | 23, 0xc0 | 1, 0xc0 | 1];
        for size in 1..=twice.len() {
            let stopped = pass_in_pieces(FrameGuard::request(100), &twice, size);
            assert!(matches!(stopped, Err(Stopped::Section(_))), "in pieces of {size}");
            assert!(pass_in_pieces(FrameGuard::response(100), &twice, size).is_ok());
        }
        assert!(matches!(FrameGuard::request(100).pass(&[HEADERS, 0]), Err(Stopped::Section(_))));
    }

    #[test]
    fn a_second_header_section_is_read_as_trailers() {
        let stream = [&[HEADERS, 5][..], &HEAD, &[HEADERS, 3, 0, 0, 0xc0 | 1]].concat();
        assert!(FrameGuard::request(100).pass(&stream).is_err(), "a path in the trailers");
        let stream = [&[HEADERS, 5][..], &HEAD, &[HEADERS, 3, 0, 0, 0xc0 | 29]].concat();
        assert!(FrameGuard::request(100).pass(&stream).is_ok());
    }

    #[test]
    fn unknown_frames_are_limited_too() {
        assert!(pass_in_pieces(FrameGuard::request(10), &[0x21, 11], 2).is_err());
    }

    #[test]
    fn the_control_stream_is_limited_and_other_streams_are_left_alone() {
        let settings = [0x4, 11];
        let control: Vec<u8> = [0x0].into_iter().chain(settings).collect();
        let encoder: Vec<u8> = [0x2].into_iter().chain(settings).collect();
        assert!(pass_in_pieces(FrameGuard::unidirectional(10), &control, 1).is_err());
        assert!(pass_in_pieces(FrameGuard::unidirectional(10), &encoder, 1).is_ok());
    }
}
