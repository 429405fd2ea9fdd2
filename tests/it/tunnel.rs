//! Programs in guests through the coordinator: real coordinators and agents, with scripted guests and with microVMs.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, Stdio};

use std::time::Duration;

use mvm_client::{Exec, ExecEvent};
use mvm_needs::{Need, can_run};
use mvm_proto::wire::tunnel::v1::{self as wire, Open};
use mvm_tests::{Cluster, PATIENCE, path_text, small_pool, wait_for, wait_until};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");

/// A node with two running instances, and the first of them as `tenant/pool/instance`.
fn cluster() -> (Cluster, String) {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", EXAMPLE, "--node", "node-a"]);
    let listed = cluster.mvm_json(&["instance", "list"]);
    let text = |key: &str| listed[0][key].as_str().expect("a text").to_owned();
    let name = format!("{}/{}/{}", text("tenant_id"), text("pool_id"), text("instance_id"));
    (cluster, name)
}

/// `mvm exec` with pipes to its standard input and from its output.
struct Running {
    child: Child,
    output: BufReader<std::process::ChildStdout>,
}

impl Running {
    fn start(cluster: &Cluster, args: &[&str]) -> Self {
        let mut command = cluster.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("mvm runs");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, output }
    }

    fn say(&mut self, text: &str) {
        self.child.stdin.as_mut().expect("a pipe").write_all(text.as_bytes()).expect("it listens");
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line
    }

    /// Closes its input and waits for its end: its exit code, the rest of its output, and what it said beside it.
    fn end(mut self) -> (Option<i32>, String, String) {
        drop(self.child.stdin.take());
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).expect("text");
        let mut said = String::new();
        self.child.stderr.take().expect("a pipe").read_to_string(&mut said).expect("text");
        (self.child.wait().expect("an end").code(), rest, said)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_command_runs_wherever_its_instance_is_and_its_end_is_this_ones_end() {
    let (cluster, name) = cluster();
    let (pool, id) = name.rsplit_once('/').expect("a name");
    for target in [name.as_str(), pool, id] {
        assert_eq!(cluster.mvm_ok(&["exec", target, "--", "echo", "hello"]), "hello\n");
    }
    assert_eq!(cluster.mvm_ok(&["instance", "exec", &name, "--", "echo", "both", "names"]), "both names\n");
    assert_eq!(cluster.mvm(&["exec", &name, "--", "false"]).status.code(), Some(1));
    assert_eq!(cluster.mvm(&["exec", &name, "--", "true"]).status.code(), Some(0));
    let told = cluster.mvm_fails(&["exec", &name, "--", "nonsense"], 1);
    assert!(told.contains("guest_refused") || told.contains("nonsense"), "{told}");

    let told = cluster.mvm_fails(&["exec", "i-00000000", "--", "true"], 1);
    assert!(told.contains("there is no instance i-00000000") && told.contains("mvm instance list"), "{told}");
    let told = cluster.mvm_fails(&["exec", "nobody/nothing", "--", "true"], 1);
    assert!(told.contains("no instance"), "{told}");
    let told = cluster.mvm_fails(&["exec", &name, "--attach", "x-00000000000000ff"], 1);
    assert!(told.contains("x-00000000000000ff"), "{told}");

    // A sleeping instance is woken; what is done is in both audit logs, without its arguments.
    cluster.mvm_ok(&["instance", "sleep", &name]);
    assert_eq!(cluster.mvm_ok(&["exec", &name, "--", "echo", "awake"]), "awake\n");
    let log = std::fs::read_to_string(cluster.agent_dir("node-a").join("tenants/acme/audit.log"));
    let log = log.expect("an audit log");
    assert!(log.contains("operator/") && log.contains("\\\"echo\\\"") && !log.contains("both"), "{log}");
}

#[test]
fn input_of_any_size_passes_through_and_a_slow_reader_loses_nothing() {
    let (cluster, name) = cluster();
    let mut cat = Running::start(&cluster, &["exec", "-i", &name, "--", "cat"]);
    let (lines, width) = (20_000, 300);
    let mut stdin = cat.child.stdin.take().expect("a pipe");
    let writer = std::thread::spawn(move || {
        for number in 0..lines {
            writeln!(stdin, "{number:0width$}").expect("it listens");
        }
    });
    for number in 0..lines {
        let heard = cat.hear();
        if heard != format!("{number:0width$}\n") {
            panic!("line {number} ends after {} bytes: {:?}", heard.len(), cat.end());
        }
    }
    writer.join().expect("all was written");
    assert_eq!(cat.end(), (Some(0), String::new(), String::new()));

    let bytes = 20_000_000;
    let mut flood = Running::start(&cluster, &["exec", &name, "--", "flood", &bytes.to_string()]);
    for line in 0..bytes / 16 {
        assert_eq!(flood.hear(), format!("{line:015}\n"));
    }
    assert_eq!(flood.end().0, Some(0));
}

#[test]
fn a_command_goes_on_over_the_end_of_its_coordinator_and_of_its_caller() {
    let (mut cluster, name) = cluster();
    let mut cat = Running::start(&cluster, &["exec", "-i", &name, "--", "cat"]);
    cat.say("one\n");
    assert_eq!(cat.hear(), "one\n");
    for round in ["two\n", "three\n"] {
        cluster.kill_coordinator();
        // Said to nobody, and not lost.
        cat.say(round);
        cluster.start_coordinator();
        assert_eq!(cat.hear(), round);
    }
    let (code, rest, said) = cat.end();
    assert_eq!((code, rest.as_str()), (Some(0), ""), "{said}");
    assert!(said.contains("attaching again"), "{said}");
}

#[test]
fn an_interrupted_command_is_ended_in_its_guest_and_a_killed_caller_leaves_it_running() {
    let (cluster, name) = cluster();
    let audited = |text: &str| {
        let log = std::fs::read_to_string(cluster.agent_dir("node-a").join("tenants/acme/audit.log"));
        log.unwrap_or_default().contains(text)
    };
    let sleep = Running::start(&cluster, &["exec", &name, "--", "sleep", "1000"]);
    wait_until("it to begin", PATIENCE, || audited("\\\"sleep\\\" with 1 argument"));
    let pid = i32::try_from(sleep.child.id()).expect("a pid");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGINT).expect("sent");
    assert_eq!(sleep.end().0, Some(130));
    wait_until("its end to be known", PATIENCE, || audited("ended: it was cancelled"));

    let mut cat = Running::start(&cluster, &["exec", "-i", &name, "--", "cat"]);
    cat.say("here\n");
    assert_eq!(cat.hear(), "here\n");
    cat.child.kill().expect("it is killed");
    drop(cat);
    // Nothing says that it ended: only the next stream, or an hour, does.
    assert_eq!(cluster.mvm_ok(&["exec", &name, "--", "echo", "still"]), "still\n");
    let log = std::fs::read_to_string(cluster.agent_dir("node-a").join("tenants/acme/audit.log"));
    let ends = log.expect("an audit log").matches("\\\"cat\\\" with 0 argument").count();
    assert_eq!(ends, 1, "its begin alone is in the log");
}

#[test]
fn a_removed_node_loses_its_tunnel_at_once() {
    let (cluster, name) = cluster();
    let mut cat = Running::start(&cluster, &["exec", "-i", &name, "--", "cat"]);
    cat.say("here\n");
    assert_eq!(cat.hear(), "here\n");
    cluster.mvm_ok(&["node", "remove", "node-a"]);
    let (code, _, said) = cat.end();
    assert_ne!(code, Some(0), "{said}");
    assert!(said.contains("node-a"), "{said}");
}

/// A boot on emulation, on a machine that others use.
const LONG: Duration = Duration::from_secs(120);

/// Programs in each of two guests, which take 64 each; and in one connection of the operator's, which takes as many calls.
const PROGRAMS: usize = 50;

/// Output of a guest in `make test`; `make soak` has it flood more.
const FLOOD_MIB: u64 = 256;
/// What coordinator and agent together may grow by meanwhile, whatever passes through.
const FLOOD_HELD_BYTES: u64 = 24 << 20;

fn runtime() -> tokio::runtime::Runtime {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    builder.worker_threads(1).enable_all().build().expect("a runtime")
}

fn open(target: [&str; 3], command: &[&str], stdin: bool) -> Open {
    let [tenant, pool, instance] = target.map(str::to_owned);
    let command = command.iter().map(|word| (*word).to_owned()).collect();
    Open {
        kind: "exec".to_owned(),
        tenant_id: tenant,
        pool_id: pool,
        instance_id: instance,
        may_wake: true,
        is_activity: true,
        exec: Some(wire::Exec { command, stdin, ..wire::Exec::default() }),
        ..Open::default()
    }
}

/// A program that is followed, and all that it said.
struct Followed {
    exec: Exec,
    said: String,
}

impl Followed {
    async fn until(&mut self, wanted: &str) {
        while !self.said.contains(wanted) {
            match self.exec.next().await {
                Ok(ExecEvent::Output { data, lost, .. }) => {
                    assert_eq!(lost, 0, "nothing is lost");
                    self.said.push_str(std::str::from_utf8(&data).expect("text"));
                }
                Ok(ExecEvent::Exit(exit)) => panic!("it ended with {exit:?} and said {:?}", self.said),
                Ok(ExecEvent::Opened(_) | ExecEvent::Resuming) => {}
                Err(error) => panic!("{error:?} after {:?}", self.said),
            }
        }
    }
}

#[test]
fn a_hundred_commands_in_real_guests_go_on_over_the_end_of_their_agent() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut cluster = Cluster::start();
    cluster.join_with_microvms("node-a");
    let pool = cluster.file("pool.json", &small_pool(2, 0, 0).to_string());
    cluster.mvm_ok(&["push", "-f", path_text(&pool), "--node", "node-a", "--timeout", "2m"]);
    let guests = wait_for("two guests to run", LONG, || {
        let listed = cluster.mvm_json(&["instance", "list"]);
        let running = listed.as_array()?.iter().filter(|one| one["phase"] == "running");
        let ids: Vec<String> =
            running.filter_map(|one| one["instance_id"].as_str().map(str::to_owned)).collect();
        (ids.len() == 2).then_some(ids)
    });
    let whole = |id: &str| format!("acme/workers/{id}");
    assert!(cluster.mvm_ok(&["exec", &whole(&guests[0]), "--", "uname", "-a"]).starts_with("Linux "));

    // A guest that floods output: all of it comes, in order.
    let lines = 50_000;
    let script = format!("i=0; while [ $i -lt {lines} ]; do echo line $i; i=$((i+1)); done");
    let mut flood = Running::start(&cluster, &["exec", &whole(&guests[0]), "--", "sh", "-c", &script]);
    for line in 0..lines {
        assert_eq!(flood.hear(), format!("line {line}\n"));
    }
    assert_eq!(flood.end().0, Some(0));

    let runtime = runtime();
    let script = "i=0; while read -r line; do echo $i $line; i=$((i+1)); done";
    let mut running = runtime.block_on(async {
        let mut running = Vec::new();
        for guest in &guests {
            let channel = cluster.channel().await;
            let target = ["acme", "workers", guest];
            for _ in 0..PROGRAMS {
                let exec = Exec::open(channel.clone(), open(target, &["sh", "-c", script], true)).await;
                running.push(Followed { exec: exec.expect("it is begun"), said: String::new() });
            }
        }
        for (at, one) in running.iter_mut().enumerate() {
            assert!(one.exec.input().write(format!("first {at}\n").into()).await);
            one.until(&format!("0 first {at}\n")).await;
        }
        running
    });
    cluster.kill_agent("node-a");
    runtime.block_on(async {
        for (at, one) in running.iter().enumerate() {
            assert!(one.exec.input().write(format!("second {at}\n").into()).await);
        }
    });
    cluster.start_with_microvms("node-a");
    runtime.block_on(async {
        for (at, one) in running.iter_mut().enumerate() {
            one.until(&format!("1 second {at}\n")).await;
            assert_eq!(one.said, format!("0 first {at}\n1 second {at}\n"), "each once");
            one.exec.input().close().await;
        }
        for one in &mut running {
            let end = loop {
                match one.exec.next().await {
                    Ok(ExecEvent::Exit(exit)) => break exit.code,
                    Ok(_) => {}
                    Err(error) => panic!("{error:?}"),
                }
            };
            assert_eq!(end, 0);
        }
    });
}

#[test]
fn output_without_end_passes_in_constant_memory_while_documents_go_their_way() {
    let (mut cluster, name) = cluster();
    cluster.join("node-b");
    let held = |cluster: &Cluster| {
        let coordinator = cluster.coordinator.as_ref().expect("it runs").resident_bytes();
        coordinator + cluster.agents["node-a"].process.resident_bytes()
    };
    let mib = std::env::var("MVM_FLOOD_MIB").ok().and_then(|mib| mib.parse().ok()).unwrap_or(FLOOD_MIB);
    let [tenant, pool, instance] = name.split('/').collect::<Vec<_>>()[..] else { panic!("{name}") };
    let target = [tenant, pool, instance];
    let runtime = runtime();
    let channel = runtime.block_on(cluster.channel());
    let begin = |mib: u64| {
        let bytes = (mib << 20).to_string();
        runtime.block_on(Exec::open(channel.clone(), open(target, &["flood", &bytes], false))).expect("begun")
    };
    let read = |mut exec: Exec| async move {
        let mut bytes = 0;
        loop {
            match exec.next().await.expect("it goes on") {
                ExecEvent::Output { data, lost, .. } => {
                    assert_eq!(lost, 0);
                    bytes += data.len() as u64;
                }
                ExecEvent::Exit(exit) => return (bytes, exit.code),
                ExecEvent::Opened(_) | ExecEvent::Resuming => {}
            }
        }
    };
    // Every buffer and cache has its size after this.
    assert_eq!(runtime.block_on(read(begin(16))), (16 << 20, 0));
    let before = held(&cluster);
    let reading = runtime.spawn(read(begin(mib)));
    let (mut most, mut pushed) = (before, 0);
    while !reading.is_finished() {
        cluster.mvm_ok(&["push", "-f", EXAMPLE, "--node", "node-b"]);
        pushed += usize::from(!reading.is_finished());
        most = most.max(held(&cluster));
    }
    assert_eq!(runtime.block_on(reading).expect("it is read"), (mib << 20, 0));
    assert!(pushed > 0, "documents arrive while it flows");
    let grown = most - before;
    assert!(grown < FLOOD_HELD_BYTES, "{grown} bytes more while {mib} MiB passed");
}

#[test]
fn a_command_is_attached_to_by_its_id_and_takes_input_from_where_the_last_caller_was() {
    let (cluster, name) = cluster();
    let [tenant, pool, instance] = name.split('/').collect::<Vec<_>>()[..] else { panic!("{name}") };
    let runtime = runtime();
    let id = runtime.block_on(async {
        let opened =
            Exec::open(cluster.channel().await, open([tenant, pool, instance], &["cat"], true)).await;
        let mut one = Followed { exec: opened.expect("it is begun"), said: String::new() };
        assert!(one.exec.input().write("one\n".into()).await);
        one.until("one\n").await;
        one.exec.id().to_owned()
    });
    let args = ["exec", "-i", &name, "--attach", &id, "--output-from", "4"];
    let mut cat = Running::start(&cluster, &args);
    cat.say("two\n");
    assert_eq!(cat.hear(), "two\n");
    assert_eq!(cat.end(), (Some(0), String::new(), String::new()));
}
