//! The grammar of the command line. Each command's own flags stand beside the command, in `commands/`.

use clap::{Parser, Subcommand};

use crate::commands;
use crate::global::Global;

const AFTER_HELP: &str = "\
Settings: every flag can also come from the environment (MVM_TIMEOUT,
MVM_AGENT_DATA_DIR ...) or from a settings file (--config, else
$XDG_CONFIG_HOME/mvm/config.toml, else /etc/mvm/config.toml). Flag beats
environment beats context beats file. docs/settings.md lists every setting.

Exit codes: 0 done, 1 failed or refused, 2 usage or unreadable input,
3 gave up waiting, 4 unreachable, 5 push --dry-run has found changes,
130 and 143 interrupted. `diff` exits 1 and `plan -f` 2 when something
would change.

First steps:
  mvm dev up                          a cluster on this machine, to try things out
  mvm get nodes,pools -A              what it has
  mvm dev down                        nothing is left but images

For real clusters:
  mvm coordinator init                make a cluster's keys and certificates
  mvm coordinator serve               run the coordinator
  mvm coordinator token create --node node-a
  mvm agent certs request --coordinator https://HOST:4433 --token-file FILE
  mvm agent serve --coordinator https://HOST:4433
  mvm apply -f examples/objects.yaml  declare tenants and pools; nodes are found for them
  mvm get pools -A                    see how they fare
  mvm push -f examples/minimal.json   or declare what one node runs";

/// Runs other people's AI agents and sandboxes in microVMs, on plain Linux machines.
#[derive(Debug, Parser)]
#[command(name = "mvm", version, after_help = AFTER_HELP, propagate_version = true, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The grammar of `mvm agent serve` alone: what a node daemon that runs for months reads its command line with, instead of the
/// grammar of sixty commands. Whatever it does not read is read, or refused, by the whole one.
#[derive(Debug, Parser)]
#[command(name = "mvm", version, propagate_version = true)]
pub(crate) struct AgentServe {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: OfAgent,
}

#[derive(Debug, Subcommand)]
enum OfAgent {
    #[command(subcommand)]
    Agent(OfServe),
}

#[derive(Debug, Subcommand)]
enum OfServe {
    Serve(Box<commands::agent::ServeArgs>),
}

impl From<AgentServe> for Cli {
    fn from(read: AgentServe) -> Self {
        let OfAgent::Agent(OfServe::Serve(args)) = read.command;
        Self { global: read.global, command: Command::Agent(commands::agent::AgentCommand::Serve(args)) }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The node daemon and its certificates
    #[command(subcommand)]
    Agent(commands::agent::AgentCommand),
    /// Make declared objects as files say
    Apply(commands::apply::ApplyArgs),
    /// Audit logs of tenants' instances: show them, and verify that they are complete
    #[command(subcommand)]
    Audit(commands::audit::AuditCommand),
    /// The clusters that you work with: list, choose, set
    #[command(subcommand)]
    Context(commands::context::ContextCommand),
    /// Let nodes take nothing new
    Cordon(commands::cordon::CordonArgs),
    /// Let nodes take new instances again
    Uncordon(commands::cordon::CordonArgs),
    /// Delete declared objects
    Delete(commands::delete::DeleteArgs),
    /// Everything about declared objects, for people
    Describe(commands::describe::DescribeArgs),
    /// A cluster on this machine to try things out: one command, no set-up
    #[command(subcommand)]
    Dev(commands::dev::DevCommand),
    /// What applying files would change in the objects
    Diff(commands::diff::DiffArgs),
    /// Move all that a node has to other nodes, and say what becomes of each instance
    Drain(commands::drain::DrainArgs),
    /// Change an object in your editor
    Edit(commands::edit::EditArgs),
    /// Run a command inside an instance, or in any instance of a pool
    Exec(Box<commands::exec::ExecArgs>),
    /// Why a pool is where it is
    Explain(commands::explain::ExplainArgs),
    /// Declared objects: tables, JSON or YAML, once or as they change
    Get(commands::get::GetArgs),
    /// How a pool's new revision goes over the fleet: status, history, undo, pause, resume
    #[command(subcommand)]
    Rollout(commands::rollout::RolloutCommand),
    /// What nodes and pools have of what there is, and what has no place
    #[command(subcommand)]
    Top(commands::top::TopCommand),
    /// Wait until a condition holds, a field has a value, or an object is gone
    Wait(commands::wait::WaitArgs),
    /// The control plane, its keys and join tokens
    #[command(subcommand)]
    Coordinator(commands::coordinator::CoordinatorCommand),
    /// The microVMs of a node or of a cluster
    #[command(subcommand)]
    Instance(commands::instance::InstanceCommand),
    /// Pools, and how each fares against its document
    #[command(subcommand)]
    Pool(commands::tenant::PoolCommand),
    /// What an instance writes to its console, and on as it writes more
    Logs(commands::logs::LogsArgs),
    /// Values of Secrets, from files and standard input
    #[command(subcommand)]
    Secret(commands::secret::SecretCommand),
    /// Guest sessions in the stores that nodes use: list and delete them
    #[command(subcommand)]
    Session(commands::session::SessionCommand),
    /// Tenants that have instances
    #[command(subcommand)]
    Tenant(commands::tenant::TenantCommand),
    /// Check whether this machine can be a node, and how to fix what is missing
    Doctor(Box<commands::doctor::DoctorArgs>),
    /// What happened lately
    Events(commands::events::EventsArgs),
    /// Tenants' networks on a node
    #[command(subcommand)]
    Net(commands::net::NetCommand),
    /// Nodes of the cluster
    #[command(subcommand)]
    Node(commands::node::NodeCommand),
    /// Show planned steps and their reasons, without changing anything
    Plan(commands::plan::PlanArgs),
    /// Declare what a node runs
    Push(commands::push::PushArgs),
    /// Images that guests boot from: build, import, list, verify, remove
    #[command(subcommand)]
    Image(commands::image::ImageCommand),
    /// Who may sign documents and images
    #[command(subcommand)]
    Trust(commands::trust::TrustCommand),
    /// JSON Schemas of what mvm reads
    Schema(commands::schema::SchemaArgs),
    /// Shell completion
    Completion(commands::reference::CompletionArgs),
    /// Write man pages to a folder
    Man(commands::reference::ManArgs),
    /// Version and build
    Version,
}
