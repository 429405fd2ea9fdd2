//! Keeps one guest's stream open: dials, greets, moves frames, and begins again when the stream breaks.
//!
//! It wakes on bytes from the guest, on something to send, and, only while no hello came back, on a timer. An idle
//! link costs no processor at all. While the guest is paused nothing is dialled and nothing is sent again.

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::guest::{
    Deframer, Found, GuestFrame, GuestHello, HostFrame, HostHello, MAX_VERSION, MIN_VERSION, OPENING, filler,
    guest_frame, host_frame, put_frame,
};
use mvm_vmm::GuestStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;
use zeroize::Zeroizing;

use super::Dial;
use super::error::LinkError;
use super::link::{Link, Mode};
use super::view::shortened;

/// A guest that is up answers within a millisecond; then what it reads is cleared by a filler.
const HELLO_WITHIN: Duration = Duration::from_millis(500);
/// Openings to a guest that is still booting come this seldom at last.
const LONGEST_HELLO_WAIT: Duration = Duration::from_secs(4);

const FIRST_REDIAL: Duration = Duration::from_millis(50);
/// While a guest boots, it is looked for this often at least.
const LONGEST_BOOT_REDIAL: Duration = Duration::from_secs(1);
const LONGEST_REDIAL: Duration = Duration::from_secs(5);
/// One whose protocol we don't speak may be replaced, but not soon.
const INCOMPATIBLE_REDIAL: Duration = Duration::from_secs(60);
const DIAL_WITHIN: Duration = Duration::from_secs(10);

/// An idle link reads into this; one that is busy into the larger.
const IDLE_READ_BYTES: usize = 1024;
const BUSY_READ_BYTES: usize = 32 * 1024;

/// Why a stream is no longer served.
#[derive(Debug, PartialEq, Eq)]
enum Ended {
    Broken { greeted: bool },
    Incompatible,
    Closed,
}

pub(super) async fn link_task(link: Arc<Link>, dialer: Arc<dyn Dial>) {
    let mut wait = FIRST_REDIAL;
    let mut known = false;
    loop {
        match link.mode() {
            Mode::Closed => return,
            Mode::Paused => {
                link.work.notified().await;
                continue;
            }
            Mode::Running => {}
        }
        let ended = match tokio::time::timeout(DIAL_WITHIN, dialer.dial(&link.instance)).await {
            Ok(Ok(stream)) => {
                let ended = serve(&link, stream).await;
                link.lost();
                ended
            }
            Ok(Err(error)) => {
                tracing::debug!(instance = %link.instance, error = %mvm_proto::text::chain(&error), "could not connect to the guest");
                Ended::Broken { greeted: false }
            }
            Err(_) => Ended::Broken { greeted: false },
        };
        let longest = if known { LONGEST_REDIAL } else { LONGEST_BOOT_REDIAL };
        match ended {
            Ended::Closed => return,
            Ended::Incompatible => wait = INCOMPATIBLE_REDIAL,
            Ended::Broken { greeted: true } => {
                known = true;
                wait = FIRST_REDIAL;
            }
            Ended::Broken { greeted: false } => wait = wait.min(longest),
        }
        let until = Instant::now() + wait.mul_f64(0.75 + fastrand::f64() / 4.0);
        wait = wait.saturating_mul(2).min(longest);
        while link.mode() != Mode::Closed
            && tokio::time::timeout_at(until, link.work.notified()).await.is_ok()
        {}
    }
}

/// One stream: what is being written, and what was understood of what was read.
#[derive(Debug)]
struct Conversation<'a> {
    link: &'a Link,
    nonce: u64,
    deframer: Deframer,
    /// There may be secrets in it.
    out: Zeroizing<Vec<u8>>,
    written: usize,
    greeted: bool,
}

async fn serve(link: &Link, stream: GuestStream) -> Ended {
    let nonce = fastrand::u64(1..);
    let mut talk = Conversation {
        link,
        nonce,
        deframer: Deframer::default(),
        out: Zeroizing::default(),
        written: 0,
        greeted: false,
    };
    talk.open();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let mut buffer = vec![0; IDLE_READ_BYTES];
    let mut patience = HELLO_WITHIN;
    let hello_timer = tokio::time::sleep(patience);
    tokio::pin!(hello_timer);
    loop {
        let mode = link.mode();
        if mode == Mode::Closed {
            return Ended::Closed;
        }
        talk.refill();
        // What a guest did not even take from us needs no second opening behind it.
        let may_reopen = !talk.greeted && mode == Mode::Running && talk.is_written();
        tokio::select! {
            read = reader.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return Ended::Broken { greeted: talk.greeted },
                Ok(count) => {
                    if let Err(ended) = talk.hear(&buffer[..count]) {
                        return ended;
                    }
                    resize(&mut buffer, count);
                }
            },
            wrote = writer.write(&talk.out[talk.written..]), if !talk.is_written() => match wrote {
                Ok(0) | Err(_) => return Ended::Broken { greeted: talk.greeted },
                Ok(count) => talk.written += count,
            },
            () = link.work.notified() => {}
            () = &mut hello_timer, if may_reopen => {
                talk.out = Zeroizing::new(filler());
                talk.written = 0;
                talk.open();
                patience = patience.saturating_mul(2).min(LONGEST_HELLO_WAIT);
                hello_timer.as_mut().reset(Instant::now() + patience);
            }
        }
    }
}

fn resize(buffer: &mut Vec<u8>, count: usize) {
    if count == buffer.len() && count < BUSY_READ_BYTES {
        buffer.resize(BUSY_READ_BYTES, 0);
    } else if buffer.len() > IDLE_READ_BYTES && count < IDLE_READ_BYTES {
        *buffer = vec![0; IDLE_READ_BYTES];
    }
}

impl Conversation<'_> {
    fn open(&mut self) {
        let hello = HostHello {
            min_version: MIN_VERSION,
            max_version: MAX_VERSION,
            agent: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let body = Some(host_frame::Body::Hello(hello));
        self.out.extend_from_slice(OPENING);
        // A hello is a few bytes.
        let _ = put_frame(&mut self.out, &HostFrame { nonce: self.nonce, request: 0, body });
        self.link.put_early(self.nonce, &mut self.out);
    }

    fn is_written(&self) -> bool {
        self.written == self.out.len()
    }

    /// When all is written, takes what was asked since.
    fn refill(&mut self) {
        if self.is_written() && self.greeted {
            self.out = self.link.take_out();
            self.written = 0;
        } else if self.is_written() && self.out.capacity() > IDLE_READ_BYTES {
            self.out = Zeroizing::default();
            self.written = 0;
        }
    }

    fn hear(&mut self, bytes: &[u8]) -> Result<(), Ended> {
        self.deframer.push(bytes);
        while let Some(found) = self.deframer.next::<GuestFrame>() {
            let Found::Message(frame) = found else { continue };
            if frame.nonce != self.nonce {
                continue;
            }
            match frame.body {
                Some(guest_frame::Body::Hello(hello)) => self.greet(&hello)?,
                _ if self.greeted => self.link.take(frame),
                // An answer before the greeting belongs to no request.
                _ => {}
            }
        }
        Ok(())
    }

    fn greet(&mut self, hello: &GuestHello) -> Result<(), Ended> {
        if !(MIN_VERSION..=MAX_VERSION).contains(&hello.version) {
            let error = LinkError::NoCommonVersion { min: hello.guest_min, max: hello.guest_max };
            self.link.modify_view(|view| view.message = shortened(&error.to_string()));
            return Err(Ended::Incompatible);
        }
        self.greeted = true;
        self.link.greeted(self.nonce, hello);
        Ok(())
    }
}
