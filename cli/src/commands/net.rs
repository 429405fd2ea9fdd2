//! `mvm net`: what holds of the tenants' networks on a node.

use anyhow::anyhow;
use clap::{Args, Subcommand};
use mvm_agent::isolation::NetworkReport;
use serde_json::json;

use crate::endpoint::EndpointArgs;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;

#[derive(Debug, Subcommand)]
pub(crate) enum NetCommand {
    /// Look at every tenant's bridge, ports and rules; repair what is wrong, and report
    Verify(VerifyArgs),
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// Also send packets that must and must not pass, as a hostile guest of each tenant would
    #[arg(long)]
    deep: bool,
    #[command(flatten)]
    endpoint: EndpointArgs,
}

pub(crate) async fn run(global: &Global, command: NetCommand) -> Run {
    let NetCommand::Verify(args) = command;
    let agent = args.endpoint.open_agent(global, "looking at networks").await?;
    let (_, body) = agent.post("/v1/node/network/verify", &json!({ "deep": args.deep })).await?;
    let report: NetworkReport = serde_json::from_slice(&body)
        .map_err(|error| anyhow!("could not read the agent's answer: {error}"))?;
    output::show(global.output, &report, |_| table(&report))?;
    if !report.enabled {
        return Err(Outcome::Failed(anyhow!("instances have no networks on this node (--network none)")));
    }
    if !report.repaired.is_empty() {
        return Err(Outcome::Failed(anyhow!("repaired just now:\n  {}", report.repaired.join("\n  "))));
    }
    if !report.holds {
        return Err(Outcome::Failed(anyhow!("some checks failed; they are marked above")));
    }
    Ok(())
}

pub(crate) fn table(report: &NetworkReport) -> output::Table {
    let mut table = output::table(["TENANT", "BRIDGE", "SUBNET", "EGRESS", "CHECK", "HOLDS", "DETAIL"]);
    for tenant in &report.tenants {
        for check in &tenant.checks {
            let holds = if check.holds { "yes" } else { "NO" };
            table.add_row([
                tenant.tenant.as_str(),
                &tenant.bridge,
                &tenant.subnet,
                &tenant.egress,
                &check.what,
                holds,
                &check.detail,
            ]);
        }
    }
    table
}
