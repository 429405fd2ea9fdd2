//! `mvm dev up`: makes the cluster, or brings back what of it does not run.

use std::fs;
use std::process::Child;
use std::time::Instant;

use anyhow::{Context as _, anyhow};
use mvm_agent::AgentSettings;
use mvm_agent::isolation::NetworkMode;
use mvm_agent::node::assemble::NodeError;
use mvm_agent::serve::doctor::examine_isolation;
use mvm_agent::serve::settings::default_socket;
use mvm_client::{Name, Objects};
use mvm_host::{AnyHost, Host as _};
use mvm_proto::object::kind_named;
use mvm_vmm::{DriverKind, VmmSettings, choice};
use nix::unistd::geteuid;

use super::dir::DevDir;
use super::isolation::{Found, Modes};
use super::ports::{self, Bound, Ports};
use super::process::{Part, living, silent, start};
use super::state::State;
use super::{UpArgs, claim, context, declare, image, isolation, members, status};
use crate::exit::{Outcome, Run};
use crate::global::Global;
use crate::output;
use crate::progress::Progress;

pub(super) async fn run(global: &Global, args: UpArgs) -> Run {
    let began = Instant::now();
    let progress = Progress::new(global.quiet);
    if !geteuid().is_root() && args.network == Some(NetworkMode::Bridges) {
        return Err(Outcome::Usage(anyhow!(
            "--network bridges needs root\nrun sudo mvm dev up, or leave --network out"
        )));
    }
    let dir = DevDir::chosen(&args.dir)?;
    let _lock = dir.make_and_lock(progress)?;
    let before = State::load(&dir.state_file())?;
    let bound = Bound {
        coordinator: living(&dir.pid_file(Part::Coordinator))?.is_some(),
        agent: living(&dir.pid_file(Part::Agent))?.is_some(),
    };
    let at = dir.path().display();
    progress.say(match (&before, bound.coordinator, bound.agent) {
        (None, ..) => format!("making a development cluster in {at}"),
        (Some(_), true, true) => format!("the development cluster in {at} runs already"),
        (Some(_), true, false) => {
            format!("going on with the development cluster in {at}, whose agent does not run")
        }
        (Some(_), false, true) => {
            format!("going on with the development cluster in {at}, whose coordinator does not run")
        }
        (Some(_), false, false) => {
            format!("going on with the development cluster in {at}, of which nothing runs")
        }
    });
    let mut state = settle(&dir, &args, before, bound, progress)?;
    if !bound.agent {
        let kind = check_driver(&dir, &state).await?;
        if kind.uses_host_resources() {
            image::ensure(&state.images_dir, state.images_dir == dir.images(), progress)?;
        }
        state.isolation = choose_isolation(&dir, &state, &args, kind, progress)?;
    }
    state.save(&dir.state_file())?;
    members::make_cluster(&dir).with_context(|| {
        format!("could not make the cluster in {at}\nmake room there, or name a directory on another disk: --dir DIR")
    })?;

    let coordinator = members::coordinator_command(&dir, &state);
    let mut started = start_unless(bound.coordinator, &dir, Part::Coordinator, &coordinator)?;
    let operator = members::operator(&dir, &state)?;
    let channel = members::reach_coordinator(global, &dir, &operator, started.as_mut()).await?;
    say_started(&dir, Part::Coordinator, started.as_ref(), &state.url(), progress)?;

    let (mut control, mut objects) = (mvm_client::control(channel.clone()), Objects::new(channel));
    members::enrol(global, &dir, &state, &mut control).await?;
    let adopted = if bound.agent { 0 } else { microvms(&dir).await? };
    let agent = members::agent_command(&dir, &state, geteuid().is_root());
    let mut started = start_unless(bound.agent, &dir, Part::Agent, &agent)?;
    if !state.declared {
        declare::declare(global, &mut objects).await?;
        state.declared = true;
        state.save(&dir.state_file())?;
        progress.say("declared tenant dev, and its pool default with one instance of builtin:busybox");
    }
    members::agent_connected(global, &dir, &mut control, started.as_mut()).await?;
    let node = Name::of(kind_named("nodes").map_err(|error| anyhow!(error))?, None, members::NODE);
    if !declare::node_ready(&objects, &node, members::ANSWERS_WITHIN).await? {
        return Err(Outcome::Failed(silent(&dir, Part::Agent, members::ANSWERS_WITHIN)));
    }
    let address = format!("https://127.0.0.1:{}", state.ports.agent);
    say_started(&dir, Part::Agent, started.as_ref(), &address, progress)?;
    if adopted > 0 {
        progress.say(format!("adopted {adopted} microVM{} that ran on", if adopted == 1 { "" } else { "s" }));
    }

    let named = context::write(
        &state.url(),
        &dir.operator(),
        &default_socket(&dir.node()),
        state.context.as_deref(),
    )?;
    state.context = named.as_ref().map(|named| named.name.clone());
    state.save(&dir.state_file())?;
    context::tell(named.as_ref(), progress);
    progress.say(format!("ready after {:.1} s", began.elapsed().as_secs_f32()));
    if output::is_for_people(global.output) {
        tell_next(named.as_ref(), args.dir.dir.as_ref().map(|_| &dir), progress);
        return Ok(());
    }
    let report = status::look(global, &dir, Some(&state)).await?;
    Ok(output::show(global.output, &report, |_| output::plain())?)
}

/// What is remembered, with what the flags change and ports that can be had.
fn settle(
    dir: &DevDir,
    args: &UpArgs,
    before: Option<State>,
    bound: Bound,
    progress: Progress,
) -> anyhow::Result<State> {
    let known = before.as_ref().map(|before| before.ports);
    let ports = ports::choose(known, bound, seed(), ports::is_free).context(
        "there are no free ports on 127.0.0.1 from 14000 to 19999\nend programs that listen there",
    )?;
    for (before, now) in known.map(|known| changes(known, ports)).unwrap_or_default() {
        progress.say(format!("port {before} is taken by another program; using {now} instead"));
    }
    let mut state =
        before.unwrap_or_else(|| State::new(ports, dir.images(), args.driver.unwrap_or_default()));
    state.ports = ports;
    let (images_dir, driver) = (args.images_dir.as_ref(), args.driver);
    let is_new = images_dir.is_some_and(|dir| *dir != state.images_dir)
        || driver.is_some_and(|it| it != state.driver());
    if bound.agent && (is_new || args.network.is_some_and(|it| it != state.isolation.network)) {
        progress.say("the agent runs with the flags that it was started with; for others: mvm dev down --keep, then mvm dev up");
        return Ok(state);
    }
    if let Some(images_dir) = images_dir {
        state.images_dir.clone_from(images_dir);
    }
    if let Some(driver) = driver {
        state.set_driver(driver);
    }
    Ok(state)
}

/// Another one for each process: two commands that begin at once look for ports in different places.
fn seed() -> u32 {
    /// More than a cluster needs.
    const APART: u32 = 8;
    std::process::id().wrapping_mul(APART)
}

fn changes(before: Ports, now: Ports) -> Vec<(u16, u16)> {
    let all = |ports: Ports| [ports.coordinator, ports.coordinator_metrics, ports.agent, ports.agent_metrics];
    all(before).into_iter().zip(all(now)).filter(|(before, now)| before != now).collect()
}

/// The driver that the agent would take, which must be able to run here.
async fn check_driver(dir: &DevDir, state: &State) -> anyhow::Result<DriverKind> {
    let vmm = VmmSettings::default();
    let kind = choice::look_with(state.driver(), &vmm, &dir.node());
    choice::check(kind, &vmm).await.map_err(NodeError::from)?;
    Ok(kind)
}

fn choose_isolation(
    dir: &DevDir,
    state: &State,
    args: &UpArgs,
    kind: DriverKind,
    progress: Progress,
) -> anyhow::Result<Modes> {
    if !kind.uses_host_resources() {
        progress.say("the fake driver runs no guest: instances exist on paper only");
        return Ok(Modes::NONE);
    }
    let is_root = geteuid().is_root();
    let mut settings = AgentSettings::new(&dir.node());
    settings.driver = state.driver();
    let checks = if is_root { examine_isolation(&settings, Some("root")) } else { Vec::new() };
    let wants_network = is_root && args.network != Some(NetworkMode::None);
    let network_taken = if wants_network {
        claim::claim(dir.path()).context("could not see whose the tenants' networks of this machine are")?
    } else {
        None
    };
    let found =
        Found { is_root, checks: &checks, network_taken: network_taken.as_deref(), network: args.network };
    let (modes, told) = isolation::choose(&found);
    told.into_iter().for_each(|line| progress.say(line));
    Ok(modes)
}

fn start_unless(
    runs: bool,
    dir: &DevDir,
    part: Part,
    command: &[std::ffi::OsString],
) -> anyhow::Result<Option<Child>> {
    if runs { Ok(None) } else { start(dir, part, command).map(Some) }
}

fn say_started(
    dir: &DevDir,
    part: Part,
    started: Option<&Child>,
    address: &str,
    progress: Progress,
) -> anyhow::Result<()> {
    let Some(recorded) = living(&dir.pid_file(part))? else {
        return Err(anyhow!(
            "the {part} has ended\nits log: {}\nrun `mvm dev up` again",
            dir.log(part).display()
        ));
    };
    let what = if started.is_some() { "started" } else { "runs" };
    progress.say(format!("{part} {what}: process {}, {address}", recorded.process.pid));
    Ok(())
}

/// How many there are that an agent would find.
async fn microvms(dir: &DevDir) -> anyhow::Result<usize> {
    if !fs::exists(dir.node().join("vms"))? {
        return Ok(0);
    }
    let vmms = AnyHost::local(&dir.node()).vmms().await;
    Ok(vmms.context("could not look for microVMs that run on")?.len())
}

fn tell_next(named: Option<&context::Named>, dir: Option<&DevDir>, progress: Progress) {
    let context = named.filter(|named| !named.is_current).map(|named| format!(" --context {}", named.name));
    let (context, dir) = (
        context.unwrap_or_default(),
        dir.map(|dir| format!(" --dir {}", dir.path().display())).unwrap_or_default(),
    );
    progress.say("");
    progress.say("next:");
    for (command, what) in [
        (format!("mvm get nodes,pools -A{context}"), "what there is"),
        (
            format!("mvm wait pool dev/default --for condition=Ready{context}"),
            "until the first instance runs",
        ),
        (format!("mvm instance list{context}"), "its id"),
        (format!("mvm instance exec ID{context} -- uname -a"), "a command in it"),
        (format!("mvm dev status{dir}"), "processes and logs"),
        (format!("mvm dev down{dir}"), "the end of it"),
    ] {
        progress.say(format!("  {command:<52}  {what}"));
    }
}
