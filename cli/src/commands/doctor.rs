//! `mvm doctor`: looks at this machine as `mvm agent serve` with the same settings would, and says how to mend what is
//! not right.

use std::time::SystemTime;

use anyhow::anyhow;
use clap::Args;
use mvm_agent::serve::doctor::{Check, Health, examine, worst};
use mvm_proto::Timestamp;
use serde::Serialize;

use crate::commands::agent::ServeArgs;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, or_dash};
use crate::progress::Progress;

/// The flags of `mvm agent serve`: what would be served with them is what is judged.
#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    serve: ServeArgs,
}

#[derive(Debug, Serialize)]
struct Report {
    health: Health,
    checks: Vec<Check>,
}

pub(crate) async fn run(global: &Global, args: DoctorArgs) -> Run {
    let user = args.serve.user.clone();
    let settings = args.serve.settings();
    let progress = Progress::new(global.quiet);
    let now = Timestamp::from(SystemTime::now());
    let checks =
        examine(&settings, user.as_deref(), now, |what| progress.say(format!("looking at {what}"))).await;
    let report = Report { health: worst(&checks), checks };
    output::show(global.output, &report, |_| table(&report.checks))?;
    let failed = report.checks.iter().filter(|check| check.health == Health::Failed).count();
    if failed > 0 {
        return Err(Outcome::Failed(anyhow!("{failed} of {} checks failed", report.checks.len())));
    }
    Ok(())
}

/// A fix stands below what it mends.
fn table(checks: &[Check]) -> output::Table {
    let mut table = output::table(["CHECK", "HEALTH", "FOUND"]);
    for check in checks {
        table.add_row([check.name, check.health.as_str(), or_dash(&check.found).as_str()]);
        if let Some(fix) = &check.fix {
            table.add_row(["", "", &format!("-> {fix}")]);
        }
    }
    table
}
