//! Streams to guests, relayed to scripted nodes: who may open them, which node they go to, and how they end.

use mvm_client::{Channel, Exec, ExecEvent, StreamError, open};
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
use serde_json::json;
use std::net::SocketAddr;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Endpoint;

use crate::keys::key;
use crate::objects::{acme, tenant};
use crate::rest::Rest;
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
            Ok::<_, StreamError>(())
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

#[tokio::test]
async fn a_tunnel_that_is_cut_is_opened_again_and_the_program_is_gone_on_with_where_it_was() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let mut exec = {
        let channel = channel(&running).await;
        tokio::spawn(async move { Exec::open(channel, exec_of(INSTANCE)).await.unwrap() })
    };
    let first = session.open_tunnel(&node).await;
    let (mut stream, open) = accept(&first).await;
    let begun = open.exec.clone().expect("an exec").exec_id;
    opened(&mut stream, &open).await;
    let output = Output { data: "hello".into(), ..Output::default() };
    stream.frames_out.send(&framed(frame::Body::Output(output))).await.unwrap();
    let mut exec = soon("it", &mut exec).await.unwrap();
    assert!(matches!(soon("it", exec.next()).await, Ok(ExecEvent::Opened(_))));
    assert!(matches!(soon("its output", exec.next()).await, Ok(ExecEvent::Output { .. })));
    // The size of the terminal changes and a signal is sent while there is no tunnel.
    first.close(close_code::DONE, "cut");
    assert!(matches!(soon("the loss", exec.next()).await, Ok(ExecEvent::Resuming)));
    let input = exec.input();
    input.resize(50, 120);
    input.signal(2);
    let following = tokio::spawn(async move {
        loop {
            if let ExecEvent::Exit(exit) = exec.next().await? {
                return Ok::<_, StreamError>((exec.output_from(), exit.code));
            }
        }
    });
    let second = session.open_tunnel(&node).await;
    let (mut stream, open) = accept(&second).await;
    let attach = open.attach.clone().expect("it is attached to");
    assert_eq!((attach.exec_id, attach.output_from, open.exec), (begun, 5, None));
    let mut told = Vec::new();
    while told.len() < 2 {
        told.extend(soon("a frame", stream.frames_in.recv()).await.unwrap().unwrap().body);
    }
    assert!(
        matches!(&told[..], [frame::Body::Resize(size), frame::Body::Signal(signal)]
            if (size.rows, size.cols, signal.number) == (50, 120, 2)),
        "{told:?}"
    );
    // Told again from before where it was: what the caller has is not given out twice.
    let output = Output { offset: 3, data: "lo!".into(), ..Output::default() };
    stream.frames_out.send(&framed(frame::Body::Output(output))).await.unwrap();
    stream.frames_out.send(&framed(frame::Body::Exit(wire::Exit::default()))).await.unwrap();
    assert_eq!(soon("the end", following).await.unwrap().unwrap(), (6, 0));
}

#[tokio::test]
async fn a_node_that_floods_one_stream_waits_for_its_reader_and_holds_up_no_other() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let shared = channel(&running).await;
    let begin = |shared: Channel| {
        tokio::spawn(async move {
            let open = Open { node_id: "n1".into(), ..exec_of(INSTANCE) };
            let mut exec = Exec::open(shared, open).await.unwrap();
            assert!(matches!(exec.next().await, Ok(ExecEvent::Opened(_))));
            exec
        })
    };
    let slow = begin(shared.clone());
    let tunnel = session.open_tunnel(&node).await;
    let (mut stream, open) = accept(&tunnel).await;
    opened(&mut stream, &open).await;
    // It is opened and never read again.
    let _slow = soon("it", slow).await.unwrap();
    let sent = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let flood = {
        let sent = std::sync::Arc::clone(&sent);
        tokio::spawn(async move {
            let data = bytes::Bytes::from(vec![b'x'; 100 * 1024]);
            for at in 0_u64.. {
                let output = Output { offset: at * 102_400, data: data.clone(), ..Output::default() };
                if stream.frames_out.send(&framed(frame::Body::Output(output))).await.is_err() {
                    return;
                }
                sent.fetch_add(data.len(), std::sync::atomic::Ordering::Relaxed);
            }
        })
    };
    for _ in 0..20 {
        let other = begin(shared.clone());
        let (mut stream, open) = accept(&tunnel).await;
        opened(&mut stream, &open).await;
        stream.frames_out.send(&framed(frame::Body::Exit(wire::Exit::default()))).await.unwrap();
        let mut other = soon("it", other).await.unwrap();
        assert!(matches!(soon("its end", other.next()).await, Ok(ExecEvent::Exit(_))));
    }
    let sent = sent.load(std::sync::atomic::Ordering::Relaxed);
    // The windows on the way, and the frames that wait.
    assert!(sent < 4 << 20, "{sent} bytes of a stream that nothing reads");
    assert!(!flood.is_finished(), "the stream stands still, and is not broken");
    flood.abort();
}

#[tokio::test]
async fn a_node_that_answers_out_of_turn_or_for_another_kind_loses_the_stream_alone() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let shared = channel(&running).await;
    let begin = |shared: Channel| {
        tokio::spawn(async move {
            let open = Open { node_id: "n1".into(), ..exec_of(INSTANCE) };
            let mut exec = Exec::open(shared, open).await.unwrap();
            loop {
                match exec.next().await {
                    Ok(ExecEvent::Exit(exit)) => return Ok(exit.code),
                    Ok(ExecEvent::Opened(opened)) => assert_eq!(opened.tenant_id, "acme", "as it was asked"),
                    Ok(_) => {}
                    Err(error) => return Err(error.problem().expect("a problem").code),
                }
            }
        })
    };
    let calling = begin(shared.clone());
    let tunnel = session.open_tunnel(&node).await;
    let (mut stream, open) = accept(&tunnel).await;
    // It says that it is another tenant's, then sends what only a console has.
    let lie = Open { tenant_id: "zeta".into(), ..open };
    opened(&mut stream, &lie).await;
    let log = wire::LogPiece { data: "log".into(), ..wire::LogPiece::default() };
    stream.frames_out.send(&framed(frame::Body::Log(log))).await.unwrap();
    assert_eq!(soon("its end", calling).await.unwrap(), Err("stream_broken".to_owned()));
    let calling = begin(shared);
    let (mut stream, open) = accept(&tunnel).await;
    opened(&mut stream, &open).await;
    let exit = wire::Exit { code: 4, ..wire::Exit::default() };
    stream.frames_out.send(&framed(frame::Body::Exit(exit))).await.unwrap();
    assert_eq!(soon("its end", calling).await.unwrap(), Ok(4));
}

/// What shows an API key with each call.
#[derive(Clone)]
struct Bearer(tonic::metadata::MetadataValue<tonic::metadata::Ascii>);

impl Interceptor for Bearer {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, tonic::Status> {
        request.metadata_mut().insert("authorization", self.0.clone());
        Ok(request)
    }
}

type Keyed = GuestsClient<InterceptedService<tonic::transport::Channel, Bearer>>;

/// A program's client of streams, with an API key and no certificate.
async fn keyed(running: &Running, key: &str) -> Keyed {
    let tls = mvm_pki::tls::client_config(None, &running.anchors(), coordinator(), &[b"h2"]).unwrap();
    let (connector, address) =
        (tokio_rustls::TlsConnector::from(std::sync::Arc::new(tls)), running.addresses.grpc);
    let connect = tower::service_fn(move |_: http::Uri| {
        let connector = connector.clone();
        async move {
            let tcp = tokio::net::TcpStream::connect(address).await?;
            let name = rustls::pki_types::ServerName::try_from("127.0.0.1").unwrap();
            connector.connect(name, tcp).await.map(hyper_util::rt::TokioIo::new)
        }
    });
    let channel = Endpoint::from_static("http://127.0.0.1").connect_with_connector(connect).await.unwrap();
    GuestsClient::with_interceptor(channel, Bearer(format!("Bearer {key}").parse().unwrap()))
}

#[tokio::test]
async fn a_key_reaches_its_own_tenant_as_its_role_says_and_all_else_looks_like_what_is_not_there() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    rest.put("/v1/tenants/zeta", &tenant()).await;
    let user = key(&mut rest, "user", &json!({ "role": "tenant-user", "tenant": "zeta" })).await;
    let viewer = key(&mut rest, "viewer", &json!({ "role": "viewer", "tenant": "zeta" })).await;
    let node = running.enrol("n1").await;
    let _session = node.connect(None).await;
    let (user, viewer) = (keyed(&running, &user).await, keyed(&running, &viewer).await);
    let refused = async |client: &Keyed, open: Open| {
        let frames = futures::stream::iter([framed(frame::Body::Open(open))]);
        let refused = soon("an answer", client.clone().open(frames)).await.unwrap_err();
        mvm_client::problem_of(&refused).unwrap()
    };
    let logs = |open: Open| Open { kind: "logs".into(), exec: None, logs: Some(Default::default()), ..open };
    let attach =
        |open: Open| Open { kind: "attach".into(), exec: None, attach: Some(Default::default()), ..open };
    let own = |open: Open| Open { tenant_id: "zeta".into(), ..open };
    // By kind: a viewer reads consoles and runs nothing.
    for open in [exec_of(INSTANCE), own(exec_of(INSTANCE)), attach(own(exec_of(INSTANCE)))] {
        assert_eq!(refused(&viewer, open).await.code, "forbidden");
    }
    assert_eq!(refused(&viewer, logs(own(exec_of(INSTANCE)))).await.code, "unknown_instance");
    // Another tenant's, one that is not there, a node that is there and one that is not: all the same.
    let mut told = Vec::new();
    for kind in [&(|open| open) as &dyn Fn(Open) -> Open, &logs, &attach] {
        for (tenant, node) in [("acme", ""), ("acme", "n1"), ("zeta", ""), ("zeta", "n1"), ("zeta", "n9")] {
            let open = Open { tenant_id: tenant.into(), node_id: node.into(), ..exec_of(INSTANCE) };
            let problem = refused(&user, kind(open)).await;
            told.push((problem.status, problem.code));
        }
    }
    told.dedup();
    assert_eq!(told, [(404, "unknown_instance".to_owned())]);
}

#[tokio::test]
async fn a_node_is_not_believed_to_have_what_it_was_not_given() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    acme(&mut Rest::operator(&running).await).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let channel = channel(&running).await;
    let calling = tokio::spawn(async move {
        // By its id alone, so that every node is asked.
        let open = Open { tenant_id: String::new(), pool_id: String::new(), ..exec_of(INSTANCE) };
        Exec::open(channel, open).await.unwrap_err().problem().unwrap().code
    });
    // It says that it has the instance, of a tenant of which it was given nothing.
    let answering = async {
        loop {
            session.asked_for_tunnel().await;
        }
    };
    tokio::select! {
        code = calling => assert_eq!(code.unwrap(), "unknown_instance"),
        () = answering => {}
    }
}

#[tokio::test]
async fn a_stream_ends_with_its_key_at_the_node_too_though_its_caller_reads_nothing() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let text = key(&mut rest, "ci", &json!({ "role": "operator" })).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let mut client = keyed(&running, &text).await;
    let (frames, outgoing) = tokio::sync::mpsc::channel(4);
    frames.send(framed(frame::Body::Open(exec_of(INSTANCE)))).await.unwrap();
    let calling =
        tokio::spawn(async move { client.open(tokio_stream::wrappers::ReceiverStream::new(outgoing)).await });
    let tunnel = session.open_tunnel(&node).await;
    let (mut stream, open) = accept(&tunnel).await;
    opened(&mut stream, &open).await;
    let _unread = soon("the call", calling).await.unwrap().unwrap();
    // It goes on to say things, and reads no answer.
    let input = wire::Input { data: "typed".into(), ..wire::Input::default() };
    frames.send(framed(frame::Body::Input(input.clone()))).await.unwrap();
    assert!(matches!(soon("input", stream.frames_in.recv()).await, Ok(Some(_))));
    rest.call("DELETE", "/v1/api-keys/ci", &[], None).await;
    let end = async { while let Ok(Some(_)) = stream.frames_in.recv().await {} };
    let revoked = std::time::Instant::now();
    soon("the stream's end at the node", end).await;
    assert!(revoked.elapsed() < std::time::Duration::from_secs(2), "{:?}", revoked.elapsed());
}
