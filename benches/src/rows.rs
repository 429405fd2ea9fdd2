//! The measurements, one file for each subject.

mod apply;
mod day;
mod documents;
mod exec;
mod fanout;
mod firewall;
mod fleet;
mod floor;
mod handshakes;
mod idle;
mod pause;
mod placement;
mod planner;
mod push;
mod quiet_passes;
mod rest;
mod startup;

use std::time::Duration;

use anyhow::Result;
use mvm_tests::ClusterSettings;

use crate::effort::Effort;
use crate::row::{Row, Subject};

/// Everything, in the order in which it is shown.
pub const ALL: [Subject; 15] = [
    Subject::Documents,
    Subject::Planner,
    Subject::Placement,
    Subject::Day,
    Subject::Handshakes,
    Subject::Push,
    Subject::Apply,
    Subject::Pause,
    Subject::Rest,
    Subject::Exec,
    Subject::Firewall,
    Subject::Idle,
    Subject::Sessions,
    Subject::Fanout,
    Subject::Startup,
];

/// Measures `wanted`, one after the other. What fails, or panics, becomes a row that says so; the others go on.
pub fn measure(wanted: &[Subject], effort: Effort, mut progress: impl FnMut(Subject)) -> Vec<Row> {
    let mut rows = Vec::new();
    for subject in ALL.into_iter().filter(|subject| wanted.contains(subject)) {
        // Both are looked at on one fleet, once.
        if subject == Subject::Fanout && wanted.contains(&Subject::Sessions) {
            continue;
        }
        progress(subject);
        rows.extend(apart(subject, move || match subject {
            Subject::Documents => documents::measure(&effort),
            Subject::Planner => planner::measure(&effort)
                .and_then(|rows| Ok(rows.into_iter().chain([quiet_passes::measure()?]).collect())),
            Subject::Placement => placement::measure(&effort),
            Subject::Day => day::measure(&effort),
            Subject::Handshakes => handshakes::measure(&effort),
            Subject::Push => push::measure(&effort),
            Subject::Apply => apply::measure(&effort),
            Subject::Pause => pause::measure(&effort),
            Subject::Rest => rest::measure(&effort),
            Subject::Exec => exec::measure(&effort),
            Subject::Firewall => firewall::measure(&effort),
            Subject::Idle => idle::measure(&effort),
            Subject::Sessions => fleet::measure(&effort),
            // Memory is looked at in several fresh coordinators, and a fan-out in one.
            Subject::Fanout => fleet::measure(&Effort {
                fresh_starts: 1,
                settle: Duration::ZERO,
                watch: Duration::from_secs(1),
                ..effort
            }),
            Subject::Startup => startup::measure(&effort),
        }));
    }
    rows.retain(|row| wanted.contains(&row.subject));
    rows
}

/// In a thread of its own, which it may bind to a core, and whose panic is not everyone's.
fn apart(subject: Subject, measure: impl FnOnce() -> Result<Vec<Row>> + Send + 'static) -> Vec<Row> {
    let told = std::thread::spawn(measure).join();
    let why = match told {
        Ok(Ok(rows)) => return rows,
        Ok(Err(error)) => format!("{error:#}"),
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
        }
    };
    vec![Row::failed(subject, why)]
}

/// A runtime on the calling thread only, so that its work stays on the thread's core.
fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// A cluster with the product's own settings; those of the tests are for noticing trouble soon, not for resting.
fn as_shipped() -> ClusterSettings {
    ClusterSettings { dev: true, serve: Vec::new() }
}
