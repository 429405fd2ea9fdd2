//! Which agent or coordinator a command about instances, tenants, pools and events talks to.
//!
//! `--endpoint` says it: `unix:PATH` is an agent on this machine, `agent:URL` an agent over the network, `URL` a
//! coordinator. Without it, it is the coordinator that `--coordinator`, MVM_COORDINATOR or the settings file names;
//! and where none is named, this machine's own agent.

use std::path::PathBuf;
use std::str::FromStr;

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, FromArgMatches};
use mvm_agent::serve::settings::default_socket;
use mvm_client::ControlClient;
use mvm_proto::NodeId;
use mvm_proto::status::NodeInfo;
use mvm_transport::Target;

use crate::agent_client::AgentClient;
use crate::client::{Operator, parse_target};
use crate::exit::Outcome;
use crate::global::Global;
use crate::paths::default_data_dir;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Socket(PathBuf),
    Agent(Target),
    Coordinator(Target),
}

impl FromStr for Endpoint {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return match path {
                "" => Err("unix: must be followed by a path".to_owned()),
                path => Ok(Self::Socket(PathBuf::from(path))),
            };
        }
        match text.strip_prefix("agent:") {
            Some(url) => parse_target(url).map(Self::Agent),
            None => parse_target(text).map(Self::Coordinator),
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct EndpointArgs {
    flags: EndpointFlags,
    /// Whether this machine's agent was named, and more closely than a coordinator was: on the command line, say, where
    /// the coordinator is in the settings file.
    is_here: bool,
}

#[derive(Debug, Clone, Args)]
struct EndpointFlags {
    /// The agent or coordinator to call: unix:PATH (an agent here), agent:https://HOST:4434 (an agent), https://HOST:4433 (a coordinator) [default: the coordinator if one is named, else this machine's agent]
    #[arg(long, value_name = "ENDPOINT", env = "MVM_ENDPOINT")]
    endpoint: Option<Endpoint>,
    /// The agent of the node that is meant, for what does not go through the coordinator that is called: unix:PATH or agent:URL
    #[arg(long, value_name = "ENDPOINT", env = "MVM_NODE_ENDPOINT")]
    node_endpoint: Option<Endpoint>,
    /// Folder of this machine's agent, which holds its socket
    #[arg(long, value_name = "DIR", env = "MVM_AGENT_DATA_DIR", default_value_os_t = default_data_dir("agent"))]
    data_dir: PathBuf,
    /// Only this node; an agent that is asked directly must be its agent
    #[arg(long, value_name = "NODE")]
    node: Option<NodeId>,
    #[command(flatten)]
    operator: Operator,
}

impl Args for EndpointArgs {
    fn augment_args(command: Command) -> Command {
        EndpointFlags::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        EndpointFlags::augment_args_for_update(command)
    }
}

impl FromArgMatches for EndpointArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let named = |flag: &str| matches.value_source(flag).map_or(0, closeness);
        let here = named("data_dir");
        // In one place both may be said, as for a node's own service: it is a cluster's, then.
        let is_here = here > named("coordinator") || here == closeness(ValueSource::CommandLine);
        Ok(Self { flags: EndpointFlags::from_arg_matches(matches)?, is_here })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// A default is no word of anybody's, or the settings file's.
fn closeness(source: ValueSource) -> u8 {
    match source {
        ValueSource::CommandLine => 3,
        ValueSource::EnvVariable => 2,
        _ => 1,
    }
}

/// Which way what reaches into a guest goes.
#[derive(Debug, Clone)]
pub(crate) enum Route {
    Coordinator(Operator),
    /// The agent that is named, or this machine's.
    Agent,
}

/// Who answers.
#[derive(Debug)]
pub(crate) enum Session {
    Agent(AgentClient),
    Coordinator(Box<ControlClient>),
}

impl EndpointArgs {
    /// Through a coordinator: only this node.
    pub(crate) fn node(&self) -> Option<&NodeId> {
        self.flags.node.as_ref()
    }

    /// Whether the agent of the node that is meant is named beside the coordinator.
    pub(crate) fn names_an_agent(&self) -> bool {
        self.flags.node_endpoint.is_some()
    }

    fn chosen(&self) -> Endpoint {
        let EndpointFlags { endpoint, data_dir, operator, .. } = &self.flags;
        match (endpoint, &operator.coordinator) {
            (Some(endpoint), _) => endpoint.clone(),
            (None, Some(coordinator)) if !self.is_here => Endpoint::Coordinator(coordinator.clone()),
            _ => Endpoint::Socket(default_socket(data_dir)),
        }
    }

    /// Whether a coordinator is asked.
    pub(crate) fn route(&self) -> Route {
        match self.chosen() {
            Endpoint::Coordinator(target) => {
                Route::Coordinator(Operator { coordinator: Some(target), ..self.flags.operator.clone() })
            }
            Endpoint::Socket(_) | Endpoint::Agent(_) => Route::Agent,
        }
    }

    pub(crate) async fn open(&self, global: &Global) -> Result<Session, Outcome> {
        self.of_the_node(self.chosen().open(&self.flags.operator, global).await?).await
    }

    /// For what is asked of a coordinator unless an endpoint says otherwise.
    pub(crate) async fn open_coordinator(&self, global: &Global) -> Result<Session, Outcome> {
        let EndpointFlags { endpoint, operator, .. } = &self.flags;
        match endpoint {
            Some(endpoint) => self.of_the_node(endpoint.open(operator, global).await?).await,
            None => Ok(Session::Coordinator(Box::new(operator.connect(global).await?))),
        }
    }

    /// Refuses the agent of another node than `--node` names: a coordinator passes the name on, an agent acts on its own
    /// node whatever it is asked.
    async fn of_the_node(&self, session: Session) -> Result<Session, Outcome> {
        let (Session::Agent(agent), Some(wanted)) = (&session, self.node()) else { return Ok(session) };
        let NodeInfo { node_id, .. } = agent.get("/v1/node/info").await?;
        if node_id == wanted.as_str() {
            return Ok(session);
        }
        Err(Outcome::Failed(anyhow::anyhow!(
            "--node {wanted}: the agent that answers is {node_id}'s, and was asked for nothing\n\
             name the coordinator with --coordinator or MVM_COORDINATOR, or {wanted}'s agent with --endpoint \
             agent:https://{wanted}:4434"
        )))
    }

    /// For what only an agent can answer.
    pub(crate) async fn open_agent(&self, global: &Global, what: &str) -> Result<AgentClient, Outcome> {
        match (&self.flags.node_endpoint, self.chosen()) {
            (Some(agent), Endpoint::Coordinator(_)) => {
                self.of_the_node(agent.open(&self.flags.operator, global).await?).await?.agent(what)
            }
            _ => self.open(global).await?.agent(what),
        }
    }
}

impl Endpoint {
    pub(crate) async fn open(&self, operator: &Operator, global: &Global) -> Result<Session, Outcome> {
        match self {
            Endpoint::Socket(path) => Ok(Session::Agent(AgentClient::local(path, global.timeout()))),
            Endpoint::Agent(target) => {
                Ok(Session::Agent(AgentClient::network(target, operator, global.timeout()).await?))
            }
            Endpoint::Coordinator(target) => {
                let operator = Operator { coordinator: Some(target.clone()), ..operator.clone() };
                Ok(Session::Coordinator(Box::new(operator.connect(global).await?)))
            }
        }
    }
}

impl Session {
    pub(crate) fn agent(self, what: &str) -> Result<AgentClient, Outcome> {
        match self {
            Session::Agent(client) => Ok(client),
            Session::Coordinator(_) => Err(Outcome::Usage(anyhow::anyhow!(
                "{what} does not go through a coordinator\nask the node's agent: run this on the node, or with \
                 --endpoint agent:https://NODE:4434"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_is_a_socket_an_agent_or_a_coordinator() {
        let socket = "unix:/run/a.sock".parse();
        assert_eq!(socket, Ok(Endpoint::Socket("/run/a.sock".into())));
        assert!(matches!("agent:https://node:4434".parse(), Ok(Endpoint::Agent(_))));
        assert!(matches!("https://host:4433".parse(), Ok(Endpoint::Coordinator(_))));
        assert!("unix:".parse::<Endpoint>().is_err() && "ftp://x".parse::<Endpoint>().is_err());
    }
}
