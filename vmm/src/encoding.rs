//! Compresses and encrypts the memory of a sleeping instance.
//!
//! The QEMU driver saves through [`encode`] and restores through [`decode`], both on streams; what is compressed and
//! encrypted is compressed first. A stream that was cut, changed or exchanged ends in an error that [`is_damage`] knows, at
//! the latest at its end, so that nothing of it may be used before its end was read ([`feed`]).

mod compressed;
mod encrypted;
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

use self::compressed::Compressor;
use self::encrypted::{Decryptor, Encryptor};
use crate::snapshot_key::{KeyError, KeyId, SnapshotKey, TenantKey};

/// What is read and written at once, between two looks at whether it is still wanted.
const STEP_BYTES: usize = 256 * 1024;

/// What may be on its way between a VMM and us; where the system allows less, less is.
const PIPE_BYTES: usize = 1024 * 1024;

/// What the document wants of a pool's snapshots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotPolicy {
    pub compression: SnapshotCompression,
    pub encryption: bool,
}

/// How one instance's snapshot is encoded, and where its key is.
#[derive(Debug, Clone)]
pub struct SnapshotOptions {
    pub policy: SnapshotPolicy,
    /// Absent: nothing of it is ever encrypted.
    pub key: Option<TenantKey>,
}

impl SnapshotOptions {
    /// Neither compressed nor encrypted: for a template, which belongs to no instance.
    #[must_use]
    pub fn plain() -> Self {
        Self { policy: SnapshotPolicy::default(), key: None }
    }

    /// Reads the key that encryption needs.
    pub fn check(&self) -> Result<(), KeyError> {
        if self.policy.encryption {
            self.tenant_key()?.read()?;
        }
        Ok(())
    }

    /// Why a snapshot of this encoding is not restored: it should be encrypted and is not. An attacker who can write to
    /// the disk and lacks the key could have put it there.
    pub(super) fn refuses(&self, encoding: &Encoding) -> Option<String> {
        let in_clear = self.policy.encryption && encoding.key.is_none();
        in_clear.then(|| "its memory is in clear, and was to be encrypted".to_owned())
    }

    fn tenant_key(&self) -> Result<&TenantKey, KeyError> {
        self.key.as_ref().ok_or(KeyError::NoTenant)
    }

    fn bind(
        &self,
        tenant_key: SnapshotKey,
        instance: &InstanceId,
        revision: Digest,
    ) -> Result<StreamKey, KeyError> {
        let (instance, tenant) = (instance.clone(), self.tenant_key()?.tenant().clone());
        Ok(StreamKey { tenant_key, binding: Binding { instance, tenant, revision } })
    }

    /// What an instance's memory is encrypted with when it is saved; absent: it is not.
    pub(super) fn key_to_save(
        &self,
        instance: &InstanceId,
        revision: Digest,
    ) -> Result<Option<StreamKey>, KeyError> {
        if !self.policy.encryption {
            return Ok(None);
        }
        self.bind(self.tenant_key()?.read()?, instance, revision).map(Some)
    }

    /// What a file of this encoding is decrypted with; absent: it is not encrypted.
    pub(super) fn key_to_restore(
        &self,
        encoding: &Encoding,
        instance: &InstanceId,
        revision: Digest,
    ) -> Result<Option<StreamKey>, KeyError> {
        let Some(id) = &encoding.key else { return Ok(None) };
        self.bind(self.tenant_key()?.read_again(id)?, instance, revision).map(Some)
    }
}

/// How a guest's memory is encoded in a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Encoding {
    pub(super) compression: SnapshotCompression,
    /// Of the key that they are encrypted with; absent: they are not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<KeyId>,
}

impl Encoding {
    /// Neither compressed nor encrypted.
    pub(super) fn is_plain(&self) -> bool {
        *self == Self::default()
    }
}

/// What an encrypted stream is bound to: for anything else it is not decrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) instance: InstanceId,
    pub(super) tenant: TenantId,
    pub(super) revision: Digest,
}

/// The tenant's key, and the instance and revision that a stream is bound to.
#[derive(Debug)]
pub(super) struct StreamKey {
    pub(super) tenant_key: SnapshotKey,
    pub(super) binding: Binding,
}

/// Writes all that `from` gives into `into`, compressed and then encrypted as asked, and answers how much it was before
/// that. Ends with [`io::ErrorKind::Interrupted`] once it is not wanted any more.
pub(super) fn encode<W: Write>(
    mut from: impl Read,
    into: W,
    compression: SnapshotCompression,
    key: Option<&StreamKey>,
    wanted: impl Fn() -> bool,
) -> io::Result<(W, u64)> {
    let encryptor = Encryptor::new(into, compression, key)?;
    let mut compressor = Compressor::new(encryptor, compression)?;
    let mut buffer = Zeroizing::new(vec![0; STEP_BYTES]);
    let mut plain_bytes = 0;
    loop {
        if !wanted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let read = read_some(&mut from, &mut buffer)?;
        if read == 0 {
            return Ok((compressor.finish()?.finish()?, plain_bytes));
        }
        compressor.write_all(&buffer[..read])?;
        plain_bytes += read as u64;
    }
}

/// Reads what [`encode`] wrote. The first bytes are read at once, so that what is no such stream fails here, before
/// anything is done with it.
pub(super) fn decode(
    from: impl Read + Send + 'static,
    compression: SnapshotCompression,
    key: Option<&StreamKey>,
) -> io::Result<Box<dyn Read + Send>> {
    let mut decoded = match key {
        Some(key) => compressed::decompress(Decryptor::open(from, compression, key)?, compression)?,
        None => compressed::decompress(from, compression)?,
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
            // The VMM has what it needs, or is gone; the caller finds out which.
            Some(Err(error)) if error.kind() == io::ErrorKind::BrokenPipe => into = None,
            Some(Err(error)) => return Err(error),
            Some(Ok(())) | None => {}
        }
    }
    match plain_bytes.filter(|expected| *expected != fed) {
        Some(expected) => {
            if let (0, Some(pipe)) = (fed, into.as_mut()) {
                // Makes a VMM that waits for the first byte fail. One that is gone needs nothing.
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
