//! How the memory of a sleeping instance is kept: as it is, compressed, encrypted, or both.
//!
//! All of it is streams. [`encode`] takes what a VMM saves and writes it in its [`Form`]; [`decode`] gives it back. What
//! is both is compressed first. A stream that was cut, changed, or put in another's place ends in an error that
//! [`is_damage`] knows, at the latest at its end: a reader that uses earlier bytes must wait for that ([`feed`]).

mod packed;
mod sealed;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use mvm_proto::document::SnapshotCompression;
use mvm_proto::{Digest, InstanceId, TenantId};
use rustix::pipe::PipeFlags;
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use self::packed::Packer;
use self::sealed::{SealedReader, Sealer};
use crate::snapshot_key::{KeyError, KeyId, SnapshotKey, TenantKey};

/// What is read and written at once, between two looks at whether it is still wanted.
const STEP_BYTES: usize = 256 * 1024;

/// What may be on its way between a VMM and us; where the system allows less, less is.
const PIPE_BYTES: usize = 1024 * 1024;

/// What the document wants of a pool's snapshots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AtRest {
    pub compression: SnapshotCompression,
    pub encryption: bool,
}

/// How one instance's snapshot is to be kept, and what opens it.
#[derive(Debug, Clone)]
pub struct Keeping {
    pub at_rest: AtRest,
    /// Absent: nothing of it is ever encrypted.
    pub key: Option<TenantKey>,
}

impl Keeping {
    /// As it is: for a template, which is no one yet.
    #[must_use]
    pub fn plain() -> Self {
        Self { at_rest: AtRest::default(), key: None }
    }

    /// Whether it can be kept so now: the key that it needs is there.
    pub fn check(&self) -> Result<(), KeyError> {
        if self.at_rest.encryption {
            self.place()?.read()?;
        }
        Ok(())
    }

    /// Why what lies there in this form is not restored: it was to be encrypted when it was saved, and is not. Whoever
    /// can write to the disk but does not have the key could have put it there.
    pub(super) fn refuses(&self, form: &Form) -> Option<String> {
        let in_clear = self.at_rest.encryption && form.key.is_none();
        in_clear.then(|| "its memory is in clear, and was to be encrypted".to_owned())
    }

    fn place(&self) -> Result<&TenantKey, KeyError> {
        self.key.as_ref().ok_or(KeyError::Nobodys)
    }

    fn lock(&self, key: SnapshotKey, instance: &InstanceId, revision: Digest) -> Result<Lock, KeyError> {
        let (instance, tenant) = (instance.clone(), self.place()?.tenant().clone());
        Ok(Lock { key, binding: Binding { instance, tenant, revision } })
    }

    /// What an instance's memory is encrypted with when it is saved; absent: it is not.
    pub(super) fn lock_to_save(
        &self,
        instance: &InstanceId,
        revision: Digest,
    ) -> Result<Option<Lock>, KeyError> {
        if !self.at_rest.encryption {
            return Ok(None);
        }
        self.lock(self.place()?.read()?, instance, revision).map(Some)
    }

    /// What opens a file of this form; absent: it is not encrypted.
    pub(super) fn lock_to_open(
        &self,
        form: &Form,
        instance: &InstanceId,
        revision: Digest,
    ) -> Result<Option<Lock>, KeyError> {
        let Some(id) = &form.key else { return Ok(None) };
        self.lock(self.place()?.read_again(id)?, instance, revision).map(Some)
    }
}

/// How a guest's bytes lie in a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Form {
    pub(super) compression: SnapshotCompression,
    /// Of the key that they are encrypted with; absent: they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<KeyId>,
}

impl Form {
    /// Whether the file is the very bytes.
    pub(super) fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// What an encrypted stream belongs to. In another's place it does not open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) instance: InstanceId,
    pub(super) tenant: TenantId,
    pub(super) revision: Digest,
}

/// A key, and what it seals to.
#[derive(Debug)]
pub(super) struct Lock {
    pub(super) key: SnapshotKey,
    pub(super) binding: Binding,
}

/// Writes all that `from` gives into `into`, compressed and then encrypted as asked, and answers how much it was before
/// that. Ends with [`io::ErrorKind::Interrupted`] once it is not wanted any more.
pub(super) fn encode<W: Write>(
    mut from: impl Read,
    into: W,
    compression: SnapshotCompression,
    lock: Option<&Lock>,
    wanted: impl Fn() -> bool,
) -> io::Result<(W, u64)> {
    let sealer = Sealer::new(into, compression, lock)?;
    let mut packer = Packer::new(sealer, compression)?;
    let mut buffer = Zeroizing::new(vec![0; STEP_BYTES]);
    let mut plain_bytes = 0;
    loop {
        if !wanted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let read = read_some(&mut from, &mut buffer)?;
        if read == 0 {
            return Ok((packer.finish()?.finish()?, plain_bytes));
        }
        packer.write_all(&buffer[..read])?;
        plain_bytes += read as u64;
    }
}

/// What was encoded in this form, as it was before. Its beginning is read at once: what is no such stream at all is
/// told here, before anything is done with it.
pub(super) fn decode(
    from: impl Read + Send + 'static,
    compression: SnapshotCompression,
    lock: Option<&Lock>,
) -> io::Result<Box<dyn Read + Send>> {
    let mut decoded = match lock {
        Some(lock) => packed::unpack(SealedReader::open(from, compression, lock)?, compression)?,
        None => packed::unpack(from, compression)?,
    };
    let mut first = Zeroizing::new(vec![0; STEP_BYTES]);
    let read = read_some(&mut decoded, &mut first)?;
    if read == 0 {
        // Nothing, and all of it: asking again is asking too much.
        return Ok(Box::new(io::empty()));
    }
    first.truncate(read);
    Ok(Box::new(io::Cursor::new(first).chain(decoded)))
}

/// Gives a VMM all of a stream, and makes sure of the stream's end and length even if the VMM needs no more of it. It
/// is never given nothing: QEMU waits for ever at a pipe that is closed before anything came.
pub(super) fn feed(mut from: impl Read, into: OwnedFd, plain_bytes: Option<u64>) -> io::Result<()> {
    let mut into = Some(File::from(into));
    let mut buffer = Zeroizing::new(vec![0; STEP_BYTES]);
    let mut fed = 0;
    loop {
        let read = read_some(&mut from, &mut buffer)?;
        if read == 0 {
            break;
        }
        fed += read as u64;
        match into.as_mut().map(|pipe| pipe.write_all(&buffer[..read])) {
            // It has what it needs, or it is gone: which of them is for others to find out.
            Some(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => into = None,
            Some(Err(error)) => return Err(error),
            Some(Ok(())) | None => {}
        }
    }
    match plain_bytes.filter(|expected| *expected != fed) {
        Some(expected) => {
            if let (0, Some(pipe)) = (fed, into.as_mut()) {
                // Whoever waits for the first byte finds that it is a wrong one; if it is gone, so much the better.
                let _ = pipe.write_all(&[0]);
            }
            Err(damaged(format!("it gives {fed} bytes, not {expected}")))
        }
        None => Ok(()),
    }
}

/// Both ends of a pipe: to read from, and to write to.
pub(super) fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (from, into) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // A smaller one is slower and no worse.
    let _ = rustix::pipe::fcntl_setpipe_size(&into, PIPE_BYTES);
    Ok((from, into))
}

/// Whether a stream can't be read because of what is in it, and not because of the disk it is on.
pub(super) fn is_damage(error: &io::Error) -> bool {
    error.raw_os_error().is_none()
}

fn damaged(reason: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason.into())
}

/// The next bytes; none at the end.
fn read_some(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match from.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted && !is_damage(&error) => {}
            read => return read,
        }
    }
}

/// As many bytes as fit, fewer only at the end.
fn read_full(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match read_some(from, &mut buffer[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}
