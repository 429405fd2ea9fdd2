//! `mvm doctor`: looks at this machine as an agent would, and says how to mend what is not right.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::anyhow;
use clap::Args;
use mvm_agent::serve::doctor::{Check, DoctorSettings, Health, examine, worst};
use mvm_agent::serve::settings::{default_certs_dir, default_socket};
use mvm_proto::Timestamp;
use serde::Serialize;

use crate::commands::agent::{ProgramArgs, absolute_path};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, or_dash};
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Folder for the agent's state
    #[arg(long, value_name = "DIR", env = "MVM_AGENT_DATA_DIR", value_parser = absolute_path(), default_value_os_t = default_data_dir("agent"))]
    data_dir: PathBuf,
    /// Folder with certificates [default: certs/ in the data folder]
    #[arg(long, value_name = "DIR")]
    certs_dir: Option<PathBuf>,
    #[command(flatten)]
    programs: ProgramArgs,
    /// Address of the agent's HTTP/3 API (UDP)
    #[arg(long, value_name = "ADDR", default_value = "[::]:4434")]
    listen: SocketAddr,
    /// Address for /metrics, /healthz and /readyz
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9434")]
    metrics_listen: SocketAddr,
}

#[derive(Debug, Serialize)]
struct Report {
    health: Health,
    checks: Vec<Check>,
}

pub(crate) async fn run(global: &Global, args: DoctorArgs) -> Run {
    let settings = DoctorSettings {
        certs_dir: args.certs_dir.unwrap_or_else(|| default_certs_dir(&args.data_dir)),
        socket: default_socket(&args.data_dir),
        vmm: args.programs.settings(),
        listen: args.listen,
        metrics_listen: args.metrics_listen,
        data_dir: args.data_dir,
    };
    let progress = Progress::new(global.quiet);
    let now = Timestamp::from(SystemTime::now());
    let checks = examine(&settings, now, |what| progress.say(format!("looking at {what}"))).await;
    let report = Report { health: worst(&checks), checks };
    output::show(global.output, &report, |_| table(&report.checks))?;
    let failed = report.checks.iter().filter(|check| check.health == Health::Failed).count();
    match failed {
        0 => Ok(()),
        _ => Err(Outcome::Failed(anyhow!("{failed} of {} checks failed", report.checks.len()))),
    }
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
