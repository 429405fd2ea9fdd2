//! The coordinator and the node of a development cluster: made, started, and waited for until they answer.

use std::ffi::OsString;
use std::net::Ipv4Addr;
use std::process::Child;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow};
use mvm_agent::serve::settings::default_certs_dir;
use mvm_agent::upkeep::certs::{self, CertsDir};
use mvm_client::Channel;
use mvm_client::ControlClient;
use mvm_coordinator::{InitSettings, OPERATOR_LIFE};
use mvm_pki::status::CertificateState;
use mvm_pki::{Credential, CsrNames, JoinToken};
use mvm_proto::wire::control::v1::CreateTokenRequest;
use mvm_proto::{NodeId, Timestamp};
use tokio::time::{Instant, sleep};

use super::context::NAME;
use super::dir::DevDir;
use super::process::{LOOK_AGAIN, Part, check_runs, flag, living, silent};
use super::state::State;
use crate::client::{Operator, all_nodes, parse_target, within};
use crate::exit::Outcome;
use crate::global::Global;

/// The name of the node, of the cluster, and of its tenant.
pub(super) const NODE: &str = NAME;
/// The operator that a new cluster has.
const OPERATOR: &str = "admin";
/// Longer than a start takes on a busy machine, with its disk and its certificates.
pub(super) const ANSWERS_WITHIN: Duration = Duration::from_secs(60);
/// Of one attempt to connect.
const ATTEMPT: Duration = Duration::from_secs(5);

/// Keys and certificates, unless they are there. An operator's certificate that has expired is made anew.
pub(super) fn make_cluster(dir: &DevDir) -> anyhow::Result<()> {
    let now = Timestamp::from(SystemTime::now());
    let data_dir = dir.coordinator();
    if !data_dir.join("cluster.json").exists() {
        let cluster = NAME.parse().context("could not name the cluster")?;
        let settings = InitSettings { dev: true, ..InitSettings::new(&data_dir, cluster) };
        mvm_coordinator::init(&settings, now).map_err(anyhow::Error::new)?;
    }
    let credential = Credential::load(&dir.operator().join("operator.pem"));
    let in_date = credential.is_ok_and(|credential| credential.not_after() > now);
    if !in_date {
        mvm_coordinator::create_operator(&data_dir, OPERATOR, &dir.operator(), OPERATOR_LIFE, now)?;
    }
    Ok(())
}

pub(super) fn coordinator_command(dir: &DevDir, state: &State) -> Vec<OsString> {
    let address = |port: u16| format!("127.0.0.1:{port}");
    let mut args = vec!["coordinator".into(), "serve".into()];
    args.extend(flag("--data-dir", dir.coordinator()));
    args.extend(flag("--listen", address(state.ports.coordinator)));
    args.extend(flag("--metrics-listen", address(state.ports.coordinator_metrics)));
    args
}

/// What every command on the node's directory is told.
pub(super) fn node_flags(dir: &DevDir, state: &State) -> Vec<OsString> {
    let modes = state.isolation;
    let mut args = Vec::new();
    args.extend(flag("--data-dir", dir.node()));
    args.extend(flag("--images-dir", &state.images_dir));
    args.extend(flag("--secrets-dir", dir.secrets()));
    args.extend(flag("--driver", state.driver().to_string()));
    args.extend(flag("--network", modes.network.as_str()));
    args.extend(flag("--cgroups", modes.cgroups.as_str()));
    args.extend(flag("--jail", modes.jail.as_str()));
    args
}

pub(super) fn agent_command(dir: &DevDir, state: &State, is_root: bool) -> Vec<OsString> {
    let address = |port: u16| format!("127.0.0.1:{port}");
    let mut args = vec!["agent".into(), "serve".into()];
    args.extend(node_flags(dir, state));
    args.extend(flag("--coordinator", state.url()));
    args.extend(flag("--listen", address(state.ports.agent)));
    args.extend(flag("--metrics-listen", address(state.ports.agent_metrics)));
    // What else this machine does, a build perhaps, puts no instance to sleep under its user's hands.
    args.push("--ignore-memory-pressure".into());
    if is_root {
        // The directory is below a user's home, where no other user comes.
        args.extend(flag("--user", "root"));
    }
    args
}

/// How the cluster is called by this very command, whatever its user's settings say.
pub(super) fn operator(dir: &DevDir, state: &State) -> Result<Operator, Outcome> {
    let coordinator = parse_target(&state.url()).map_err(|error| Outcome::Usage(anyhow!(error)))?;
    Ok(Operator {
        coordinator: Some(coordinator),
        operator_dir: Some(dir.operator()),
        coordinator_dir: dir.coordinator(),
    })
}

/// Waits until the coordinator answers. `started`: its process, where this command has just started it.
pub(super) async fn reach_coordinator(
    global: &Global,
    dir: &DevDir,
    operator: &Operator,
    mut started: Option<&mut Child>,
) -> Result<Channel, Outcome> {
    let attempt = Global { chosen_timeout: Some(ATTEMPT), ..global.clone() };
    let deadline = Instant::now() + ANSWERS_WITHIN;
    loop {
        match operator.channel(&attempt).await {
            Err(Outcome::Unreachable(_)) if Instant::now() < deadline => {
                check_runs(dir, Part::Coordinator, started.as_deref_mut())?;
                sleep(LOOK_AGAIN).await;
            }
            Err(Outcome::Unreachable(_)) => {
                return Err(Outcome::Failed(silent(dir, Part::Coordinator, ANSWERS_WITHIN)));
            }
            answered => return answered,
        }
    }
}

/// Gives the node its certificate, unless it has one that is in date: a cluster that was off for a day has none.
pub(super) async fn enrol(
    global: &Global,
    dir: &DevDir,
    state: &State,
    control: &mut ControlClient,
) -> Result<(), Outcome> {
    let certs_dir = default_certs_dir(&dir.node());
    let now = Timestamp::from(SystemTime::now());
    if CertsDir::new(&certs_dir).is_enrolled() {
        let status = certs::status(&certs_dir, now).map_err(anyhow::Error::new)?;
        if status.state != CertificateState::Expired {
            return Ok(());
        }
    }
    let request = CreateTokenRequest { node_id: NODE.to_owned(), ..CreateTokenRequest::default() };
    let answer = within(global.timeout(), control.create_token(request)).await?;
    let token = JoinToken::parse(answer.token.trim()).context("the coordinator gave an unusable token")?;
    let node: NodeId = NODE.parse().context("could not name the node")?;
    let target = parse_target(&state.url()).map_err(|error| Outcome::Usage(anyhow!(error)))?;
    let names = CsrNames { dns: vec!["localhost".to_owned()], ips: vec![Ipv4Addr::LOCALHOST.into()] };
    let enrolled = certs::request(&certs_dir, &target, &token, Some(node), names, global.timeout()).await;
    enrolled.map_err(anyhow::Error::new)?;
    Ok(())
}

/// Waits until the agent has its session with the coordinator: this process, and not one before it whose end the coordinator has
/// not noticed yet. `started`: as above.
pub(super) async fn agent_connected(
    global: &Global,
    dir: &DevDir,
    control: &mut ControlClient,
    mut started: Option<&mut Child>,
) -> Result<(), Outcome> {
    let deadline = Instant::now() + ANSWERS_WITHIN;
    loop {
        let nodes = all_nodes(control, true, global.timeout()).await?;
        let node = nodes.iter().find(|node| node.node_id == NODE && node.connected);
        let connected = node.and_then(|node| node.connected_since.parse::<Timestamp>().ok());
        let recorded = living(&dir.pid_file(Part::Agent))?;
        if connected.zip(recorded).is_some_and(|(since, recorded)| since >= recorded.since) {
            return Ok(());
        }
        check_runs(dir, Part::Agent, started.as_deref_mut())?;
        if Instant::now() >= deadline {
            return Err(Outcome::Failed(silent(dir, Part::Agent, ANSWERS_WITHIN)));
        }
        sleep(LOOK_AGAIN).await;
    }
}
