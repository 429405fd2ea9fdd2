//! Decompresses kernels and their modules.
//!
//! LZ4, gzip and zstd are done here. For xz its own program is asked, since no kernel that mvm builds needs
//! it and its library is large.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use super::ImageError;

/// No kernel or module is larger uncompressed.
const MAX_UNPACKED_BYTES: usize = 1 << 30;
/// The size of LZ4's blocks in the form that the kernel's build writes.
const LZ4_BLOCK_BYTES: usize = 8 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    Lz4Legacy,
    Gzip,
    Xz,
    Zstd,
}

impl Compression {
    /// How these bytes are compressed, by how they begin.
    pub(super) fn of(bytes: &[u8]) -> Option<Self> {
        const MAGIC: [(&[u8], Compression); 4] = [
            (&[0x02, 0x21, 0x4c, 0x18], Compression::Lz4Legacy),
            (&[0x1f, 0x8b, 0x08], Compression::Gzip),
            (b"\xfd7zXZ\0", Compression::Xz),
            (&[0x28, 0xb5, 0x2f, 0xfd], Compression::Zstd),
        ];
        MAGIC.into_iter().find(|(magic, _)| bytes.starts_with(magic)).map(|(_, packing)| packing)
    }

    /// Unpacks the content of `path`.
    pub(super) fn unpack(self, bytes: &[u8], path: &Path) -> Result<Vec<u8>, ImageError> {
        let damaged = |fault: String| ImageError::invalid(path, format!("damaged or truncated: {fault}"));
        match self {
            Self::Lz4Legacy => lz4_legacy(bytes).map_err(damaged),
            Self::Gzip => gzip(bytes).map_err(|error| damaged(error.to_string())),
            Self::Xz => by_program("xz", &["-dc", "--single-stream"], bytes, path, "install xz-utils"),
            Self::Zstd => zstd(bytes).map_err(|error| damaged(error.to_string())),
        }
    }
}

/// Blocks, each after its packed size. What ends the file may be the unpacked size, which the kernel's build adds.
fn lz4_legacy(bytes: &[u8]) -> Result<Vec<u8>, String> {
    let mut rest = bytes.get(4..).unwrap_or(&[]);
    let mut out = Vec::new();
    let mut block = vec![0; LZ4_BLOCK_BYTES];
    while rest.len() > 4 {
        let (size, after) = rest.split_at(4);
        let size =
            usize::try_from(u32::from_le_bytes([size[0], size[1], size[2], size[3]])).unwrap_or(usize::MAX);
        let packed = after.get(..size).ok_or("a block is cut off")?;
        let unpacked =
            lz4_flex::block::decompress_into(packed, &mut block).map_err(|error| error.to_string())?;
        out.extend_from_slice(&block[..unpacked]);
        if out.len() > MAX_UNPACKED_BYTES {
            return Err("it unpacks to more than a kernel ever is".to_owned());
        }
        rest = &after[size..];
    }
    Ok(out)
}

fn zstd(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let limit = u64::try_from(MAX_UNPACKED_BYTES).unwrap_or(u64::MAX);
    zstd::Decoder::new(bytes)?.take(limit).read_to_end(&mut out)?;
    Ok(out)
}

fn gzip(bytes: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let limit = u64::try_from(MAX_UNPACKED_BYTES).unwrap_or(u64::MAX);
    flate2::read::GzDecoder::new(bytes).take(limit).read_to_end(&mut out)?;
    Ok(out)
}

fn by_program(
    program: &str,
    arguments: &[&str],
    bytes: &[u8],
    path: &Path,
    advice: &'static str,
) -> Result<Vec<u8>, ImageError> {
    let started = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = started.map_err(|cause| match cause.kind() {
        std::io::ErrorKind::NotFound => ImageError::ProgramMissing { program: program.to_owned(), advice },
        _ => ImageError::Start { program: program.to_owned(), cause },
    })?;
    let (mut stdin, stdout) = (child.stdin.take(), child.stdout.take());
    let mut out = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A program that ends early tells why by its exit.
            let _ = stdin.take().map(|mut stdin| stdin.write_all(bytes));
        });
        let limit = u64::try_from(MAX_UNPACKED_BYTES).unwrap_or(u64::MAX);
        stdout.map(|stdout| stdout.take(limit).read_to_end(&mut out))
    });
    let ended = child.wait().map_err(|cause| ImageError::Start { program: program.to_owned(), cause })?;
    if !ended.success() {
        return Err(ImageError::invalid(
            path,
            format!("damaged or truncated: {program} could not unpack it"),
        ));
    }
    Ok(out)
}
