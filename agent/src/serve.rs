//! `mvm agent serve`: puts the agent's tasks together, and takes them apart again.
//!
//! ```text
//!  coordinator <-> its session --+                +-> /metrics /healthz /readyz (loopback TCP)
//!  peers ---- HTTP/3 ---- api ----+-> intake -> acceptor -> in force -> reconcile_task -> status, events
//!  root ---- unix socket -- api --+                           ^
//!  --desired FILE ------------------- file_source_task -------+
//! ```
//!
//! Everything that can fail at start fails in [`Agent::start`], before the service manager hears that the agent is
//! ready. On shutdown the listeners close first, what is in flight finishes, instances are left as they are.

mod credentials;
pub mod doctor;
mod error;
pub mod health;
mod listeners;
mod member;
pub mod privileges;
pub mod settings;
pub mod shutdown;
mod start_record;
mod tasks;
mod traces;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use listeners::Listeners;
use mvm_host::AnyHost;
use mvm_image::Vouched;
use mvm_pki::status::expiries;
use mvm_pki::{LiveAnchors, files};
use mvm_proto::status::{Capacity, DesiredSource, NodeInfo, PassedOver};
use mvm_proto::{NodeId, Timestamp};
use mvm_telemetry::Tracer;
use mvm_vmm::DriverKind;
use mvm_vmm::choice;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::clock::Clock;
use crate::intake::acceptor::{Acceptor, AcceptorSettings, HardLimits};
use crate::intake::api::{Api, ApiParts};
use crate::intake::coordinator_session::{SessionContext, SessionState, coordinator_session_task};
use crate::intake::ledger::LEDGER_FILE;
use crate::intake::removed_operators::RemovedOperators;
use crate::intake::source::{FileSource, FileState, Intake, file_source_task};
use crate::intake::tunnel::{TunnelParts, Tunnels};
use crate::metrics::{Metrics, NodeState};
use crate::node::assemble::{Node, NodeSettings, check_bounds};
use crate::node::event_log::{EventLog, event_log_task};
use crate::node::handle::NodeHandle;
use crate::node::info;
use crate::node::reconcile_task::reconcile_task;
use crate::serve::health::{Health, SourceHealth, StateOf};
use crate::serve::privileges::Privileges;
use crate::serve::settings::AgentSettings;
use crate::serve::shutdown::{notify_ready, notify_stopping, watchdog_task};
use crate::upkeep::certs::{CertsDir, CertsError};
use crate::upkeep::image_gc_task::image_gc_task;
use crate::upkeep::pressure_task::pressure_task;
use crate::upkeep::removed_tenants_task::removed_tenants_task;
use crate::upkeep::session_copy_task::session_copy_task;
use crate::upkeep::session_retention_task::session_retention_task;
pub use error::AgentError;
use member::{Member, choose_node_id, load_member};
use mvm_vmm::{DriverChoice, VmmSettings};
use tasks::Tasks;

/// Ends when the helper is gone, and the agent with it.
const HELPER_TASK: &str = "helper";

/// Runs an agent until `shutdown`. Returns `Ok` after an orderly stop, also when something in flight was cut off.
pub async fn serve(settings: AgentSettings, shutdown: CancellationToken) -> Result<(), AgentError> {
    let agent = Box::pin(Agent::start(settings, shutdown)).await?;
    agent.run().await
}

/// An agent whose tasks run.
#[derive(Debug)]
pub struct Agent {
    node_id: NodeId,
    /// Absent: this node has no certificates and is not on the network.
    api_address: Option<SocketAddr>,
    metrics_address: SocketAddr,
    socket: PathBuf,
    node: NodeHandle,
    tasks: Tasks,
    shutdown: CancellationToken,
}

impl Agent {
    /// Loads, opens and binds everything, then starts the tasks.
    pub async fn start(settings: AgentSettings, shutdown: CancellationToken) -> Result<Self, AgentError> {
        let clock = Clock::system();
        let started_at = Timestamp::from(SystemTime::now());
        let metrics = Arc::new(Metrics::new(started_at));
        let data_dir = &settings.data_dir;
        files::create_private_dir(data_dir)
            .map_err(|cause| AgentError::DataDir { path: data_dir.clone(), cause })?;

        let host =
            settings.privileges.host(data_dir, settings.isolation.groups()).map_err(AgentError::Helper)?;
        let certs = CertsDir::new(&settings.certs_dir);
        let member = load_member(&settings, &certs)?;
        let driver = choice::decide(settings.driver, &settings.vmm, data_dir).await;
        let isolation = settings.isolation.with(driver);
        check_bounds(&isolation, driver, &host, settings.privileges.looked())
            .await
            .map_err(|cause| AgentError::Node(Box::new(cause)))?;
        choice::check(driver, &settings.vmm)
            .await
            .map_err(|cause| AgentError::Node(Box::new(cause.into())))?;
        let mut info = info::measure(data_dir, driver, &settings.capacity, started_at);
        let node_id = choose_node_id(&settings, member.as_ref(), &info)?;
        info.node_id = node_id.to_string();
        info.cluster = member.as_ref().map_or_else(String::new, |member| member.cluster.to_string());
        let from_file = settings.desired_file.is_some();
        info.source = if from_file { DesiredSource::File } else { DesiredSource::Session }.to_string();

        // The listeners first: two agents on one data directory must not both open its state.
        let listeners = Listeners::bind(&settings, member.as_ref()).await?;
        let (api_address, metrics_address) = listeners.addresses();
        let start = start_record::count(data_dir);

        let capacity = info.capacity.unwrap_or_default();
        let acceptor =
            member.as_ref().map(|_| open_acceptor(&settings, &certs, &node_id, clock.clone())).transpose()?;
        let vouched = match &acceptor {
            Some(acceptor) if settings.desired_file.is_none() => acceptor.vouched(),
            _ => Vouched::unchecked(),
        };
        let (tracer, exporter) = traces::tracing_of(&settings, &info, &metrics)?;
        let opening = (driver, vouched, tracer.clone());
        let (node, handle) =
            open_node(&settings, host.clone(), &node_id, capacity, opening, clock.clone()).await?;
        info.capabilities = node.capabilities();
        let intake = Intake::new(
            acceptor.clone(),
            settings.desired_file.is_some(),
            handle.clone(),
            Arc::clone(&metrics),
            tracer.clone(),
        );

        let mut tasks = Tasks::new(&shutdown);
        let stop = tasks.stop_token();
        if let Some(exporter) = exporter {
            tasks.spawn("export of spans", exporter.run(stop.clone()));
        }

        if let AnyHost::Remote(helper) = host {
            let stop = stop.clone();
            tasks.spawn(HELPER_TASK, async move {
                tokio::select! {
                    () = stop.cancelled() => {}
                    () = helper.gone() => {}
                }
            });
        }

        let (file_state, file_watch) = watch::channel(FileState::default());
        let current_document = match (&settings.desired_file, &acceptor) {
            (Some(path), _) => {
                let (sender, receiver) = watch::channel(None);
                let (path, node_id, interval) = (path.clone(), node_id.clone(), settings.interval);
                let source = FileSource { path, node_id, interval };
                let task = file_source_task(source, sender, file_state, handle.clone(), stop.clone());
                tasks.spawn("file_source", task);
                receiver
            }
            (None, Some(acceptor)) => acceptor.current_document(),
            (None, None) => return Err(AgentError::NoSource),
        };

        // Health before the tasks that it watches, so that it sees their first word.
        let (session_state, session_watch) = watch::channel(SessionState::default());
        let dials = settings.session && member.as_ref().is_some_and(Member::knows_coordinator);
        let source = match &settings.desired_file {
            Some(_) => SourceHealth::File(file_watch),
            None if dials => SourceHealth::Session(session_watch.clone()),
            None => SourceHealth::Pushed,
        };
        let (pass_sender, last_pass) = watch::channel(Instant::now());
        let health = Arc::new(Health {
            clock: clock.clone(),
            interval: settings.interval,
            data_dir: data_dir.clone(),
            last_pass,
            credential: member.as_ref().map(|member| member.credential.clone()),
            source,
        });
        let passes = tasks::passes_task(handle.clone(), Arc::clone(&metrics), pass_sender, stop.clone());
        tasks.spawn("passes", passes);
        if driver.uses_host_resources() && !settings.ignore_memory_pressure {
            tasks.spawn("pressure", pressure_task(handle.clone(), stop.clone()));
        }
        let images = node.images();
        tasks.spawn("image_gc", image_gc_task(images, Arc::clone(handle.records()), stop.clone()));
        let sessions = Arc::clone(handle.sessions());
        let sessions = session_copy_task(sessions, Arc::clone(handle.records()), stop.clone());
        tasks.spawn("sessions", sessions);
        let session = session_watch.clone();
        let is_connected = move || !dials || matches!(&*session.borrow(), SessionState::Connected { .. });
        tasks.spawn("removed_tenants", removed_tenants_task(handle.clone(), is_connected, stop.clone()));
        let retention = session_retention_task(handle.clone(), settings.session_retention, stop.clone());
        tasks.spawn("session_retention", retention);
        tasks.spawn("reconcile", reconcile_task(node, current_document, stop.clone()));

        let driver = DriverInUse {
            kind: driver,
            choice: settings.driver,
            vmm: settings.vmm.clone(),
            data_dir: data_dir.clone(),
        };
        let describe = describe(
            info,
            driver,
            intake.clone(),
            Arc::clone(&health),
            dials.then_some(session_watch),
            settings.privileges.clone(),
            member.as_ref().map(|member| member.anchors.clone()),
        );
        let events = Arc::new(EventLog::default());
        tasks.spawn("events", event_log_task(handle.events().subscribe(), Arc::clone(&events), stop.clone()));
        let removed_operators = RemovedOperators::load(&certs.removed_operators()).map_err(|cause| {
            let path = certs.removed_operators();
            AgentError::Certs(CertsError::Damaged { path, cause: cause.into() })
        })?;
        let removed_operators = Arc::new(removed_operators);
        let parts = ApiParts {
            removed_operators: Arc::clone(&removed_operators),
            intake: intake.clone(),
            node: handle.clone(),
            describe: Arc::clone(&describe),
            events: Arc::clone(&events),
            metrics: Arc::clone(&metrics),
            max_body_bytes: settings.limits.max_body_bytes,
            tracer: tracer.clone(),
            shutdown: stop.clone(),
        };
        let api = Api::new(parts, settings.rate);
        let state = node_state(Arc::clone(&describe), &handle, member.as_ref(), acceptor);
        let local = health::router(Arc::clone(&health), Arc::clone(&metrics), handle.clone(), state);
        listeners.open(&mut tasks, &api, local);
        if let Some(member) = member {
            member.spawn_upkeep(&mut tasks, certs);
            if let (true, Some(coordinator)) = (dials, member.coordinator) {
                let tunnels = Tunnels::new(TunnelParts {
                    credential: member.credential.clone(),
                    anchors: member.anchors.clone(),
                    limits: settings.limits.clone(),
                    node: handle.clone(),
                    metrics: Arc::clone(&metrics),
                    tracer,
                    shutdown: stop.clone(),
                });
                let context = SessionContext {
                    coordinator,
                    credential: member.credential,
                    anchors: member.anchors,
                    limits: settings.limits.clone(),
                    node: handle.clone(),
                    intake,
                    describe,
                    events,
                    metrics,
                    removed_operators,
                    state: session_state,
                    tunnels,
                    start,
                };
                tasks.spawn("session", coordinator_session_task(context, stop.clone()));
            }
        }
        let watched = Arc::clone(&health);
        tasks.spawn_short("watchdog", watchdog_task(move || watched.is_alive(), stop));

        Ok(Self {
            node_id,
            api_address,
            metrics_address,
            socket: settings.socket,
            node: handle,
            tasks,
            shutdown,
        })
    }

    /// Says that the agent is ready, and keeps it until `shutdown`.
    pub async fn run(mut self) -> Result<(), AgentError> {
        let api = self.api_address.map_or_else(|| "none".to_owned(), |address| address.to_string());
        info!(node = %self.node_id, %api, metrics = %self.metrics_address, socket = %self.socket.display(), "ready");
        notify_ready(&format!("node {} is ready", self.node_id));
        let ended = tokio::select! {
            // An orderly stop ends tasks too; it goes first.
            biased;
            () = self.shutdown.cancelled() => None,
            ended = self.tasks.first_to_end() => Some(ended),
        };
        notify_stopping();
        self.tasks.stop().await;
        match ended {
            None => {
                info!("stopped; instances are left as they are");
                Ok(())
            }
            Some(HELPER_TASK) => Err(AgentError::HelperGone),
            Some(task) => Err(AgentError::TaskEnded { task }),
        }
    }

    #[must_use]
    pub fn node_id(&self) -> &NodeId {
        &self.node_id
    }

    /// Where the HTTP/3 API listens; none without certificates.
    #[must_use]
    pub fn api_address(&self) -> Option<SocketAddr> {
        self.api_address
    }

    #[must_use]
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics_address
    }

    #[must_use]
    pub fn node(&self) -> &NodeHandle {
        &self.node
    }
}

async fn open_node(
    settings: &AgentSettings,
    host: AnyHost,
    node_id: &NodeId,
    capacity: Capacity,
    (driver, vouched, tracer): (DriverKind, watch::Receiver<Vouched>, Tracer),
    clock: Clock,
) -> Result<(Node, NodeHandle), AgentError> {
    let settings = NodeSettings {
        node_id: node_id.clone(),
        data_dir: settings.data_dir.clone(),
        host: Some(host),
        driver,
        vmm: settings.vmm.clone(),
        images_dir: settings.images_dir.clone(),
        vouched,
        secrets_dir: settings.secrets_dir.clone(),
        sessions_dir: settings.sessions_dir.clone(),
        session_limits: settings.session_limits,
        sweep_after: settings.sweep_after,
        boot_deadline: settings.boot_deadline,
        capacity,
        isolation: settings.isolation.with(driver),
        interval: settings.interval,
        parallel_steps: settings.parallel_steps,
        tracer,
        clock,
    };
    Box::pin(Node::open(settings)).await.map_err(|cause| AgentError::Node(Box::new(cause)))
}

fn open_acceptor(
    settings: &AgentSettings,
    certs: &CertsDir,
    node_id: &NodeId,
    clock: Clock,
) -> Result<Arc<Acceptor>, AgentError> {
    let settings = AcceptorSettings {
        node_id: node_id.clone(),
        trust_file: certs.trust(),
        ledger_file: settings.data_dir.join(LEDGER_FILE),
        limits: HardLimits::default(),
    };
    Acceptor::open(settings, clock).map_err(|problem| AgentError::State(Box::new(problem)))
}

/// What `/metrics` tells of this node, as it is at each asking.
fn node_state(
    describe: Describe,
    node: &NodeHandle,
    member: Option<&Member>,
    acceptor: Option<Arc<Acceptor>>,
) -> StateOf {
    let status = node.status();
    let identity = member.map(|member| (member.credential.clone(), member.anchors.clone()));
    let (machine_processors, machine_memory_mib) = info::machine();
    Arc::new(move || {
        let current =
            identity.as_ref().map(|(credential, anchors)| (credential.current(), anchors.current()));
        let mut expiries = match &current {
            Some((credential, anchors)) => expiries(Some(credential), Some(anchors), None),
            None => Vec::new(),
        };
        expiries.extend(acceptor.iter().flat_map(|acceptor| acceptor.expiries()));
        NodeState {
            info: describe(),
            status: status.borrow().clone(),
            machine_processors,
            machine_memory_mib,
            expiries,
        }
    })
}

/// What this node is, described anew at each asking.
type Describe = Arc<dyn Fn() -> NodeInfo + Send + Sync>;

/// What runs this node's microVMs, and what it was chosen from.
#[derive(Debug)]
struct DriverInUse {
    kind: DriverKind,
    choice: DriverChoice,
    vmm: VmmSettings,
    data_dir: PathBuf,
}

/// What this node is, with what changes filled in at each asking.
fn describe(
    fixed: NodeInfo,
    driver: DriverInUse,
    intake: Intake,
    health: Arc<Health>,
    session: Option<watch::Receiver<SessionState>>,
    privileges: Privileges,
    anchors: Option<LiveAnchors>,
) -> Describe {
    Arc::new(move || {
        let mut info = fixed.clone();
        let DriverInUse { kind, choice, vmm, data_dir } = &driver;
        info.accelerator = choice::accelerator(*kind, vmm, data_dir).to_owned();
        let over = choice::passed_over(*kind, *choice, &choice::find(vmm, data_dir));
        let shown = |over: choice::PassedOver| PassedOver { what: over.what.to_owned(), reason: over.reason };
        info.passed_over = over.into_iter().map(shown).collect();
        let roots = anchors.iter().flat_map(|anchors| anchors.current().fingerprints());
        info.roots = roots.map(|root| root.to_string()).collect();
        info.trust_root_version = intake.trust_versions().0;
        info.dev_cluster = intake.is_dev_cluster();
        info.conditions.push(health.condition());
        info.conditions.extend(privileges.condition(health.clock.now()));
        if let Some(session) = &session {
            info.conditions.push(session.borrow().condition(health.clock.now()));
        }
        info
    })
}
