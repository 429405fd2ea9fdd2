//! `mvm audit`: what was done to a tenant's instances, and whether anyone changed the record of it.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use mvm_agent::audit::{Kind, Line, Report, lines_of, tenants, verify_files, verify_tenant};
use mvm_proto::{InstanceId, TenantId};

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;
use crate::paths::default_data_dir;

/// A log may be written while it is read: a last line that is not whole is looked at again this often.
const LOOKS: usize = 3;
const BETWEEN_LOOKS: std::time::Duration = std::time::Duration::from_millis(50);

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// Check that no audit log was changed; exit code 1 when one was
    Verify(VerifyArgs),
    /// The last entries
    #[command(aliases = ["show", "info", "inspect"])]
    Get(GetArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    logs: Logs,
    /// Files of one tenant, oldest first, instead of those in the data folder; nothing says where they should end
    #[arg(value_name = "FILE", conflicts_with = "tenant")]
    files: Vec<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct GetArgs {
    #[command(flatten)]
    logs: Logs,
    /// Of this instance only
    #[arg(long, value_name = "ID")]
    instance: Option<InstanceId>,
    /// How many entries of each tenant, the last ones
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: usize,
}

#[derive(Debug, Args)]
struct Logs {
    /// Where the agent keeps its state
    #[arg(long, value_name = "DIR", env = "MVM_AGENT_DATA_DIR", default_value_os_t = default_data_dir("agent"))]
    data_dir: PathBuf,
    /// Of this tenant only
    #[arg(long, value_name = "ID")]
    tenant: Option<TenantId>,
}

impl Logs {
    fn tenants(&self) -> anyhow::Result<Vec<TenantId>> {
        let found = tenants(&self.data_dir)
            .with_context(|| format!("could not look for audit logs in {}", self.data_dir.display()))?;
        match &self.tenant {
            None => Ok(found),
            Some(tenant) if found.contains(tenant) => Ok(vec![tenant.clone()]),
            Some(tenant) => Err(anyhow!("{tenant} has no audit log in {}", self.data_dir.display())),
        }
    }
}

pub(crate) fn run(global: &Global, command: AuditCommand) -> Run {
    match command {
        AuditCommand::Verify(args) => verify(global, &args),
        AuditCommand::Get(args) => show(global, &args),
    }
}

fn verify(global: &Global, args: &VerifyArgs) -> Run {
    let reports = if args.files.is_empty() {
        let tenants = args.logs.tenants()?;
        tenants.iter().map(|tenant| look(&args.logs.data_dir, tenant)).collect::<anyhow::Result<Vec<_>>>()?
    } else {
        vec![verify_files(&args.files).context("could not read the files").map_err(Outcome::Usage)?]
    };
    output::show(global.output, &reports, |_| reports_table(&reports))?;
    let broken: Vec<_> = reports.iter().filter_map(|report| report.broken.as_ref()).collect();
    match broken.first() {
        None => Ok(()),
        Some(first) => Err(Outcome::Failed(anyhow!(
            "{} of {} audit logs broken; {}:{}: {}: {}",
            broken.len(),
            reports.len(),
            first.file.display(),
            first.line,
            first.kind.as_str(),
            first.why
        ))),
    }
}

fn look(data_dir: &Path, tenant: &TenantId) -> anyhow::Result<Report> {
    let context = || format!("could not read the audit log of {tenant}");
    let mut report = verify_tenant(data_dir, tenant).with_context(context)?;
    for _ in 1..LOOKS {
        if report.broken.as_ref().is_none_or(|broken| broken.kind == Kind::Changed) {
            break;
        }
        std::thread::sleep(BETWEEN_LOOKS);
        report = verify_tenant(data_dir, tenant).with_context(context)?;
    }
    Ok(report)
}

fn reports_table(reports: &[Report]) -> output::Table {
    let mut table = output::table(["TENANT", "LINES", "FROM", "TO", "HEAD", "RESULT"]);
    for report in reports {
        let number = |seq: Option<u64>| seq.map_or_else(|| "-".to_owned(), |seq| seq.to_string());
        let result = match &report.broken {
            None => "ok".to_owned(),
            Some(b) => format!("{}:{}: {}: {}", b.file.display(), b.line, b.kind.as_str(), b.why),
        };
        table.add_row([
            report.tenant.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
            report.lines.to_string(),
            number(report.known_from),
            number(report.last.map(|last| last.seq)),
            report.last.map_or_else(|| "-".to_owned(), |last| last.hash.to_string()),
            result,
        ]);
        for note in &report.notes {
            let at = format!("{}:{}: {}: {}", note.file.display(), note.line, note.action, note.reason);
            table.add_row(["", "", "", "", "", &at].map(str::to_owned));
        }
    }
    table
}

fn show(global: &Global, args: &GetArgs) -> Run {
    let mut all = Vec::new();
    for tenant in args.logs.tenants()? {
        let mut last = VecDeque::new();
        let keep = |line: Line| {
            if args.instance.is_some() && line.instance != args.instance {
                return;
            }
            if last.len() == args.limit {
                last.pop_front();
            }
            if args.limit > 0 {
                last.push_back(line);
            }
        };
        lines_of(&args.logs.data_dir, &tenant, keep)
            .with_context(|| format!("could not read the audit log of {tenant}"))?;
        all.extend(last);
    }
    Ok(output::show(global.output, &all, |_| lines_table(&all))?)
}

pub(crate) fn lines_table(lines: &[Line]) -> output::Table {
    let mut table =
        output::table(["AT", "TENANT", "POOL", "INSTANCE", "ACTOR", "ACTION", "OUTCOME", "REASON"]);
    for line in lines {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        table.add_row([
            line.at.to_string(),
            line.tenant.to_string(),
            or_dash(line.pool.as_ref().map(ToString::to_string)),
            or_dash(line.instance.as_ref().map(ToString::to_string)),
            line.actor.clone(),
            line.action.clone(),
            line.outcome.clone(),
            line.reason.clone(),
        ]);
    }
    table
}
