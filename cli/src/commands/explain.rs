//! `mvm explain`: why a pool is where it is and what each node has against one more; of a node how far its drain is, and what
//! keeps the rest.

use clap::Args;
use mvm_proto::object::{PoolCounts, PoolExplanation};

use crate::commands::drain;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{ObjectArgs, within};
use crate::output::{self, Table};

const EXAMPLES: &str = "\
Examples:
  mvm explain pool acme/workers
  mvm explain pool/acme/workers -o json
  mvm explain node/n1              what of a drained node is left, and why";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExplainArgs {
    /// A pool: pool/TENANT/NAME, or pool TENANT/NAME; or a node: node/NAME
    #[arg(required = true, num_args = 1..=2, value_name = "POOL")]
    object_name: Vec<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: ExplainArgs) -> Run {
    let names = args.object.names(&args.object_name)?;
    let [name] = names.as_slice() else {
        return Err(Outcome::Usage(anyhow::anyhow!("one pool or node is explained at a time")));
    };
    let mut objects = args.object.open(global).await?;
    if name.kind.name == "Node" {
        let object = within(global.timeout(), objects.get(name)).await?;
        return Ok(output::show_all(global.output, &object, |_| drain::tables(&object))?);
    }
    let why = within(global.timeout(), objects.explain(name)).await?;
    Ok(output::show_all(global.output, &why, |_| tables(&why))?)
}

/// `running 3, warm 1`: what is not zero.
pub(crate) fn counts(counts: &PoolCounts) -> String {
    let all = [("running", counts.running), ("warm", counts.warm), ("sleeping", counts.sleeping)];
    let told: Vec<_> =
        all.iter().filter(|(_, count)| *count > 0).map(|(phase, count)| format!("{phase} {count}")).collect();
    if told.is_empty() { "none".to_owned() } else { told.join(", ") }
}

/// In short; where it is; what each node would do with one more; what is not done yet.
pub(crate) fn tables(why: &PoolExplanation) -> Vec<Table> {
    let mut rows = vec![("pool", why.pool.clone()), ("wanted", counts(&why.wanted))];
    if let Some(unplaced) = &why.unplaced {
        rows.push(("unplaced", format!("{}: {}", counts(&unplaced.counts), unplaced.reason)));
    }
    rows.extend(why.quota.iter().map(|quota| ("at its quota", quota.clone())));
    let mut placed = output::table(["PLACED ON", "WANTED", "ACTUAL"]);
    for one in &why.placed {
        let actual = one.actual.as_ref().map_or_else(|| "-".to_owned(), counts);
        placed.add_row([one.node.to_string(), counts(&one.wanted), actual]);
    }
    let mut nodes = output::table(["NODE", "HAS", "SCORE", "AGAINST ONE MORE"]);
    for fit in &why.nodes {
        let score = fit.score.map_or_else(|| "-".to_owned(), |score| score.to_string());
        let obstacle = fit.obstacle.clone().unwrap_or_else(|| "nothing".to_owned());
        nodes.add_row([fit.node.to_string(), fit.has.to_string(), score, obstacle]);
    }
    let mut deferred = output::table(["NOT DONE YET"]);
    why.deferred.iter().for_each(|text| deferred.add_row([text]));
    let mut rollout = output::table(["ROLLOUT", "REVISION", "STATE", "WAITS FOR"]);
    if let Some(detail) = &why.rollout {
        rows.push(("rollout", detail.message.clone()));
        for one in detail.nodes.iter().filter(|one| one.state != "done") {
            let revision = one.revision.map_or_else(|| "-".to_owned(), |number| number.to_string());
            rollout.add_row([
                one.node.to_string(),
                revision,
                one.state.clone(),
                output::or_dash(&one.reason),
            ]);
        }
    }
    vec![output::properties(rows), placed, nodes, rollout, deferred]
}
