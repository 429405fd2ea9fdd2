//! Compresses and decompresses streams with LZ4 or zstd, as frames that other programs read too.
//!
//! Both have a checksum of their content; a frame without its end is refused.

use std::io::{self, Read, Write};

use lz4_flex::frame::{BlockMode, BlockSize, FrameDecoder, FrameEncoder, FrameInfo};
use mvm_proto::document::SnapshotCompression;

use super::damaged;

/// Of zstd: the fastest of the usual ones. Memory is written once, and higher ones gain little on it.
const ZSTD_LEVEL: i32 = 1;

/// Compresses what is written to it.
pub(super) enum Compressor<W: Write> {
    None(W),
    Lz4(Box<FrameEncoder<W>>),
    Zstd(zstd::Encoder<'static, W>),
}

impl<W: Write> Compressor<W> {
    pub(super) fn new(into: W, compression: SnapshotCompression) -> io::Result<Self> {
        Ok(match compression {
            SnapshotCompression::None => Self::None(into),
            SnapshotCompression::Lz4 => {
                let frame = FrameInfo::new()
                    .block_size(BlockSize::Max1MB)
                    .block_mode(BlockMode::Independent)
                    .content_checksum(true);
                Self::Lz4(Box::new(FrameEncoder::with_frame_info(frame, into)))
            }
            SnapshotCompression::Zstd => {
                let mut encoder = zstd::Encoder::new(into, ZSTD_LEVEL)?;
                encoder.include_checksum(true)?;
                Self::Zstd(encoder)
            }
        })
    }

    /// Ends the frame.
    pub(super) fn finish(self) -> io::Result<W> {
        match self {
            Self::None(into) => Ok(into),
            Self::Lz4(encoder) => Ok(encoder.finish()?),
            Self::Zstd(encoder) => encoder.finish(),
        }
    }
}

impl<W: Write> Write for Compressor<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::None(into) => into.write(bytes),
            Self::Lz4(encoder) => encoder.write(bytes),
            Self::Zstd(encoder) => encoder.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::None(into) => into.flush(),
            Self::Lz4(encoder) => encoder.flush(),
            Self::Zstd(encoder) => encoder.flush(),
        }
    }
}

/// Reads what a [`Compressor`] wrote.
pub(super) fn decompress(
    from: impl Read + Send + 'static,
    compression: SnapshotCompression,
) -> io::Result<Box<dyn Read + Send>> {
    Ok(match compression {
        SnapshotCompression::None => Box::new(from),
        SnapshotCompression::Lz4 => Box::new(FrameDecoder::new(Unended(from))),
        SnapshotCompression::Zstd => Box::new(zstd::Decoder::new(from)?),
    })
}

/// Fails where its source ends. The LZ4 decoder takes an end between two blocks for the end of the frame; in a whole frame
/// it never reads that far.
struct Unended<R>(R);

impl<R: Read> Read for Unended<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.0.read(buffer) {
            Ok(0) if !buffer.is_empty() => Err(damaged("its frame was cut")),
            read => read,
        }
    }
}
