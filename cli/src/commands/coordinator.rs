//! `mvm coordinator`: make a cluster, run its coordinator, make operators.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use clap::{Args, Subcommand};
use mvm_agent::serve::shutdown::{notify_ready, notify_stopping, watchdog_task};
use mvm_coordinator::{CoordinatorSettings, InitSettings, WebhookSettings};
use mvm_proto::{ClusterId, Timestamp};
use tokio::sync::watch;

use crate::commands::operator::{self, OperatorCommand};
use crate::commands::root::{self, RootCommand};
use crate::commands::token::{self, TokenCommand};
use crate::commands::{block_on, shutdown_on_signals};
use crate::exit::Run;
use crate::global::Global;
use crate::otlp::OtlpArgs;
use crate::output;
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum CoordinatorCommand {
    /// Make a new cluster: authorities, certificates, signing keys, an operator
    Init(InitArgs),
    /// Run the coordinator
    Serve(Box<ServeArgs>),
    /// Join tokens
    #[command(subcommand)]
    Token(TokenCommand),
    /// Operators: make, list and remove them
    #[command(subcommand)]
    Operator(OperatorCommand),
    /// Root certificates: replace them step by step
    #[command(subcommand)]
    Root(RootCommand),
}

#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// Folder for the cluster's keys and state
    #[arg(long, value_name = "DIR", default_value_os_t = default_data_dir("coordinator"))]
    data_dir: PathBuf,
    /// The cluster's name: the trust domain of every identity
    #[arg(long, default_value = "mvm")]
    cluster: ClusterId,
    /// This coordinator's name
    #[arg(long, default_value = "coordinator")]
    name: String,
    /// A cluster for development: all signing keys stay with the coordinator, and images need no vouching
    #[arg(long)]
    dev: bool,
    /// A DNS name or IP address under which agents reach the coordinator (repeatable; localhost is always in)
    #[arg(long = "san", value_name = "NAME")]
    sans: Vec<String>,
    /// Put the root's keys here instead of into the data folder, for example on a stick that is then taken away
    #[arg(long, value_name = "DIR")]
    root_key_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Folder made by `mvm coordinator init`
    #[arg(long, value_name = "DIR", default_value_os_t = default_data_dir("coordinator"))]
    data_dir: PathBuf,
    /// Address for agents (UDP, QUIC) and operators (TCP, gRPC)
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:4433")]
    listen: SocketAddr,
    /// Address for nodes' tunnels (UDP, QUIC) [default: the address of --listen, with port 4435, or one of the system's choice where --listen has another port than 4433]
    #[arg(long, value_name = "ADDR")]
    tunnel_listen: Option<SocketAddr>,
    /// Address for /metrics, /healthz and /readyz; keep it on loopback
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9433")]
    metrics_listen: SocketAddr,
    /// Lifetime of documents; they are issued again at half of it
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = humantime::parse_duration)]
    document_life: Duration,
    /// Lifetime of certificates; they are renewed at half of it
    #[arg(long, value_name = "TIME", default_value = "24h", value_parser = humantime::parse_duration)]
    leaf_life: Duration,
    /// How often agents send a heartbeat
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    heartbeat: Duration,
    /// How long a node may be away before what is placed on it is placed on others
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = humantime::parse_duration)]
    node_grace: Duration,
    /// Post what has no place for want of nodes, and which nodes have nothing, to this URL (docs/placement.md)
    #[arg(long, value_name = "URL", requires = "demand_webhook_key")]
    demand_webhook: Option<String>,
    /// The file with the key that signs what is posted; only its owner may read it
    #[arg(long, value_name = "FILE", requires = "demand_webhook")]
    demand_webhook_key: Option<PathBuf>,
    /// The authority of the URL's certificate, as PEM; https needs it
    #[arg(long, value_name = "FILE", requires = "demand_webhook")]
    demand_webhook_ca: Option<PathBuf>,
    #[command(flatten)]
    otlp: OtlpArgs,
    /// A DNS name or IP address to add to the coordinator's certificate (repeatable)
    #[arg(long = "san", value_name = "NAME")]
    sans: Vec<String>,
}

pub(crate) fn run(global: &Global, command: CoordinatorCommand) -> Run {
    match command {
        CoordinatorCommand::Init(args) => init(global, args),
        CoordinatorCommand::Serve(args) => serve(*args),
        CoordinatorCommand::Token(command) => block_on(token::run(global, command)),
        CoordinatorCommand::Root(command) => root::run(global, command),
        CoordinatorCommand::Operator(command) => operator::run(global, command),
    }
}

fn init(global: &Global, args: InitArgs) -> Run {
    let (dns, ips) = split_names(args.sans);
    let settings = InitSettings {
        data_dir: args.data_dir,
        cluster: args.cluster,
        name: args.name,
        dev: args.dev,
        dns,
        ips,
        root_key_dir: args.root_key_dir,
    };
    let report =
        mvm_coordinator::init(&settings, Timestamp::from(SystemTime::now())).map_err(anyhow::Error::new)?;
    output::show(global.output, &report, |_| output::properties(report.rows()))?;
    let progress = Progress::new(global.quiet);
    report.next_steps().lines().for_each(|step| progress.say(step));
    Ok(())
}

/// Ten times what lies between two beats: a disk may be slow, and starting takes a moment.
const BEATS_WITHIN: Duration = Duration::from_secs(20);

fn serve(args: ServeArgs) -> Run {
    let (dns, ips) = split_names(args.sans);
    let mut settings = CoordinatorSettings::new(args.data_dir);
    settings.listen = args.listen;
    settings.tunnel_listen = args.tunnel_listen;
    settings.metrics_listen = Some(args.metrics_listen);
    settings.document_life = args.document_life;
    settings.leaf_life = args.leaf_life;
    settings.heartbeat = args.heartbeat;
    settings.node_grace = args.node_grace;
    settings.demand_webhook = args
        .demand_webhook
        .zip(args.demand_webhook_key)
        .map(|(url, key_file)| WebhookSettings { url, key_file, ca_file: args.demand_webhook_ca });
    settings.otlp = args.otlp.settings();
    settings.dns = dns;
    settings.ips = ips;
    settings.on_ready = Some(Arc::new(|_| notify_ready("the coordinator is ready")));
    let (beat, beats) = watch::channel(Instant::now());
    settings.on_beat = Some(Arc::new(move || {
        beat.send_replace(Instant::now());
    }));
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("could not start the runtime")?;
    runtime.block_on(async {
        let shutdown = shutdown_on_signals()?;
        let alive = move || beats.borrow().elapsed() < BEATS_WITHIN;
        tokio::spawn(watchdog_task(alive, shutdown.clone()));
        let stopping = shutdown.clone();
        tokio::spawn(async move {
            stopping.cancelled().await;
            notify_stopping();
        });
        mvm_coordinator::serve(settings, shutdown).await.map_err(anyhow::Error::new)
    })?;
    Ok(())
}

/// Names that read as IP addresses, and the others.
pub(crate) fn split_names(names: Vec<String>) -> (Vec<String>, Vec<IpAddr>) {
    let mut dns = Vec::new();
    let mut ips = Vec::new();
    for name in names {
        match name.parse() {
            Ok(ip) => ips.push(ip),
            Err(_) => dns.push(name),
        }
    }
    (dns, ips)
}
