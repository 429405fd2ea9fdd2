//! Sends the frames that a node gets after its welcome, one at a time.

use std::ops::ControlFlow;
use std::sync::Arc;

use mvm_proto::wire::session::v1::{
    AgentFrame, CoordinatorFrame, Document, DocumentDelta, HeartbeatAck, StatusWanted, Trust,
    coordinator_frame,
};
use mvm_transport::frame::encode_once;
use mvm_transport::{FrameReceiver, FrameSender};

use super::{End, Talk, frame};
use crate::documents::Stored;
use crate::fleet::Item;
use crate::stored::now;

impl Talk<'_> {
    /// Sends one frame, and hears the node all the while. A node whose own frame fills the window reads ours only once
    /// we have read its: were reading to wait for writing here, both would wait for ever. What is heard meanwhile costs
    /// no queue, it goes to slots.
    pub(super) async fn send(
        &mut self,
        body: coordinator_frame::Body,
        frames_in: &mut FrameReceiver<AgentFrame>,
        frames_out: &mut FrameSender<CoordinatorFrame>,
    ) -> Result<ControlFlow<()>, End> {
        use coordinator_frame::Body;
        let is_document = matches!(body, Body::Document(_) | Body::DocumentDelta(_));
        let numbers = self.sent.filter(|_| is_document);
        let encoded = encode_once(&frame(body));
        let crash = &self.state.settings.crash;
        if is_document {
            crash.before(|| "document".to_owned()).await;
        }
        let mut sending = std::pin::pin!(frames_out.send_encoded(encoded));
        loop {
            tokio::select! {
                sent = &mut sending => {
                    sent?;
                    break;
                }
                received = frames_in.recv() => if self.hear(received?).await?.is_break() {
                    return Ok(ControlFlow::Break(()));
                },
            }
        }
        if is_document {
            crash.after(|| "document".to_owned()).await;
        }
        if let Some(numbers) = numbers {
            self.attached.live.change(|live| live.sent = Some(numbers));
            self.state.metrics.documents_sent.inc();
            tracing::debug!(node = %self.attached.node, generation = numbers.generation, "sent a document");
        }
        Ok(ControlFlow::Continue(()))
    }

    /// What to send next, and noted as sent: its answer may be heard before the sending is known to be over.
    pub(super) fn next_out(&mut self) -> Result<Option<coordinator_frame::Body>, End> {
        if let Some(sequence) = self.unanswered.take() {
            return Ok(Some(coordinator_frame::Body::HeartbeatAck(HeartbeatAck { sequence })));
        }
        if std::mem::take(&mut self.ask_for_whole) {
            return Ok(Some(coordinator_frame::Body::StatusWanted(StatusWanted {})));
        }
        while let Some(item) = self.attached.outbox.take() {
            let body = match item {
                Item::Goodbye(goodbye) => return Err(End::Goodbye(goodbye)),
                Item::Trust => self.trust_to_send().map(coordinator_frame::Body::Trust),
                Item::Operators => {
                    Some(coordinator_frame::Body::RemovedOperators(self.state.operators.refused(now())))
                }
                Item::Document(stored) => self.document_to_send(stored),
                Item::Request(request) => Some(coordinator_frame::Body::Request(request)),
            };
            if body.is_some() {
                return Ok(body);
            }
        }
        // After all else: a document waits for one piece at most.
        Ok(self.secrets.frame())
    }

    fn trust_to_send(&mut self) -> Option<Trust> {
        let (root, images) = self.trust;
        let trust = self.state.trust.since(root, images)?;
        if self.state.trust.resets_since(root) {
            // What comes next is numbered anew, from below.
            self.sent = None;
        }
        let current = self.state.trust.current();
        self.trust = (current.root_version(), current.images_version());
        Some(trust)
    }

    /// The document, as what changed of the one that the node accepted last where it knows of such deltas.
    fn document_to_send(&mut self, stored: Stored) -> Option<coordinator_frame::Body> {
        let numbers = stored.assigned.numbers;
        if self.sent >= Some(numbers) {
            return None;
        }
        self.sent = Some(numbers);
        self.retry = None;
        let has_base = |delta: &DocumentDelta| {
            let live = self.attached.live.lock();
            live.accepted.as_ref().is_some_and(|accepted| accepted.digest == delta.base)
        };
        let traceparent = stored.trace.map(|trace| trace.to_string()).unwrap_or_default();
        match stored.delta.filter(|delta| self.takes_deltas && has_base(delta)) {
            Some(delta) => {
                self.state.metrics.document_deltas_sent.inc();
                let delta = DocumentDelta { traceparent, ..Arc::unwrap_or_clone(delta) };
                Some(coordinator_frame::Body::DocumentDelta(delta))
            }
            None => {
                let envelope = if self.takes_batches {
                    stored.envelope
                } else {
                    self.state.documents.signed_alone(stored.envelope, now())
                };
                Some(coordinator_frame::Body::Document(Document { envelope, traceparent }))
            }
        }
    }
}
