//! Sleep, wake, fork and resume as a caller of the agent sees them, beside a bare QEMU that does the same with the same
//! files until its guest answers. Nothing is compressed or encrypted; both ends of a save are on disk when it is over.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use mvm_tests::{LoneAgent, small_pool};
use serde_json::{Value, json};

use super::runtime;
use crate::bare_qemu::{BareQemu, CommandLine};
use crate::effort::Effort;
use crate::row::{Goal, Row, Subject, Unit};

const WAKE_GOAL: Goal = Goal::RatioAtMost(1.3);
const FORK_GOAL: Goal = Goal::RatioAtMost(1.5);
const SLEEP_GOAL: Goal = Goal::RatioAtMost(1.5);
/// Milliseconds beyond QEMU's own `cont`.
const RESUME_GOAL: Goal = Goal::FigureBelow(1.0);
const BOOT_GOAL: Goal = Goal::RatioAtMost(0.1);
/// A boot takes as long as thirty forks.
const BOOTS: usize = 3;
/// At least; the others have as many as all rows have.
const PAIRS: usize = 30;

const FLAGS: &[&str] = &["--rate-per-second", "100000", "--rate-burst", "100000"];

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let images = mvm_tests::test_images();
    let flags = [FLAGS, &["--images-dir", mvm_tests::path_text(&images)]].concat();
    let mut agent = LoneAgent::new("qemu", &flags);
    agent.declare(&small_pool(1, 0, 0));
    agent.start();
    agent.wait_counts(1, 0, 0, Duration::from_secs(120));
    let mut guest = Guest::new(&agent)?;
    // A person's from here on: no count wants another while this one rests, and nobody else's boot is measured with it.
    guest.api.act("warm").and_then(|_| guest.api.wake())?;
    agent.declare(&small_pool(0, 0, 0));
    let measured = guest.measure(effort.pairs.max(PAIRS));
    // Its VM would outlive it.
    agent.declare(&mvm_tests::nothing());
    agent.wait_counts(0, 0, 0, Duration::from_secs(60));
    measured
}

/// One instance of the agent, and a copy of its files for QEMU alone.
struct Guest {
    api: Api,
    run_dir: PathBuf,
    bare_dir: tempfile::TempDir,
    /// How a fork is started.
    fork: CommandLine,
}

type Pairs = Vec<(f64, f64)>;

impl Guest {
    fn new(agent: &LoneAgent) -> Result<Self> {
        let census = agent.census().context("the agent says nothing")?;
        let id = census["running"].first().context("nothing runs")?.clone();
        let vms = agent.data_dir().join("vms");
        let pid = *agent.vmms().get(&id).and_then(|pids| pids.first()).context("the instance has no VMM")?;
        let fork = CommandLine::of(pid)?;
        let api = Api::connect(&agent.data_dir().join("agent.sock"), &id)?;
        Ok(Self { api, run_dir: vms.join(&id), bare_dir: tempfile::tempdir_in(agent.data_dir())?, fork })
    }

    fn measure(mut self, pairs: usize) -> Result<Vec<Row>> {
        let runtime = runtime()?;
        // Its first sleep leaves the template's memory behind; all others are alike.
        let (mut sleeps, mut wakes, mut forks, mut resumes) = (vec![], vec![], vec![], vec![]);
        let template = self.template()?;
        let base = self.bare_dir.path().join("base");
        std::fs::hard_link(template.join("memory"), &base)?;
        let plain = self.fork.in_memory();
        let bare_state = self.bare_dir.path().join("state");
        for _ in 0..pairs {
            let ours = self.api.act("stop").and_then(|_| self.api.act("start"))?;
            let begun = Instant::now();
            let bare = runtime.block_on(async {
                let qemu = BareQemu::start(self.bare_dir.path(), &self.fork).await?;
                qemu.restore(&template.join("state"), true).await?;
                anyhow::Ok(qemu)
            })?;
            forks.push((ours, millis(begun)));
            let bare_save = runtime.block_on(async {
                let begun = Instant::now();
                bare.save(&bare_state).await?;
                anyhow::Ok(millis(begun))
            })?;
            drop(bare);
            sleeps.push((self.api.act("sleep")?, bare_save));
            std::fs::copy(self.run_dir.join("snapshot/state"), &bare_state)?;
            let ours = self.api.wake()?;
            let begun = Instant::now();
            let bare = runtime.block_on(async {
                let qemu = BareQemu::start(self.bare_dir.path(), &plain).await?;
                qemu.restore(&bare_state, false).await?;
                anyhow::Ok(qemu)
            })?;
            wakes.push((ours, millis(begun)));
            self.api.act("warm")?;
            let ours = self.api.wake()?;
            let bare = runtime.block_on(async {
                bare.command("stop", Value::Null).await?;
                let begun = Instant::now();
                bare.command("cont", Value::Null).await?;
                anyhow::Ok(millis(begun))
            })?;
            resumes.push((ours, bare));
        }
        let mut boots = Pairs::new();
        for (fork, _) in forks.iter().take(BOOTS) {
            let begun = Instant::now();
            runtime.block_on(async {
                let qemu = BareQemu::start(self.bare_dir.path(), &plain.booting()).await?;
                qemu.answer().await
            })?;
            boots.push((*fork, millis(begun)));
        }
        // What was acted on by hand is left alone for a while, also by pruning.
        for end in ["stop", "destroy"] {
            self.api.act(end)?;
        }
        let row = |name: &str, pairs: &Pairs, peer: &str, goal| {
            let ours: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
            Row::of(Subject::Rest, name, &ours, Unit::Milliseconds).beside(peer, pairs).goal(goal)
        };
        let added: Vec<f64> = resumes.iter().map(|(ours, bare)| ours - bare).collect();
        Ok(vec![
            row("wake, until ready", &wakes, "bare QEMU restore of the same file", WAKE_GOAL),
            row("start as a fork, until ready", &forks, "bare QEMU restore of the template", FORK_GOAL),
            row("sleep, drained and on disk", &sleeps, "bare QEMU save, on disk", SLEEP_GOAL),
            row("start as a fork, until ready", &boots, "bare QEMU boot", BOOT_GOAL),
            Row::of(Subject::Rest, "what the agent adds to resuming a warm one", &added, Unit::Milliseconds)
                .goal(RESUME_GOAL)
                .note("beside bare QMP cont; the call to the agent is in it".to_owned()),
        ])
    }

    /// Where the snapshot of the pool's template is.
    fn template(&self) -> Result<PathBuf> {
        let vms = self.run_dir.parent().context("a run directory lies in one for all")?;
        let mut found = std::fs::read_dir(vms)?.filter_map(|dir| Some(dir.ok()?.path().join("snapshot")));
        found.find(|dir| dir.join("memory").exists()).context("the pool has no template")
    }
}

fn millis(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1000.0
}

/// The agent's API, on one connection that stays.
struct Api {
    stream: BufReader<UnixStream>,
    path: String,
}

impl Api {
    fn connect(socket: &Path, instance: &str) -> Result<Self> {
        let stream = BufReader::new(UnixStream::connect(socket)?);
        Ok(Self { stream, path: format!("/v1/tenants/acme/pools/workers/instances/{instance}") })
    }

    /// Milliseconds until the agent says that it is done.
    fn act(&mut self, action: &str) -> Result<f64> {
        self.post(action, &json!({ "override_seconds": 600 }).to_string())
    }

    fn wake(&mut self) -> Result<f64> {
        self.post("wake", "")
    }

    fn post(&mut self, action: &str, body: &str) -> Result<f64> {
        let head = format!(
            "POST {}/{action} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n",
            self.path,
            body.len()
        );
        let begun = Instant::now();
        self.stream.get_mut().write_all((head + body).as_bytes())?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        let took = millis(begun);
        let status = line.clone();
        let mut length = 0;
        loop {
            line.clear();
            self.stream.read_line(&mut line)?;
            let header = line.trim().to_ascii_lowercase();
            if header.is_empty() {
                break;
            }
            if let Some(value) = header.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        let mut answer = vec![0; length];
        self.stream.read_exact(&mut answer)?;
        ensure!(status.contains(" 20"), "{action}: {status}{}", String::from_utf8_lossy(&answer));
        Ok(took)
    }
}
