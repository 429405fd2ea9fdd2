//! An operator's connection to a coordinator: where it is, who we are, and a certificate that stays fresh.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow};
use clap::Args;
use mvm_client::{Channel, ClientError, ControlClient, StreamError};
use mvm_pki::{Anchors, Credential, CsrNames, LeafKey, LiveAnchors, LiveCredential, Refusal, Renewed};
use mvm_proto::wire::control::v1::{Node, RenewCertificateRequest};
use mvm_proto::{Problem, Timestamp};
use mvm_transport::Target;

use crate::exit::Outcome;
use crate::global::Global;
use crate::output::when_exactly;
use crate::paths::default_data_dir;
use crate::trace;

/// Where a coordinator listens by default.
const DEFAULT_COORDINATOR: &str = "https://127.0.0.1:4433";

#[derive(Debug, Clone, Args)]
pub(crate) struct Operator {
    /// The coordinator to talk to [default: https://127.0.0.1:4433]
    #[arg(long, value_name = "URL", env = "MVM_COORDINATOR", value_parser = parse_target)]
    pub(crate) coordinator: Option<Target>,
    /// Folder with operator.pem and ca.crt, as made by `mvm coordinator init` [default: operator/ in the coordinator's data folder]
    #[arg(long, value_name = "DIR", env = "MVM_OPERATOR_DIR")]
    pub(crate) operator_dir: Option<PathBuf>,
    /// The coordinator's data folder, where it is on this machine: the operator's folder lies in it, and the keys for `mvm push --direct`
    #[arg(long, value_name = "DIR", env = "MVM_COORDINATOR_DATA_DIR", default_value_os_t = default_data_dir("coordinator"))]
    pub(crate) coordinator_dir: PathBuf,
}

pub(crate) fn parse_target(text: &str) -> Result<Target, String> {
    text.parse::<Target>().map_err(|error| error.to_string())
}

impl Operator {
    fn target(&self) -> Result<Target, Outcome> {
        match &self.coordinator {
            Some(target) => Ok(target.clone()),
            None => parse_target(DEFAULT_COORDINATOR).map_err(|error| Outcome::Usage(anyhow!(error))),
        }
    }

    /// Who we are, for a call to an agent.
    pub(crate) fn credential(&self) -> anyhow::Result<(Credential, Anchors)> {
        load(&self.dir())
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.operator_dir.clone().unwrap_or_else(|| self.coordinator_dir.join("operator"))
    }

    pub(crate) async fn connect(&self, global: &Global) -> Result<ControlClient, Outcome> {
        self.channel(global).await.map(mvm_client::control)
    }

    /// Connects with the operator's certificate, renewing it on the way once half of its life is over.
    pub(crate) async fn channel(&self, global: &Global) -> Result<Channel, Outcome> {
        let dir = self.dir();
        let target = self.target()?;
        let (credential, anchors) = load(&dir)?;
        let now = Timestamp::from(SystemTime::now());
        if credential.not_after() <= now {
            return Err(Outcome::Failed(anyhow!(
                "the operator certificate in {} expired at {}\nmake a new one on the coordinator's machine: mvm coordinator operator create {} --out {}",
                dir.display(),
                credential.not_after(),
                credential.identity().name(),
                dir.display()
            )));
        }
        let renew_at = mvm_pki::rotation::renew_at(credential.not_before(), credential.not_after(), 0.0);
        let cluster = credential.identity().cluster().clone();
        let live = LiveCredential::new(credential);
        let anchors = LiveAnchors::new(anchors);
        let channel = mvm_client::open(&target, &live, &anchors, &cluster, global.timeout()).await.map_err(
            |error| {
                let hint = hint(&target, &error);
                let error = anyhow::Error::new(error);
                Outcome::Unreachable(
                    error.context(format!("could not reach the coordinator at {target}\n{hint}")),
                )
            },
        )?;
        if renew_at <= now
            && let Err(error) = renew(&mut mvm_client::control(channel.clone()), &dir, &live, &anchors).await
        {
            tracing::warn!(error = format!("{error:#}"), "could not renew the operator certificate");
        }
        Ok(match trace::context() {
            Some(context) => channel.of_trace(context),
            None => channel,
        })
    }
}

/// What to do about a coordinator that was not reached.
fn hint(target: &Target, error: &ClientError) -> String {
    match error {
        ClientError::NotTheCoordinator { cause: Refusal::WrongName { .. }, .. } => format!(
            "use one of the names that its certificate has; or start it with `mvm coordinator serve --san {}`, which adds \
             this one",
            target.host()
        ),
        ClientError::NotTheCoordinator { cause, .. } => cause.remediation().to_owned(),
        _ => "is `mvm coordinator serve` running there? name another with --coordinator".to_owned(),
    }
}

fn load(dir: &Path) -> anyhow::Result<(Credential, Anchors)> {
    let hint = || {
        format!(
            "could not read the operator's credential in {}\ngive its folder with --operator-dir or MVM_OPERATOR_DIR; `mvm coordinator init` makes one",
            dir.display()
        )
    };
    let credential = Credential::load(&dir.join("operator.pem")).with_context(hint)?;
    let anchors = Anchors::load(&dir.join("ca.crt")).with_context(hint)?;
    Ok((credential, anchors))
}

async fn renew(
    client: &mut ControlClient,
    dir: &Path,
    live: &LiveCredential,
    anchors: &LiveAnchors,
) -> anyhow::Result<()> {
    let key = LeafKey::generate()?;
    let csr_der = key.csr_der(&CsrNames::default())?;
    let answer = client.renew_certificate(RenewCertificateRequest { csr_der }).await?.into_inner();
    let renewed = Renewed {
        chain_pem: answer.chain_pem,
        roots_pem: Some(answer.roots_pem),
        endorsements_pem: answer.endorsements_pem,
    };
    let (identity, now) = (live.current().identity().clone(), Timestamp::from(SystemTime::now()));
    let (credential, roots) = renewed.accept(key, &identity, &anchors.current(), now)?;
    roots.save(&dir.join("ca.crt"))?;
    credential.save(&dir.join("operator.pem"))?;
    Ok(())
}

/// What a gRPC refusal says to a person: the coordinator's problem when it sent one.
pub(crate) fn refused(status: &tonic::Status) -> Outcome {
    if let Some(problem) = mvm_client::problem_of(status) {
        return Outcome::from(anyhow::Error::new(problem));
    }
    match status.code() {
        tonic::Code::Unavailable => {
            Outcome::Unreachable(anyhow!("lost the connection to the coordinator: {}", status.message()))
        }
        tonic::Code::DeadlineExceeded => {
            Outcome::TimedOut(anyhow!("no answer in time: {}", status.message()))
        }
        code => Outcome::Failed(anyhow!("{} ({code:?})", status.message())),
    }
}

/// Why a stream to a guest is over, and how to go on with what it followed.
pub(crate) fn stream_failed(error: StreamError, go_on: &str) -> Outcome {
    if let StreamError::Call(call) = &error
        && let Some(status) = call.status()
    {
        return refused(status);
    }
    let is_lost = matches!(error, StreamError::Lost(_));
    match error.problem() {
        Some(problem) if is_lost => {
            Outcome::Unreachable(anyhow::Error::new(problem).context(format!("{error}{go_on}")))
        }
        Some(problem) => Outcome::from(anyhow::Error::new(problem)),
        None if is_lost => {
            Outcome::Unreachable(anyhow::Error::new(error).context(format!("lost sight of it{go_on}")))
        }
        None => Outcome::Failed(anyhow!("{error}{go_on}")),
    }
}

/// Bounds one call by the user's `--timeout`.
pub(crate) async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
) -> Result<T, Outcome> {
    match tokio::time::timeout(limit, call).await {
        Ok(Ok(answer)) => Ok(answer.into_inner()),
        Ok(Err(status)) => Err(refused(&status)),
        Err(_) => Err(Outcome::TimedOut(anyhow!("no answer within {}", humantime::format_duration(limit)))),
    }
}

/// Every node of the cluster; with `summary` without pools and conditions.
pub(crate) async fn all_nodes(
    client: &mut ControlClient,
    summary: bool,
    limit: Duration,
) -> Result<Vec<Node>, Outcome> {
    let listing = mvm_client::list_all_nodes(client, summary);
    within(limit, async { listing.await.map(tonic::Response::new) }).await
}

/// A warning for a node that is not connected: when it was last seen, and what the answer lacks.
pub(crate) fn not_connected(node_id: &str, last_seen_at: &str, lacks: &str) -> String {
    format!("{node_id} is not connected since {}: {lacks}", when_exactly(last_seen_at))
}

/// The next answer of a stream; `None` after the last.
pub(crate) async fn next_within<T>(
    limit: Duration,
    stream: &mut tonic::Streaming<T>,
) -> Result<Option<T>, Outcome> {
    within(limit, async { stream.message().await.map(tonic::Response::new) }).await
}

/// A problem that came as JSON bytes, or its text when it is not one.
pub(crate) fn problem_from_json(bytes: &[u8]) -> anyhow::Error {
    match serde_json::from_slice::<Problem>(bytes) {
        Ok(problem) => anyhow::Error::new(problem),
        Err(_) => anyhow!("{}", String::from_utf8_lossy(bytes)),
    }
}
