//! `mvm push --direct`: signs with the coordinator's own keys and pushes straight to an agent.
//!
//! For a single machine, and for the day when the coordinator is down: the same document, the same rules and the
//! same keys, over the agent's HTTP/3 API. The number comes from the agent: one above what it last accepted.

use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use bytes::Bytes;
use http_body_util::BodyExt;
use mvm_coordinator::{DOCUMENT_LIFE, DataDir, coordinator_credential};
use mvm_pki::tls::client_config;
use mvm_pki::{Anchors, ExpectedPeer, LiveAnchors, LiveCredential, Role, SigningKey, TrustStore, seal};
use mvm_planner::{Observation, plan_node};
use mvm_proto::document::{DOCUMENT_PAYLOAD_TYPE, Provenance};
use mvm_proto::status::{Mark, NodeStatus};
use mvm_proto::{DesiredState, Digest, NodeId, SignedDocument, Timestamp};
use mvm_transport::{ALPN_H3, Client, Limits, Target};

use crate::client::problem_from_json;
use crate::commands::plan::PlanOutput;
use crate::commands::push::{confirm_losses, show_plan};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::progress::Progress;

/// A status line holds every pool of a node; this is far above the largest.
const MAX_ANSWER_BYTES: usize = 8 * 1024 * 1024;

/// What is asked for besides the document.
pub(crate) struct How {
    pub(crate) dry_run: bool,
    /// Without asking, whatever it takes away.
    pub(crate) yes: bool,
    /// How long to wait until the node is as the document says; none: not at all.
    pub(crate) wait: Option<Duration>,
}

pub(crate) async fn push(
    global: &Global,
    agent: &Target,
    coordinator_dir: &Path,
    desired: DesiredState,
    how: How,
) -> Run {
    let progress = Progress::new(global.quiet);
    let now = Timestamp::from(SystemTime::now());
    let keys = Keys::load(coordinator_dir, now).map_err(Outcome::Failed)?;
    keys.trust.check_images(&desired, now).map_err(|error| Outcome::Failed(anyhow::Error::new(error)))?;
    let node = desired.node_id.clone();
    progress.say(format!("{node} validated"));
    let limit = how.wait.unwrap_or_else(|| global.timeout());
    let work = async {
        let agent = connect(agent, &keys, &node).await?;
        if how.dry_run {
            let observed: Observation = get(&agent, "/v1/node/observation").await?;
            let plan = plan_node(&desired, &observed, now);
            return show_plan(global, &PlanOutput::new(&desired, plan), &node);
        }
        let status: NodeStatus = get(&agent, "/v1/node/stats").await?;
        confirm_losses(&desired, &status, how.yes)?;
        let mark = send(&agent, &keys, desired, status.accepted.as_ref(), now).await?;
        progress.say(format!("{node} {}.{} accepted", mark.epoch, mark.generation));
        if how.wait.is_some() {
            follow(&agent, &mark).await?;
            progress.say(format!("{node} {}.{} converged", mark.epoch, mark.generation));
        }
        Ok(())
    };
    tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        let limit = humantime::format_duration(limit);
        Err(Outcome::TimedOut(anyhow!("{node} has not converged within {limit}")))
    })
}

/// What a coordinator signs and speaks with, read from its data folder.
struct Keys {
    credential: LiveCredential,
    anchors: LiveAnchors,
    director: SigningKey,
    trust: TrustStore,
}

impl Keys {
    fn load(dir: &Path, now: Timestamp) -> anyhow::Result<Self> {
        let dir = DataDir::new(dir);
        let hint = || {
            format!(
                "could not read the coordinator's keys in {}\ngive its data folder with --coordinator-dir; \
                 `mvm coordinator init` makes one",
                dir.path().display()
            )
        };
        Ok(Self {
            credential: LiveCredential::new(coordinator_credential(dir.path(), now).with_context(hint)?),
            anchors: LiveAnchors::new(Anchors::load(&dir.root_ca_cert()).with_context(hint)?),
            director: SigningKey::from_file(&dir.director_key()).with_context(hint)?,
            trust: TrustStore::load(&dir.trust_file()).with_context(hint)?,
        })
    }
}

async fn connect(agent: &Target, keys: &Keys, node: &NodeId) -> Result<Client, Outcome> {
    // The name in the certificate is the node's; under which address it was reached says nothing more.
    let expected = ExpectedPeer {
        cluster: keys.trust.cluster().clone(),
        role: Role::Node,
        name: Some(node.to_string()),
        check_host: false,
    };
    let tls = client_config(Some(&keys.credential), &keys.anchors, expected, &[ALPN_H3])
        .map_err(anyhow::Error::new)?;
    let unreachable = |error: anyhow::Error| {
        Outcome::Unreachable(error.context(format!("could not reach the agent at {agent}")))
    };
    let addresses = agent.resolve().await.map_err(|error| unreachable(error.into()))?;
    let mut last = anyhow!("the name has no address");
    for address in addresses {
        match Client::connect(address, agent.host(), tls.clone(), &Limits::default()).await {
            Ok(client) => return Ok(client),
            Err(error) => last = error.into(),
        }
    }
    Err(unreachable(last))
}

async fn send(
    agent: &Client,
    keys: &Keys,
    desired: DesiredState,
    accepted: Option<&Mark>,
    now: Timestamp,
) -> Result<Mark, Outcome> {
    let bundle = serde_json::to_vec(&keys.trust.bundle()).context("could not write the trust bundle")?;
    call(agent, "POST", "/v1/trust", bundle).await?;
    let (epoch, generation) = accepted.map_or((1, 0), Mark::order);
    let provenance = Provenance {
        cluster: keys.trust.cluster().clone(),
        epoch: epoch.max(1),
        generation: generation + 1,
        issued_at: now,
        expires_at: now + DOCUMENT_LIFE,
    };
    let document = SignedDocument::new(provenance, desired);
    let payload = document.to_payload();
    let mark = Mark::new(epoch.max(1), generation + 1, Digest::of(&payload));
    let envelope = seal(DOCUMENT_PAYLOAD_TYPE, payload, &[&keys.director]);
    call(agent, "POST", "/v1/reconcile", envelope.to_json()).await?;
    Ok(mark)
}

/// Reads the agent's stream of status changes until it says that this document was made true.
async fn follow(agent: &Client, mark: &Mark) -> Run {
    let answer = request(agent, "GET", "/v1/node/watch", Vec::new()).await?;
    let mut body = answer.into_body();
    let mut line = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(anyhow::Error::new)?;
        let Ok(data) = frame.into_data() else { continue };
        for byte in data {
            if byte != b'\n' {
                line.push(byte);
                continue;
            }
            let status: NodeStatus =
                serde_json::from_slice(&line).context("could not read the agent's status")?;
            line.clear();
            if status.converged.as_ref().is_some_and(|converged| converged.order() >= mark.order()) {
                return Ok(());
            }
        }
    }
    Err(anyhow!("the agent ended its stream of status changes").into())
}

async fn get<T: serde::de::DeserializeOwned>(agent: &Client, path: &str) -> Result<T, Outcome> {
    let body = call(agent, "GET", path, Vec::new()).await?;
    Ok(serde_json::from_slice(&body)
        .with_context(|| format!("could not read the agent's answer to {path}"))?)
}

async fn call(agent: &Client, method: &str, path: &str, body: Vec<u8>) -> Result<Bytes, Outcome> {
    let answer = request(agent, method, path, body).await?;
    let ok = answer.status().is_success();
    let body = answer.into_body().bytes(MAX_ANSWER_BYTES).await.map_err(anyhow::Error::new)?;
    if ok { Ok(body) } else { Err(Outcome::Failed(problem_from_json(&body))) }
}

async fn request(
    agent: &Client,
    method: &str,
    path: &str,
    body: Vec<u8>,
) -> Result<http::Response<mvm_transport::ResponseBody>, Outcome> {
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Bytes::from(body))
        .context("could not build the request")?;
    Ok(agent.request(request).await.map_err(anyhow::Error::new)?)
}
