//! Reading: bounded in what is kept, in what is written, and in how long nothing may come.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt as _};

use super::{DIGEST_BYTES, END, Header, MAGIC, MAX_HEADER_BYTES, MAX_MEMBERS, Member, PIECE_BYTES, VERSION};

/// A sender of an archive that sends nothing for this long has gone away.
const STALLED_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    #[error("the file is not an instance archive")]
    NotOne,
    #[error("the archive has version {0}, this agent reads version {VERSION}")]
    Version(u32),
    #[error("could not parse the archive's header")]
    Header(#[source] serde_json::Error),
    #[error("the archive's header is invalid: {0}")]
    Odd(String),
    #[error("the archive is truncated")]
    Truncated,
    #[error("{member} in the archive is damaged: {fault}")]
    Damaged { member: String, fault: &'static str },
    #[error("the archive is damaged: its members do not match its final digest")]
    Closing,
    #[error("the archive has data after its end")]
    Trailing,
    #[error("the sender sent nothing of the archive for {0:?}")]
    Stalled(Duration),
    #[error("could not read the archive")]
    Read(#[source] io::Error),
    #[error("could not write {member}")]
    Write {
        member: String,
        #[source]
        cause: io::Error,
    },
}

/// An archive whose header was read.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    closing: Sha256,
}

impl<R: AsyncRead + Unpin> Reader<R> {
    pub async fn open(mut input: R) -> Result<(Header, Self), ArchiveError> {
        let mut opening = vec![0; MAGIC.len() + 8];
        match fill(&mut input, &mut opening).await {
            Err(ArchiveError::Truncated) => return Err(ArchiveError::NotOne),
            filled => filled?,
        }
        let (magic, numbers) = opening.split_at(MAGIC.len());
        let (version, length) = numbers.split_at(4);
        if magic != MAGIC {
            return Err(ArchiveError::NotOne);
        }
        let version = number(version);
        if version != VERSION {
            return Err(ArchiveError::Version(version));
        }
        let length = number(length);
        if length > MAX_HEADER_BYTES {
            return Err(ArchiveError::Odd(format!("it is {length} bytes long")));
        }
        let mut json = vec![0; length as usize];
        fill(&mut input, &mut json).await?;
        let header: Header = serde_json::from_slice(&json).map_err(ArchiveError::Header)?;
        check(&header)?;
        let mut closing = Sha256::new_with_prefix(&opening);
        closing.update(&json);
        Ok((header, Self { input, closing }))
    }

    /// Writes the next member into a new, empty file, and leaves it on the disk; without a file it is only checked. Until
    /// [`Self::close`] has ended well, what is in it is worth nothing.
    pub async fn member(&mut self, member: &Member, file: Option<File>) -> Result<(), ArchiveError> {
        let damaged = |fault| ArchiveError::Damaged { member: member.name.clone(), fault };
        let write = |cause| ArchiveError::Write { member: member.name.clone(), cause };
        let file = file.map(Arc::new);
        let mut hash = Sha256::new();
        let (mut reached, mut stored) = (0_u64, 0_u64);
        loop {
            let mut frame = [0; 12];
            fill(&mut self.input, &mut frame).await?;
            hash.update(frame);
            let (offset, length) = frame.split_at(8);
            let offset = u64::from_be_bytes(offset.try_into().unwrap_or_default());
            let length = number(length);
            if offset == END && length == 0 {
                break;
            }
            let end = offset.checked_add(length.into()).filter(|end| *end <= member.bytes);
            let end = end.ok_or_else(|| damaged("it is longer than it says"))?;
            if length == 0 || length as usize > PIECE_BYTES || offset < reached {
                return Err(damaged("its pieces are out of order"));
            }
            stored += u64::from(length);
            if stored > member.stored_bytes {
                return Err(damaged("there is more of it than it says"));
            }
            reached = end;
            let mut piece = vec![0; length as usize];
            fill(&mut self.input, &mut piece).await?;
            hash.update(&piece);
            if let Some(into) = file.clone() {
                blocking(move || into.write_all_at(&piece, offset)).await.map_err(write)?;
            }
        }
        let mut told = [0; DIGEST_BYTES];
        fill(&mut self.input, &mut told).await?;
        let found: [u8; DIGEST_BYTES] = hash.finalize().into();
        if told != found {
            return Err(damaged("it does not hash to what it was written as"));
        }
        self.closing.update(found);
        let (Some(file), bytes) = (file, member.bytes) else { return Ok(()) };
        let finish = move || {
            file.set_len(bytes)?;
            file.sync_all()
        };
        blocking(finish).await.map_err(write)
    }

    /// Reads all members and the end, and keeps nothing of them.
    pub async fn check(mut self, header: &Header) -> Result<(), ArchiveError> {
        for member in &header.members {
            self.member(member, None).await?;
        }
        self.close().await
    }

    /// Reads the end. Without an error, every member is what it was when the archive was written.
    pub async fn close(mut self) -> Result<(), ArchiveError> {
        let mut told = [0; DIGEST_BYTES];
        fill(&mut self.input, &mut told).await?;
        let found: [u8; DIGEST_BYTES] = self.closing.finalize().into();
        if told != found {
            return Err(ArchiveError::Closing);
        }
        match fill(&mut self.input, &mut [0]).await {
            Err(ArchiveError::Truncated) => Ok(()),
            Err(error) => Err(error),
            Ok(()) => Err(ArchiveError::Trailing),
        }
    }
}

fn number(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
}

fn check(header: &Header) -> Result<(), ArchiveError> {
    let odd = |text: String| Err(ArchiveError::Odd(text));
    if header.members.len() > MAX_MEMBERS {
        return odd(format!("it has {} members", header.members.len()));
    }
    for (number, member) in header.members.iter().enumerate() {
        if header.members[..number].iter().any(|other| other.name == member.name) {
            return odd(format!("it has {:?} twice", member.name));
        }
        if member.stored_bytes > member.bytes {
            return odd(format!("{:?} takes more than it has", member.name));
        }
    }
    Ok(())
}

async fn fill(input: &mut (impl AsyncRead + Unpin), buffer: &mut [u8]) -> Result<(), ArchiveError> {
    match tokio::time::timeout(STALLED_AFTER, input.read_exact(buffer)).await {
        Err(_) => Err(ArchiveError::Stalled(STALLED_AFTER)),
        Ok(Err(cause)) if cause.kind() == io::ErrorKind::UnexpectedEof => Err(ArchiveError::Truncated),
        Ok(Err(cause)) => Err(ArchiveError::Read(cause)),
        Ok(Ok(_)) => Ok(()),
    }
}

async fn blocking(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    tokio::task::spawn_blocking(work).await.map_err(io::Error::other)?
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
