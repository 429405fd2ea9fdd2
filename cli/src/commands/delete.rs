//! `mvm delete`: deletes declared objects by their names or by the files that declare them.

use std::path::PathBuf;

use clap::Args;
use mvm_client::{DeleteOptions, Name, files};

use crate::commands::apply::marked;
use crate::commands::get::listed;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::objects::{Failures, ObjectArgs, failed, is_lines, tell};
use crate::output;

const EXAMPLES: &str = "\
Examples:
  mvm delete pool acme/workers --wait --timeout 5m
  mvm delete -f acme.yaml
  mvm delete tenant acme --dry-run

An object goes when nothing of it is left on any node; until then `mvm get` shows it as Deleting.";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct DeleteArgs {
    /// KIND NAME... or KIND/NAME...
    #[arg(required_unless_present = "files", value_name = "KIND[/NAME]")]
    objects: Vec<String>,
    /// The objects that this file or folder declares; - for standard input
    #[arg(short, long = "file", visible_alias = "filename", value_name = "FILE", conflicts_with = "objects")]
    files: Vec<PathBuf>,
    /// Wait until they are gone, for as long as --timeout says
    #[arg(long)]
    wait: bool,
    /// Remove the object at once: nodes stop its instances with their next document, and are not waited for. A tenant must
    /// have no pools
    #[arg(long)]
    force: bool,
    /// Say what would be deleted
    #[arg(long)]
    dry_run: bool,
    /// What is not there counts as deleted
    #[arg(long)]
    ignore_not_found: bool,
    #[command(flatten)]
    object: ObjectArgs,
}

pub(crate) async fn run(global: &Global, args: DeleteArgs) -> Run {
    let mut names: Vec<Name> = if args.files.is_empty() {
        args.object.names(&args.objects)?
    } else {
        args.object.read(&args.files)?.iter().map(files::Entry::name).collect()
    };
    // In the reverse of the order in which they are made.
    names.sort_by_key(|name| std::cmp::Reverse(files::order(name)));
    let mut objects = args.object.open(global).await?;
    let options = DeleteOptions { dry_run: args.dry_run, force: args.force, ..DeleteOptions::default() };
    let (mut done, mut begun, mut failures) = (Vec::new(), Vec::new(), Failures::default());
    for name in names {
        let deleting = objects.delete(&name, &options);
        let Ok(answer) = tokio::time::timeout(global.timeout(), deleting).await else {
            return Err(Outcome::TimedOut(anyhow::anyhow!("no answer about {name} in time")));
        };
        match answer {
            Ok(deleted) => {
                let text = if deleted.gone { "deleted" } else { "deleting" };
                tell(global.output, &name, &marked(text, args.dry_run))?;
                done.push(deleted.object);
                if !deleted.gone {
                    begun.push(name);
                }
            }
            Err(error) if args.ignore_not_found && error.is_not_found() => {}
            Err(error) => failures.note(&name, failed(error))?,
        }
    }
    if args.wait && !args.dry_run {
        let waiting = async {
            for name in &begun {
                objects.wait_for(name, |object| object.is_none()).await.map_err(failed)?;
                tell(global.output, name, "deleted")?;
            }
            Ok::<_, Outcome>(())
        };
        let Ok(waited) = tokio::time::timeout(global.timeout(), waiting).await else {
            let text = format!(
                "of {} not all are gone within {}\n`mvm describe` says what is waited for",
                listed(&begun),
                humantime::format_duration(global.timeout())
            );
            return Err(Outcome::TimedOut(anyhow::anyhow!(text)));
        };
        waited?;
    }
    if !is_lines(global.output) {
        output::show(global.output, &done, |_| output::plain())?;
    }
    failures.conclude()
}
