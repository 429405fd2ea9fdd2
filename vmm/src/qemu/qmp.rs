//! One connection to a VMM's control socket, kept open: QEMU serves one client at a time.
//!
//! One task reads; a caller waits for the answer with its number, up to a deadline. Events of the VMM keep
//! [`Qmp::run`] and [`Qmp::migration`] true, so that looking at the state costs no round trip.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::run_files::Dial;

/// The longest line that is read; real answers are below a few KiB. More does not come from QEMU.
const MAX_LINE_BYTES: usize = 1024 * 1024;

/// Between attempts to connect to a VMM that has just been started and does not listen yet.
const CONNECT_EVERY: Duration = Duration::from_millis(2);

#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    #[error("the control socket was closed")]
    Closed,
    #[error("no answer to {command} within {waited:?}")]
    Silent { command: &'static str, waited: Duration },
    #[error("{command} was refused: {reason}")]
    Refused { command: &'static str, reason: String },
    #[error("could not use the control socket")]
    Io(#[from] io::Error),
}

type Answers = HashMap<u64, oneshot::Sender<Result<Value, String>>>;

/// What the reading task and the callers share.
#[derive(Debug)]
struct Shared {
    stream: UnixStream,
    /// None once the connection is closed.
    answers: Mutex<Option<Answers>>,
    run: watch::Sender<String>,
    migration: watch::Sender<String>,
}

impl Shared {
    fn answers(&self) -> MutexGuard<'_, Option<Answers>> {
        self.answers.lock()
    }
}

#[derive(Debug)]
pub struct Qmp {
    shared: Arc<Shared>,
    /// One command is written at a time, whole.
    writing: tokio::sync::Mutex<()>,
    next: AtomicU64,
    reader: AbortHandle,
}

impl Drop for Qmp {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Qmp {
    /// Connects as soon as QEMU listens, and negotiates the protocol.
    pub async fn connect(control: &Dial, deadline: Duration) -> Result<Self, QmpError> {
        let silent = |_| QmpError::Silent { command: "a connection", waited: deadline };
        timeout(deadline, Self::connect_at_last(control)).await.map_err(silent)?
    }

    async fn connect_at_last(control: &Dial) -> Result<Self, QmpError> {
        let stream = loop {
            match control.connect().await {
                Ok(stream) => break stream,
                Err(cause) => match cause.kind() {
                    io::ErrorKind::NotFound
                    | io::ErrorKind::ConnectionRefused
                    | io::ErrorKind::WouldBlock => {
                        tokio::time::sleep(CONNECT_EVERY).await;
                    }
                    _ => return Err(cause.into()),
                },
            }
        };
        let shared = Arc::new(Shared {
            stream,
            answers: Mutex::new(Some(Answers::new())),
            run: watch::Sender::new(String::new()),
            migration: watch::Sender::new(String::new()),
        });
        let (greeted, greeting) = oneshot::channel();
        let reader = tokio::spawn(read(Arc::clone(&shared), Some(greeted))).abort_handle();
        let qmp = Self { shared, writing: tokio::sync::Mutex::default(), next: AtomicU64::new(1), reader };
        greeting.await.map_err(|_| QmpError::Closed)?;
        qmp.command("qmp_capabilities", Value::Null, Duration::MAX).await?;
        qmp.query_run(Duration::MAX).await?;
        Ok(qmp)
    }

    pub fn is_closed(&self) -> bool {
        self.shared.answers().is_none()
    }

    /// The run state as last heard: `running`, `paused`, `postmigrate`, `inmigrate` and others.
    pub fn run(&self) -> String {
        self.shared.run.borrow().clone()
    }

    /// Asks for the run state.
    pub async fn query_run(&self, deadline: Duration) -> Result<String, QmpError> {
        let answer = self.command("query-status", Value::Null, deadline).await?;
        let run = answer["status"].as_str().unwrap_or_default().to_owned();
        self.shared.run.send_replace(run.clone());
        Ok(run)
    }

    /// Follows migration, from which what was heard before is forgotten.
    pub fn migration(&self) -> watch::Receiver<String> {
        self.shared.migration.send_replace(String::new());
        self.shared.migration.subscribe()
    }

    /// Runs one command. Null stands for no arguments.
    pub async fn command(
        &self,
        command: &'static str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        self.ask(command, arguments, None, deadline).await
    }

    /// Hands an open file to the VMM, which knows it by `name` from then on.
    pub async fn give(&self, name: &str, file: BorrowedFd<'_>, deadline: Duration) -> Result<(), QmpError> {
        self.ask("getfd", json!({ "fdname": name }), Some(file), deadline).await.map(|_| ())
    }

    async fn ask(
        &self,
        command: &'static str,
        arguments: Value,
        file: Option<BorrowedFd<'_>>,
        deadline: Duration,
    ) -> Result<Value, QmpError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut message = json!({ "execute": command, "id": number });
        if !arguments.is_null() {
            message["arguments"] = arguments;
        }
        let mut line = message.to_string().into_bytes();
        line.push(b'\n');
        let (answer, answered) = oneshot::channel();
        match self.shared.answers().as_mut() {
            Some(answers) => answers.insert(number, answer),
            None => return Err(QmpError::Closed),
        };
        let asked = async {
            self.write(&line, file).await?;
            match answered.await {
                Ok(Ok(value)) => Ok(value),
                Ok(Err(reason)) => Err(QmpError::Refused { command, reason }),
                Err(_) => Err(QmpError::Closed),
            }
        };
        let outcome = timeout(deadline, asked).await;
        if outcome.is_err()
            && let Some(answers) = self.shared.answers().as_mut()
        {
            answers.remove(&number);
        }
        outcome.unwrap_or(Err(QmpError::Silent { command, waited: deadline }))
    }

    async fn write(&self, line: &[u8], mut file: Option<BorrowedFd<'_>>) -> Result<(), QmpError> {
        let _whole = self.writing.lock().await;
        let mut rest = line;
        while !rest.is_empty() {
            let stream = &self.shared.stream;
            let sent = stream.async_io(Interest::WRITABLE, || send(stream.as_fd(), rest, file)).await?;
            rest = &rest[sent..];
            // A file travels with the first bytes.
            file = None;
        }
        Ok(())
    }
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files: Vec<_> = file.into_iter().collect();
    if !files.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&files));
    }
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Reads until the connection is closed, then fails the callers that still wait.
async fn read(shared: Arc<Shared>, mut greeted: Option<oneshot::Sender<()>>) {
    let mut buffer = Vec::with_capacity(4096);
    while let Ok(()) = shared.stream.readable().await {
        match shared.stream.try_read_buf(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => continue,
            Err(_) => break,
        }
        let Some(end) = buffer.iter().rposition(|byte| *byte == b'\n') else {
            if buffer.len() > MAX_LINE_BYTES {
                break;
            }
            continue;
        };
        for line in buffer[..end].split(|byte| *byte == b'\n') {
            let Ok(message) = serde_json::from_slice::<Value>(line) else { continue };
            if message.get("QMP").is_some() {
                greeted.take().map(|greeted| greeted.send(()));
            }
            heard(&shared, message);
        }
        buffer.drain(..=end);
    }
    // Dropping what they wait on tells them; so does what is put in its place.
    *shared.answers() = None;
    shared.migration.send_replace("closed".to_owned());
}

fn heard(shared: &Shared, mut message: Value) {
    if let Some(event) = message["event"].as_str() {
        let run = match event {
            "STOP" => "paused",
            "RESUME" => "running",
            "MIGRATION" => {
                let status = message["data"]["status"].as_str().unwrap_or_default().to_owned();
                shared.migration.send_replace(status);
                return;
            }
            _ => return,
        };
        shared.run.send_replace(run.to_owned());
        return;
    }
    let Some(number) = message["id"].as_u64() else { return };
    let Some(answer) = shared.answers().as_mut().and_then(|answers| answers.remove(&number)) else { return };
    let result = match message["error"]["desc"].as_str() {
        Some(reason) => Err(reason.to_owned()),
        None => Ok(message["return"].take()),
    };
    // The caller may have given up.
    let _ = answer.send(result);
}
