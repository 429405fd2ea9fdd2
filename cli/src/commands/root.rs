//! `mvm coordinator root`: replacing the root certificate without anyone noticing.

use std::path::{Path, PathBuf};
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
    /// Although certificates of nodes may lead to the root yet: those nodes can't connect until they have others
    #[arg(long, visible_alias = "yes")]
    force: bool,
    #[command(flatten)]
    folder: Folder,
    /// Who asks the coordinator which root the nodes' certificates lead to: by default the operator in the data folder
    #[command(flatten)]
    operator: Operator,
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
                block_on(check_switch(global, &args, now))?;
            }
            let root = mvm_coordinator::switch_issuing(&args.folder.data_dir, &args.root_key_dir, now)
                .map_err(anyhow::Error::new)?;
            progress.say(format!("certificates are issued under {root}; {AFTER_SWITCH}"));
        }
        RootCommand::Retire(args) => {
            if !args.force {
                block_on(check_retire(global, &args, now))?;
            }
            mvm_coordinator::retire_root(&args.folder.data_dir, &args.fingerprint, now)
                .map_err(anyhow::Error::new)?;
            progress.say(format!("{} is trusted no longer; restart the coordinator", args.fingerprint));
        }
    }
    Ok(())
}

/// Refuses while a node would reject certificates issued under the root.
async fn check_switch(global: &Global, args: &SwitchArgs, now: Timestamp) -> Run {
    let folder = &args.folder.data_dir;
    let root = RootAuthority::load(&args.root_key_dir).map_err(anyhow::Error::new)?.fingerprint();
    let roots = mvm_coordinator::trusted_roots(folder, now).map_err(anyhow::Error::new)?;
    // The nodes check the coordinator by it already; and one that is not listed is refused by its own name.
    if roots.iter().all(|listed| listed.fingerprint != root || listed.issuing) {
        return Ok(());
    }
    let what = format!("which nodes trust the root {root}");
    let nodes = ask_nodes(global, &args.operator, folder, &what, "all do").await?;
    let without = without_root(&nodes, &root);
    if without.is_empty() {
        return Ok(());
    }
    Err(Outcome::Failed(anyhow!(
        "{} of {} nodes have not reported that they trust the root {root}, and could not connect after the switch:\n{}\n\
         a node takes the coordinator's roots when it renews its certificate: restart the coordinator after `root add`, then run \
         `mvm agent certs rotate` on each of these nodes, or wait; remove nodes that are gone with `mvm node remove`\n\
         --force switches all the same; `mvm coordinator root switch` with the old root's folder is the way back",
        without.len(),
        nodes.len(),
        named(&without)
    )))
}

/// Refuses while the coordinator would reject nodes for the certificates that they have.
async fn check_retire(global: &Global, args: &RetireArgs, now: Timestamp) -> Run {
    let folder = &args.folder.data_dir;
    let root = args.fingerprint;
    let roots = mvm_coordinator::trusted_roots(folder, now).map_err(anyhow::Error::new)?;
    // One that is not listed, issues, or is the last is refused by its own name.
    if roots.iter().all(|listed| listed.fingerprint != root || listed.issuing) {
        return Ok(());
    }
    let what = format!("which nodes' certificates lead to the root {root}");
    let nodes = ask_nodes(global, &args.operator, folder, &what, "none does").await?;
    let under = under_root(&nodes, &root, now);
    if under.is_empty() {
        return Ok(());
    }
    Err(Outcome::Failed(anyhow!(
        "{} of {} nodes may have a certificate that leads to the root {root}, and could not connect once it is retired:\n{}\n\
         a node gets another with its next renewal after `root switch` and a restart of the coordinator: run \
         `mvm agent certs rotate` on each of these nodes, or wait; remove nodes that are gone with `mvm node remove`\n\
         --force retires it all the same: these nodes then need a new join token",
        under.len(),
        nodes.len(),
        named(&under)
    )))
}

/// Every node as the coordinator knows it. `what` is asked, and `certain` is what its asker may know instead.
async fn ask_nodes(
    global: &Global,
    operator: &Operator,
    folder: &Path,
    what: &str,
    certain: &str,
) -> Result<Vec<Node>, Outcome> {
    let mut operator = operator.clone();
    operator.operator_dir.get_or_insert_with(|| folder.join("operator"));
    let asked = async {
        let mut client = operator.connect(global).await?;
        all_nodes(&mut client, true, global.timeout()).await
    };
    asked.await.map_err(|outcome| {
        let what = format!(
            "could not ask the coordinator {what}\nstart it or name it with --coordinator; or use --force if you know that {certain}"
        );
        match outcome {
            Outcome::Unreachable(error) => Outcome::Unreachable(error.context(what)),
            Outcome::Failed(error) => Outcome::Failed(error.context(what)),
            other => other,
        }
    })
}

/// A line for each of the first few.
fn named(lines: &[String]) -> String {
    let mut named: Vec<_> = lines.iter().take(NAMED).map(|line| format!("  {line}")).collect();
    if lines.len() > NAMED {
        named.push(format!("  and {} more", lines.len() - NAMED));
    }
    named.join("\n")
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

/// The nodes whose newest certificate is in date and leads to this root as far as is known, each with the reason.
fn under_root(nodes: &[Node], root: &Digest, now: Timestamp) -> Vec<String> {
    let root = root.to_string();
    let mut under = Vec::new();
    for node in nodes {
        let until = node.certificate_not_after.as_str();
        // A certificate that has expired opens no session whichever roots there are.
        if until.parse::<Timestamp>().is_ok_and(|until| until <= now) {
            continue;
        }
        let why = match node.certificate_root.as_str() {
            found if found == root => "its certificate was issued under it",
            "" => "its certificate was issued by an older version, which did not record the root",
            _ => continue,
        };
        under.push(format!("{}: {why}, and is good until {}", node.node_id, when(until, false)));
    }
    under
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

    #[test]
    fn a_node_is_under_a_root_while_its_newest_certificate_may_lead_to_it() {
        let (old, new) = (Digest::of(b"old"), Digest::of(b"new"));
        let now: Timestamp = "2026-01-31T09:30:00Z".parse().unwrap();
        let node = |name: &str, root: Option<Digest>, until: &str| Node {
            node_id: name.to_owned(),
            certificate_root: root.map(|root| root.to_string()).unwrap_or_default(),
            certificate_not_after: until.to_owned(),
            ..Node::default()
        };
        let (past, later) = ("2026-01-31T09:30:00Z", "2026-01-31T09:30:01Z");
        let nodes = [
            node("behind", Some(old), later),
            node("renewed", Some(new), later),
            node("expired", Some(old), past),
            node("unknown", None, later),
        ];
        let named = |root| -> Vec<String> {
            let lines = under_root(&nodes, root, now).into_iter();
            lines.map(|line| line.split(':').next().unwrap_or_default().to_owned()).collect()
        };
        assert_eq!(named(&old), ["behind", "unknown"]);
        assert_eq!(named(&new), ["renewed", "unknown"]);
    }
}
