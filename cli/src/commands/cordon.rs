//! `mvm cordon` and `mvm uncordon`: whether nodes take something new. Uncordoning ends a drain as well.

use clap::Args;
use mvm_proto::object::kind_named;
use serde_json::json;

use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::names::of_kind;
use crate::objects::{Failures, ObjectArgs, failed, set_in_spec, tell, within};

const EXAMPLES: &str = "\
Examples:
  mvm cordon n1 n2      what runs there stays, nothing new comes
  mvm uncordon n1";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct CordonArgs {
    /// Nodes by their names
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<String>,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: CordonArgs, cordoned: bool) -> Run {
    let usage = |error: String| Outcome::Usage(anyhow::anyhow!(error));
    let kind = kind_named("nodes").map_err(usage)?;
    let names = args.nodes.iter().map(|node| of_kind(kind, node.strip_prefix("node/").unwrap_or(node), None));
    let names = names.collect::<Result<Vec<_>, _>>().map_err(usage)?;
    let mut objects = args.object.open(global).await?;
    let (mut failures, done) = (Failures::default(), if cordoned { "cordoned" } else { "uncordoned" });
    for name in &names {
        let setting = async {
            let drain = match cordoned {
                true => Ok(false),
                false => set_in_spec(&mut objects, name, "drain", &json!(false)).await,
            };
            Ok(match drain {
                Ok(drain) => {
                    let set = set_in_spec(&mut objects, name, "cordoned", &json!(cordoned)).await;
                    set.map(|cordon| cordon || drain)
                }
                Err(error) => Err(error),
            })
        };
        match within(global.timeout(), setting).await? {
            Ok(true) => tell(global.output, name, done)?,
            Ok(false) => tell(global.output, name, &format!("already {done}"))?,
            Err(error) => failures.note(name, failed(error))?,
        }
    }
    failures.conclude()
}
