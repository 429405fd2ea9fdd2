//! An agent's side of the protocol, as plain as can be, and a guest in this process to talk to.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mvm_guest::protocol::guest_frame::Body;
use mvm_guest::protocol::host_frame::Body as Ask;
use mvm_guest::protocol::{
    Deframer, Exec, Exit, Found, GuestFrame, GuestHello, HostFrame, HostHello, OPENING, Reborn, Window,
    put_frame,
};
use mvm_guest::{Guest, Settings, protocol, serve};
use tempfile::TempDir;

/// How long anything may take on a machine that does many things at once.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// A guest, with the folder that stands for its machine.
pub(crate) struct Machine {
    pub(crate) guest: Guest,
    pub(crate) folder: TempDir,
}

impl Machine {
    pub(crate) fn new() -> Self {
        Self::with(None, protocol::MAX_VERSION)
    }

    pub(crate) fn with(config: Option<&str>, max_version: u32) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        if let Some(config) = config {
            let config = config.replace("RUN", folder.path().join("run").to_str().expect("text"));
            std::fs::write(folder.path().join("guest.json"), config).expect("the image's configuration");
        }
        let mut settings = Settings::borrowed(folder.path());
        settings.max_version = max_version;
        Self { guest: Guest::new(settings).expect("a guest"), folder }
    }

    /// A connection on which nothing was said yet.
    pub(crate) fn connect(&self) -> Host {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let guest = self.guest.clone();
        std::thread::spawn(move || {
            let reader = theirs.try_clone().expect("a second handle");
            let _ = serve(&reader, theirs, &guest);
            let _ = reader.shutdown(std::net::Shutdown::Both);
        });
        Host::new(ours)
    }

    /// A connection of the newest version to a guest that knows who it is.
    pub(crate) fn ready(&self) -> Host {
        let mut host = self.connect();
        assert_eq!(host.hello(1, protocol::MAX_VERSION).version, protocol::MAX_VERSION);
        let reborn = reborn(1);
        assert_eq!(host.ask(Ask::Reborn(reborn)), done());
        host
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("text").to_owned()
    }
}

pub(crate) fn reborn(generation: u64) -> Reborn {
    Reborn { entropy: vec![7; 32], start_workload: true, generation, ..Reborn::default() }
}

pub(crate) fn done() -> Body {
    Body::Done(mvm_guest::protocol::Done {})
}

pub(crate) fn command(words: &[&str]) -> Exec {
    Exec { command: words.iter().map(|word| (*word).to_owned()).collect(), ..Exec::default() }
}

pub(crate) fn shell(script: &str) -> Exec {
    command(&["sh", "-c", script])
}

/// The code of a failure, or what came in its place.
pub(crate) fn code(body: &Body) -> String {
    match body {
        Body::Failure(failure) => failure.code.clone(),
        other => format!("{other:?}"),
    }
}

static NONCE: AtomicU64 = AtomicU64::new(1);
static NUMBER: AtomicU64 = AtomicU64::new(1000);

pub(crate) fn number() -> u64 {
    NUMBER.fetch_add(1, Ordering::Relaxed)
}

pub(crate) struct Host {
    pub(crate) stream: UnixStream,
    pub(crate) nonce: u64,
    deframer: Deframer,
    waiting: VecDeque<(u64, Body)>,
}

impl Host {
    pub(crate) fn new(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        let nonce = NONCE.fetch_add(1, Ordering::Relaxed);
        Self { stream, nonce, deframer: Deframer::default(), waiting: VecDeque::new() }
    }

    pub(crate) fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the guest listens");
    }

    pub(crate) fn send(&mut self, request: u64, body: Ask) {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, &HostFrame { nonce: self.nonce, request, body: Some(body) })
            .expect("a short message");
        self.send_bytes(&bytes);
    }

    pub(crate) fn hello(&mut self, min_version: u32, max_version: u32) -> GuestHello {
        self.send_bytes(OPENING);
        self.send(0, Ask::Hello(HostHello { min_version, max_version, agent: "test".into() }));
        loop {
            if let (0, Body::Hello(hello)) = self.receive() {
                return hello;
            }
        }
    }

    /// The next frame of this connection.
    pub(crate) fn receive(&mut self) -> (u64, Body) {
        self.try_receive().expect("the guest answers")
    }

    /// Absent: the connection ended, or nothing came in time.
    pub(crate) fn try_receive(&mut self) -> Option<(u64, Body)> {
        if let Some(frame) = self.waiting.pop_front() {
            return Some(frame);
        }
        let mut buffer = [0; 65536];
        loop {
            match self.deframer.next::<GuestFrame>() {
                Some(Found::Message(GuestFrame { nonce, request, body: Some(body) }))
                    if nonce == self.nonce =>
                {
                    return Some((request, body));
                }
                Some(_) => {}
                None => match self.stream.read(&mut buffer) {
                    Ok(length) if length > 0 => self.deframer.push(&buffer[..length]),
                    // A child of this process ended meanwhile: reads with a time limit are not gone on with by themselves.
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    _ => return None,
                },
            }
        }
    }

    /// What the guest says next about this request; other news is dropped.
    pub(crate) fn next_of(&mut self, request: u64) -> Body {
        loop {
            let (about, body) = self.receive();
            if about == request {
                return body;
            }
        }
    }

    /// The final answer to a request.
    pub(crate) fn answer(&mut self, request: u64) -> Body {
        loop {
            let body = self.next_of(request);
            if !matches!(body, Body::Accepted(_) | Body::Window(_)) {
                return body;
            }
        }
    }

    pub(crate) fn ask(&mut self, body: Ask) -> Body {
        let number = number();
        self.send(number, body);
        self.answer(number)
    }

    /// Waits until the guest says that its readiness is this one.
    pub(crate) fn wait_for(&mut self, readiness: mvm_guest::protocol::Readiness) -> String {
        loop {
            if let (0, Body::State(state)) = self.receive()
                && state.readiness() == readiness
            {
                return state.message;
            }
        }
    }

    /// Follows an exec to its end, confirming what it reads.
    pub(crate) fn follow(&mut self, request: u64) -> Outcome {
        let mut outcome = Outcome::default();
        loop {
            match self.answer(request) {
                Body::Output(output) => {
                    outcome.lost += output.lost;
                    let end = output.offset + output.data.len() as u64;
                    if output.stderr { &mut outcome.stderr } else { &mut outcome.stdout }.extend(output.data);
                    self.send(request, Ask::Window(Window { bytes: end, received: 0 }));
                }
                Body::Exit(exit) => {
                    outcome.exit = exit;
                    return outcome;
                }
                other => panic!("not of an exec: {other:?}"),
            }
        }
    }

    pub(crate) fn run(&mut self, exec: Exec) -> Outcome {
        let number = number();
        self.send(number, Ask::Exec(exec));
        self.follow(number)
    }
}

#[derive(Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) lost: u64,
    pub(crate) exit: Exit,
}

/// Polls until the condition holds.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < LONG, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
