//! A small client of the guest protocol, for the laws and the benches: greets a guest, runs programs, reads and writes files.

use std::time::Duration;

use mvm_proto::guest::{
    Deframer, Exec, Found, GuestFrame, HostFrame, HostHello, MAX_VERSION, MIN_VERSION, OPENING, ReadFile,
    Shutdown, WriteFile, filler, guest_frame, host_frame, put_frame,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::{Instant, timeout, timeout_at};

use crate::GuestStream;

/// A guest that does not answer an opening is sent another one.
const GREET_AGAIN: Duration = Duration::from_millis(500);

/// A cold boot on a busy machine without KVM, and then some.
const GREETED_WITHIN: Duration = Duration::from_secs(60);
const ANSWERED_WITHIN: Duration = Duration::from_secs(20);

/// A guest that was greeted.
pub struct Client {
    stream: GuestStream,
    deframer: Deframer,
    nonce: u64,
    next: u64,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Client {
    /// Sends openings until the guest answers one.
    pub async fn greet(stream: GuestStream) -> Result<Self, String> {
        // Any number will do that the guest has not seen on this boot.
        let nonce = u64::from_le_bytes(random());
        let mut client = Self { stream, deframer: Deframer::default(), nonce, next: nonce | 1 };
        let deadline = Instant::now() + GREETED_WITHIN;
        client.open().await?;
        loop {
            match timeout(GREET_AGAIN, client.frame()).await {
                Ok(Ok(GuestFrame { body: Some(guest_frame::Body::Hello(hello)), .. })) => {
                    return if hello.version == 0 { Err(format!("{hello:?}")) } else { Ok(client) };
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return Err(error),
                Err(_) if Instant::now() > deadline => return Err("the guest did not answer".to_owned()),
                Err(_) => {
                    client.send(filler()).await?;
                    client.open().await?;
                }
            }
        }
    }

    async fn open(&mut self) -> Result<(), String> {
        let hello =
            HostHello { min_version: MIN_VERSION, max_version: MAX_VERSION, agent: "conformance".to_owned() };
        let mut bytes = OPENING.to_vec();
        self.put(&mut bytes, 0, host_frame::Body::Hello(hello))?;
        self.send(bytes).await
    }

    fn put(&self, bytes: &mut Vec<u8>, request: u64, body: host_frame::Body) -> Result<(), String> {
        let frame = HostFrame { nonce: self.nonce, request, body: Some(body) };
        put_frame(bytes, &frame).map_err(|error| error.to_string())
    }

    async fn send(&mut self, bytes: Vec<u8>) -> Result<(), String> {
        self.stream.write_all(&bytes).await.map_err(|error| error.to_string())
    }

    /// The next frame of this conversation. Dropping the future loses nothing.
    async fn frame(&mut self) -> Result<GuestFrame, String> {
        loop {
            while let Some(found) = self.deframer.next::<GuestFrame>() {
                if let Found::Message(frame) = found
                    && frame.nonce == self.nonce
                {
                    return Ok(frame);
                }
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes).await.map_err(|error| error.to_string())? {
                0 => return Err("the stream ended".to_owned()),
                count => self.deframer.push(&bytes[..count]),
            }
        }
    }

    /// Everything that answers one request, up to what ends it.
    async fn ask(&mut self, body: host_frame::Body) -> Result<Vec<guest_frame::Body>, String> {
        use guest_frame::Body;
        self.next = self.next.wrapping_add(2);
        let (request, mut bytes) = (self.next, Vec::new());
        self.put(&mut bytes, request, body)?;
        self.send(bytes).await?;
        let deadline = Instant::now() + ANSWERED_WITHIN;
        let mut answers = Vec::new();
        loop {
            let frame = timeout_at(deadline, self.frame()).await;
            let frame =
                frame.map_err(|_| format!("no end within {ANSWERED_WITHIN:?} after {answers:?}"))??;
            let Some(body) = frame.body.filter(|_| frame.request == request) else { continue };
            let last = match &body {
                Body::Exit(_) | Body::Done(_) | Body::Failure(_) => true,
                Body::Chunk(chunk) => chunk.last,
                _ => false,
            };
            answers.push(body);
            if last {
                return Ok(answers);
            }
        }
    }

    /// What a program prints, if it ends well.
    pub async fn run(&mut self, command: &[&str]) -> Result<String, String> {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        let answers = self.ask(host_frame::Body::Exec(Exec { command, ..Exec::default() })).await?;
        let mut said = Vec::new();
        for answer in &answers {
            match answer {
                guest_frame::Body::Output(output) => said.extend_from_slice(&output.data),
                guest_frame::Body::Exit(exit) if exit.code == 0 && exit.signal == 0 => {}
                guest_frame::Body::Accepted(_) => {}
                other => return Err(format!("{other:?}")),
            }
        }
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Puts a file of this text in the guest.
    pub async fn write(&mut self, path: &str, text: &str) -> Result<(), String> {
        let (path, data) = (path.to_owned(), text.as_bytes().to_vec());
        let write = WriteFile { path, offset: 0, data, last: true, mode: 0 };
        match self.ask(host_frame::Body::WriteFile(write)).await?.pop() {
            Some(guest_frame::Body::Done(_)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    }

    /// What is in a file of the guest.
    pub async fn read(&mut self, path: &str) -> Result<String, String> {
        let read = ReadFile { path: path.to_owned(), offset: 0, limit: 0 };
        let mut text = Vec::new();
        for answer in self.ask(host_frame::Body::ReadFile(read)).await? {
            match answer {
                guest_frame::Body::Chunk(chunk) => text.extend(chunk.data),
                guest_frame::Body::Accepted(_) | guest_frame::Body::Done(_) => {}
                other => return Err(format!("{other:?}")),
            }
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Asks the guest to end. It may be gone before it answers.
    pub(super) async fn shut_down(&mut self) -> Result<(), String> {
        let mut bytes = Vec::new();
        self.next = self.next.wrapping_add(2);
        self.put(&mut bytes, self.next, host_frame::Body::Shutdown(Shutdown { grace_seconds: 1 }))?;
        self.send(bytes).await
    }
}

fn random() -> [u8; 8] {
    let mut bytes = [0; 8];
    let hasher = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0_u8);
    bytes.copy_from_slice(&hasher.to_le_bytes());
    bytes
}
