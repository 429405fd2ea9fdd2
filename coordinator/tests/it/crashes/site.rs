//! A coordinator that is ended and started again, its two nodes, and what they had before.

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::thread::JoinHandle;

use futures::FutureExt as _;
use mvm_coordinator::CrashPoints;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::checks::{self, Stored};
use super::node::FakeNode;
use super::{At, Case, Operation, Round};
use crate::rest::Rest;
use crate::support::{Running, new_cluster, soon, wait_until};

pub(super) fn tenant() -> Value {
    json!({ "spec": { "quotas": {
        "max_pools": 1000, "max_vcpus": 1000, "max_mem_mib": 1_000_000, "max_running": 1000
    } } })
}

pub(super) fn pool(running: u32) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "counts": { "running": running },
    } })
}

pub(super) fn secret(value: &str) -> Value {
    json!({ "spec": { "data": { "VALUE": value } } })
}

/// The same of another revision.
pub(super) fn larger_pool(running: u32) -> Value {
    let mut pool = pool(running);
    pool["spec"]["resources"]["mem_mib"] = json!(LARGER_MIB);
    pool
}

pub(super) const LARGER_MIB: u64 = 96;

/// A coordinator on a thread and a runtime of its own: dropping the runtime ends it as a kill does.
struct Victim {
    running: Running,
    kill: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

pub(super) struct Site {
    dir: TempDir,
    data_dir: std::path::PathBuf,
    pub(super) points: CrashPoints,
    victim: Option<Victim>,
    nodes: Vec<FakeNode>,
}

impl Site {
    /// A coordinator, two nodes, and the tenant `acme`.
    pub(super) async fn start() -> Self {
        let (dir, report) = new_cluster();
        let data_dir = report.data_dir.clone();
        let mut site =
            Self { dir, data_dir, points: CrashPoints::default(), victim: None, nodes: Vec::new() };
        site.restart(0).await;
        let [a, b] = [site.running().enrol("a").await, site.running().enrol("b").await];
        site.nodes = vec![FakeNode::start_older(a), FakeNode::start(b)];
        site.have_tenant("acme").await;
        site.wait_at_rest().await;
        site
    }

    pub(super) fn running(&self) -> &Running {
        &self.victim.as_ref().expect("a coordinator runs").running
    }

    /// Starts a coordinator, which is ended at the `nth` step of its start; 0: at none. It is started again then.
    async fn restart(&mut self, nth: u32) {
        let mut nth = nth;
        loop {
            self.points.arm(nth);
            let (data_dir, points) = (self.data_dir.clone(), self.points.clone());
            let (started, start) = oneshot::channel();
            let (kill, killed) = oneshot::channel::<()>();
            let thread = std::thread::spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let life = async {
                        let running =
                            Running::start_with(&data_dir, |settings| settings.crash = points.clone()).await;
                        let _ = started.send(running);
                        killed.await.ok();
                    };
                    tokio::select! {
                        () = life => {}
                        _ = points.hit() => {}
                    }
                });
            });
            match soon("the coordinator", start).await {
                Ok(running) => {
                    let address = running.addresses.quic;
                    self.victim = Some(Victim { running, kill, thread });
                    self.nodes.iter().for_each(|node| node.follow(Some(address)));
                }
                Err(_) => join(thread).await,
            }
            if nth == 0 {
                return;
            }
            // Its steps go on once the nodes are back.
            if self.victim.is_some() {
                tokio::select! {
                    _ = self.points.hit() => {}
                    () = self.wait_at_rest() => {}
                }
                if self.points.disarm().is_none() {
                    return;
                }
                self.end().await;
            }
            nth = 0;
        }
    }

    /// Ends the coordinator as a kill does.
    async fn end(&mut self) {
        self.nodes.iter().for_each(|node| node.follow(None));
        if let Some(Victim { kill, thread, .. }) = self.victim.take() {
            let _ = kill.send(());
            join(thread).await;
        }
    }

    pub(super) async fn have_tenant(&self, name: &str) {
        let made = Rest::operator(self.running()).await.put(&format!("/v1/tenants/{name}"), &tenant()).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }

    /// A pool with this many running instances.
    pub(super) async fn have(&self, tenant: &str, name: &str, running: u32) {
        self.have_object(&format!("/v1/tenants/{tenant}/pools/{name}"), &pool(running)).await;
    }

    pub(super) async fn have_secret(&self, path: &str, value: &str) {
        self.have_object(path, &secret(value)).await;
    }

    pub(super) async fn have_object(&self, path: &str, object: &Value) {
        let made = Rest::operator(self.running()).await.put(path, object).await;
        assert_eq!(made.status, 201, "{}", made.body);
    }

    /// Whether each node that runs the pool was given this value of a Secret, and some node runs it.
    pub(super) fn is_given(&self, pool: &str, secret: &str, value: &str) -> bool {
        let given: Vec<bool> =
            self.nodes.iter().filter_map(|node| node.heard.lock().is_given(pool, secret, value)).collect();
        !given.is_empty() && given.iter().all(|given| *given)
    }

    /// Waits until what is declared is placed, and the nodes have it.
    pub(super) async fn wait_at_rest(&self) {
        wait_until("the nodes to have what is declared", async || {
            self.stored().await.is_some_and(|stored| checks::is_at_rest(&stored, &self.nodes))
        })
        .await;
    }

    /// What is durable now: of a copy of the store's files, as a power cut would leave them. None while it is being written.
    async fn stored(&self) -> Option<Stored> {
        let copy = TempDir::new_in(self.dir.path()).unwrap();
        copy_files(&self.data_dir.join("store"), copy.path()).ok()?;
        Stored::read(copy.path()).await
    }

    /// Whether the status of node `a` has what it said last.
    pub(super) async fn told_of_the_node(&self, number: u32) -> bool {
        let shown = Rest::operator(self.running()).await.get("/v1/nodes/a").await.body;
        let conditions = shown["status"]["conditions"].as_array().cloned().unwrap_or_default();
        conditions.iter().any(|condition| condition["message"] == format!("said {number}"))
    }

    /// Asks for the operation and ends the coordinator `at` a step; the step's name, or none where the operation was done
    /// before it.
    pub(super) async fn end_at(&mut self, case: &Case, at: &At, round: Round) -> Option<String> {
        let before = self.stored_soon().await;
        match at {
            At::Nth(step) => self.points.arm(*step),
            At::Named(name) => self.points.arm_named(name),
        }
        if case.operation == Operation::Status {
            self.nodes[0].say(&format!("said {}", case.number));
        }
        let asked = {
            let site = &*self;
            let mut acknowledged = false;
            let working = async {
                acknowledged = case.ask(site.running()).await;
                assert!(acknowledged, "{case:?} was refused");
                wait_until("the operation to be done", async || case.is_done(site).await).await;
                site.wait_at_rest().await;
            };
            let worked = tokio::select! {
                biased;
                _ = site.points.hit() => Ok(()),
                worked = AssertUnwindSafe(working).catch_unwind() => worked,
            };
            match (site.points.disarm(), worked) {
                (Some(name), _) => Some((name, acknowledged)),
                (None, Ok(())) => None,
                // It was not because its coordinator had ended.
                (None, Err(panic)) => std::panic::resume_unwind(panic),
            }
        };
        let Some((name, acknowledged)) = asked else {
            checks::done_once(case, &before, &self.stored_soon().await);
            return None;
        };
        self.end().await;
        let left = self.stored_soon().await;
        checks::whole(&left);
        checks::done_or_not(case, &before, &left, acknowledged);
        self.restart(if round == Round::EndedTwice { 1 + case.number % 7 } else { 0 }).await;
        if round != Round::Repeated {
            self.wait_at_rest().await;
            checks::done_or_not(case, &before, &self.stored_soon().await, acknowledged);
        }
        wait_until("the operation to be acknowledged", async || case.ask(self.running()).await).await;
        wait_until("the operation to be done", async || self.is_done_again(case).await).await;
        self.wait_at_rest().await;
        let after = self.stored_soon().await;
        checks::done_once(case, &before, &after);
        checks::told_once(case, &before, &after, self.running()).await;
        Some(name)
    }

    /// What was said of a node is told by whichever coordinator runs; all else as in [`Case::is_done`].
    async fn is_done_again(&self, case: &Case) -> bool {
        match case.operation {
            Operation::Status => self.told_of_the_node(case.number).await,
            _ => case.is_done(self).await,
        }
    }

    async fn stored_soon(&self) -> Stored {
        let mut look = tokio::time::interval(std::time::Duration::from_millis(10));
        let read = async {
            loop {
                look.tick().await;
                if let Some(stored) = self.stored().await {
                    return stored;
                }
            }
        };
        soon("a copy of the store", read).await
    }
}

async fn join(thread: JoinHandle<()>) {
    tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
}

fn copy_files(from: &Path, to: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}
