//! `mvm events`: what happened on a node or on all of them lately, and what happens.

use anyhow::Context;
use bytes::Bytes;
use clap::Args;
use http::Method;
use mvm_client::ControlClient;
use mvm_proto::status::Event;
use mvm_proto::wire::control::v1::{Node, NodeEvent, StreamEventsRequest};
use serde::Serialize;

use crate::client::{self, all_nodes, next_within, refused, within};
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, or_dash, when};
use crate::progress::Progress;

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Go on and print what happens
    #[arg(short, long, visible_short_alias = 'w', alias = "watch")]
    follow: bool,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

pub(crate) async fn run(global: &Global, args: EventsArgs) -> Run {
    match args.endpoint.open(global).await? {
        Session::Agent(agent) if args.follow => {
            let mut lines = agent.stream(Method::GET, "/v1/node/events?follow=true", Bytes::new()).await?;
            let mut rest = Vec::new();
            while let Some(piece) = lines.next().await? {
                rest.extend_from_slice(&piece);
                let whole = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
                let events = read(&rest.drain(..whole).collect::<Vec<_>>())?;
                for event in &events {
                    let Event { at, kind, subject, message, .. } = event;
                    output::show_line(global.output, event, [at, kind, &or_dash(subject), message])?;
                }
            }
            Ok(())
        }
        Session::Agent(agent) => {
            let events = read(&agent.bytes("/v1/node/events").await?)?.into_iter();
            let events: Vec<_> = events.map(|event| Told { event, ..Told::default() }).collect();
            Ok(output::show(global.output, &events, |wide| table(&events, wide))?)
        }
        Session::Coordinator(mut client) => {
            let node_id = args.endpoint.node().map(ToString::to_string).unwrap_or_default();
            warn_of_missing(global, &mut client, &node_id).await?;
            let request = StreamEventsRequest { node_id, follow: args.follow };
            let mut stream = within(global.timeout(), client.stream_events(request)).await?;
            if args.follow {
                while let Some(event) = stream.message().await.map_err(|status| refused(&status))? {
                    let event = Told::of(event);
                    let Event { at, kind, subject, message } = &event.event;
                    let parts = [at, &or_dash(&event.node_id), kind, &or_dash(subject), message];
                    output::show_line(global.output, &event, parts.map(String::as_str))?;
                }
                return Ok(());
            }
            let mut events = Vec::new();
            while let Some(event) = next_within(global.timeout(), &mut stream).await? {
                events.push(Told::of(event));
            }
            Ok(output::show(global.output, &events, |wide| table(&events, wide))?)
        }
    }
}

/// Warns of nodes whose newer events are missing.
async fn warn_of_missing(global: &Global, client: &mut ControlClient, node_id: &str) -> Result<(), Outcome> {
    let nodes = all_nodes(client, true, global.timeout()).await?;
    let asked = |node: &&Node| node_id.is_empty() || node_id == node.node_id;
    for node in nodes.iter().filter(asked).filter(|node| !node.connected && !node.last_seen_at.is_empty()) {
        let lacks = "its later events are missing";
        let warning = client::not_connected(&node.node_id, &node.last_seen_at, lacks);
        Progress::new(global.quiet).say(format!("warning: {warning}"));
    }
    Ok(())
}

/// An event, and the node that it is of; empty when an agent was asked directly.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Told {
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) node_id: String,
    #[serde(flatten)]
    pub(crate) event: Event,
}

impl Told {
    fn of(told: NodeEvent) -> Self {
        Self { node_id: told.node_id, event: told.event.unwrap_or_default() }
    }
}

fn read(lines: &[u8]) -> anyhow::Result<Vec<Event>> {
    let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).context("could not read the agent's events")).collect()
}

pub(crate) fn table(events: &[Told], wide: bool) -> output::Table {
    let mut table = output::table(["AT", "NODE", "KIND", "SUBJECT", "MESSAGE"]);
    for Told { node_id, event } in events {
        table.add_row([
            when(&event.at, wide),
            or_dash(node_id),
            event.kind.clone(),
            or_dash(&event.subject),
            event.message.clone(),
        ]);
    }
    table.drop_empty(&["NODE"]);
    table
}
