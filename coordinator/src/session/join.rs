//! A session takes its node's place in the fleet, if no other machine has it.

use std::net::SocketAddr;

use mvm_proto::NodeId;
use mvm_proto::status::Event;
use mvm_proto::wire::FEATURE_TUNNEL;
use mvm_proto::wire::session::v1::Hello;
use mvm_transport::SessionControl;
use mvm_transport::session::close_code;

use super::End;
use crate::fleet::second_session::{Agent, SecondMachine, Verdict, checked, judge, told};
use crate::fleet::{Attached, Newcomer, Presumed};
use crate::state::State;
use crate::stored::now;

/// How often the place may change hands while a session looks at it.
const MAX_TRIES: usize = 3;
/// Characters of a host's name, as in DNS.
const MAX_HOSTNAME: usize = 63;

/// The session's place in the fleet. Of two machines with one certificate the one that is there keeps it.
pub(super) async fn join(
    state: &State,
    node: &NodeId,
    control: &SessionControl,
    address: SocketAddr,
    hello: &Hello,
) -> Result<Attached, End> {
    let info = hello.info.clone();
    let of_info = |text: fn(&mvm_proto::status::NodeInfo) -> &String| info.as_ref().map(text).cloned();
    let agent = Agent {
        start: checked(hello.start.clone()),
        boot_id: of_info(|info| &info.boot_id).unwrap_or_default(),
        hostname: shown(&of_info(|info| &info.hostname).unwrap_or_default()),
    };
    for _ in 0..MAX_TRIES {
        let live = state.fleet.get_or_insert(node);
        let older = live.lock().session.as_ref().map(|it| (it.id, it.agent.clone(), it.address));
        if let Some((_, known, at)) = &older
            && judge(known, &agent) == Verdict::Ask
        {
            match state.fleet.ask_if_there(node).await {
                Presumed::Gone => {}
                Presumed::BeingAsked => {
                    let reason = format!("another session of node {node} is being looked at; dial again");
                    return Err(End::Refused { code: close_code::OVERLOADED, reason, redial: true });
                }
                Presumed::There => return Err(refuse(state, node, (known, *at), (&agent, address))),
            }
        }
        let newcomer = Newcomer {
            control: control.clone(),
            address,
            agent: agent.clone(),
            info: info.clone(),
            high_water: hello.high_water.clone(),
            has_tunnels: hello.features.iter().any(|feature| feature == FEATURE_TUNNEL),
        };
        if let Some(attached) = state.fleet.attach(node, newcomer, older.map(|(id, ..)| id), now()) {
            state.tunnels.note_process(node, &agent.process());
            return Ok(attached);
        }
    }
    let reason = format!("sessions of node {node} come too fast; dial again");
    Err(End::Refused { code: close_code::OVERLOADED, reason, redial: true })
}

/// What of a name that a node gives itself comes into logs and messages.
fn shown(hostname: &str) -> String {
    let is_plain = |c: &char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    hostname.chars().filter(is_plain).take(MAX_HOSTNAME).collect()
}

/// Both machines are told, and both are shown.
fn refuse(
    state: &State,
    node: &NodeId,
    (known, at): (&Agent, SocketAddr),
    (agent, address): (&Agent, SocketAddr),
) -> End {
    let named = |host: &str| if host.is_empty() { "a machine".to_owned() } else { host.to_owned() };
    let (first, second) = (named(&known.hostname), named(&agent.hostname));
    // A newcomer's port is another one with each session.
    let (first_ip, second_ip) = (at.ip().to_string(), address.ip().to_string());
    let reason = told(node.as_str(), (&first, &first_ip), (&second, &second_ip));
    let live = state.fleet.get_or_insert(node);
    let is_news = live.change(|live| {
        let before = live.second.take();
        let is_news = before
            .as_ref()
            .is_none_or(|it| (it.address.ip(), &it.hostname) != (address.ip(), &agent.hostname));
        let since = before.filter(|_| !is_news).map_or_else(now, |it| it.since);
        let hostname = agent.hostname.clone();
        live.second = Some(SecondMachine { address, hostname, since, last_at: state.fleet.steady.now() });
        let event = Event {
            at: now().to_string(),
            kind: "SecondMachine".to_owned(),
            subject: String::new(),
            message: reason.clone(),
        };
        live.add_event_once(event);
        is_news
    });
    state.fleet.note_session(node);
    if is_news {
        state.fleet.tell_news(node);
    }
    End::Refused { code: close_code::SECOND_MACHINE, reason, redial: true }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_other_than_letters_brings_nothing_into_the_log() {
        assert_eq!(shown("host-1.example\n\u{1b}[31mevil"), "host-1.example31mevil");
        assert_eq!(shown(&"x".repeat(1000)).len(), MAX_HOSTNAME);
    }
}
