//! `mvm coordinator root`: replacing the root certificate without anyone noticing.

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::anyhow;
use clap::{Args, Subcommand};
use mvm_pki::RootAuthority;
use mvm_proto::wire::control::v1::Node;
use mvm_proto::{Digest, Timestamp};

use crate::client::{Operator, all_nodes};
use crate::commands::block_on;
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output::{self, when};
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum RootCommand {
    /// The roots that the cluster trusts
    #[command(visible_alias = "ls")]
    List(ListArgs),
    /// Make a new root and trust it beside the old
    Add(AddArgs),
    /// Make a new issuing authority under a root that every node trusts already; also the way back, with the old root's folder
    Switch(SwitchArgs),
    /// Stop trusting a root
    #[command(visible_alias = "rm")]
    Retire(RetireArgs),
}

#[derive(Debug, Args)]
pub(crate) struct Folder {
    /// The coordinator's data folder
    #[arg(long, value_name = "DIR", default_value_os_t = default_data_dir("coordinator"))]
    data_dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// Folder for the new root's key and certificate; take it away afterwards
    #[arg(long, value_name = "DIR")]
    root_key_dir: PathBuf,
    /// Folder with ca.crt and ca.key of a root that is trusted now: it endorses the new one to nodes and operators [default: pki/root in the data folder]
    #[arg(long, value_name = "DIR")]
    signed_by: Option<PathBuf>,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct SwitchArgs {
    /// Folder with the root's ca.crt and ca.key
    #[arg(long, value_name = "DIR")]
    root_key_dir: PathBuf,
    /// Although nodes may not trust the root yet: those can't connect until they do
    #[arg(long, visible_alias = "yes")]
    force: bool,
    #[command(flatten)]
    folder: Folder,
    /// Who asks the coordinator which nodes trust the root: by default the operator in the data folder
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct RetireArgs {
    /// The root's fingerprint, as `list` shows it
    fingerprint: Digest,
    #[command(flatten)]
    folder: Folder,
}

const AFTER_ADD: &str = "restart the coordinator. Nodes take the root with their next renewal (after half of a certificate's life, \
     12 h by default), or at once with `mvm agent certs rotate` on the node; operators when they use `mvm` in the second half of theirs. \
     `mvm coordinator root switch` names the nodes that have not";
const AFTER_SWITCH: &str = "restart the coordinator, then wait for one life of a certificate before another root is retired: 24 h for \
     nodes, 7 days for operators, by default";
/// Nodes that a refusal names; the rest are counted.
const NAMED: usize = 20;

pub(crate) fn run(global: &Global, command: RootCommand) -> Run {
    let now = Timestamp::from(SystemTime::now());
    let progress = Progress::new(global.quiet);
    match command {
        RootCommand::List(args) => {
            let roots =
                mvm_coordinator::trusted_roots(&args.folder.data_dir, now).map_err(anyhow::Error::new)?;
            output::show(global.output, &roots, |_| {
                let mut table = output::table(["ROOT", "ISSUING"]);
                for root in &roots {
                    table.add_row([
                        root.fingerprint.to_string(),
                        if root.issuing { "yes" } else { "no" }.to_owned(),
                    ]);
                }
                table
            })?;
        }
        RootCommand::Add(args) => {
            let root = mvm_coordinator::add_root(
                &args.folder.data_dir,
                &args.root_key_dir,
                args.signed_by.as_deref(),
                now,
            )
            .map_err(anyhow::Error::new)?;
            progress.say(format!("{root} is trusted beside the others; {AFTER_ADD}"));
        }
        RootCommand::Switch(args) => {
            if !args.force {
                block_on(check_nodes(global, &args, now))?;
            }
            let root = mvm_coordinator::switch_issuing(&args.folder.data_dir, &args.root_key_dir, now)
                .map_err(anyhow::Error::new)?;
            progress.say(format!("certificates are issued under {root}; {AFTER_SWITCH}"));
        }
        RootCommand::Retire(args) => {
            mvm_coordinator::retire_root(&args.folder.data_dir, &args.fingerprint, now)
                .map_err(anyhow::Error::new)?;
            progress.say(format!("{} is trusted no longer; restart the coordinator", args.fingerprint));
        }
    }
    Ok(())
}

/// Refuses while a node would reject certificates issued under the root.
async fn check_nodes(global: &Global, args: &SwitchArgs, now: Timestamp) -> Run {
    let folder = &args.folder.data_dir;
    let root = RootAuthority::load(&args.root_key_dir).map_err(anyhow::Error::new)?.fingerprint();
    let roots = mvm_coordinator::trusted_roots(folder, now).map_err(anyhow::Error::new)?;
    // The nodes check the coordinator by it already; and one that is not listed is refused by its own name.
    if roots.iter().all(|listed| listed.fingerprint != root || listed.issuing) {
        return Ok(());
    }
    let mut operator = args.operator.clone();
    operator.operator_dir.get_or_insert_with(|| folder.join("operator"));
    let asked = async {
        let mut client = operator.connect(global).await?;
        all_nodes(&mut client, true, global.timeout()).await
    };
    let nodes = asked.await.map_err(|outcome| {
        let what = format!(
            "could not ask the coordinator which nodes trust the root {root}\nstart it or name it with --coordinator; or use --force \
             if you know that all do"
        );
        match outcome {
            Outcome::Unreachable(error) => Outcome::Unreachable(error.context(what)),
            Outcome::Failed(error) => Outcome::Failed(error.context(what)),
            other => other,
        }
    })?;
    let without = without_root(&nodes, &root);
    if without.is_empty() {
        return Ok(());
    }
    let mut lines: Vec<_> = without.iter().take(NAMED).map(|line| format!("  {line}")).collect();
    if without.len() > NAMED {
        lines.push(format!("  and {} more", without.len() - NAMED));
    }
    Err(Outcome::Failed(anyhow!(
        "{} of {} nodes have not reported that they trust the root {root}, and could not connect after the switch:\n{}\n\
         a node takes the coordinator's roots when it renews its certificate: restart the coordinator after `root add`, then run \
         `mvm agent certs rotate` on each of these nodes, or wait; remove nodes that are gone with `mvm node remove`\n\
         --force switches all the same; `mvm coordinator root switch` with the old root's folder is the way back",
        without.len(),
        nodes.len(),
        lines.join("\n")
    )))
}

/// The nodes that have not reported that they trust this root, each with the reason.
fn without_root(nodes: &[Node], root: &Digest) -> Vec<String> {
    let root = root.to_string();
    let mut without = Vec::new();
    for node in nodes {
        let roots = node.info.as_ref().map(|info| info.roots.as_slice()).unwrap_or_default();
        if roots.contains(&root) {
            continue;
        }
        let why = match (node.last_seen_at.as_str(), roots) {
            ("", _) => "it never connected".to_owned(),
            (at, []) => format!("its agent does not report its roots (last seen {})", when(at, false)),
            (_, _) if node.connected => {
                "it has not renewed its certificate since the root was added".to_owned()
            }
            (at, _) => {
                format!("it is not connected, and did not trust the root when last seen {}", when(at, false))
            }
        };
        without.push(format!("{}: {why}", node.node_id));
    }
    without
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::NodeInfo;

    use super::*;

    #[test]
    fn a_node_trusts_a_root_only_when_it_reported_so() {
        let (old, new) = (Digest::of(b"old"), Digest::of(b"new"));
        let node = |name: &str, connected, seen: &str, roots: &[Digest]| Node {
            node_id: name.to_owned(),
            connected,
            last_seen_at: seen.to_owned(),
            info: Some(NodeInfo {
                roots: roots.iter().map(ToString::to_string).collect(),
                ..NodeInfo::default()
            }),
            ..Node::default()
        };
        let seen = "2026-01-31T09:30:00Z";
        let nodes = [
            node("both", true, seen, &[old, new]),
            node("away-with-it", false, seen, &[new]),
            node("behind", true, seen, &[old]),
            node("away", false, seen, &[old]),
            node("older", true, seen, &[]),
            Node { node_id: "never".to_owned(), ..Node::default() },
        ];
        let named = |root| -> Vec<String> {
            let lines = without_root(&nodes, root).into_iter();
            lines.map(|line| line.split(':').next().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(named(&new), ["behind", "away", "older", "never"]);
        assert_eq!(named(&old), ["away-with-it", "older", "never"]);
    }
}
