//! Keeps this node in agreement with its desired state.
//!
//! One task owns the loop. It wakes on a new document, a change of trust, a trigger, the end of a step or of a VM, an image that was
//! built, a guest that has something to say, or a timer; it observes the node, asks the planner, hands the steps to the runner, then publishes [`NodeStatus`]. It never decides: every choice is
//! made in `mvm_planner::node`. A missed event costs at most one interval, for every pass looks at everything.

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::text::chain;
use mvm_proto::{Phase, Timestamp};
use mvm_vmm::{Driver, DriverError};
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::instance::record::Record;
use crate::node::CurrentDocument;
use crate::node::assemble::Node;
use crate::node::engine::{Found, tell_done};
use crate::node::handle::Pass;
use crate::node::pool_readiness::PoolReadiness;
use crate::node::removals;
use crate::node::status::{self, Facts};

/// While steps run, the next plan is made this soon after the last: one slow step does not hold up the others' next.
const REPLAN_AFTER: Duration = Duration::from_millis(100);

/// Guests that change their minds all the time are listened to this often.
const LISTEN_AFTER: Duration = Duration::from_secs(1);

/// When to look again after the driver could not say what lives.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// From a request that changed something to the pass that looks at what became of it: the caller may send more,
/// which comes first, and many requests are one pass.
const AFTER_REQUEST: Duration = Duration::from_millis(10);

/// How long steps under way may take when the agent ends; they are resolved at the next start otherwise.
const FINISH_WITHIN: Duration = Duration::from_secs(6);

/// Runs until `shutdown`. Steps that are under way are finished; instances are left as they are.
pub async fn reconcile_task(
    mut node: Node,
    mut desired: watch::Receiver<Option<Arc<CurrentDocument>>>,
    shutdown: CancellationToken,
) {
    let handle = node.handle.clone();
    let shared = &handle.shared;
    let mut exits = node.engine.driver.exits();
    let mut images = node.engine.executor.images.changed();
    let mut vouched = node.engine.executor.images.vouched();
    let mut guests = handle.guests().changed();
    let (clock, records) = (node.engine.clock.clone(), Arc::clone(handle.records()));
    loop {
        let current_document = desired.borrow_and_update().clone();
        shared.current_document.send_replace(current_document.clone());
        let begun = Instant::now();
        let found = node.engine.pass(current_document.as_ref()).await;
        let next = match &found {
            Ok(_) => next_pass(&node, current_document.as_deref()),
            Err(_) => clock.now() + LOOK_AGAIN.min(node.interval),
        };
        tell(&node, current_document.as_deref(), found, next);
        let (plans, took) = (node.engine.plans, begun.elapsed());
        shared.passes.send_modify(|pass| *pass = Pass { count: pass.count + 1, plans, took });

        let timer = tokio::time::sleep_until(begun + next.since(clock.now()).min(node.interval));
        tokio::pin!(timer);
        let wait = async {
            let mut source_gone = false;
            let mut builds = true;
            let mut vouches = true;
            loop {
                tokio::select! {
                    biased;
                    () = shutdown.cancelled() => return false,
                    changed = desired.changed(), if !source_gone => match changed {
                        Ok(()) => return true,
                        // The source of documents is gone; the last one stays in force.
                        Err(_) => source_gone = true,
                    },
                    () = shared.trigger.notified() => {
                        tokio::time::sleep(AFTER_REQUEST).await;
                        return true;
                    }
                    exit = exits.recv() => match exit {
                        // The step that holds its lease ended it, or sees that it ended.
                        Ok(exit) if records.is_leased(&exit.instance) => {}
                        // How it ended the pass hears itself, whatever it was woken by.
                        Ok(_) => return true,
                        Err(broadcast::error::RecvError::Lagged(_)) => return true,
                        // The driver never goes before this task.
                        Err(broadcast::error::RecvError::Closed) => return true,
                    },
                    changed = images.changed(), if builds => match changed {
                        Ok(()) => return true,
                        Err(_) => builds = false,
                    },
                    changed = vouched.changed(), if vouches => match changed {
                        Ok(()) => return true,
                        // The source of the cluster's trust is gone; the last statement stays valid.
                        Err(_) => vouches = false,
                    },
                    Ok(()) = guests.changed() => {
                        let soon = begun + LISTEN_AFTER;
                        if timer.deadline() > soon {
                            timer.as_mut().reset(soon);
                        }
                    }
                    Some(done) = node.engine.next_done() => {
                        tell_done(handle.events(), &done);
                        if node.engine.runner.is_idle() || begun.elapsed() >= REPLAN_AFTER {
                            return true;
                        }
                        // The others may take long; what this one made possible does not wait for them.
                        let soon = begun + REPLAN_AFTER;
                        if timer.deadline() > soon {
                            timer.as_mut().reset(soon);
                        }
                    }
                    () = &mut timer => return true,
                }
            }
        };
        if !wait.await {
            break;
        }
    }
    node.engine.runner.drop_waiting();
    node.engine.let_go();
    let finish = async {
        while let Some(done) = node.engine.next_done().await {
            tell_done(handle.events(), &done);
        }
        // Wakes and actions by hand are not the runner's, and are finished all the same.
        records.wait_idle().await;
    };
    if tokio::time::timeout(FINISH_WITHIN, finish).await.is_err() {
        tracing::warn!("steps were still running; the next start recovers them");
    }
    if let Err(error) = node.engine.executor.audit.flush().await {
        tracing::warn!(error = %chain(&error), "some actions are missing from the audit log");
    }
    records.close().await;
}

/// When the next pass is due if nothing happens before.
fn next_pass(node: &Node, current_document: Option<&CurrentDocument>) -> Timestamp {
    let now = node.engine.clock.now();
    let expiry =
        current_document.and_then(|current_document| current_document.expires_at).filter(|at| *at > now);
    [node.engine.next_deadline(), expiry, Some(now + node.interval)]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(now)
}

/// Publishes what a pass found.
fn tell(
    node: &Node,
    current_document: Option<&CurrentDocument>,
    found: Result<Found, DriverError>,
    next_reconcile_at: Timestamp,
) {
    let engine = &node.engine;
    let (found, driver_error) = match found {
        Ok(found) => (found, None),
        Err(error) => {
            tracing::error!(error = %chain(&error), "could not observe the node");
            (Found::default(), Some(chain(&error)))
        }
    };
    node.handle.shared.blocked.send_replace(engine.blocked().to_vec());
    let records = engine.records.all();
    let died = found.died.iter().map(|(id, reason)| (id, "InstanceFailed", reason));
    let workloads = found.workloads.iter().map(|(id, kind, message)| (id, *kind, message));
    for (id, kind, message) in died.chain(workloads) {
        let record = records.iter().find(|record| record.id == *id);
        let subject = record.map_or_else(|| id.to_string(), Record::full_name);
        node.handle.events().publish(kind, subject, message.as_str());
    }
    let observed = engine.records.observed();
    let now = engine.clock.now();
    let ready = PoolReadiness::of(&observed, &engine.records.templates(), engine.blocked(), now);
    let guests = node.handle.guests();
    let running = records.iter().filter(|record| record.phase == Phase::Running);
    let used =
        running.filter_map(|record| Some((record.id.clone(), guests.view(&record.id)?.used_percent()?)));
    let facts = Facts {
        used_percent: used.collect(),
        now: engine.clock.now(),
        current_document,
        records: &records,
        ready: &ready,
        memory_pressure: *engine.pressed.borrow(),
        plan: engine.plan(),
        converged: engine.is_converged() && driver_error.is_none(),
        write_error: engine.records.write_error(),
        driver_error,
        orphans: &found.orphans,
        needs: engine.needs.conditions(engine.clock.now()),
        images: engine.revoked.condition(engine.clock.now()),
        sessions: engine.executor.sessions.condition(),
        bounds: [
            engine.network_check.condition(engine.clock.now()),
            engine.groups.condition(engine.clock.now()),
            engine.resolvers.condition(engine.clock.now()),
        ],
        removals: removals::of_document(current_document, &node.handle.shared.removals.borrow()),
        next_reconcile_at,
    };
    node.handle.shared.status.send_modify(|status| status::update(status, &facts));
}
