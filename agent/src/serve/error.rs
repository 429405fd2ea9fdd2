//! Why an agent does not start, or does not go on, and what to do about it.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use mvm_host::HostError;
use mvm_pki::{Identity, TlsError};
use mvm_proto::{NodeId, Problem};
use mvm_telemetry::OtlpError;
use mvm_transport::BindError;

use crate::node::assemble::NodeError;
use crate::upkeep::certs::CertsError;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    #[error("could not use this node's certificates")]
    Certs(#[source] CertsError),
    #[error("the certificate is for {identity}, which is not a node")]
    NotANode { identity: Identity },
    #[error("the certificate is for node {certified}, but this agent was started as {given}")]
    OtherNodeId { given: NodeId, certified: NodeId },
    #[error("no node id was given, and the host name {hostname:?} is not a valid node id")]
    NoNodeId { hostname: String },
    #[error("could not set up the export of traces")]
    Traces(#[source] OtlpError),
    #[error("there is no source of desired state")]
    NoSource,
    #[error("could not use the data directory {path}")]
    DataDir {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("could not listen on the unix socket {path}")]
    Socket {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("could not listen on TCP {address} for metrics and health")]
    MetricsListen {
        address: SocketAddr,
        #[source]
        cause: io::Error,
    },
    #[error("could not start the API")]
    Listen(#[source] BindError),
    #[error("could not set up TLS for the API")]
    Tls(#[source] TlsError),
    #[error("could not open this node's trust and ledger")]
    State(#[source] Box<Problem>),
    #[error("could not open this node's instances")]
    Node(#[source] Box<NodeError>),
    #[error("the task `{task}` ended unexpectedly")]
    TaskEnded { task: &'static str },
    #[error("could not switch to user {user}: this agent was not started as root")]
    NotRoot { user: String },
    #[error("there is no user {user}")]
    NoUser { user: String },
    #[error("could not drop root's privileges")]
    Privileges(#[source] HostError),
    #[error("could not start the privileged helper")]
    Helper(#[source] io::Error),
    #[error("the privileged helper ended; the agent can't change this machine without it")]
    HelperGone,
}

impl AgentError {
    /// What to do next.
    #[must_use]
    pub fn remediation(&self) -> String {
        match self {
            Self::Certs(error) => format!(
                "{} To run from a local file without a coordinator, start with --desired FILE.",
                error.remediation()
            ),
            Self::NotANode { .. } => "Point --certs-dir at the certificates of this node.".to_owned(),
            Self::OtherNodeId { .. } => "Leave --node-id out, or enrol again under that id.".to_owned(),
            Self::NoNodeId { .. } => "Give one: --node-id NODE (a-z, 0-9 and hyphens).".to_owned(),
            Self::Traces(_) => "Correct the --otlp settings, or leave them out: docs/tracing.md.".to_owned(),
            Self::NoSource => "Enrol this node, or start with --desired FILE.".to_owned(),
            Self::DataDir { path, .. } => {
                format!("Check the owner and mode of {}, or give another --data-dir.", path.display())
            }
            Self::Socket { .. } => "Give another --socket, or stop the agent that uses this one.".to_owned(),
            Self::MetricsListen { .. } => "Give another --metrics-listen.".to_owned(),
            Self::Listen(_) => "Stop what uses that UDP port, or give another --listen.".to_owned(),
            Self::Tls(_) => "Check the certificates with `mvm agent certs status`.".to_owned(),
            Self::State(problem) => problem.remediation.clone(),
            Self::Node(cause) => {
                let usual = || "The causes above name the file; nothing was changed.".to_owned();
                cause.remediation().unwrap_or_else(usual)
            }
            Self::TaskEnded { .. } => {
                "Start the agent again and report the log; instances still run.".to_owned()
            }
            Self::NotRoot { .. } => "Leave --user out, or start the agent as root.".to_owned(),
            Self::NoUser { user } => {
                format!("Make one (`useradd --system {user}`), or name another by --user.")
            }
            Self::Privileges(_) => {
                "The cause above says what was attempted. `--user root` keeps everything.".to_owned()
            }
            Self::Helper(_) => "Check that this program can be started again, by its own path.".to_owned(),
            Self::HelperGone => "Start the agent again, which starts both; instances still run.".to_owned(),
        }
    }
}
