//! The agent's side: each call is a request, and waits for the answer with its number.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mvm_proto::InstanceId;
use parking_lot::{Mutex, MutexGuard};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::AbortHandle;

use super::frame::{self, Frame, Reader};
use super::message::{Answer, Call, Request, Response};
use crate::data_dir::VMS_DIR;
use crate::{Access, Host, HostError, Operation, Outcome, ProcessEnd, VmmProcess};

type Answered = (Answer, Option<OwnedFd>);
type Waiting = HashMap<u64, oneshot::Sender<Answered>>;

/// Asks a helper that [`super::serve_helper`] runs in.
#[derive(Debug)]
pub struct RemoteHost {
    vms_dir: PathBuf,
    next: AtomicU64,
    requests: mpsc::UnboundedSender<Vec<u8>>,
    shared: Arc<Shared>,
    tasks: [AbortHandle; 2],
}

#[derive(Debug)]
struct Shared {
    /// None once the helper is gone.
    waiting: Mutex<Option<Waiting>>,
    gone: watch::Sender<bool>,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Option<Waiting>> {
        self.waiting.lock()
    }

    /// Dropping what they wait on tells all who wait.
    fn close(&self) {
        *self.waiting() = None;
        self.gone.send_replace(true);
    }
}

impl Drop for RemoteHost {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

/// While this exists, a caller waits for the answer.
struct Asking<'a> {
    host: &'a RemoteHost,
    number: u64,
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        let waited = self.host.shared.waiting().as_mut().and_then(|waiting| waiting.remove(&self.number));
        if waited.is_some() {
            // Not answered yet: the helper need not wait for a process any longer on this one's behalf.
            let number = self.host.next.fetch_add(1, Ordering::Relaxed);
            let call = Call::Forget { number: self.number };
            if let Ok(body) = serde_json::to_vec(&Request { number, call }) {
                let _ = self.host.requests.send(body);
            }
        }
    }
}

impl RemoteHost {
    /// The helper at the other end of this socket. Needs a runtime.
    pub fn new(socket: OwnedFd, data_dir: &Path) -> io::Result<Self> {
        let stream = StdStream::from(socket);
        stream.set_nonblocking(true)?;
        let stream = Arc::new(UnixStream::from_std(stream)?);
        let waiting = Mutex::new(Some(Waiting::new()));
        let shared = Arc::new(Shared { waiting, gone: watch::Sender::new(false) });
        let (requests, to_send) = mpsc::unbounded_channel();
        let reading = tokio::spawn(read(Arc::clone(&stream), Arc::clone(&shared)));
        let writing = tokio::spawn(write(stream, to_send, Arc::clone(&shared)));
        Ok(Self {
            vms_dir: data_dir.join(VMS_DIR),
            next: AtomicU64::new(1),
            requests,
            shared,
            tasks: [reading.abort_handle(), writing.abort_handle()],
        })
    }

    /// Returns once the helper is gone: nothing can be done to this machine any more.
    pub async fn gone(&self) {
        let mut gone = self.shared.gone.subscribe();
        let _ = gone.wait_for(|gone| *gone).await;
    }

    async fn ask(&self, call: Call) -> Result<Answered, HostError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let body = serde_json::to_vec(&Request { number, call }).map_err(|cause| failed(cause.into()))?;
        if body.len() > frame::MAX_FRAME_BYTES {
            return Err(HostError::Refused(format!("a request of {} bytes is too long", body.len())));
        }
        let (answer, answered) = oneshot::channel();
        match self.shared.waiting().as_mut() {
            Some(waiting) => waiting.insert(number, answer),
            None => return Err(gone()),
        };
        let _asking = Asking { host: self, number };
        self.requests.send(body).map_err(|_| gone())?;
        match answered.await.map_err(|_| gone())? {
            (Answer::Failed(failure), _) => Err(failure.into()),
            answered => Ok(answered),
        }
    }
}

fn failed(cause: io::Error) -> HostError {
    HostError::Io { attempt: "ask the privileged helper".to_owned(), cause }
}

fn gone() -> HostError {
    failed(io::Error::new(io::ErrorKind::BrokenPipe, "the helper ended; restart the agent"))
}

fn unfitting() -> HostError {
    failed(io::Error::new(io::ErrorKind::InvalidData, "the helper's answer does not match the request"))
}

async fn read(stream: Arc<UnixStream>, shared: Arc<Shared>) {
    let mut reader = Reader::default();
    loop {
        let frame = match reader.next(&stream).await {
            Ok(Some(frame)) => frame,
            Ok(None) => break,
            Err(cause) => {
                tracing::error!(error = %cause, "could not read from the privileged helper");
                break;
            }
        };
        let Ok(response) = serde_json::from_slice::<Response>(&frame.body) else {
            tracing::error!("the privileged helper sent an invalid message");
            break;
        };
        let waiting = shared.waiting().as_mut().and_then(|waiting| waiting.remove(&response.number));
        if let Some(waiting) = waiting {
            // The caller may have given up; then its descriptor is closed here.
            let _ = waiting.send((response.answer, frame.descriptor));
        }
    }
    shared.close();
}

async fn write(stream: Arc<UnixStream>, mut requests: mpsc::UnboundedReceiver<Vec<u8>>, shared: Arc<Shared>) {
    while let Some(body) = requests.recv().await {
        if let Err(cause) = frame::write(&stream, &Frame { body, descriptor: None }).await {
            tracing::error!(error = %cause, "could not write to the privileged helper");
            break;
        }
    }
    shared.close();
}

impl Host for RemoteHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        match self.ask(Call::Perform(Box::new(operation.clone()))).await? {
            (Answer::Outcome(outcome), _) => Ok(outcome),
            _ => Err(unfitting()),
        }
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        match self.ask(Call::Vmms).await? {
            (Answer::Vmms(vmms), _) => Ok(vmms),
            _ => Err(unfitting()),
        }
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        match self.ask(Call::RunDirs).await? {
            (Answer::RunDirs(instances), _) => Ok(instances),
            _ => Err(unfitting()),
        }
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.vms_dir.join(instance.as_str())
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        match self.ask(Call::WaitEnd(vmm.clone())).await? {
            (Answer::End(end), _) => Ok(end),
            _ => Err(unfitting()),
        }
    }

    async fn open_file(
        &self,
        instance: &InstanceId,
        name: &str,
        access: Access,
    ) -> Result<Option<File>, HostError> {
        let (instance, name) = (instance.clone(), name.to_owned());
        match self.ask(Call::Open { instance, name, access }).await? {
            (Answer::Opened, Some(file)) => Ok(Some(file.into())),
            (Answer::NotThere, _) => Ok(None),
            _ => Err(unfitting()),
        }
    }

    async fn connect(&self, instance: &InstanceId, name: &str) -> Result<StdStream, HostError> {
        let (instance, name) = (instance.clone(), name.to_owned());
        match self.ask(Call::Connect { instance, name }).await? {
            (Answer::Opened, Some(stream)) => Ok(stream.into()),
            _ => Err(unfitting()),
        }
    }

    async fn names(&self, instance: &InstanceId) -> Result<Vec<String>, HostError> {
        match self.ask(Call::Names { instance: instance.clone() }).await? {
            (Answer::Names(names), _) => Ok(names),
            _ => Err(unfitting()),
        }
    }

    async fn jail_root(&self, instance: &InstanceId) -> Result<Option<PathBuf>, HostError> {
        match self.ask(Call::JailRoot { instance: instance.clone() }).await? {
            (Answer::JailRoot(root), _) => Ok(root),
            _ => Err(unfitting()),
        }
    }
}
