//! `mvm coordinator operator`: who may operate the cluster.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::{Args, Subcommand};
use mvm_proto::Timestamp;
use mvm_proto::wire::control::v1::{ListOperatorsRequest, Operator as Listed, RemoveOperatorRequest};

use crate::client::{Operator, within};
use crate::commands::block_on;
use crate::exit::Run;
use crate::global::Global;
use crate::output::{self, or_dash, when};
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum OperatorCommand {
    /// Make an operator's certificate; run it where the coordinator's data folder is
    Create(CreateArgs),
    /// Operators, and how long their certificates live
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Refuse an operator's certificates from now on, at the coordinator and on every agent
    #[command(visible_alias = "rm")]
    Remove(RemoveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The operator's name; one that was removed comes back, its old certificates do not
    name: String,
    /// The coordinator's data folder
    #[arg(long, value_name = "DIR", default_value_os_t = default_data_dir("coordinator"))]
    data_dir: PathBuf,
    /// Folder to write operator.pem and ca.crt to
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// How long the certificate lives; `mvm` renews it in use from half of it on
    #[arg(long, value_name = "TIME", default_value = "7days", value_parser = humantime::parse_duration)]
    life: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// The operator's name, as `list` shows it
    name: String,
    /// Also the last operator that is left, or one that was never seen
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) fn run(global: &Global, command: OperatorCommand) -> Run {
    match command {
        OperatorCommand::Create(args) => create(global, &args),
        OperatorCommand::List(args) => block_on(async {
            let mut client = args.operator.connect(global).await?;
            let list = within(global.timeout(), client.list_operators(ListOperatorsRequest {})).await?;
            Ok(output::show(global.output, &list.operators, |wide| table(&list.operators, wide))?)
        }),
        OperatorCommand::Remove(args) => block_on(async {
            let mut client = args.operator.connect(global).await?;
            let request = RemoveOperatorRequest { name: args.name, force: args.force };
            let answer = within(global.timeout(), client.remove_operator(request)).await?;
            let operators: Vec<Listed> = answer.operator.into_iter().collect();
            Ok(output::show(global.output, &operators, |wide| table(&operators, wide))?)
        }),
    }
}

fn create(global: &Global, args: &CreateArgs) -> Run {
    let now = Timestamp::from(SystemTime::now());
    mvm_coordinator::create_operator(&args.data_dir, &args.name, &args.out, args.life, now)
        .map_err(anyhow::Error::new)?;
    let out = args.out.display();
    Progress::new(global.quiet).say(format!(
        "{} may operate the cluster with what is in {out}: carry it over a safe channel, then use it with --operator-dir or MVM_OPERATOR_DIR\n\
         it has no pinned trust root yet; pin it there with a digest from who has: mvm trust pin --digest SHA256",
        args.name
    ));
    Ok(())
}

pub(crate) fn table(operators: &[Listed], wide: bool) -> output::Table {
    let mut table = if wide {
        output::table(["OPERATOR", "STATE", "UNTIL", "RENEWED", "REMOVED", "SINCE", "CERTIFICATES"])
    } else {
        output::table(["OPERATOR", "STATE", "UNTIL", "RENEWED"])
    };
    for operator in operators {
        let (until, renewed) = (when(&operator.not_after, wide), when(&operator.renewed_at, wide));
        let mut row = vec![&operator.name, &operator.state, &until, &renewed];
        let serials: Vec<&str> = operator.certificates.iter().map(|it| it.serial.as_str()).collect();
        let serials = serials.join(" ");
        if wide {
            row.extend([&operator.removed_at, &operator.since, &serials]);
        }
        table.add_row(row.into_iter().map(|text| or_dash(text)));
    }
    table
}
