//! `mvm schema`: the JSON Schema of what users write, for editors and pipelines.

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser as _};
use mvm_proto::object::{KINDS, Kind, kind_named, kind_schema};

use crate::exit::Run;
use crate::output;

const DESIRED_STATE: &str = "desired-state";
const OBSERVATION: &str = "observation";

#[derive(Debug, Args)]
#[command(after_help = "Example:\n  mvm schema pool > pool.schema.json")]
pub(crate) struct SchemaArgs {
    /// Of what
    #[arg(value_name = "KIND", value_parser = parser())]
    of: Of,
}

#[derive(Debug, Clone, Copy)]
enum Of {
    DesiredState,
    Observation,
    Object(&'static Kind),
}

fn parser() -> impl clap::builder::TypedValueParser<Value = Of> {
    let documents = [
        PossibleValue::new(DESIRED_STATE).help("The desired-state document for one node"),
        PossibleValue::new(OBSERVATION)
            .help("What a node is like: printed by `mvm agent observe`, read by `mvm plan node`"),
    ];
    let kinds = KINDS.iter().map(|kind| {
        let name = kind.plural.trim_end_matches('s').to_owned();
        PossibleValue::new(name).help(kind.about).alias(kind.plural).alias(kind.short).alias(kind.name)
    });
    PossibleValuesParser::new(documents.into_iter().chain(kinds)).try_map(|text| match text.as_str() {
        DESIRED_STATE => Ok(Of::DesiredState),
        OBSERVATION => Ok(Of::Observation),
        kind => kind_named(kind).map(Of::Object),
    })
}

pub(crate) fn run(args: &SchemaArgs) -> Run {
    let schema = match args.of {
        Of::DesiredState => mvm_proto::document::schema::desired_state_schema(),
        Of::Observation => mvm_planner::observation::schema::observation_schema(),
        Of::Object(kind) => kind_schema(kind),
    };
    Ok(output::print(&format!("{schema:#}\n"))?)
}
