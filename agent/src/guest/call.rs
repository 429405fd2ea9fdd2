//! One request from its caller's side: yields the answers, and cancels the request when the caller goes away.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use mvm_proto::guest::{Chunk, Directory, Exit, Output, host_frame};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::error::LinkError;
use super::files::entry_bytes;
use super::link::Link;

/// What waits for a caller may be this much. A guest that keeps to its window stays far below.
const MAX_QUEUED_BYTES: usize = 1024 * 1024;
const MAX_QUEUED_EVENTS: usize = 4096;
/// Pieces of output that wait are put together up to this size.
const MERGED_BYTES: usize = 32 * 1024;

#[derive(Debug)]
pub(super) enum Event {
    Accepted,
    Output(Output),
    /// So much of the input has been taken.
    Taken(u64),
    Exit(Exit),
    Chunk(Chunk),
    Directory(Directory),
    Done,
    /// The link broke: what came so far comes again from the beginning.
    Again,
    /// Nothing more comes.
    Broken(LinkError),
}

impl Event {
    fn bytes(&self) -> usize {
        match self {
            Event::Output(output) => output.data.len(),
            Event::Chunk(chunk) => chunk.data.len(),
            Event::Directory(directory) => directory.entries.iter().map(entry_bytes).sum(),
            _ => 0,
        }
    }
}

/// Answers that the caller has not taken yet.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    queue: Mutex<(VecDeque<Event>, usize)>,
    arrived: Notify,
}

impl Inbox {
    /// Whether there was room. If not, the caller finds only that.
    pub(super) fn push(&self, event: Event) -> bool {
        let mut queue = self.queue.lock();
        let (events, bytes) = &mut *queue;
        *bytes += event.bytes();
        // Many small pieces of output become few: what waits is bounded by its bytes, not by their number.
        let event = match (event, events.back_mut()) {
            (Event::Output(next), Some(Event::Output(last)))
                if last.stderr == next.stderr && next.lost == 0 && last.data.len() < MERGED_BYTES =>
            {
                last.data.extend_from_slice(&next.data);
                return true;
            }
            (Event::Taken(next), Some(Event::Taken(last))) => {
                *last = next.max(*last);
                return true;
            }
            (event, _) => event,
        };
        let fits = *bytes <= MAX_QUEUED_BYTES && events.len() < MAX_QUEUED_EVENTS;
        if fits {
            events.push_back(event);
        } else {
            events.clear();
            *bytes = 0;
            events.push_back(Event::Broken(LinkError::Flooded));
        }
        drop(queue);
        self.arrived.notify_one();
        fits
    }

    fn pop(&self) -> Option<Event> {
        let mut queue = self.queue.lock();
        let event = queue.0.pop_front()?;
        queue.1 = queue.1.saturating_sub(event.bytes());
        Some(event)
    }

    async fn next(&self) -> Event {
        loop {
            if let Some(event) = self.pop() {
                return event;
            }
            self.arrived.notified().await;
        }
    }
}

/// A request under way. Dropped, it is forgotten on both sides, unless another call has taken its number over.
#[derive(Debug)]
pub(super) struct Call {
    link: Arc<Link>,
    number: u64,
    inbox: Arc<Inbox>,
    work: Mutex<Work>,
    /// Dropped, it leaves its request under way in the guest.
    leaves: AtomicBool,
}

/// How a request counts among the signs of a guest's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// It is no work: it is answered at once.
    No,
    /// The guest works for as long as it is under way.
    Yes,
    /// It is under way, and nothing has moved for so long that the guest may be idle.
    Lapsed,
}

impl Call {
    pub(super) fn new(link: Arc<Link>, number: u64, inbox: Arc<Inbox>, work: Work) -> Self {
        Self { link, number, inbox, work: Mutex::new(work), leaves: AtomicBool::new(false) }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether its request goes on in the guest once this is dropped, for those that ask again under its number.
    pub(super) fn leave_when_dropped(&self, leave: bool) {
        self.leaves.store(leave, Ordering::Relaxed);
    }

    /// From here on it counts like this.
    pub(super) fn count_as(&self, work: Work) {
        let before = std::mem::replace(&mut *self.work.lock(), work);
        self.link.count_work(before, work);
    }

    /// The next answer. Dropping the future loses nothing.
    pub(super) async fn next(&self) -> Event {
        self.inbox.next().await
    }

    /// Waits for a plain yes.
    pub(super) async fn done(self) -> Result<(), LinkError> {
        loop {
            match self.next().await {
                Event::Done => return Ok(()),
                Event::Accepted | Event::Again => {}
                Event::Broken(error) => return Err(error),
                _ => return Err(LinkError::Unexpected),
            }
        }
    }

    /// Sends something small for this request.
    pub(super) fn send(&self, body: &host_frame::Body) -> Result<(), LinkError> {
        self.link.send(self.number, body)
    }

    /// Waits while the guest does not read what was sent before.
    pub(super) async fn wait_until_read(&self) {
        self.link.wait_until_read().await;
    }

    /// Sends a piece of a stream once there is room for it.
    pub(super) async fn send_piece(&self, body: host_frame::Body) -> Result<(), LinkError> {
        self.link.wait_room(self.number).await?;
        self.link.send(self.number, &body)
    }

    /// Whether the guest can let its program go on without a reader.
    pub(super) fn can_let_go(&self) -> bool {
        self.link.view().can_let_go
    }

    pub(super) fn version(&self) -> u32 {
        self.link.version().unwrap_or_default()
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        let forget = !self.leaves.load(Ordering::Relaxed);
        self.link.end(self.number, &self.inbox, *self.work.lock(), forget);
    }
}
