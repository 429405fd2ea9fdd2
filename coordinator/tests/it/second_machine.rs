//! Two machines with the certificate of one node: the second is refused and both are shown; an agent that comes back is not.

use mvm_proto::Problem;
use mvm_proto::wire::control::v1::{GetNodeRequest, Node as NodeMessage, RemoveNodeRequest};
use mvm_proto::wire::session::v1::{AgentStart, Goodbye, Reply, agent_frame, coordinator_frame, request};

use crate::objects::field;
use crate::rest::Rest;
use crate::support::{Node, Running, Session, new_cluster, soon, wait_until};

fn start(id: &str, data_dir: &str, number: u64) -> Option<AgentStart> {
    Some(AgentStart { id: id.to_owned(), data_dir: data_dir.to_owned(), number })
}

/// A session of a process that says this of itself, before its welcome.
async fn dial(node: &Node, hostname: &str, boot: &str, start: Option<AgentStart>) -> Session {
    let mut hello = node.hello(None);
    let info = hello.info.as_mut().unwrap();
    (info.hostname, info.boot_id) = (hostname.to_owned(), boot.to_owned());
    hello.start = start;
    let mut session = node.dial().await.unwrap();
    session.send(agent_frame::Body::Hello(hello)).await;
    session
}

async fn welcomed(node: &Node, hostname: &str, boot: &str, start: Option<AgentStart>) -> Session {
    let mut session = dial(node, hostname, boot, start).await;
    session.welcome().await;
    session
}

/// Answers questions whether it is there, as an agent does, until the other session got its goodbye.
async fn refused_beside(first: &mut Session, second: &mut Session, knows_ping: bool) -> Goodbye {
    let answering = async {
        loop {
            if let Some(coordinator_frame::Body::Request(asked)) = first.next().await {
                assert!(matches!(asked.ask, Some(request::Ask::Ping(_))), "{asked:?}");
                let problem = Problem::new(501, "unknown_request", "unknown", "");
                let problem = if knows_ping { Vec::new() } else { serde_json::to_vec(&problem).unwrap() };
                first.send(agent_frame::Body::Reply(Reply { id: asked.id, problem, answer: None })).await;
            }
        }
    };
    tokio::select! {
        () = answering => unreachable!("it answers for ever"),
        goodbye = second.end() => goodbye.expect("a goodbye"),
    }
}

async fn get(running: &Running) -> NodeMessage {
    running.operator().await.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap().into_inner()
}

#[tokio::test]
async fn a_second_machine_with_the_same_certificate_is_refused_and_both_are_shown() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut first = welcomed(&node, "host-a", "b1", start("p1", "d1", 1)).await;
    let mut second = dial(&node, "host-b", "b2", start("p2", "d2", 7)).await;
    let goodbye = refused_beside(&mut first, &mut second, true).await;
    assert!(goodbye.redial);
    for told in ["host-a at 127.0.0.1", "host-b at 127.0.0.1", "mvm node remove n1"] {
        assert!(goodbye.reason.contains(told), "{}", goodbye.reason);
    }
    first.expect_quiet().await;

    let shown = get(&running).await;
    assert_eq!((shown.connected, shown.second_hostname.as_str()), (true, "host-b"));
    assert!(shown.second_address.starts_with("127.0.0.1:"), "{shown:?}");
    assert_eq!(shown.info.unwrap().hostname, "host-a");
    assert_eq!(shown.events.iter().filter(|event| event.kind == "SecondMachine").count(), 1);
    wait_until("the condition", async || {
        let conditions =
            field(&mut Rest::operator(&running).await, "/v1/nodes/n1", "/status/conditions").await;
        conditions.as_array().is_some_and(|all| {
            let told = all.iter().find(|condition| condition["type"] == "SingleMachine");
            told.is_some_and(|it| {
                let text = it["message"].as_str().unwrap_or_default();
                it["status"] == "False" && text.contains("host-a") && text.contains("host-b")
            })
        })
    })
    .await;
}

#[tokio::test]
async fn an_older_agent_that_does_not_know_the_question_is_there_all_the_same() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut first = welcomed(&node, "host-a", "b1", None).await;
    let mut second = dial(&node, "host-b", "b2", None).await;
    assert!(refused_beside(&mut first, &mut second, false).await.reason.contains("two machines"));
    first.expect_quiet().await;
}

#[tokio::test]
async fn an_agent_that_comes_back_takes_its_place_at_once() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut older = welcomed(&node, "host-a", "b1", start("p1", "d1", 1)).await;
    // The network changed; then the agent was restarted. The older sessions answer nothing.
    for (id, number) in [("p1", 1), ("p2", 2)] {
        let begun = std::time::Instant::now();
        let mut newer = welcomed(&node, "host-a", "b1", start(id, "d1", number)).await;
        assert!(begun.elapsed() < std::time::Duration::from_secs(3), "it was not asked for");
        assert!(older.end().await.is_none());
        newer.expect_quiet().await;
        older = newer;
    }
    assert_eq!(get(&running).await.second_address, "");
}

#[tokio::test]
async fn a_session_that_does_not_answer_gives_way_to_another_machine() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut silent = welcomed(&node, "host-a", "b1", start("p1", "d1", 4)).await;
    // The machine was rebooted, and its session is not known to be over yet.
    let mut rebooted = welcomed(&node, "host-a", "b2", start("p2", "d1", 5)).await;
    while silent.next().await.is_some() {}
    rebooted.expect_quiet().await;
}

/// The hard case: both have the same data directory, and the copy was started more often.
#[tokio::test]
async fn a_copy_of_a_data_directory_on_another_machine_is_refused_while_the_first_is_there() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut first = welcomed(&node, "host-a", "b1", start("p1", "d1", 4)).await;
    for number in [3, 4, 9] {
        let mut copy = dial(&node, "host-a", "b2", start("p2", "d1", number)).await;
        assert!(refused_beside(&mut first, &mut copy, true).await.redial);
    }
    first.expect_quiet().await;
}

#[tokio::test]
async fn removing_the_node_and_enrolling_it_anew_ends_a_dispute_for_good() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let right = running.enrol("n1").await;
    // The thief was first: the right machine is kept out.
    let mut thief = welcomed(&right, "thief", "b2", start("p2", "d2", u64::MAX)).await;
    let mut session = dial(&right, "host-a", "b1", start("p1", "d1", 1)).await;
    assert!(refused_beside(&mut thief, &mut session, true).await.redial);

    running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    soon("the thief's end", thief.end()).await;
    let enrolled = running.enrol("n1").await;
    let mut session = welcomed(&enrolled, "host-a", "b1", start("p1", "d1", 1)).await;
    let mut thief = dial(&right, "thief", "b2", start("p2", "d2", u64::MAX)).await;
    assert!(!thief.end().await.unwrap().redial, "its certificate is refused by name");
    session.expect_quiet().await;
    assert_eq!(get(&running).await.second_address, "");
}
