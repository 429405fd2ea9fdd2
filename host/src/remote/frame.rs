//! Frames on a stream socket: a length, a count of descriptors, and that many bytes of JSON.
//!
//! Descriptors travel with the first byte of their frame, so they are there when its header is. A frame that is too
//! long or has descriptors that may not be sent is an error, after which nothing more is read.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Room for the longest text that an operation may carry, and for a list of some thousands of VMMs.
pub(super) const MAX_FRAME_BYTES: usize = 1024 * 1024;

/// No answer has more.
const MAX_DESCRIPTORS: usize = 1;

const HEADER_BYTES: usize = 8;
const READ_BYTES: usize = 64 * 1024;

#[derive(Debug)]
pub(super) struct Frame {
    pub(super) body: Vec<u8>,
    pub(super) descriptor: Option<OwnedFd>,
}

fn header(bytes: usize, descriptors: usize) -> io::Result<[u8; HEADER_BYTES]> {
    let too_long = || io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {bytes} bytes"));
    let length = u32::try_from(bytes).ok().filter(|_| bytes <= MAX_FRAME_BYTES).ok_or_else(too_long)?;
    let mut header = [0; HEADER_BYTES];
    header[..4].copy_from_slice(&length.to_le_bytes());
    header[4] = u8::from(descriptors > 0);
    Ok(header)
}

/// One frame, before there is a runtime.
pub(super) fn write_blocking(mut stream: &StdStream, body: &[u8]) -> io::Result<()> {
    stream.write_all(&header(body.len(), 0)?)?;
    stream.write_all(body)
}

/// Writes one frame, whole. Not to be given up half-way: the stream would be of no use to anyone.
pub(super) async fn write(stream: &UnixStream, frame: &Frame) -> io::Result<()> {
    let mut bytes = header(frame.body.len(), frame.descriptor.iter().count())?.to_vec();
    bytes.extend_from_slice(&frame.body);
    let mut descriptor = frame.descriptor.as_ref().map(|fd| fd.as_fd());
    let mut rest = bytes.as_slice();
    while !rest.is_empty() {
        let sent = stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), rest, descriptor)).await?;
        rest = rest.get(sent..).unwrap_or_default();
        descriptor = None;
    }
    Ok(())
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Reads frames. What is read ahead stays here.
#[derive(Debug, Default)]
pub(super) struct Reader {
    buffer: Vec<u8>,
    descriptors: VecDeque<OwnedFd>,
}

impl Reader {
    /// The next frame; none once the other side has closed.
    pub(super) async fn next(&mut self, stream: &UnixStream) -> io::Result<Option<Frame>> {
        let mut chunk = vec![0; READ_BYTES];
        loop {
            if let Some(frame) = self.whole()? {
                return Ok(Some(frame));
            }
            let (read, descriptors) =
                stream.async_io(Interest::READABLE, || receive(stream.as_fd(), &mut chunk)).await?;
            if read == 0 {
                let cut_off = || io::Error::new(io::ErrorKind::UnexpectedEof, "a frame was cut off");
                return if self.buffer.is_empty() { Ok(None) } else { Err(cut_off()) };
            }
            self.buffer.extend_from_slice(chunk.get(..read).unwrap_or_default());
            self.descriptors.extend(descriptors);
            if self.descriptors.len() > READ_BYTES {
                return Err(invalid("more descriptors than frames"));
            }
        }
    }

    fn whole(&mut self) -> io::Result<Option<Frame>> {
        let Some((header, rest)) = self.buffer.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [a, b, c, d, descriptors, zeros @ ..] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > MAX_FRAME_BYTES || usize::from(descriptors) > MAX_DESCRIPTORS || zeros != [0; 3] {
            return Err(invalid("a header that no frame has"));
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let body = body.to_vec();
        self.buffer.drain(..HEADER_BYTES + length);
        let descriptor = match descriptors {
            0 => None,
            _ => Some(self.descriptors.pop_front().ok_or_else(|| invalid("a descriptor is missing"))?),
        };
        Ok(Some(Frame { body, descriptor }))
    }

    /// Whether descriptors came that no frame has spoken of.
    pub(super) fn has_strays(&self) -> bool {
        !self.descriptors.is_empty()
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn receive(socket: BorrowedFd<'_>, chunk: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(socket, &mut [IoSliceMut::new(chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut descriptors = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = part {
            descriptors.extend(given);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(invalid("more descriptors at once than any frame has"));
    }
    Ok((message.bytes, descriptors))
}
