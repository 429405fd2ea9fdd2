//! Encrypted streams: AES-256-GCM in chunks, by a key that is derived for each stream.
//!
//! A header in clear has the cipher, chunk size, salt, the key's id, instance, tenant and revision. The stream's own key
//! is derived from the tenant's by HKDF-SHA256 with the salt. Every chunk is encrypted with the whole header as associated
//! data, and a nonce of its number and whether it is the last. So a chunk that was changed, left out, put elsewhere or
//! taken from another stream is not decrypted, nor is a stream that ends too early, goes on too long or has another header.

use std::io::{self, Read, Write};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{hkdf, rand};
use mvm_proto::document::SnapshotCompression;
use mvm_proto::{Digest, InstanceId, TenantId};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize as _, Zeroizing};

use super::{StreamKey, damaged, read_full};
use crate::snapshot_key::{KeyId, SnapshotKey};

/// Every encrypted stream begins with it.
const MAGIC: &[u8; 8] = b"MVMSEAL\n";

/// Of the header and of what follows it.
const FORMAT: u32 = 1;
const CIPHER: &str = "aes-256-gcm";

/// What a chunk holds before it is encrypted: small enough to be checked before it is used, large enough that its tag
/// costs nothing.
const CHUNK_BYTES: usize = 256 * 1024;
const TAG_BYTES: usize = 16;
const SALT_BYTES: usize = 32;

/// Names and digests are some hundred bytes.
const MAX_HEADER_BYTES: usize = 4096;

/// In clear before the first chunk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Header {
    format: u32,
    cipher: String,
    /// Of what is inside.
    compression: SnapshotCompression,
    chunk_bytes: usize,
    key: KeyId,
    instance: InstanceId,
    tenant: TenantId,
    revision: Digest,
    salt: String,
}

impl Header {
    fn of(key: &StreamKey, compression: SnapshotCompression, salt: String) -> Self {
        Self {
            format: FORMAT,
            cipher: CIPHER.to_owned(),
            compression,
            chunk_bytes: CHUNK_BYTES,
            key: key.tenant_key.id(),
            instance: key.binding.instance.clone(),
            tenant: key.binding.tenant.clone(),
            revision: key.binding.revision,
            salt,
        }
    }

    /// Why this is not the header of what is to be opened, if it is not.
    fn misfit(&self, wanted: &Self) -> Option<String> {
        let pairs = [
            ("format", self.format.to_string(), wanted.format.to_string()),
            ("cipher", self.cipher.clone(), wanted.cipher.clone()),
            ("instance", self.instance.to_string(), wanted.instance.to_string()),
            ("tenant", self.tenant.to_string(), wanted.tenant.to_string()),
            ("revision", self.revision.to_string(), wanted.revision.to_string()),
            ("key", self.key.to_string(), wanted.key.to_string()),
        ];
        if let Some((what, found, wanted)) = pairs.into_iter().find(|(_, found, wanted)| found != wanted) {
            return Some(format!("it was sealed for {what} {found}, not {wanted}"));
        }
        (self != wanted).then(|| "it was sealed in another way than was noted".to_owned())
    }
}

/// What both ends do with one stream.
struct Stream {
    key: LessSafeKey,
    /// The header as it is in the file.
    header: Vec<u8>,
    /// Of the next chunk.
    number: u64,
}

impl Stream {
    fn new(key: &SnapshotKey, salt: &[u8], header: Vec<u8>) -> io::Result<Self> {
        let whole = hkdf::Salt::new(hkdf::HKDF_SHA256, salt).extract(key.bytes());
        let own = whole.expand(&[b"mvm snapshot stream 1"], &AES_256_GCM);
        let own = own.map_err(|_| io::Error::other("no key could be derived"))?;
        Ok(Self { key: LessSafeKey::new(UnboundKey::from(own)), header, number: 0 })
    }

    /// Never twice the same under one key: the number never comes again, and there is one last chunk.
    fn nonce(&mut self, last: bool) -> io::Result<Nonce> {
        let mut nonce = [0; NONCE_LEN];
        nonce[3..11].copy_from_slice(&self.number.to_be_bytes());
        nonce[11] = u8::from(last);
        self.number = self.number.checked_add(1).ok_or_else(|| io::Error::other("a stream without end"))?;
        Ok(Nonce::assume_unique_for_key(nonce))
    }
}

/// Writes what it is given, encrypted if there is a lock.
pub(super) enum Encryptor<W: Write> {
    Open(W),
    Sealed(SealedWriter<W>),
}

impl<W: Write> Encryptor<W> {
    pub(super) fn new(
        into: W,
        compression: SnapshotCompression,
        key: Option<&StreamKey>,
    ) -> io::Result<Self> {
        Ok(match key {
            Some(key) => Self::Sealed(SealedWriter::new(into, compression, key)?),
            None => Self::Open(into),
        })
    }

    pub(super) fn finish(self) -> io::Result<W> {
        match self {
            Self::Open(into) => Ok(into),
            Self::Sealed(sealed) => sealed.finish(),
        }
    }
}

impl<W: Write> Write for Encryptor<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Open(into) => into.write(bytes),
            Self::Sealed(sealed) => sealed.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Open(into) => into.flush(),
            // What is not a whole chunk yet stays: only the last may be shorter.
            Self::Sealed(sealed) => sealed.into.flush(),
        }
    }
}

pub(super) struct SealedWriter<W: Write> {
    into: W,
    stream: Stream,
    /// What is not sealed yet. A full one waits for what follows: it may be the last.
    chunk: Zeroizing<Vec<u8>>,
}

impl<W: Write> SealedWriter<W> {
    fn new(mut into: W, compression: SnapshotCompression, key: &StreamKey) -> io::Result<Self> {
        let mut salt = [0; SALT_BYTES];
        rand::fill(&mut salt).map_err(|_| io::Error::other("the system has no random bytes"))?;
        let header = serde_json::to_vec(&Header::of(key, compression, to_hex(&salt)))?;
        let length = u16::try_from(header.len()).map_err(io::Error::other)?;
        into.write_all(MAGIC)?;
        into.write_all(&length.to_be_bytes())?;
        into.write_all(&header)?;
        let stream = Stream::new(&key.tenant_key, &salt, header)?;
        // With room for the tag: one that grew would leave a copy behind.
        let chunk = Zeroizing::new(Vec::with_capacity(CHUNK_BYTES + TAG_BYTES));
        Ok(Self { into, stream, chunk })
    }

    fn seal(&mut self, last: bool) -> io::Result<()> {
        let nonce = self.stream.nonce(last)?;
        let aad = Aad::from(&self.stream.header);
        let sealed = self.stream.key.seal_in_place_append_tag(nonce, aad, &mut *self.chunk);
        sealed.map_err(|_| io::Error::other("a chunk could not be encrypted"))?;
        self.into.write_all(&self.chunk)?;
        self.chunk.clear();
        Ok(())
    }

    fn finish(mut self) -> io::Result<W> {
        self.seal(true)?;
        Ok(self.into)
    }
}

impl<W: Write> Write for SealedWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.chunk.len() == CHUNK_BYTES && !bytes.is_empty() {
            self.seal(false)?;
        }
        let taken = bytes.len().min(CHUNK_BYTES - self.chunk.len());
        self.chunk.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.into.flush()
    }
}

/// Gives what was sealed, chunk by chunk, each only once it was found to be what was written.
pub(super) struct Decryptor<R: Read> {
    from: R,
    stream: Stream,
    /// As it is in the file, one ahead: whether a chunk is the last shows by what follows.
    next: Vec<u8>,
    plain: Zeroizing<Vec<u8>>,
    given: usize,
    over: bool,
}

impl<R: Read> Decryptor<R> {
    pub(super) fn open(mut from: R, compression: SnapshotCompression, key: &StreamKey) -> io::Result<Self> {
        let mut magic = [0; MAGIC.len()];
        let mut length = [0; 2];
        if read_full(&mut from, &mut magic)? != magic.len() || magic != *MAGIC {
            return Err(damaged("it is not what was encrypted"));
        }
        let read = read_full(&mut from, &mut length)?;
        let mut bytes = vec![0; usize::from(u16::from_be_bytes(length))];
        if read != length.len() || bytes.len() > MAX_HEADER_BYTES {
            return Err(damaged("its header has no length"));
        }
        if read_full(&mut from, &mut bytes)? != bytes.len() {
            return Err(damaged("its header was cut"));
        }
        let header: Header = serde_json::from_slice(&bytes)
            .map_err(|error| damaged(format!("its header is none: {error}")))?;
        let wanted = Header::of(key, compression, header.salt.clone());
        if let Some(reason) = header.misfit(&wanted) {
            return Err(damaged(reason));
        }
        let salt = from_hex(&header.salt).ok_or_else(|| damaged("its header has no salt"))?;
        let stream = Stream::new(&key.tenant_key, &salt, bytes)?;
        let mut reader =
            Self { from, stream, next: Vec::new(), plain: Zeroizing::default(), given: 0, over: false };
        reader.next = reader.chunk()?;
        Ok(reader)
    }

    /// The next chunk as it is in the file; empty at the end.
    fn chunk(&mut self) -> io::Result<Vec<u8>> {
        let mut chunk = vec![0; CHUNK_BYTES + TAG_BYTES];
        let read = read_full(&mut self.from, &mut chunk)?;
        chunk.truncate(read);
        Ok(chunk)
    }

    fn open_next(&mut self) -> io::Result<()> {
        let following = self.chunk()?;
        self.over = following.is_empty();
        let nonce = self.stream.nonce(self.over)?;
        let mut chunk = Zeroizing::new(std::mem::replace(&mut self.next, following));
        let aad = Aad::from(&self.stream.header);
        let opened = self.stream.key.open_in_place(nonce, aad, &mut chunk).map(|plain| plain.len());
        let length = opened.map_err(|_| damaged("it was changed or cut since it was encrypted"))?;
        chunk[length..].zeroize();
        chunk.truncate(length);
        self.plain = chunk;
        self.given = 0;
        Ok(())
    }
}

impl<R: Read> Read for Decryptor<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.given == self.plain.len() {
            if self.over {
                return Ok(0);
            }
            self.open_next()?;
        }
        let left = &self.plain[self.given..];
        let taken = left.len().min(buffer.len());
        buffer[..taken].copy_from_slice(&left[..taken]);
        self.given += taken;
        Ok(taken)
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if digits.len() != 2 * SALT_BYTES {
        return None;
    }
    let digit = |byte: u8| (byte as char).to_digit(16);
    let byte = |pair: &[u8]| u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok();
    digits.chunks_exact(2).map(byte).collect()
}
