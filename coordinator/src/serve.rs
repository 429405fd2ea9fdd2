//! Puts a coordinator together, runs it, and takes it apart again.
//!
//! Order of start: files, store, epoch, certificate, sockets, tasks; ready only when all of them stand. Order of stop:
//! nothing new is accepted, sessions get a goodbye, calls in flight finish, then the store closes. All within
//! [`STOP_WITHIN`], whatever the peers do.

mod tasks;
mod traces;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use mvm_pki::endorsement::Endorsements;
use mvm_pki::status::expiries;
use mvm_pki::tls::server_config;
use mvm_pki::{Anchors, Authority, ClientAuth, LeafProfile, LiveAnchors, LiveCredential, SigningKey};
use mvm_planner::fleet::AwayGrace;
use mvm_store::{Settings as StoreSettings, SledStore, Watch};
use mvm_telemetry::Exporter;
use mvm_transport::{ALPN_H3, ALPN_SESSION, ALPN_TUNNEL, RateLimit, ResetKey, Server, tunnel_limits};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use self::tasks::Tasks;
use self::traces::tracing_of;
use crate::cleanup_task::{cleanup_task, write_statuses};
use crate::clock::SteadyClock;
use crate::documents::{Carried, Documents};
use crate::drain_task::drain_task;
use crate::enrolment::Members;
use crate::error::{BoxError, CoordinatorError};
use crate::events::Events;
use crate::fleet::{Fleet, Rules};
use crate::health_task::health_task;
use crate::init::{ClusterFile, InitError, read_cluster_file};
use crate::key_calls::KeyCalls;
use crate::metrics::{self, FleetOf, FleetState, Metrics};
use crate::objects::Objects;
use crate::operators::{Operators, take_notes};
use crate::paths::DataDir;
use crate::placement::{load_world, placement_task};
use crate::records::OBJECTS;
use crate::reissue_task::reissue_task;
use crate::revocation_task::revocation_task;
use crate::roots::issuing_root;
use crate::secrets::{SecretKeys, reencrypt};
use crate::session::Sessions;
use crate::settings::{Addresses, CoordinatorSettings};
use crate::state::State;
use crate::stored::{Backend, StateError, now, take_epoch};
use crate::trust::Trust;
use crate::tunnel_listener::AcceptTunnels;
use crate::tunnels::Tunnels;
use crate::webhook::{Hook, webhook_task};
use crate::{api, enrolment, grpc_listener, http, own_leaf, reset_key, session};

/// A service manager that waits 10 s before it kills must never have to.
const STOP_WITHIN: Duration = Duration::from_secs(9);
/// Of that, for goodbyes to reach the nodes.
const GOODBYES_WITHIN: Duration = Duration::from_secs(3);
/// sled's page cache: the numbers of some thousand nodes stay in it.
const STORE_CACHE_BYTES: u64 = 32 * 1024 * 1024;
/// What watchers of objects may be behind: some thousand changes of the largest pools, and what is far more than the fleet's
/// statuses write in the time that a client takes to come back.
const STORE_LOG_BYTES: usize = 16 * 1024 * 1024;
/// With port 0, the UDP port that the system picks may be taken on TCP; another one is then tried.
const PORT_TRIES: usize = 16;
/// Plans that are worked out at a time: each holds a copy of all that is known.
const PLANS_AT_A_TIME: usize = 2;

/// Runs a coordinator until `shutdown`, then stops it gracefully.
pub async fn serve(
    settings: CoordinatorSettings,
    shutdown: CancellationToken,
) -> Result<(), CoordinatorError> {
    check(&settings)?;
    let data = DataDir::new(&settings.data_dir);
    let cluster = cluster_file(&data)?;
    let load = |what, path, cause: BoxError| CoordinatorError::Load { what, path, cause };
    let authority = Authority::load(&data.issuing_ca_dir())
        .map_err(|cause| load("the issuing authority", data.issuing_ca_dir(), cause.into()))?;
    let anchors = Anchors::load(&data.root_ca_cert())
        .map_err(|cause| load("the root certificates", data.root_ca_cert(), cause.into()))?;
    let endorsements = Endorsements::load(&data.endorsements())
        .map_err(|cause| load("the endorsements of roots", data.endorsements(), cause.into()))?;
    let director = SigningKey::from_file(&data.director_key())
        .map_err(|cause| load("the director key", data.director_key(), cause.into()))?;
    let trust = Trust::load(data.trust_file())
        .map_err(|cause| load("the trust root", data.trust_file(), cause.into()))?;
    let carried = Carried::load(data.carried_file())
        .map_err(|cause| load("the list of carried documents", data.carried_file(), cause.into()))?;

    let store_error = |cause: BoxError| CoordinatorError::Store { path: data.store_dir(), cause };
    let store = SledStore::open(
        data.store_dir(),
        StoreSettings {
            cache_bytes: STORE_CACHE_BYTES,
            log_bytes: STORE_LOG_BYTES,
            watched: vec![OBJECTS.to_owned()],
            ..StoreSettings::default()
        },
    )
    .await
    .map_err(|cause| store_error(cause.into()))?;
    let metrics = Arc::new(Metrics::new());
    let store = Backend::new(store, Arc::clone(&metrics), settings.crash.clone());
    let (epoch, epoch_version) = take_epoch(&store).await.map_err(|cause| store_error(cause.into()))?;

    let issuing_root = issuing_root(&data, &authority, &anchors, now()).unwrap_or_else(|error| {
        // An authority that has expired issues nothing of which the root could be asked.
        tracing::warn!(error = %mvm_proto::text::chain(&error), "could not find the root of the issuing authority");
        None
    });
    let authority = Arc::new(authority);
    let anchors = LiveAnchors::new(anchors);
    let trust = Arc::new(trust);
    metrics.set_epoch(epoch);
    let documents = Documents::new(
        store.clone(),
        director,
        (Arc::clone(&trust), carried),
        cluster.cluster.clone(),
        epoch,
        settings.document_life,
    );
    let known = documents.count_assigned().await.map_err(|cause: StateError| store_error(cause.into()))?;
    let secret_keys = Arc::new(SecretKeys::load_or_make(&data)?);
    reencrypt(&store, &secret_keys).await.map_err(|cause| store_error(cause.into()))?;
    let steady = SteadyClock::start();
    let (world, object_changes) = load_world(&store, steady.now(), AwayGrace(settings.node_grace))
        .await
        .map_err(|cause: StateError| store_error(cause.into()))?;
    let world = Arc::new(parking_lot::Mutex::new(world));
    let operators = Operators::open(&store, data.operator_notes());
    let operators = operators.await.map_err(|cause| store_error(cause.into()))?;
    let events = Events::load(&store).await.map_err(|cause: StateError| store_error(cause.into()))?;
    let rules = Rules::new(settings.heartbeat, settings.node_grace);
    let (tracer, exporter) = tracing_of(&settings, &cluster, &metrics)?;
    let state = Arc::new(State {
        operators,
        fleet: Arc::new(Fleet::new(rules, steady, Arc::clone(&metrics))),
        tunnels: Tunnels::default(),
        enrol_limit: RateLimit::new(settings.enrol_per_second, settings.enrol_burst),
        renew_limit: RateLimit::new(enrolment::RENEW_PER_SECOND, enrolment::RENEW_BURST),
        session_limit: RateLimit::new(session::SESSIONS_PER_SECOND, session::SESSIONS_BURST),
        settings,
        objects: Objects::new(
            store.clone(),
            cluster.cluster.clone(),
            Arc::clone(&trust),
            Arc::clone(&world),
            Arc::clone(&secret_keys),
        ),
        events,
        key_calls: KeyCalls::default(),
        revocations: tokio::sync::watch::Sender::new(0),
        secret_keys,
        cluster,
        store,
        authority,
        issuing_root,
        anchors,
        endorsements_pem: endorsements.to_pem(),
        trust,
        documents,
        metrics,
        tracer,
        epoch,
        epoch_version,
        world,
        started_at: now(),
        steady,
        plans: tokio::sync::Semaphore::new(PLANS_AT_A_TIME),
        shutdown,
    });
    for node in state.world.lock().nodes.keys() {
        state.fleet.get_or_insert(node);
    }
    take_notes(&state, now()).await.map_err(|problem| store_error(problem.into()))?;
    tracing::info!(cluster = %state.cluster.cluster, epoch, documents = known, "opened the store");
    run(state, &data, object_changes, exporter).await
}

fn check(settings: &CoordinatorSettings) -> Result<(), CoordinatorError> {
    let positive = [
        ("the life of documents", settings.document_life),
        ("the life of certificates", settings.leaf_life),
        ("the heartbeat", settings.heartbeat),
        ("the grace of nodes", settings.node_grace),
    ];
    for (what, value) in positive {
        if value.is_zero() {
            return Err(CoordinatorError::Settings(format!("{what} must be more than zero")));
        }
    }
    if !(settings.enrol_per_second > 0.0 && settings.enrol_burst >= 1.0) {
        return Err(CoordinatorError::Settings("enrolment needs a rate above zero".to_owned()));
    }
    webhook(settings)?;
    match settings.metrics_listen {
        Some(address) if !address.ip().is_loopback() => {
            Err(CoordinatorError::Settings(format!("metrics are for loopback only, not for {address}")))
        }
        _ => Ok(()),
    }
}

fn webhook(settings: &CoordinatorSettings) -> Result<Option<Hook>, CoordinatorError> {
    let hook = settings.demand_webhook.as_ref().map(Hook::new).transpose();
    hook.map_err(|error| {
        CoordinatorError::Settings(format!("the demand webhook: {}", mvm_proto::text::chain(&error)))
    })
}

fn cluster_file(data: &DataDir) -> Result<ClusterFile, CoordinatorError> {
    read_cluster_file(data).map_err(|error| match error {
        InitError::NotInitialised { path } => CoordinatorError::NotInitialised { path },
        error => {
            CoordinatorError::Load { what: "cluster.json", path: data.cluster_file(), cause: error.into() }
        }
    })
}

struct Sockets {
    quic: Server,
    tunnels: Server,
    grpc: TcpListener,
    metrics: Option<TcpListener>,
    addresses: Addresses,
}

/// Both listeners on one port number.
async fn bind(state: &State, live: &LiveCredential, reset: &ResetKey) -> Result<Sockets, CoordinatorError> {
    let listen = state.settings.listen;
    let mut tries = 0;
    let (quic, grpc) = loop {
        tries += 1;
        let tls = server_config(
            live,
            &state.anchors,
            &state.cluster.cluster,
            ClientAuth::Optional,
            &[ALPN_SESSION, ALPN_H3],
        )
        .map_err(|cause| CoordinatorError::Tls(cause.into()))?;
        let quic = Server::bind_with(listen, tls, state.settings.limits.clone(), reset)
            .map_err(|cause| CoordinatorError::Bind { what: "UDP", address: listen, cause: cause.into() })?;
        let address = SocketAddr::new(listen.ip(), quic.local_addr().port());
        match TcpListener::bind(address).await {
            Ok(grpc) => break (quic, grpc),
            Err(_) if listen.port() == 0 && tries < PORT_TRIES => {}
            Err(cause) => return Err(CoordinatorError::Bind { what: "TCP", address, cause: cause.into() }),
        }
    };
    let bind_error = |address, cause: std::io::Error| CoordinatorError::Bind {
        what: "the metrics listener",
        address,
        cause: cause.into(),
    };
    let mut metrics = None;
    let mut metrics_address = None;
    if let Some(address) = state.settings.metrics_listen {
        let listener = TcpListener::bind(address).await.map_err(|cause| bind_error(address, cause))?;
        metrics_address = Some(listener.local_addr().map_err(|cause| bind_error(address, cause))?);
        metrics = Some(listener);
    }
    let grpc_address = grpc.local_addr().map_err(|cause| bind_error(listen, cause))?;
    let tunnels = bind_tunnels(state, live, reset)?;
    let addresses = Addresses {
        quic: quic.local_addr(),
        grpc: grpc_address,
        metrics: metrics_address,
        tunnels: tunnels.local_addr(),
    };
    Ok(Sockets { quic, tunnels, grpc, metrics, addresses })
}

/// A socket of its own: bytes that fill its buffer keep no document out.
fn bind_tunnels(state: &State, live: &LiveCredential, reset: &ResetKey) -> Result<Server, CoordinatorError> {
    let address = state.settings.tunnel_address();
    let tls =
        server_config(live, &state.anchors, &state.cluster.cluster, ClientAuth::Required, &[ALPN_TUNNEL])
            .map_err(|cause| CoordinatorError::Tls(cause.into()))?;
    let limits = tunnel_limits(&state.settings.limits);
    Server::bind_with(address, tls, limits, reset).map_err(|cause| CoordinatorError::Bind {
        what: "UDP for tunnels",
        address,
        cause: cause.into(),
    })
}

async fn run(
    state: Arc<State>,
    data: &DataDir,
    object_changes: Watch,
    exporter: Option<Exporter>,
) -> Result<(), CoordinatorError> {
    let leaf_error = |cause: BoxError| CoordinatorError::Load {
        what: "the coordinator's certificate",
        path: data.leaf(),
        cause,
    };
    let profile = own_leaf::profile(&state.cluster, &state.settings).map_err(leaf_error)?;
    let live = own_leaf::start(data, &state.authority, &state.anchors.current(), &profile, now())
        .map_err(leaf_error)?;
    let reset = reset_key::load_or_make(data)?;
    let sockets = bind(&state, &live, &reset).await?;
    let grpc_tls = server_config(
        &live,
        &state.anchors,
        &state.cluster.cluster,
        ClientAuth::Optional,
        &[b"h2", b"http/1.1"],
    )
    .map_err(|cause| CoordinatorError::Tls(cause.into()))?;

    let webhook = webhook(&state.settings)?;
    let mut tasks = start_tasks(&state, data, &live, profile, (sockets.metrics, object_changes));

    if let Some(hook) = webhook {
        tasks.spawn("demand webhook", webhook_task(Arc::clone(&state), hook).map(Ok));
    }

    if let Some(exporter) = exporter {
        tasks.spawn("export of spans", exporter.run(state.shutdown.clone()).map(Ok));
    }

    // QUIC outlives `shutdown` by as long as the goodbyes take.
    let quic_stop = CancellationToken::new();
    let sessions = Arc::new(Sessions(Arc::clone(&state)));
    let members = Arc::new(Members(Arc::clone(&state)));
    let quic = sockets.quic.judged_by(members).serve(
        Some(http::router(Arc::clone(&state))),
        Some(sessions),
        quic_stop.clone(),
    );
    let mut quic = tokio::spawn(quic);
    state.tunnels.listen_on(sockets.addresses.tunnels.port());
    let tunnels = sockets
        .tunnels
        .judged_by(Arc::new(Members(Arc::clone(&state))))
        .with_tunnels(Arc::new(AcceptTunnels(Arc::clone(&state))))
        .serve(None, None, quic_stop.clone());
    let mut tunnels = tokio::spawn(tunnels);
    let connections = grpc_listener::accept(sockets.grpc, grpc_tls, Arc::clone(&state));
    let mut grpc = tokio::spawn(api::serve(Arc::clone(&state), connections));

    state.metrics.set_ready(true);
    let Addresses { quic: quic_address, grpc: grpc_address, tunnels: tunnel_address, .. } = sockets.addresses;
    tracing::info!(quic = %quic_address, grpc = %grpc_address, tunnels = %tunnel_address, "ready");
    if let Some(on_ready) = &state.settings.on_ready {
        on_ready(&sockets.addresses);
    }

    let early = |what, cause: BoxError| CoordinatorError::Stopped { what, cause };
    let result = tokio::select! {
        // First, because being told to stop also ends the listeners.
        biased;
        () = state.shutdown.cancelled() => Ok(()),
        cause = state.store.failure() => Err(early("store", cause.into())),
        Some((name, ended)) = tasks.ended() => {
            Err(early(name, ended.err().unwrap_or_else(|| "it returned".into())))
        }
        ended = &mut quic => Err(early("QUIC endpoint", ended.err().map_or("it returned".into(), Into::into))),
        ended = &mut tunnels => {
            Err(early("tunnel endpoint", ended.err().map_or("it returned".into(), Into::into)))
        }
        ended = &mut grpc => Err(early("gRPC listener", match ended {
            Ok(Ok(())) => "it returned".into(),
            Ok(Err(cause)) => cause,
            Err(cause) => cause.into(),
        })),
    };

    state.shutdown.cancel();
    state.metrics.set_ready(false);
    let stopping = stop(&state, quic_stop, (quic, tunnels), grpc, &mut tasks);
    if tokio::time::timeout(STOP_WITHIN, stopping).await.is_err() {
        tracing::warn!("some tasks did not end in time; stopping anyway");
    }
    state.store.close().await;
    tracing::info!("stopped");
    result
}

fn start_tasks(
    state: &Arc<State>,
    data: &DataDir,
    live: &LiveCredential,
    profile: LeafProfile,
    (metrics_listener, object_changes): (Option<TcpListener>, Watch),
) -> Tasks {
    let mut tasks = Tasks::default();
    tasks.spawn("reissue task", reissue_task(Arc::clone(state)).map(Ok));
    tasks.spawn("placement", placement_task(Arc::clone(state), object_changes).map(Ok));
    tasks.spawn("drains", drain_task(Arc::clone(state)).map(Ok));
    tasks.spawn("revocations", revocation_task(Arc::clone(state)).map(Ok));
    tasks.spawn("node health", health_task(Arc::clone(state)).map(Ok));
    tasks.spawn("cleanup task", cleanup_task(Arc::clone(state)).map(Ok));
    let own_leaf = own_leaf::own_leaf_task(
        data.clone(),
        live.clone(),
        state.anchors.clone(),
        Arc::clone(&state.authority),
        profile,
        state.shutdown.clone(),
    );
    tasks.spawn("renewal of the own certificate", own_leaf.map(Ok));
    if let Some(listener) = metrics_listener {
        let router = metrics::router(Arc::clone(&state.metrics), fleet_of(state, live));
        let stop = state.shutdown.clone().cancelled_owned();
        let serving = axum::serve(listener, router).with_graceful_shutdown(stop);
        tasks.spawn("metrics listener", async { Ok(serving.await?) });
    }
    tasks
}

/// What `/metrics` tells of the fleet and of what ends when.
fn fleet_of(state: &Arc<State>, live: &LiveCredential) -> FleetOf {
    let (state, live) = (Arc::clone(state), live.clone());
    Arc::new(move || {
        let (credential, anchors, trust) = (live.current(), state.anchors.current(), state.trust.current());
        let own = expiries(Some(&credential), Some(&anchors), Some(&trust));
        let mut fleet = FleetState::new(own, state.operators.expiries());
        state.fleet.for_each_connected(|node| fleet.add(node.info.as_ref(), node.status()));
        let world = state.world.lock();
        fleet.add_demand(&crate::placement::demand_of(&world));
        fleet.add_addresses(world.addresses());
        drop(world);
        fleet
    })
}

async fn stop(
    state: &State,
    quic_stop: CancellationToken,
    (quic, tunnels): (tokio::task::JoinHandle<()>, tokio::task::JoinHandle<()>),
    grpc: tokio::task::JoinHandle<Result<(), BoxError>>,
    tasks: &mut Tasks,
) {
    state.fleet.close_all(GOODBYES_WITHIN).await;
    quic_stop.cancel();
    for endpoint in [quic, tunnels] {
        if !endpoint.is_finished() {
            let _ = endpoint.await;
        }
    }
    if !grpc.is_finished() {
        let _ = grpc.await;
    }
    while let Some((task, ended)) = tasks.ended().await {
        if let Err(error) = ended {
            tracing::warn!(%task, %error, "ended badly");
        }
    }
    if let Err(error) = write_statuses(state).await {
        tracing::warn!(error = %mvm_proto::text::chain(&error), "could not write the nodes' last statuses");
    }
}
