//! Where desired state comes from. An agent has one source: pushed documents, or a local file; never both.
//!
//! [`Intake`] is where pushed documents arrive, the same for the API and the session: it refuses them when a file is
//! the source, and counts and announces what became of each. [`file_source_task`] owns the other source: it reads the
//! file when it changes, and at every interval anyway, and puts what is valid in force.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_proto::document::MAX_DOCUMENT_BYTES;
use mvm_proto::status::Mark;
use mvm_proto::wire::session::v1::DocumentDelta;
use mvm_proto::{DesiredState, Digest, NodeId, Problem, TraceContext};
use mvm_telemetry::{Attribute, Kind, Span, Tracer};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::intake::acceptor::{Accepted, Acceptor};
use crate::metrics::{DocumentResult, Metrics};
use crate::node::CurrentDocument;
use crate::node::handle::NodeHandle;
use crate::upkeep::dir_watch::DirWatch;

/// What takes pushed documents in. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Intake {
    /// Absent: this node is not enrolled and can verify nothing.
    acceptor: Option<Arc<Acceptor>>,
    from_file: bool,
    node: NodeHandle,
    metrics: Arc<Metrics>,
    tracer: Tracer,
}

impl Intake {
    #[must_use]
    pub fn new(
        acceptor: Option<Arc<Acceptor>>,
        from_file: bool,
        node: NodeHandle,
        metrics: Arc<Metrics>,
        tracer: Tracer,
    ) -> Self {
        Self { acceptor, from_file, node, metrics, tracer }
    }

    /// Hands over a DSSE envelope. When this returns `Ok`, the document is durable. A document that belongs to no trace begins
    /// none: most of them only have a new date.
    pub async fn accept(
        &self,
        envelope_json: &[u8],
        cause: Option<TraceContext>,
    ) -> Result<Accepted, Problem> {
        let mut span = cause.map(|cause| self.tracer.begin(Kind::Consumer, "accept document", Some(cause)));
        let trace = span.as_ref().and_then(Span::sampled);
        let result = match &self.acceptor {
            Some(acceptor) if !self.from_file => acceptor.accept_traced(envelope_json, trace).await,
            _ => Err(source_is_file()),
        };
        if let Some(span) = &mut span {
            tell(span, &result);
        }
        match &result {
            Ok(accepted) if accepted.is_new => {
                self.metrics.document(DocumentResult::Accepted);
                let Mark { epoch, generation, digest } = &accepted.mark;
                info!(epoch, generation, %digest, "accepted a document");
                let message = format!("generation {generation} of epoch {epoch} is in force");
                self.node.events().publish("DocumentAccepted", "", message);
            }
            Ok(_) => self.metrics.document(DocumentResult::Unchanged),
            Err(problem) => {
                self.metrics.document(DocumentResult::Refused);
                warn!(code = %problem.code, detail = %problem.detail, "refused a document");
                self.node.events().publish("DocumentRefused", "", problem.detail.as_str());
            }
        }
        result
    }

    /// The envelope that a delta stands for, as JSON; none where this node has not the document that it is of.
    #[must_use]
    pub fn rebuilt(&self, delta: DocumentDelta) -> Option<Bytes> {
        self.acceptor.as_ref()?.rebuilt(delta)
    }

    /// Hands over the cluster's next root and images metadata: DSSE envelopes as JSON, oldest first.
    pub async fn update_trust(&self, roots: &[Vec<u8>], images: &[Vec<u8>]) -> Result<(), Problem> {
        let acceptor = self.acceptor.as_ref().ok_or_else(not_enrolled)?;
        let result = acceptor.update_trust(roots, images).await;
        if let Err(problem) = &result {
            warn!(code = %problem.code, detail = %problem.detail, "refused new trust metadata");
            self.node.events().publish("TrustRefused", "", problem.detail.as_str());
        }
        result
    }

    /// The highest document that this node ever accepted.
    #[must_use]
    pub fn high_water(&self) -> Option<Mark> {
        self.acceptor.as_ref().and_then(|acceptor| acceptor.high_water())
    }

    /// The versions of root and images metadata that this node goes by; 0 for none.
    #[must_use]
    pub fn trust_versions(&self) -> (u64, u64) {
        self.acceptor.as_ref().map_or((0, 0), |acceptor| (acceptor.root_version(), acceptor.images_version()))
    }

    #[must_use]
    pub fn is_dev_cluster(&self) -> bool {
        self.acceptor.as_ref().is_some_and(|acceptor| acceptor.is_dev_cluster())
    }
}

fn tell(span: &mut Span, result: &Result<Accepted, Problem>) {
    match result {
        Ok(Accepted { mark, is_new }) => {
            span.set(Attribute::Epoch, mark.epoch);
            span.set(Attribute::Generation, mark.generation);
            let result = if *is_new { DocumentResult::Accepted } else { DocumentResult::Unchanged };
            span.set(Attribute::Outcome, result.label());
        }
        Err(problem) => {
            span.set(Attribute::Outcome, DocumentResult::Refused.label());
            span.fail(&problem.code);
        }
    }
}

fn source_is_file() -> Problem {
    Problem::new(
        409,
        "source_is_file",
        "this agent takes its desired state from a local file and accepts no other",
        "Change the file, or restart the agent without --desired.",
    )
}

fn not_enrolled() -> Problem {
    let detail = "this agent has no certificates and can verify nothing";
    Problem::new(409, "not_enrolled", detail, "Enrol it with `mvm agent certs request`.")
}

/// Whether the file is usable, for readiness and for people.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum FileState {
    #[default]
    NotRead,
    InForce,
    /// The last good content, if there was one, stays in force.
    Refused(Problem),
}

/// The file that is this node's desired state.
#[derive(Debug)]
pub struct FileSource {
    pub path: PathBuf,
    pub node_id: NodeId,
    /// How often the file is read even without a notification of a change.
    pub interval: Duration,
}

/// Reads the file now, on every change and at every interval; ends at `shutdown`.
pub async fn file_source_task(
    source: FileSource,
    desired: watch::Sender<Option<Arc<CurrentDocument>>>,
    state: watch::Sender<FileState>,
    node: NodeHandle,
    shutdown: CancellationToken,
) {
    let mut changes = DirWatch::around(&source.path);
    let mut ticks = tokio::time::interval(source.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seen: Option<Digest> = None;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = changes.changed() => {}
            () = shutdown.cancelled() => return,
        }
        let read = read(&source.path);
        let digest =
            read.as_ref().map_or_else(|problem| Digest::of(problem.detail.as_bytes()), |b| Digest::of(b));
        if seen.replace(digest) == Some(digest) {
            continue;
        }
        match read.and_then(|bytes| judge(&bytes, &source.node_id)) {
            Ok(document) => {
                info!(path = %source.path.display(), %digest, "the file's content is in force");
                node.events().publish("DocumentAccepted", "", "the local file's content is in force");
                state.send_replace(FileState::InForce);
                desired.send_replace(Some(CurrentDocument::local(document)));
            }
            Err(problem) => {
                warn!(path = %source.path.display(), %problem, "refused the file; the previous document stays in force");
                node.events().publish("DocumentRefused", "", problem.detail.as_str());
                state.send_replace(FileState::Refused(problem));
            }
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Problem> {
    let remediation = "Check the path given by --desired, and its mode.";
    let unreadable = |cause: std::io::Error| {
        Problem::new(
            422,
            "file_unreadable",
            format!("could not read {}: {cause}", path.display()),
            remediation,
        )
    };
    let length = std::fs::metadata(path).map_err(unreadable)?.len();
    if length > MAX_DOCUMENT_BYTES as u64 {
        let detail = format!("{} is {length} bytes long, the limit is {MAX_DOCUMENT_BYTES}", path.display());
        return Err(Problem::new(413, "document_too_large", detail, "Split the document."));
    }
    std::fs::read(path).map_err(unreadable)
}

/// The file's content as desired state for this node.
fn judge(bytes: &[u8], node_id: &NodeId) -> Result<DesiredState, Problem> {
    let desired = DesiredState::parse(bytes)?;
    if desired.node_id == *node_id {
        return Ok(desired);
    }
    let detail = format!("the document is for node {}, this is {node_id}", desired.node_id);
    Err(Problem::new(422, "wrong_node", detail, "Correct node_id, or start the agent with --node-id."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(result: Result<impl Sized, Problem>) -> Option<String> {
        result.err().map(|problem| problem.code)
    }

    #[test]
    fn a_file_is_judged_whole_and_for_this_node_only() {
        let node = "node-1".parse().unwrap();
        let good = br#"{"schema_version":1,"node_id":"node-1","tenants":[]}"#;
        assert_eq!(code(judge(good, &node)), None);
        assert_eq!(code(judge(good, &"node-2".parse().unwrap())).as_deref(), Some("wrong_node"));
        let problem = judge(br#"{"schema_version":1,"colour":"red"}"#, &node).unwrap_err();
        assert_eq!(problem.code, "document_invalid");
        assert!(problem.errors.len() > 1, "all errors are told at once: {problem:?}");
    }

    #[test]
    fn a_file_that_is_not_there_or_too_long_is_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("desired.json");
        assert_eq!(code(read(&path)).as_deref(), Some("file_unreadable"));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(MAX_DOCUMENT_BYTES as u64 + 1).unwrap();
        assert_eq!(code(read(&path)).as_deref(), Some("document_too_large"));
    }
}
