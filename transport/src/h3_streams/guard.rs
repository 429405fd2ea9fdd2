//! Follows the frames of an HTTP/3 stream without keeping any of them, and stops one that is too long to gather.

use super::FrameTooLong;

/// Body data: passed on piece by piece, so its frames may be of any length.
const DATA: u64 = 0x0;
/// The one kind of unidirectional stream that carries frames.
const CONTROL_STREAM: u64 = 0x0;

/// Where in a stream the next byte stands.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// In the type of a unidirectional stream.
    StreamType,
    /// In a frame's type.
    FrameType,
    /// In a frame's length.
    Length { data: bool },
    /// In a frame's payload.
    Payload { left: u64 },
    /// In a stream without frames, which h3 does not read, so that flow control bounds it.
    Unframed,
}

#[derive(Debug)]
pub(super) struct FrameGuard {
    limit: u64,
    place: Place,
    number: Number,
}

impl FrameGuard {
    /// For a stream of frames from its first byte.
    pub(super) fn request(limit: u64) -> Self {
        Self { limit, place: Place::FrameType, number: Number::default() }
    }

    /// For a stream that begins by saying what it is.
    pub(super) fn unidirectional(limit: u64) -> Self {
        Self { limit, place: Place::StreamType, number: Number::default() }
    }

    /// Looks at the next bytes of the stream.
    pub(super) fn pass(&mut self, mut bytes: &[u8]) -> Result<(), FrameTooLong> {
        while let Some((first, rest)) = bytes.split_first() {
            match &mut self.place {
                Place::Unframed => return Ok(()),
                Place::Payload { left } => {
                    let skipped = (*left).min(bytes.len() as u64);
                    *left -= skipped;
                    if *left == 0 {
                        self.place = Place::FrameType;
                    }
                    // At most the slice's own length, so the cast loses nothing.
                    bytes = &bytes[skipped as usize..];
                    continue;
                }
                place => {
                    if let Some(number) = self.number.push(*first) {
                        self.place = place.after(number, self.limit)?;
                    }
                }
            }
            bytes = rest;
        }
        Ok(())
    }
}

impl Place {
    /// Where the stream goes on after the number that ends at this place.
    fn after(self, number: u64, limit: u64) -> Result<Self, FrameTooLong> {
        Ok(match self {
            Self::StreamType if number == CONTROL_STREAM => Self::FrameType,
            Self::StreamType | Self::Unframed => Self::Unframed,
            Self::FrameType => Self::Length { data: number == DATA },
            Self::Length { data: false } if number > limit => {
                return Err(FrameTooLong { claimed: number, limit });
            }
            Self::Length { .. } | Self::Payload { .. } if number == 0 => Self::FrameType,
            Self::Length { .. } | Self::Payload { .. } => Self::Payload { left: number },
        })
    }
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

    fn pass_in_pieces(mut guard: FrameGuard, stream: &[u8], size: usize) -> Result<(), FrameTooLong> {
        stream.chunks(size).try_for_each(|piece| guard.pass(piece))
    }

    #[test]
    fn frames_within_the_limit_and_data_of_any_length_pass() {
        let mut stream = vec![HEADERS, 3, 1, 2, 3];
        // Data of 70,000 bytes: a length of four bytes.
        stream.extend([0, 0x80, 0x01, 0x11, 0x70]);
        stream.extend(std::iter::repeat_n(0xff, 70_000));
        stream.extend([HEADERS, 0, 0x21, 1, 9]);
        for size in [1, 2, 3, 1000, stream.len()] {
            assert!(pass_in_pieces(FrameGuard::request(3), &stream, size).is_ok(), "in pieces of {size}");
        }
    }

    #[test]
    fn a_header_section_above_the_limit_is_stopped_at_its_length() {
        let stream = [HEADERS, 0x44, 0x01];
        for size in [1, 3] {
            let stopped = pass_in_pieces(FrameGuard::request(1024), &stream, size);
            assert!(matches!(stopped, Err(FrameTooLong { claimed: 1025, limit: 1024 })));
        }
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
