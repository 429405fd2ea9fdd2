//! `mvm schema`: the JSON Schema of what users write, for editors and pipelines.

use clap::{Args, ValueEnum};

use crate::exit::Run;
use crate::output;

#[derive(Debug, Args)]
pub(crate) struct SchemaArgs {
    /// Of what
    #[arg(value_enum)]
    kind: Kind,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    /// The desired-state document for one node
    DesiredState,
    /// What a node is like: printed by `mvm agent observe`, read by `mvm plan node`
    Observation,
}

pub(crate) fn run(args: &SchemaArgs) -> Run {
    let schema = match args.kind {
        Kind::DesiredState => mvm_proto::document::schema::desired_state_schema(),
        Kind::Observation => mvm_planner::observation::schema::observation_schema(),
    };
    Ok(output::print(&format!("{schema:#}\n"))?)
}
