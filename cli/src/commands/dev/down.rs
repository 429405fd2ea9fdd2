//! `mvm dev down`: stops the processes, destroys the instances, and removes what is left of the cluster.

use std::io::Write as _;
use std::process::Stdio;

use anyhow::{Context as _, anyhow, bail};
use mvm_agent::isolation::NetworkMode;
use mvm_host::{AnyHost, EndSignal, Host as _};
use nix::unistd::geteuid;
use serde_json::json;

use super::dir::DevDir;
use super::process::{Part, flag, hermetic, living, stop};
use super::state::State;
use super::{DownArgs, claim, context, members};
use crate::exit::Run;
use crate::global::Global;
use crate::progress::Progress;

pub(super) async fn run(global: &Global, args: DownArgs) -> Run {
    let progress = Progress::new(global.quiet);
    let dir = DevDir::chosen(&args.dir)?;
    let at = dir.path().display();
    let Some(_lock) = dir.lock(progress)? else {
        progress
            .say(format!("there is no development cluster in {at}: nothing to do; `mvm dev up` makes one"));
        return Ok(());
    };
    let Some(state) = State::load(&dir.state_file())? else {
        // An `up` that was cut off at its beginning may have left something, and an earlier `down` the images.
        dir.remove(!args.purge)?;
        progress.say(format!("no development cluster runs in {at}: nothing to stop"));
        return Ok(());
    };
    // The agent first: a coordinator that goes away is none of its business then.
    for part in [Part::Agent, Part::Coordinator] {
        if let Some(recorded) = living(&dir.pid_file(part))? {
            stop(part, &recorded.process).await?;
            progress.say(format!("stopped the {part}, process {}", recorded.process.pid));
        }
    }
    destroy_instances(&dir, &state, progress).await?;
    if state.isolation.network == NetworkMode::Bridges {
        let removed = mvm_host::remove_firewall().map_err(anyhow::Error::new);
        removed.context(
            "could not remove the tenants' firewall\nstop what the text names, and run `mvm dev down` again",
        )?;
    }
    if geteuid().is_root() {
        claim::release(dir.path()).context("could not give up the tenants' networks")?;
    }
    if args.keep {
        progress.say(format!("kept keys, objects and images in {at}: `mvm dev up` goes on with them"));
        return Ok(());
    }
    if let Some(name) = &state.context {
        match context::forget(name, &dir.operator())? {
            Some(true) => {
                progress.say(format!("forgot the context {name}; no context is the current one now"));
            }
            Some(false) => progress.say(format!("forgot the context {name}")),
            None => {}
        }
    }
    let keeps_images = !args.purge && dir.images().is_dir();
    dir.remove(!args.purge)?;
    progress.say(if keeps_images {
        format!(
            "removed the cluster; its images stay in {} (--purge removes them, too)",
            dir.images().display()
        )
    } else {
        format!("removed the cluster in {at}")
    });
    Ok(())
}

/// Has the instances destroyed by the agent's own code, with networks, limits and jails: a document without tenants is made
/// true once. What can't be taken away stays with all that is known of it, but no microVM runs on.
async fn destroy_instances(dir: &DevDir, state: &State, progress: Progress) -> anyhow::Result<()> {
    let node = dir.node();
    if !node.join("state").exists() && !node.join("vms").exists() {
        return Ok(());
    }
    let host = AnyHost::local(&node);
    let before = host.vmms().await.context("could not look for microVMs")?.len();
    let reconciled = reconcile_to_nothing(dir, state);
    for vmm in host.vmms().await.context("could not look for microVMs")? {
        vmm.process.signal(EndSignal::Kill).context("could not end a microVM")?;
        progress.say(format!("killed the microVM of {}", vmm.instance));
    }
    reconciled.with_context(|| {
        format!(
            "could not take away all that instances had\nwhen that is mended, run `mvm dev down` again; what is left is in {}",
            dir.path().display()
        )
    })?;
    progress.say(match before {
        0 => "destroyed all instances; no microVM ran".to_owned(),
        1 => "destroyed all instances, and ended 1 microVM".to_owned(),
        _ => format!("destroyed all instances, and ended {before} microVMs"),
    });
    Ok(())
}

fn reconcile_to_nothing(dir: &DevDir, state: &State) -> anyhow::Result<()> {
    let mut args = vec!["agent".into(), "reconcile".into()];
    args.extend(flag("--desired", "-"));
    args.extend(members::node_flags(dir, state));
    // All processes have ended: what no record owns is an orphan now.
    args.extend(flag("--sweep-after", "0s"));
    let mut command = hermetic(dir, Part::Agent, &args)?;
    command.stdin(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("could not start mvm")?;
    let document = json!({
        "schema_version": 1, "node_id": members::NODE, "tenants": [],
        "prune_unknown_tenants": true, "prune_unknown_pools": true,
    });
    if let Some(mut stdin) = child.stdin.take() {
        // What ends early says why.
        let _ = stdin.write_all(document.to_string().as_bytes());
    }
    let output = child.wait_with_output().context("could not wait for mvm")?;
    let told = String::from_utf8_lossy(&output.stderr);
    let log = dir.log(Part::Agent);
    let kept =
        std::fs::File::options().append(true).open(&log).and_then(|mut log| log.write_all(&output.stderr));
    kept.with_context(|| format!("could not write to the log {}", log.display()))?;
    if output.status.success() {
        return Ok(());
    }
    let error = told.rsplit_once("error:").map_or(told.trim(), |(_, error)| error.trim());
    if error.is_empty() {
        bail!("mvm agent reconcile ended with {}", output.status)
    }
    Err(anyhow!("{error}"))
}
