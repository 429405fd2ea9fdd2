//! `mvm events`: what happened on a node lately, and what happens.

use anyhow::Context;
use bytes::Bytes;
use clap::Args;
use http::Method;
use mvm_proto::status::Event;
use mvm_proto::wire::control::v1::GetNodeRequest;

use crate::client::{all_nodes, within};
use crate::endpoint::{EndpointArgs, Session};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, or_dash};

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Go on and print what happens
    #[arg(short, long)]
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
            let events = read(&agent.bytes("/v1/node/events").await?)?;
            Ok(output::show(global.output, &events, |_| table(&events))?)
        }
        Session::Coordinator(_) if args.follow => Err(Outcome::Usage(anyhow::anyhow!(
            "events are followed on the node itself\nrun this there, or with --endpoint agent:https://NODE:4434"
        ))),
        Session::Coordinator(mut client) => {
            let names = match args.endpoint.node() {
                Some(node) => vec![node.to_string()],
                None => {
                    let nodes = all_nodes(&mut client, true, global.timeout()).await?;
                    nodes.into_iter().map(|node| node.node_id).collect()
                }
            };
            // A list of nodes comes without their events.
            let mut nodes = Vec::new();
            for node_id in names {
                nodes.push(within(global.timeout(), client.get_node(GetNodeRequest { node_id })).await?);
            }
            let named = nodes.into_iter().flat_map(|node| {
                let name = node.node_id;
                node.events.into_iter().map(move |event| Event {
                    subject: format!("{name} {}", event.subject).trim_end().to_owned(),
                    ..event
                })
            });
            let mut events: Vec<Event> = named.collect();
            events.sort_by(|a, b| a.at.cmp(&b.at));
            Ok(output::show(global.output, &events, |_| table(&events))?)
        }
    }
}

fn read(lines: &[u8]) -> anyhow::Result<Vec<Event>> {
    let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).context("could not read the agent's events")).collect()
}

pub(crate) fn table(events: &[Event]) -> output::Table {
    let mut table = output::table(["AT", "KIND", "SUBJECT", "MESSAGE"]);
    for event in events {
        table.add_row([event.at.clone(), event.kind.clone(), or_dash(&event.subject), event.message.clone()]);
    }
    table
}
