//! Streams to guests, relayed to scripted nodes: who may open them, which node they go to, and how they end.

use mvm_client::Channel;
use mvm_client::{Exec, ExecError, ExecEvent, open};
use mvm_pki::{Credential, LiveCredential};
use mvm_proto::status::InstanceStatus;
use mvm_proto::wire::control::v1::RemoveNodeRequest;
use mvm_proto::wire::session::v1::{
    Instances, OpenTunnel, Reply, agent_frame, coordinator_frame, reply, request,
};
use mvm_proto::wire::tunnel::v1::guests_client::GuestsClient;
use mvm_proto::wire::tunnel::v1::{self as wire, Frame, Hello, Open, Opened, Output, frame};
use mvm_transport::{
    ALPN_TUNNEL, ConnectError, Limits, SessionError, Tunnel, TunnelStream, close_code, dial_tunnel,
    tunnel_limits,
};
use std::net::SocketAddr;

use crate::support::{Node, PATIENCE, Running, Session, cluster_id, coordinator, new_cluster, soon};

const INSTANCE: &str = "i-00000001";

fn framed(body: frame::Body) -> Frame {
    Frame { body: Some(body) }
}

async fn channel(running: &Running) -> Channel {
    let credential = Credential::load(&running.data_dir.join("operator/operator.pem")).unwrap();
    let live = LiveCredential::new(credential);
    open(&running.target(), &live, &running.anchors(), &cluster_id(), PATIENCE).await.unwrap()
}

fn exec_of(instance: &str) -> Open {
    let exec = wire::Exec { command: vec!["true".into()], ..wire::Exec::default() };
    Open {
        kind: "exec".into(),
        tenant_id: "acme".into(),
        pool_id: "web".into(),
        instance_id: instance.into(),
        may_wake: true,
        exec: Some(exec),
        actor: "somebody/else".into(),
        ..Open::default()
    }
}

impl Session {
    /// Answers questions until one asks for a tunnel.
    async fn asked_for_tunnel(&mut self) -> (String, OpenTunnel) {
        loop {
            match self.next().await {
                Some(coordinator_frame::Body::Request(asked)) => match asked.ask {
                    Some(request::Ask::OpenTunnel(open)) => return (asked.id, open),
                    Some(request::Ask::ListInstances(_)) => {
                        let one = InstanceStatus {
                            tenant_id: "acme".into(),
                            pool_id: "web".into(),
                            instance_id: INSTANCE.into(),
                            phase: "running".into(),
                            ..InstanceStatus::default()
                        };
                        let answer = Instances { instances: vec![one], ..Instances::default() };
                        self.answer(asked.id, Some(reply::Answer::Instances(answer))).await;
                    }
                    other => panic!("unexpected {other:?}"),
                },
                Some(_) => {}
                None => panic!("the session ended"),
            }
        }
    }

    async fn answer(&mut self, id: String, answer: Option<reply::Answer>) {
        self.send(agent_frame::Body::Reply(Reply { id, problem: Vec::new(), answer })).await;
    }

    /// Opens the tunnel that is asked for next.
    async fn open_tunnel(&mut self, node: &Node) -> Tunnel {
        let (id, asked) = self.asked_for_tunnel().await;
        let tunnel = dial(node, &asked).await.unwrap();
        assert!(greet(&tunnel, &asked.ticket).await);
        tunnel.let_open(16);
        self.answer(id, None).await;
        tunnel
    }
}

async fn dial(node: &Node, asked: &OpenTunnel) -> Result<Tunnel, ConnectError> {
    let tls =
        mvm_pki::tls::client_config(Some(&node.credential), &node.anchors, coordinator(), &[ALPN_TUNNEL])
            .unwrap();
    let address = SocketAddr::new(node.address.ip(), u16::try_from(asked.port).unwrap());
    let limits = tunnel_limits(&Limits::default());
    dial_tunnel(address, "127.0.0.1", tls, &limits).await.map(|(tunnel, _)| tunnel)
}

/// Whether the tunnel was welcomed.
async fn greet(tunnel: &Tunnel, ticket: &str) -> bool {
    let mut control = tunnel.open::<Frame>().await.unwrap();
    let hello = Hello { ticket: ticket.into(), kinds: vec!["exec".into()] };
    control.frames_out.send(&framed(frame::Body::Hello(hello))).await.unwrap();
    let answer = soon("an answer", control.frames_in.recv()).await;
    // Kept open for as long as the tunnel.
    std::mem::forget(control);
    matches!(answer, Ok(Some(Frame { body: Some(frame::Body::Welcome(_)) })))
}

/// The next stream, with its header.
async fn accept(tunnel: &Tunnel) -> (TunnelStream<Frame>, Open) {
    let mut stream = soon("a stream", tunnel.accept::<Frame>()).await.unwrap();
    match soon("a header", stream.frames_in.recv()).await {
        Ok(Some(Frame { body: Some(frame::Body::Open(open)) })) => (stream, open),
        other => panic!("expected a header, found {other:?}"),
    }
}

async fn opened(stream: &mut TunnelStream<Frame>, open: &Open) {
    let opened = Opened {
        exec_id: open.exec.as_ref().map(|exec| exec.exec_id.clone()).unwrap_or_default(),
        tenant_id: open.tenant_id.clone(),
        pool_id: open.pool_id.clone(),
        instance_id: open.instance_id.clone(),
        node_id: "n1".into(),
        woken: false,
    };
    stream.frames_out.send(&framed(frame::Body::Opened(opened))).await.unwrap();
}

#[tokio::test]
async fn a_stream_goes_to_the_node_that_has_the_instance_and_says_who_asks() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let channel = channel(&running).await;
    let following = tokio::spawn(async move {
        let mut exec = Exec::open(channel, exec_of("")).await.unwrap();
        let mut events = Vec::new();
        loop {
            let event = exec.next().await.unwrap();
            let is_last = matches!(event, ExecEvent::Exit(_));
            events.push(event);
            if is_last {
                return events;
            }
        }
    });
    let tunnel = session.open_tunnel(&node).await;
    let (mut stream, open) = accept(&tunnel).await;
    assert_eq!((open.instance_id.as_str(), open.actor.starts_with("operator/")), (INSTANCE, true));
    assert!(open.traceparent.starts_with("00-") && open.exec.as_ref().unwrap().exec_id.starts_with("x-"));
    opened(&mut stream, &open).await;
    let output = Output { data: "hello".into(), ..Output::default() };
    stream.frames_out.send(&framed(frame::Body::Output(output))).await.unwrap();
    let exit = wire::Exit { code: 3, ..wire::Exit::default() };
    stream.frames_out.send(&framed(frame::Body::Exit(exit))).await.unwrap();
    let events = soon("the end", following).await.unwrap();
    assert!(
        matches!(&events[..], [ExecEvent::Opened(_), ExecEvent::Output { data, .. }, ExecEvent::Exit(exit)]
        if data == "hello" && exit.code == 3)
    );
}

#[tokio::test]
async fn a_tunnel_without_the_sessions_ticket_is_refused_and_a_removed_node_loses_its_own() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let mut exec = {
        let channel = channel(&running).await;
        tokio::spawn(async move { Exec::open(channel, exec_of(INSTANCE)).await.unwrap().next().await })
    };
    let (id, asked) = session.asked_for_tunnel().await;
    // As from a second machine with the node's certificate.
    let thief = dial(&node, &asked).await.unwrap();
    assert!(!greet(&thief, "0123456789abcdef").await);
    let reason = soon("its end", thief.closed()).await;
    assert!(matches!(reason, SessionError::Closed { code, .. } if code == u64::from(close_code::NOT_HERE)));
    let tunnel = dial(&node, &asked).await.unwrap();
    assert!(greet(&tunnel, &asked.ticket).await);
    tunnel.let_open(16);
    session.answer(id, None).await;
    let again = dial(&node, &asked).await.unwrap();
    assert!(!greet(&again, &asked.ticket).await, "a ticket is for one tunnel");

    let (mut stream, open) = accept(&tunnel).await;
    opened(&mut stream, &open).await;
    assert!(matches!(soon("it", &mut exec).await.unwrap(), Ok(ExecEvent::Opened(_))));
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    let reason = soon("its end", tunnel.closed()).await;
    assert!(matches!(reason, SessionError::Closed { code, .. } if code == u64::from(close_code::REMOVED)));
    let refused = dial(&node, &asked).await;
    let is_refused = match refused {
        Err(_) => true,
        Ok(tunnel) => !greet(&tunnel, &asked.ticket).await,
    };
    assert!(is_refused);
}

#[tokio::test]
async fn a_hundred_streams_ask_for_one_tunnel_and_an_agent_that_knows_none_is_told_of() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let mut followed = tokio::task::JoinSet::new();
    let shared = channel(&running).await;
    for _ in 0..50 {
        let channel = shared.clone();
        followed.spawn(async move {
            // Named, so that no node has to be asked for it.
            let open = Open { node_id: "n1".into(), ..exec_of(INSTANCE) };
            let mut exec = Exec::open(channel, open).await?;
            while !matches!(exec.next().await?, ExecEvent::Exit(_)) {}
            Ok::<_, ExecError>(())
        });
    }
    let tunnel = session.open_tunnel(&node).await;
    tunnel.let_open(64);
    for _ in 0..50 {
        let (mut stream, open) = accept(&tunnel).await;
        opened(&mut stream, &open).await;
        stream.frames_out.send(&framed(frame::Body::Exit(wire::Exit::default()))).await.unwrap();
        stream.frames_out.finish();
    }
    while let Some(done) = soon("the ends", followed.join_next()).await {
        done.unwrap().unwrap();
    }
    session.expect_quiet().await;

    let old = running.enrol("n2").await;
    let mut session = old.dial().await.unwrap();
    let mut hello = old.hello(None);
    hello.features.clear();
    session.send(agent_frame::Body::Hello(hello)).await;
    session.welcome().await;
    let channel = channel(&running).await;
    let refused = Exec::open(channel, Open { node_id: "n2".into(), ..exec_of(INSTANCE) }).await;
    assert_eq!(refused.unwrap_err().problem().unwrap().code, "agent_too_old");
}

#[tokio::test]
async fn a_caller_sends_frames_of_a_caller_and_begins_with_a_header_of_a_known_kind() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut client = GuestsClient::new(channel(&running).await);
    let refused = |frames: Vec<Frame>| {
        let mut client = client.clone();
        async move {
            let refused = client.open(futures::stream::iter(frames)).await.unwrap_err();
            mvm_client::problem_of(&refused).unwrap()
        }
    };
    assert_eq!(refused(Vec::new()).await.code, "bad_request");
    assert_eq!(refused(vec![framed(frame::Body::Exit(wire::Exit::default()))]).await.code, "bad_request");
    let unknown = Open { kind: "fly".into(), ..exec_of(INSTANCE) };
    assert!(refused(vec![framed(frame::Body::Open(unknown))]).await.detail.contains("\"fly\""));
    let away = Open { node_id: "n9".into(), ..exec_of(INSTANCE) };
    assert_eq!(refused(vec![framed(frame::Body::Open(away))]).await.code, "node_unknown");
    assert_eq!(
        refused(vec![framed(frame::Body::Open(exec_of("i-000000ff")))]).await.code,
        "unknown_instance"
    );

    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let (frames, outgoing) = tokio::sync::mpsc::channel(4);
    frames.send(framed(frame::Body::Open(exec_of(INSTANCE)))).await.unwrap();
    frames.send(framed(frame::Body::Exit(wire::Exit::default()))).await.unwrap();
    let calling =
        tokio::spawn(async move { client.open(tokio_stream::wrappers::ReceiverStream::new(outgoing)).await });
    // The stream may be gone before it is looked at.
    let _tunnel = session.open_tunnel(&node).await;
    let mut answers = soon("the call", calling).await.unwrap().unwrap().into_inner();
    match soon("an answer", answers.message()).await.unwrap().unwrap().body {
        Some(frame::Body::Ended(ended)) => {
            let problem: mvm_proto::Problem = serde_json::from_slice(&ended.problem).unwrap();
            assert_eq!(problem.code, "bad_request");
        }
        other => panic!("{other:?}"),
    }
}
