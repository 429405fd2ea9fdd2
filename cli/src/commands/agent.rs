//! `mvm agent`: run the node daemon, or make one document true once.

use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow};
use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use mvm_agent::isolation::{AddressRange, Effort, IsolationFlags, NetworkMode};
use mvm_agent::node::info::CapacityCaps;
use mvm_agent::node::{OnceSettings, Report, peek, reconcile_once};
use mvm_agent::persist::SessionLimits;
use mvm_agent::serve::privileges::{HELPER_THREADS, give_up, run_helper};
use mvm_agent::serve::settings::{
    DEFAULT_SECRETS_DIR, default_certs_dir, default_images_dir, default_sessions_dir, default_socket,
};
use mvm_agent::upkeep::certs as agent_certs;
use mvm_agent::{AgentSettings, RateSettings};
use mvm_pki::{CsrNames, Identity};
use mvm_planner::Observation;
use mvm_proto::{DesiredState, NodeId, Timestamp};
use mvm_transport::Target;
use mvm_vmm::DriverKind;
use mvm_vmm::choice;
use mvm_vmm::{DriverChoice, VmmSettings};

use crate::client::{Operator, parse_target};
use crate::commands::certs::{self, CertsCommand};
use crate::commands::coordinator::split_names;
use crate::commands::push::read_document;
use crate::commands::{block_on, one_thread, shutdown_on_signals};
use crate::endpoint::{Endpoint, EndpointArgs};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::otlp::OtlpArgs;
use crate::output::{self, Format};
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum AgentCommand {
    /// Run the node daemon
    Serve(Box<ServeArgs>),
    /// Reconcile a document once, without a coordinator
    Reconcile(Box<ReconcileArgs>),
    /// Print this node's state, as `mvm plan node --observed` reads it
    Observe(Box<ObserveArgs>),
    /// Export a document that asks for what runs here
    Desired(DesiredArgs),
    /// The node's certificates
    #[command(subcommand)]
    Certs(CertsCommand),
    /// The privileged helper of an agent that was started as root; the agent starts it itself
    #[command(hide = true)]
    Helper,
}

/// Paths of the programs that a node runs.
#[derive(Debug, Args)]
pub(crate) struct ProgramArgs {
    /// The QEMU to use [default: qemu-system-x86_64 in PATH]
    #[arg(long, value_name = "PATH", value_parser = absolute_path())]
    qemu: Option<PathBuf>,
    /// The Firecracker to use [default: firecracker in PATH]
    #[arg(long, value_name = "PATH", value_parser = absolute_path())]
    firecracker: Option<PathBuf>,
    /// The jailer to start Firecracker with [default: jailer in PATH, as root]
    #[arg(long, value_name = "PATH", value_parser = absolute_path())]
    jailer: Option<PathBuf>,
    /// The guest program for images built on this node [default: mvm-guest beside this program]
    #[arg(long, value_name = "PATH", env = "MVM_AGENT_GUEST", value_parser = absolute_path())]
    guest: Option<PathBuf>,
}

impl ProgramArgs {
    pub(crate) fn settings(&self) -> VmmSettings {
        VmmSettings {
            qemu: self.qemu.clone(),
            firecracker: self.firecracker.clone(),
            jailer: self.jailer.clone(),
            jailed: false,
            guest: self.guest.clone(),
        }
    }
}

/// Isolation of instances. Real guests get all of it unless disabled here.
#[derive(Debug, Args)]
struct IsolationArgs {
    /// How instances are connected: bridges (one per tenant, behind a firewall) or none (no network card)
    /// [default: bridges, none with the fake driver]
    #[arg(long, value_name = "MODE")]
    network: Option<NetworkMode>,
    /// Limits on memory, processors and processes by cgroup v2: required, best-effort or none
    /// [default: required, none with the fake driver]
    #[arg(long, value_name = "EFFORT")]
    cgroups: Option<Effort>,
    /// A user, namespaces, a root and filters of its own for each VMM: required, best-effort or none. Firecracker gets
    /// them from its jailer, and is not started without one unless this is none [default: required, none with the fake
    /// driver]
    #[arg(long, value_name = "EFFORT")]
    jail: Option<Effort>,
    /// Let tenants query DNS at port 53 of their gateway, and configure guests to: run a resolver there that listens on all bridges
    #[arg(long)]
    gateway_dns: bool,
    /// Addresses that no tenant may reach, whatever its egress, besides private ranges and known metadata services: 203.0.113.7 or 203.0.113.0/24 (repeatable)
    #[arg(long = "deny-address", value_name = "CIDR")]
    deny: Vec<AddressRange>,
}

impl IsolationArgs {
    fn flags(&self) -> IsolationFlags {
        let Self { network, cgroups, jail, gateway_dns, deny } = self;
        IsolationFlags {
            network: *network,
            cgroups: *cgroups,
            jail: *jail,
            gateway_dns: *gateway_dns,
            deny: deny.clone(),
        }
    }
}

/// Settings that all agent commands share.
#[derive(Debug, Args)]
pub(crate) struct NodeArgs {
    /// This node's id [default: the certificate's, else the host's name]
    #[arg(long, value_name = "NODE")]
    node_id: Option<NodeId>,
    /// Folder for the agent's state
    #[arg(long, value_name = "DIR", value_parser = absolute_path(), default_value_os_t = default_data_dir("agent"))]
    data_dir: PathBuf,
    /// The VMM driver: auto (the strongest that works here), firecracker, qemu, or fake (runs no guest)
    #[arg(long, value_name = "DRIVER", default_value = "auto", value_parser = parse_driver)]
    driver: DriverChoice,
    #[command(flatten)]
    isolation: IsolationArgs,
    #[command(flatten)]
    programs: ProgramArgs,
    /// Folder with images [default: images/ in the data folder]
    #[arg(long, value_name = "DIR", value_parser = unfollowed_path())]
    images_dir: Option<PathBuf>,
    /// Folder with secrets bundles (TENANT, pool.TENANT.POOL) and snapshot keys (TENANT.snapshot-key), best kept in memory
    #[arg(long, value_name = "DIR", value_parser = absolute_path(), default_value = DEFAULT_SECRETS_DIR)]
    secrets_dir: PathBuf,
    /// Folder for sessions that are kept on this machine [default: sessions/ in the data folder]
    #[arg(long, value_name = "DIR", value_parser = unfollowed_path())]
    sessions_dir: Option<PathBuf>,
    /// Size limit of one session, in MiB; a larger one keeps its last copy
    #[arg(long, value_name = "MIB", default_value_t = SessionLimits::default().max_bytes >> 20)]
    max_session_mib: u64,
    /// How long one copy of a session may take before it is cut off
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = humantime::parse_duration)]
    session_copy_within: Duration,
    /// Delete sessions that were not used for so long: all in this node's own folder, in other stores those of the tenants in
    /// its document [default: never]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    session_retention: Option<Duration>,
    /// How long a guest may take from boot to ready
    #[arg(long, value_name = "TIME", default_value = "90s", value_parser = humantime::parse_duration)]
    boot_deadline: Duration,
    /// How long an orphan (a VM or directory without a record) is kept before it is removed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = humantime::parse_duration)]
    sweep_after: Duration,
    /// vCPUs that instances may use [default: the machine's]
    #[arg(long, value_name = "N")]
    max_vcpus: Option<u32>,
    /// Memory that instances may use, in MiB [default: the machine's]
    #[arg(long, value_name = "MIB")]
    max_mem_mib: Option<u64>,
    /// Disk that instances may use, in MiB [default: what is free in the data folder]
    #[arg(long, value_name = "MIB")]
    max_disk_mib: Option<u64>,
    /// Most instances on this node
    #[arg(long, value_name = "N")]
    max_instances: Option<u32>,
}

impl NodeArgs {
    fn vmm(&self) -> VmmSettings {
        self.programs.settings()
    }

    fn sessions_dir(&self) -> PathBuf {
        self.sessions_dir.clone().unwrap_or_else(|| default_sessions_dir(&self.data_dir))
    }

    fn session_limits(&self) -> SessionLimits {
        let max_bytes = self.max_session_mib.saturating_mul(1 << 20);
        SessionLimits { max_bytes, copy_within: self.session_copy_within }
    }

    fn images_dir(&self) -> PathBuf {
        self.images_dir.clone().unwrap_or_else(|| default_images_dir(&self.data_dir))
    }

    fn caps(&self) -> CapacityCaps {
        CapacityCaps {
            vcpus: self.max_vcpus,
            mem_mib: self.max_mem_mib,
            disk_mib: self.max_disk_mib,
            max_instances: self.max_instances,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// The coordinator to keep a session with [default: the one that enrolled this node]
    #[arg(long, value_name = "URL", env = "MVM_COORDINATOR", value_parser = parse_target)]
    coordinator: Option<Target>,
    /// Keep no session: documents come only through this agent's own API
    #[arg(long)]
    no_session: bool,
    /// Take desired state from this file instead of from a coordinator; watched for changes
    #[arg(long, value_name = "FILE", conflicts_with_all = ["coordinator"])]
    desired: Option<PathBuf>,
    /// Address of the agent's HTTP/3 API (UDP)
    #[arg(long, value_name = "ADDR", default_value = "[::]:4434")]
    listen: SocketAddr,
    /// Address for /metrics, /healthz and /readyz; keep it on loopback
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9434")]
    metrics_listen: SocketAddr,
    /// Unix socket of the API for this machine's root [default: agent.sock in the data folder]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Folder with certificates [default: certs/ in the data folder]
    #[arg(long, value_name = "DIR")]
    certs_dir: Option<PathBuf>,
    /// Drop root for this user after start, and keep a privileged helper; `root` keeps everything [default:
    /// mvm, where there is such a user]
    #[arg(long, value_name = "USER")]
    pub(crate) user: Option<String>,
    /// How often the node is compared with its desired state when nothing happens
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    interval_secs: u64,
    /// Do not put idle instances to sleep when this machine is short of memory
    #[arg(long)]
    ignore_memory_pressure: bool,
    /// API requests each peer may make a second
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    rate_per_second: u32,
    /// API requests each peer may make at once
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    rate_burst: u32,
    /// Request only these of the names fixed at enrolment when the certificate is renewed (repeatable)
    #[arg(long = "san", value_name = "NAME")]
    sans: Vec<String>,
    #[command(flatten)]
    otlp: OtlpArgs,
}

#[derive(Debug, Args)]
pub(crate) struct ReconcileArgs {
    #[command(flatten)]
    node: NodeArgs,
    /// The document; `-` reads standard input
    #[arg(long, value_name = "FILE")]
    desired: PathBuf,
    /// Show planned steps without changing anything
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ObserveArgs {
    /// The agent to ask: unix:PATH or agent:URL [default: the one of the data folder; its files when none runs]
    #[arg(long, value_name = "ENDPOINT", env = "MVM_ENDPOINT")]
    endpoint: Option<Endpoint>,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct DesiredArgs {
    #[command(flatten)]
    endpoint: EndpointArgs,
}

/// A path that means the same in any directory: VMMs are not started in this process's, and one that is confined sees
/// it by this very name. What is there is named without detours.
pub(crate) fn absolute_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        let path = std::path::absolute(path)?;
        Ok::<_, std::io::Error>(path.canonicalize().unwrap_or(path))
    })
}

/// The same of a directory that is given to the agent. No link is followed yet: it may be the agent's own.
fn unfollowed_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(std::path::absolute)
}

fn parse_driver(text: &str) -> Result<DriverChoice, String> {
    text.parse::<DriverChoice>().map_err(|error| error.to_string())
}

pub(crate) fn run(global: &Global, command: AgentCommand) -> Run {
    match command {
        AgentCommand::Serve(args) => serve(global, *args),
        AgentCommand::Reconcile(args) => one_thread()?.block_on(reconcile(global, *args)),
        AgentCommand::Observe(args) => block_on(observe(global, *args)),
        AgentCommand::Desired(args) => block_on(desired(global, args)),
        AgentCommand::Certs(command) => certs::run(global, command),
        AgentCommand::Helper => helper(),
    }
}

impl ServeArgs {
    /// All but who the agent goes on as.
    pub(crate) fn settings(self) -> AgentSettings {
        let args = self;
        let mut settings = AgentSettings::new(&args.node.data_dir);
        settings.capacity = args.node.caps();
        settings.vmm = args.node.vmm();
        settings.images_dir = args.node.images_dir();
        settings.secrets_dir.clone_from(&args.node.secrets_dir);
        settings.sessions_dir = args.node.sessions_dir();
        settings.session_limits = args.node.session_limits();
        settings.session_retention = args.node.session_retention;
        settings.boot_deadline = args.node.boot_deadline;
        settings.sweep_after = args.node.sweep_after;
        settings.node_id = args.node.node_id;
        settings.driver = args.node.driver;
        settings.isolation = args.node.isolation.flags();
        settings.coordinator = args.coordinator;
        settings.session = !args.no_session;
        settings.desired_file = args.desired;
        settings.listen = args.listen;
        settings.metrics_listen = args.metrics_listen;
        settings.interval = Duration::from_secs(args.interval_secs);
        settings.ignore_memory_pressure = args.ignore_memory_pressure;
        settings.rate = RateSettings { per_second: args.rate_per_second, burst: args.rate_burst };
        if let Some(socket) = args.socket {
            settings.socket = socket;
        }
        if let Some(dir) = args.certs_dir {
            settings.certs_dir = dir;
        }
        let (dns, ips) = split_names(args.sans);
        settings.names = CsrNames { dns, ips };
        settings.otlp = args.otlp.settings();
        settings
    }
}

fn serve(global: &Global, args: ServeArgs) -> Run {
    let user = args.user.clone();
    let mut settings = args.settings();
    // Before there is a runtime: privileges are a thread's own.
    let helper = ["agent", "helper", "--log-level", &global.log_level];
    give_up(&mut settings, user.as_deref(), &helper).map_err(anyhow::Error::new)?;
    one_thread()?.block_on(async {
        let shutdown = shutdown_on_signals()?;
        mvm_agent::serve(settings, shutdown).await.map_err(anyhow::Error::new)?;
        Ok(())
    })
}

/// Serves the agent at the other end of standard input until it is gone.
fn helper() -> Run {
    let socket = std::io::stdin().as_fd().try_clone_to_owned();
    let socket = socket.context("could not use standard input")?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(HELPER_THREADS)
        .build()
        .context("could not start the runtime")?;
    let ended = runtime.block_on(async {
        // A signal to the agent's whole process group must not end the helper, which an orderly stop needs.
        use tokio::signal::unix::{SignalKind, signal};
        let kinds = [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()];
        let deaf: Result<Vec<_>, _> = kinds.into_iter().map(signal).collect();
        deaf.context("could not listen for signals")?;
        run_helper(socket).await.map_err(anyhow::Error::new)
    });
    // What is under way can be asked for again; a disk that hangs must not keep a helper without an agent.
    runtime.shutdown_timeout(HELPER_LEAVES_WITHIN);
    Ok(ended?)
}

const HELPER_LEAVES_WITHIN: Duration = Duration::from_secs(5);

async fn reconcile(global: &Global, args: ReconcileArgs) -> Run {
    let bytes = read_document(&args.desired)?;
    let desired =
        DesiredState::parse(&bytes).map_err(|errors| Outcome::Failed(anyhow::Error::new(errors)))?;
    let now = Timestamp::from(SystemTime::now());
    let driver = if args.dry_run { args.node.look_with() } else { args.node.decide().await };
    let settings = args.node.once(now, driver, args.dry_run);
    let report = reconcile_once(desired, settings, now).await.map_err(anyhow::Error::new)?;
    if report.steps.is_empty() && report.deferred.is_empty() && report.errors.is_empty() {
        Progress::new(global.quiet).say("nothing to do: the node is as the document says");
    }
    output::show(global.output, &report, |_| table(&report))?;
    if report.converged || args.dry_run {
        Ok(())
    } else if report.errors.is_empty() {
        Err(Outcome::Failed(anyhow!(
            "not converged; the steps not taken are listed above, each with its reason"
        )))
    } else {
        Err(Outcome::Failed(anyhow!("not converged:\n  {}", report.errors.join("\n  "))))
    }
}

impl NodeArgs {
    async fn decide(&self) -> DriverKind {
        choice::decide(self.driver, &self.vmm(), &self.data_dir).await
    }

    fn look_with(&self) -> DriverKind {
        choice::look_with(self.driver, &self.vmm(), &self.data_dir)
    }

    fn once(&self, now: Timestamp, driver: DriverKind, dry_run: bool) -> OnceSettings {
        OnceSettings {
            data_dir: self.data_dir.clone(),
            node_id: this_node(self, now),
            driver,
            vmm: self.vmm(),
            images_dir: self.images_dir(),
            secrets_dir: self.secrets_dir.clone(),
            sessions_dir: self.sessions_dir(),
            session_limits: self.session_limits(),
            sweep_after: self.sweep_after,
            boot_deadline: self.boot_deadline,
            capacity: self.caps(),
            isolation: self.isolation.flags().with(driver),
            groups: self.isolation.flags().groups(),
            dry_run,
        }
    }
}

/// The running agent's word; without one, what its files and the host say.
async fn observe(global: &Global, args: ObserveArgs) -> Run {
    let socket = Endpoint::Socket(default_socket(&args.node.data_dir));
    let endpoint = args.endpoint.clone().unwrap_or(socket);
    let asked = async {
        let session = endpoint.open(&args.operator, global).await?;
        session.agent("an observation")?.get::<Observation>("/v1/node/observation").await
    };
    let observation = match asked.await {
        Err(Outcome::Unreachable(_)) if args.endpoint.is_none() => {
            let now = Timestamp::from(SystemTime::now());
            Progress::new(global.quiet)
                .say("no agent answers; showing its records and the state of the host");
            peek(&args.node.once(now, args.node.look_with(), true), now).await.map_err(anyhow::Error::new)?
        }
        asked => asked?,
    };
    Ok(output::show(global.output, &observation, |wide| observed(&observation, wide))?)
}

#[derive(serde::Deserialize)]
struct Exported {
    document: serde_json::Value,
    notes: Vec<String>,
}

/// Prints the document itself: JSON unless YAML is asked for, ready to be pushed.
async fn desired(global: &Global, args: DesiredArgs) -> Run {
    let agent = args.endpoint.open_agent(global, "an export").await?;
    let exported: Exported = agent.get("/v1/node/desired").await?;
    for note in exported.notes {
        Progress::new(global.quiet).say(format!("note: {note}"));
    }
    let format = if global.output == Format::Yaml { Format::Yaml } else { Format::Json };
    Ok(output::show(format, &exported.document, |_| output::plain())?)
}

fn observed(observation: &Observation, wide: bool) -> output::Table {
    let mut table =
        output::table(["TENANT", "POOL", "INSTANCE", "PHASE", "SINCE", "MOVING TO", "OVERRIDE UNTIL"]);
    let dash = || "-".to_owned();
    for instance in &observation.instances {
        table.add_row([
            instance.tenant.to_string(),
            instance.pool.to_string(),
            instance.id.to_string(),
            instance.phase.to_string(),
            output::when(&instance.since.to_string(), wide),
            instance.moving_to.map_or_else(dash, |phase| phase.to_string()),
            instance.override_until.map_or_else(dash, |until| output::when(&until.to_string(), wide)),
        ]);
    }
    table
}

/// The id given, else the certificate's. A machine that never joined a cluster has no name that a file could get wrong.
fn this_node(args: &NodeArgs, now: Timestamp) -> Option<NodeId> {
    let enrolled = || {
        let status = agent_certs::status(&default_certs_dir(&args.data_dir), now).ok()?;
        status.identity.parse::<Identity>().ok()?.node_id()
    };
    args.node_id.clone().or_else(enrolled)
}

fn table(report: &Report) -> output::Table {
    let mut table = output::table(["TENANT", "POOL", "INSTANCE", "STEP", "REASON"]);
    for step in &report.steps {
        table.add_row([
            step.tenant.to_string(),
            step.pool.to_string(),
            step.instance.as_ref().map_or_else(|| "new".to_owned(), ToString::to_string),
            step.action.to_string(),
            step.reason.clone(),
        ]);
    }
    for deferred in &report.deferred {
        table.add_row([
            deferred.tenant.to_string(),
            deferred.pool.to_string(),
            deferred.instance.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
            "deferred".to_owned(),
            deferred.reason.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        node: NodeArgs,
    }

    #[test]
    fn denied_addresses_are_given_one_by_one() {
        let words = ["mvm", "--deny-address", "203.0.113.7", "--deny-address", "198.51.100.0/24"];
        let denied = Line::parse_from(words).node.isolation.flags().deny;
        let denied: Vec<_> = denied.iter().map(ToString::to_string).collect();
        assert_eq!(denied, ["203.0.113.7", "198.51.100.0/24"]);
        assert!(Line::try_parse_from(["mvm", "--deny-address", "203.0.113.7/24"]).is_err());
    }

    #[test]
    fn paths_mean_the_same_in_any_directory() {
        let here = std::env::current_dir().unwrap();
        let words =
            ["mvm", "--data-dir", "state", "--qemu", "./qemu", "--guest", "guest", "--secrets-dir", "s"];
        let node = Line::parse_from(words).node;
        assert_eq!((&node.data_dir, node.images_dir()), (&here.join("state"), here.join("state/images")));
        assert_eq!((node.vmm().qemu, node.vmm().guest), (Some(here.join("qemu")), Some(here.join("guest"))));
        assert_eq!(node.secrets_dir, here.join("s"));
        let by_default = Line::parse_from(["mvm"]).node;
        assert!(by_default.data_dir.is_absolute() && by_default.images_dir().is_absolute());
    }
}
