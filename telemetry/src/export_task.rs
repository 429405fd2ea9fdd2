//! Posts spans to a collector, some at a time.
//!
//! One task takes what ended from the queue: the first wakes it, and what comes within [`GATHER`] goes along. A collector that is
//! away, or asks for patience, is tried again with growing waits; meanwhile the queue fills, and what finds it full is dropped. A
//! batch that was tried [`TRIES`] times is dropped, and so is one that the collector refuses for good. All that is dropped is
//! counted. Where nothing is traced, nothing wakes.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, StatusCode, header};
use mvm_proto::text::chain;
use mvm_transport::{Backoff, PostError, Posted, Poster};
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::otlp::{self, ExportTraceServiceResponse};
use crate::settings::{OtlpError, OtlpSettings};
use crate::span::{Ended, Resource, SpanCounters};

/// Spans that wait: some hundred bytes each, and several seconds of a busy coordinator.
pub(crate) const QUEUED_SPANS: usize = 2048;
/// Spans of one post: what OpenTelemetry's own exporters send at once.
const BATCH: usize = 512;
/// From the first span of a batch to its post, unless it is full before.
const GATHER: Duration = Duration::from_secs(1);
/// How often a batch is posted, and what is waited in between.
const TRIES: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// What is left when the program stops is posted within this.
const LAST_WORDS_WITHIN: Duration = Duration::from_secs(2);
/// An answer that says which spans were not taken is some hundred bytes.
const ANSWER_BYTES: usize = 4096;

/// What posts the spans of one tracer.
#[derive(Debug)]
pub struct Exporter {
    queue: mpsc::Receiver<Ended>,
    poster: Poster,
    headers: HeaderMap,
    resource: otlp::Resource,
    counters: SpanCounters,
    /// Whether the last post went wrong: the log says so once.
    is_away: bool,
}

/// What became of one post.
enum Outcome {
    Taken,
    /// Again, after so long at least.
    Later(Option<Duration>),
    Refused,
}

impl Exporter {
    pub(crate) fn new(
        settings: &OtlpSettings,
        resource: &Resource,
        queue: mpsc::Receiver<Ended>,
        counters: SpanCounters,
    ) -> Result<Self, OtlpError> {
        let poster = Poster::new(&settings.endpoint, settings.ca_file.as_deref());
        let poster = poster.map_err(|error| match error {
            error @ PostError::NoAuthority => OtlpError::NoAuthority(error),
            error => OtlpError::Post(error),
        })?;
        let mut headers = settings.headers()?;
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(otlp::MEDIA_TYPE));
        let service = settings.service_name.as_deref().unwrap_or(resource.service);
        let resource = otlp::Resource::of(resource, service);
        Ok(Self { queue, poster, headers, resource, counters, is_away: false })
    }

    /// Runs until `shutdown`, and posts what is left then.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut batch = Vec::new();
        loop {
            tokio::select! {
                () = shutdown.cancelled() => break,
                count = self.queue.recv_many(&mut batch, BATCH) => if count == 0 {
                    return;
                },
            }
            let due = Instant::now() + GATHER;
            while batch.len() < BATCH {
                let room = BATCH - batch.len();
                tokio::select! {
                    () = shutdown.cancelled() => break,
                    () = tokio::time::sleep_until(due) => break,
                    count = self.queue.recv_many(&mut batch, room) => if count == 0 {
                        break;
                    },
                }
            }
            tokio::select! {
                () = shutdown.cancelled() => break,
                () = self.deliver(&batch) => batch.clear(),
            }
        }
        let last_words = tokio::time::timeout(LAST_WORDS_WITHIN, self.last_words(&mut batch)).await;
        if last_words.is_err() {
            self.drop_spans(batch.len());
        }
        self.queue.close();
        let mut left = 0;
        while self.queue.try_recv().is_ok() {
            left += 1;
        }
        self.drop_spans(left);
    }

    /// Posts a batch until it is taken, refused or given up.
    async fn deliver(&mut self, batch: &[Ended]) {
        let body = otlp::request(&self.resource, batch).encode_to_vec();
        let mut backoff = Backoff::new(FIRST_WAIT, LONGEST_WAIT);
        for _ in 1..TRIES {
            match self.post(body.clone(), batch.len()).await {
                Outcome::Taken => return,
                Outcome::Refused => return self.drop_spans(batch.len()),
                Outcome::Later(at_least) => {
                    let wait = backoff.next(fastrand::f64());
                    let at_least = at_least.unwrap_or_default().min(LONGEST_WAIT);
                    tokio::time::sleep(wait.max(at_least)).await;
                }
            }
        }
        if !matches!(self.post(body, batch.len()).await, Outcome::Taken) {
            self.drop_spans(batch.len());
        }
    }

    /// What is left, once.
    async fn last_words(&mut self, batch: &mut Vec<Ended>) {
        loop {
            while batch.len() < BATCH
                && let Ok(ended) = self.queue.try_recv()
            {
                batch.push(ended);
            }
            if batch.is_empty() {
                return;
            }
            let body = otlp::request(&self.resource, batch).encode_to_vec();
            if !matches!(self.post(body, batch.len()).await, Outcome::Taken) {
                self.drop_spans(batch.len());
            }
            batch.clear();
        }
    }

    async fn post(&mut self, body: Vec<u8>, spans: usize) -> Outcome {
        let posted = self.poster.post(otlp::TRACES_PATH, &self.headers, body, ANSWER_BYTES).await;
        let (outcome, reason) = judge(&posted);
        match (&outcome, self.is_away) {
            (Outcome::Taken, _) => {
                let rejected = posted.map_or(0, |posted| rejected(&posted)).min(spans);
                self.drop_spans(rejected);
                self.counters.exported.inc_by(count(spans - rejected));
                if std::mem::take(&mut self.is_away) {
                    tracing::info!("the collector of traces takes spans again");
                }
            }
            (_, false) => {
                self.is_away = true;
                tracing::warn!(%reason, "could not export spans; what there is no room for is dropped until it works");
            }
            (_, true) => tracing::debug!(%reason, "could not export spans"),
        }
        outcome
    }

    fn drop_spans(&self, spans: usize) {
        self.counters.dropped.inc_by(count(spans));
    }
}

fn count(spans: usize) -> u64 {
    u64::try_from(spans).unwrap_or(u64::MAX)
}

/// What an answer means, by OTLP's rules: which of them ask for another try.
fn judge(posted: &Result<Posted, PostError>) -> (Outcome, String) {
    match posted {
        Ok(posted) if posted.status.is_success() => (Outcome::Taken, String::new()),
        Ok(posted) => {
            let reason = format!("the answer was {}", posted.status);
            let again = [
                StatusCode::TOO_MANY_REQUESTS,
                StatusCode::BAD_GATEWAY,
                StatusCode::SERVICE_UNAVAILABLE,
                StatusCode::GATEWAY_TIMEOUT,
            ];
            if !again.contains(&posted.status) {
                return (Outcome::Refused, reason);
            }
            let after = posted.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok());
            (Outcome::Later(after.and_then(|text| text.parse().ok()).map(Duration::from_secs)), reason)
        }
        Err(error) => (Outcome::Later(None), chain(error)),
    }
}

/// How many spans the collector did not take of a post that it took.
fn rejected(posted: &Posted) -> usize {
    let answer = ExportTraceServiceResponse::decode(posted.body.clone()).ok();
    let partial = answer.and_then(|answer| answer.partial_success);
    partial.and_then(|partial| usize::try_from(partial.rejected_spans).ok()).unwrap_or(0)
}
