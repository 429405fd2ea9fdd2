//! Writing: each file is read once, and what is a hole in it, or nothing but zeros, is left out.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt as _;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::{END, HOLE_BYTES, Header, MAGIC, MAX_HEADER_BYTES, PIECE_BYTES, VERSION};

/// A file and its member in the header.
#[derive(Debug)]
pub struct Source {
    pub file: File,
    pub bytes: u64,
}

/// How much of a file is no hole.
pub fn stored_bytes(file: &File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let (mut at, mut stored) = (0, 0_u64);
    while let Some((begin, end)) = data_from(file, at, length)? {
        stored = stored.saturating_add(end - begin);
        at = end;
    }
    Ok(stored)
}

/// The first part of a file from `at` on that is no hole.
fn data_from(file: &File, at: u64, length: u64) -> io::Result<Option<(u64, u64)>> {
    if at >= length {
        return Ok(None);
    }
    let begin = match seek(file, SeekFrom::Data(at)) {
        Err(Errno::NXIO) => return Ok(None),
        begin => begin?,
    };
    let end = seek(file, SeekFrom::Hole(begin))?.min(length);
    // Whatever a file system says, every look gets further.
    Ok((begin < length).then_some((begin, end.max(begin + 1))))
}

/// Writes all of an archive by handing out pieces of it. `last` is called when everything but the closing digest was
/// taken: what it fails with keeps the archive from ever being whole.
pub fn write(
    header: &Header,
    sources: &[Source],
    mut put: impl FnMut(Vec<u8>) -> io::Result<()>,
    last: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    let json = serde_json::to_vec(header)?;
    let length = u32::try_from(json.len()).ok().filter(|length| *length <= MAX_HEADER_BYTES);
    let length = length.ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the header is too long"))?;
    let mut opening = MAGIC.to_vec();
    opening.extend(VERSION.to_be_bytes());
    opening.extend(length.to_be_bytes());
    opening.extend(json);
    let mut closing = Sha256::new_with_prefix(&opening);
    put(opening)?;
    for source in sources {
        let digest = write_member(source, &mut put)?;
        closing.update(digest);
    }
    last()?;
    put(closing.finalize().to_vec())
}

fn write_member(source: &Source, put: &mut impl FnMut(Vec<u8>) -> io::Result<()>) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut at = 0;
    while let Some((begin, end)) = data_from(&source.file, at, source.bytes)? {
        let mut from = begin;
        while from < end {
            let wanted = usize::try_from(end - from).unwrap_or(PIECE_BYTES).min(PIECE_BYTES);
            let mut buffer = vec![0; wanted];
            source.file.read_exact_at(&mut buffer, from)?;
            for (offset, length) in without_zeros(&buffer) {
                let mut piece = Vec::with_capacity(12 + length);
                piece.extend((from + offset as u64).to_be_bytes());
                piece.extend(u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes());
                piece.extend(&buffer[offset..offset + length]);
                hash.update(&piece);
                put(piece)?;
            }
            from += wanted as u64;
        }
        at = end;
    }
    if source.file.metadata()?.len() != source.bytes {
        return Err(io::Error::new(ErrorKind::InvalidData, "a file changed while it was read"));
    }
    let mut end = END.to_be_bytes().to_vec();
    end.extend(0_u32.to_be_bytes());
    hash.update(&end);
    let digest: [u8; 32] = hash.finalize().into();
    end.extend(digest);
    put(end)?;
    Ok(digest)
}

/// Where something other than zeros is, and how long: in whole blocks, but for the end.
fn without_zeros(bytes: &[u8]) -> Vec<(usize, usize)> {
    let mut found: Vec<(usize, usize)> = Vec::new();
    for (number, block) in bytes.chunks(HOLE_BYTES).enumerate() {
        if block.iter().all(|byte| *byte == 0) {
            continue;
        }
        let begin = number * HOLE_BYTES;
        match found.last_mut() {
            Some((from, length)) if *from + *length == begin => *length += block.len(),
            _ => found.push((begin, block.len())),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_zeros_are_left_out_and_neighbours_go_together() {
        let mut bytes = vec![0; 4 * HOLE_BYTES + 3];
        assert_eq!(without_zeros(&bytes), []);
        bytes[HOLE_BYTES] = 1;
        bytes[3 * HOLE_BYTES - 1] = 1;
        bytes[4 * HOLE_BYTES + 2] = 1;
        assert_eq!(without_zeros(&bytes), [(HOLE_BYTES, 2 * HOLE_BYTES), (4 * HOLE_BYTES, 3)]);
    }
}
