//! The helper's side: takes requests from its one agent, checks each, and carries it out.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::{AbortHandle, JoinSet};

use super::frame::{self, Frame, Reader};
use super::message::{Answer, Call, Failure, Request, Response};
use super::policy::{Policy, refused};
use super::turns::{Turns, is_slow};
use crate::{Host as _, HostError, LocalHost, Operation, ProcessIdentity};

/// Threads for work that waits. Most of it waits for a disk; more threads would only wait for the same one.
pub const HELPER_THREADS: usize = 16;

/// How many requests that may take long run at once: they leave threads for the others.
const SLOW_AT_ONCE: usize = HELPER_THREADS - 4;

/// How many of the others.
const AT_ONCE: usize = 64;

/// How many requests may be unanswered, those that wait for a VMM's end included: there is one per VMM.
const MAX_UNANSWERED: usize = 16 * 1024;

/// How many answers may wait for an agent that does not read them.
const ANSWERS_KEPT: usize = 256;

/// Why a helper ended, other than because its agent did.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    #[error("could not use the socket to the agent")]
    Socket(#[source] io::Error),
    #[error("the agent's first message is not a policy")]
    NoPolicy(#[source] io::Error),
    #[error("the agent sent an invalid message; it may be compromised")]
    Garbage(#[source] io::Error),
    #[error(transparent)]
    Privileges(#[from] HostError),
}

struct Helper {
    host: LocalHost,
    policy: Policy,
    slow: Semaphore,
    running: Semaphore,
    /// Requests that wait for a VMM's end, to be forgotten when asked to.
    waits: Mutex<HashMap<u64, AbortHandle>>,
}

type Answered = (Answer, Option<OwnedFd>);

/// The whole life of a helper process: reads its policy, gives up what it does not need, serves until the agent is
/// gone.
pub async fn run_helper(socket: OwnedFd) -> Result<(), HelperError> {
    let stream = open(socket)?;
    let mut reader = Reader::default();
    let no_policy = || HelperError::NoPolicy(io::ErrorKind::UnexpectedEof.into());
    let first = reader.next(&stream).await.map_err(HelperError::NoPolicy)?.ok_or_else(no_policy)?;
    let policy: Policy =
        serde_json::from_slice(&first.body).map_err(|cause| HelperError::NoPolicy(cause.into()))?;
    crate::privileges::confine_helper()?;
    converse(stream, reader, policy).await
}

/// Serves one agent at the other end of `socket` until it is gone.
pub async fn serve_helper(socket: OwnedFd, policy: Policy) -> Result<(), HelperError> {
    converse(open(socket)?, Reader::default(), policy).await
}

fn open(socket: OwnedFd) -> Result<Arc<UnixStream>, HelperError> {
    let stream = StdStream::from(socket);
    let opened = stream.set_nonblocking(true).and_then(|()| UnixStream::from_std(stream));
    opened.map(Arc::new).map_err(HelperError::Socket)
}

async fn converse(stream: Arc<UnixStream>, mut reader: Reader, policy: Policy) -> Result<(), HelperError> {
    let host = LocalHost::of_helper(&policy)?;
    let (slow, running) = (Semaphore::new(SLOW_AT_ONCE), Semaphore::new(AT_ONCE));
    let helper = Arc::new(Helper { host, policy, slow, running, waits: Mutex::default() });
    let mut turns = Turns::default();
    let (answers, to_send) = mpsc::channel(ANSWERS_KEPT);
    let mut tasks = JoinSet::new();
    let mut writing = tokio::spawn(write(Arc::clone(&stream), to_send));
    loop {
        while tasks.try_join_next().is_some() {}
        let frame = tokio::select! {
            frame = reader.next(&stream) => frame.map_err(HelperError::Garbage)?,
            // The agent does not read any more: it is gone, or about to be.
            _ = &mut writing => None,
        };
        let Some(frame) = frame else { return Ok(()) };
        if frame.descriptor.is_some() || reader.has_strays() {
            return Err(HelperError::Garbage(io::Error::other("agents send no descriptors")));
        }
        let request: Request<Value> =
            serde_json::from_slice(&frame.body).map_err(|cause| HelperError::Garbage(cause.into()))?;
        let number = request.number;
        let call = match serde_json::from_value::<Call>(request.call) {
            Ok(Call::Forget { number }) => {
                helper.forget(number);
                continue;
            }
            Ok(call) if tasks.len() < MAX_UNANSWERED => Ok(call),
            Ok(_) => Err("too many requests wait for an answer".to_owned()),
            Err(cause) => Err(format!("invalid request: {cause}")),
        };
        let call = match call {
            Ok(call) => call,
            Err(reason) => {
                tracing::warn!(reason, "refused a request of the agent");
                let failed = (Answer::Failed(Failure::Refused(reason)), None);
                let _ = answers.send(framed(number, failed)).await;
                continue;
            }
        };
        let waits = matches!(call, Call::WaitEnd(_));
        let mut turn = turns.take(&call);
        let (serving, answers) = (Arc::clone(&helper), answers.clone());
        let task = tasks.spawn(async move {
            turn.begin().await;
            let answered = serving.answer(call).await.unwrap_or_else(|error| {
                if let HostError::Refused(reason) = &error {
                    tracing::warn!(reason, "refused a request of the agent");
                }
                (Answer::Failed(error.into()), None)
            });
            drop(turn);
            serving.forgotten(number);
            // Without anyone to read it, it is of no use.
            let _ = answers.send(framed(number, answered)).await;
        });
        if waits {
            helper.waits().insert(number, task);
        }
    }
}

fn framed(number: u64, (answer, descriptor): Answered) -> Frame {
    let body = |answer| serde_json::to_vec(&Response { number, answer });
    let reason = match body(answer) {
        Ok(body) if body.len() <= frame::MAX_FRAME_BYTES => return Frame { body, descriptor },
        Ok(_) => "the answer is too long for a frame".to_owned(),
        Err(cause) => format!("the answer can't be written down: {cause}"),
    };
    tracing::error!(reason, "could not answer the agent");
    Frame { body: body(Answer::Failed(Failure::Refused(reason))).unwrap_or_default(), descriptor: None }
}

async fn write(stream: Arc<UnixStream>, mut answers: mpsc::Receiver<Frame>) {
    while let Some(frame) = answers.recv().await {
        if frame::write(&stream, &frame).await.is_err() {
            return;
        }
    }
}

impl Helper {
    fn waits(&self) -> parking_lot::MutexGuard<'_, HashMap<u64, AbortHandle>> {
        self.waits.lock()
    }

    fn forget(&self, number: u64) {
        if let Some(task) = self.waits().remove(&number) {
            task.abort();
        }
    }

    fn forgotten(&self, number: u64) {
        self.waits().remove(&number);
    }

    async fn answer(&self, call: Call) -> Result<Answered, HostError> {
        // A request that waits for a VMM's end blocks no other.
        if let Call::WaitEnd(vmm) = call {
            if !self.host.is_child(&vmm) {
                self.is_vmm(&vmm.process).await?;
            }
            return Ok((Answer::End(self.host.wait_end(&vmm).await?), None));
        }
        let _running = if is_slow(&call) { &self.slow } else { &self.running }.acquire().await;
        let with = |answer| Ok((answer, None));
        match call {
            Call::Perform(operation) => {
                let operation = *operation;
                self.policy.admit(&operation)?;
                if let Operation::EndProcess { process, .. } = &operation {
                    self.is_vmm(process).await?;
                }
                with(Answer::Outcome(self.host.perform(&operation).await?))
            }
            Call::Vmms => with(Answer::Vmms(self.host.vmms().await?)),
            Call::RunDirs => with(Answer::RunDirs(self.host.run_dirs().await?)),
            Call::Open { instance, name, access } => {
                self.policy.opened(&name, Some(access))?;
                let file = self.host.open_file(&instance, &name, access).await?;
                let answer = if file.is_some() { Answer::Opened } else { Answer::NotThere };
                Ok((answer, file.map(|file: File| file.into())))
            }
            Call::Connect { instance, name } => {
                self.policy.opened(&name, None)?;
                let stream = self.host.connect(&instance, &name).await?;
                Ok((Answer::Opened, Some(stream.into())))
            }
            Call::Names { instance } => with(Answer::Names(self.host.names(&instance).await?)),
            Call::JailRoot { instance } => with(Answer::JailRoot(self.host.jail_root(&instance).await?)),
            Call::WaitEnd(_) | Call::Forget { .. } => refused("it is answered elsewhere"),
        }
    }

    /// Passes for a VMM of this data directory, as found by looking, and for a process that is gone.
    async fn is_vmm(&self, process: &ProcessIdentity) -> Result<(), HostError> {
        if self.host.is_vmm_or_gone(process).await? {
            return Ok(());
        }
        refused(format!("process {} is no VMM of this data directory", process.pid))
    }
}
