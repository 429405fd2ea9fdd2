//! An agent ended by SIGKILL at every point around its durable writes and effects, on the fake driver: whatever was
//! under way, the next agent comes to the desired state, and no instance is lost, doubled, leaked or renamed, nor forgets
//! anything.
//!
//! For each point: instances are brought to where a change passes it, the agent is started with the point armed and
//! the change declared, ends itself there, and is started again. That it ended by the signal proves the point passed.
//! What only a request passes is asked for: see [`requests`].

mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use mvm_agent::crash;
use mvm_tests::{LoneAgent, PATIENCE, nothing, small_pool, wait_for, wait_for_or};
use nix::sys::signal::Signal;
use requests::Asked;
use serde_json::{Value, json};
use tempfile::TempDir;

/// What no record owns goes soon, and this test asks more often than a peer should.
const FLAGS: &[&str] = &["--sweep-after", "1s", "--rate-per-second", "1000000", "--rate-burst", "1000000"];

type Counts = (u32, u32, u32);

const NONE: Counts = (0, 0, 0);
const UP: Counts = (1, 0, 0);
const WARM: Counts = (0, 1, 0);
const ASLEEP: Counts = (0, 0, 1);

/// What happens between the agent that made `from` true and the one that is to end at the point.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Before {
    Nothing,
    /// Another agent ended there, so that there is something to recover.
    CrashAt(&'static str),
    /// The VMs ended while no agent looked.
    VmsLost,
    /// A VM is there that no record owns.
    Stranger,
    /// What the driver keeps of the instances can't be written: every step fails.
    Unwritable,
    /// What they remember is gone.
    SnapshotsLost,
    /// The pool was never there.
    NoTemplate,
}

/// How the point is passed: from which counts to which.
fn case(point: &str) -> (Counts, Counts, Before) {
    use Before::{CrashAt, NoTemplate, Nothing, SnapshotsLost, Stranger, Unwritable, VmsLost};
    match point {
        "template.dropped" => (NONE, UP, CrashAt("template.booted")),
        "wake.forgotten" => (ASLEEP, UP, SnapshotsLost),
        "start.cleared" | "up.told" | "observe.recorded" => (UP, UP, VmsLost),
        "recover.removed" => (UP, NONE, CrashAt("destroy.intended")),
        "recover.saved" | "recover.done" => (WARM, ASLEEP, CrashAt("sleep.intended")),
        "sweep.removed" => (UP, UP, Stranger),
        "failure.cleared" | "failure.recorded" => (ASLEEP, UP, Unwritable),
        _ => match point.split_once('.').map(|(step, _)| step) {
            Some("template") => (NONE, UP, NoTemplate),
            Some("start") => (NONE, UP, Nothing),
            Some("warm") => (UP, WARM, Nothing),
            Some("resume") => (WARM, UP, Nothing),
            Some("sleep") => (WARM, ASLEEP, Nothing),
            Some("wake") => (ASLEEP, UP, Nothing),
            Some("restart") => (UP, UP, Nothing),
            Some("stop" | "destroy") => (UP, NONE, Nothing),
            Some("call_off") => (WARM, ASLEEP, Nothing),
            Some("export" | "import") => (ASLEEP, ASLEEP, Nothing),
            _ => panic!("no case passes {point}"),
        },
    }
}

struct Matrix {
    agent: LoneAgent,
    /// How many instances make each change.
    times: u32,
    /// Where exports go.
    archives: TempDir,
}

impl Matrix {
    fn new(times: u32) -> Self {
        let archives = TempDir::new().expect("a temporary folder can be made");
        Self { agent: LoneAgent::new("fake", FLAGS), times, archives }
    }

    fn document(&self, (running, warm, sleeping): Counts) -> Value {
        let times = self.times;
        let mut document = small_pool(running * times, warm * times, sleeping * times);
        // What a request wanted goes back soon.
        document["tenants"][0]["pools"][0]["sleep_policy"] =
            json!({"warm_after_seconds": 1, "sleep_after_seconds": 1});
        document
    }

    fn declare(&self, counts: Counts) {
        self.agent.declare(&self.document(counts));
    }

    /// Every instance, as the agent tells it.
    fn list(&self) -> Option<Vec<Value>> {
        self.send("GET", "/v1/instances")?["instances"].as_array().cloned()
    }

    /// Every instance: its phase and its address.
    fn instances(&self) -> Option<BTreeMap<String, (String, String)>> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.list()?
            .iter()
            .map(|i| Some((text(&i["instance_id"])?, (text(&i["phase"])?, text(&i["address"])?))))
            .collect()
    }

    fn world(&self) -> PathBuf {
        self.agent.data_dir().join("fake-vms")
    }

    /// What the driver has of each instance.
    fn vms(&self) -> BTreeMap<String, Value> {
        let mut all = self.kept();
        all.retain(|_, entry| entry["template"] != true);
        all
    }

    /// How often each instance was started from the beginning: what it remembered was lost each time.
    fn starts(&self) -> BTreeMap<String, usize> {
        let starts = |entry: &Value| {
            let console = entry["console"].as_str().unwrap_or_default();
            console.lines().filter(|line| ["booted", "forked"].contains(line)).count()
        };
        self.vms().iter().map(|(id, entry)| (id.clone(), starts(entry))).collect()
    }

    /// Every template is saved and has no VM.
    fn templates_rest(&self, most: usize) -> bool {
        let mut templates = self.kept();
        templates.retain(|_, entry| entry["template"] == true);
        let rests = |entry: &Value| entry["vm"].is_null() && !entry["snapshot"].is_null();
        templates.len() <= most && templates.values().all(rests)
    }

    /// What the driver has, of instances and of templates.
    fn kept(&self) -> BTreeMap<String, Value> {
        let files = std::fs::read_dir(self.world()).expect("the driver's folder is there");
        let mut vms = BTreeMap::new();
        for file in files {
            let path = file.expect("the driver's folder can be read").path();
            if path.extension().is_some_and(|extension| extension == "json") {
                let text = match std::fs::read(&path) {
                    Ok(text) => text,
                    // Removed since the folder was listed.
                    Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                    Err(error) => panic!("{}: {error}", path.display()),
                };
                let id = path.file_stem().expect("it has a name").to_string_lossy().into_owned();
                vms.insert(id, serde_json::from_slice(&text).expect("the driver renames whole files"));
            }
        }
        vms
    }

    /// Whether records, driver and counts agree exactly.
    fn agrees(&self, (running, warm, sleeping): Counts) -> Option<BTreeMap<String, String>> {
        let instances = self.instances()?;
        let vms = self.vms();
        let count = |phase: &str| instances.values().filter(|(p, _)| p == phase).count();
        let times = self.times;
        let wanted = [running, warm, sleeping].map(|n| (n * times) as usize);
        let all = wanted.iter().sum::<usize>();
        let counts = ["running", "warm", "sleeping"].map(count) == wanted && instances.len() == all;
        let ids: BTreeSet<&String> = instances.keys().collect();
        let same = vms.keys().collect::<BTreeSet<_>>() == ids;
        let fits = instances.iter().all(|(id, (phase, _))| {
            let vm = &vms.get(id).unwrap_or(&Value::Null)["vm"];
            let snapshot = !vms.get(id).unwrap_or(&Value::Null)["snapshot"].is_null();
            match phase.as_str() {
                "running" => vm["state"] == "running" && vm["reborn"] == true && !snapshot,
                "warm" => vm["state"] == "paused" && !snapshot,
                _ => vm.is_null() && snapshot,
            }
        });
        (counts && same && fits && self.templates_rest(1))
            .then(|| instances.into_iter().map(|(id, (_, address))| (id, address)).collect())
    }

    fn settle(&self, point: &str, counts: Counts) -> BTreeMap<String, String> {
        let found = || {
            format!("{counts:?} after {point}: {:#?}\n{}", (self.instances(), self.vms()), self.agent.log())
        };
        wait_for_or(PATIENCE, || self.agrees(counts), found)
    }

    /// Starts an agent that ends itself at `point`, and waits for that.
    fn die_at(&mut self, point: &str) {
        self.agent.launch(&[("MVM_CRASH_AT", point)]);
        self.agent.wait_crashed(point, PATIENCE);
    }

    fn prepare(&mut self, before: Before) {
        let files: Vec<_> = self.vms().into_keys().collect();
        match before {
            Before::Nothing | Before::NoTemplate => {}
            Before::SnapshotsLost => {
                for id in files {
                    let path = self.world().join(format!("{id}.json"));
                    let mut entry = self.vms()[&id].clone();
                    (entry["snapshot"], entry["asleep"]) = (Value::Null, Value::Null);
                    std::fs::write(path, entry.to_string()).expect("a snapshot can be taken away");
                }
            }
            Before::CrashAt(point) => self.die_at(point),
            Before::VmsLost => {
                for id in files {
                    let path = self.world().join(format!("{id}.json"));
                    let mut entry = self.vms()[&id].clone();
                    entry["vm"] = Value::Null;
                    std::fs::write(path, entry.to_string()).expect("a VM can be taken away");
                }
            }
            Before::Stranger => {
                let entry = self.vms().into_values().next().unwrap_or_else(|| json!({}));
                let path = self.world().join("i-0badcafe.json");
                std::fs::write(path, entry.to_string()).expect("a stranger can be put there");
            }
            Before::Unwritable => {
                for id in files {
                    std::fs::create_dir(self.world().join(format!("{id}.tmp")))
                        .expect("a folder can be made");
                }
            }
        }
    }

    fn run(&mut self, point: &'static str, passing: u32) {
        let (from, to, before) = case(point);
        if before == Before::NoTemplate || before == Before::CrashAt("template.booted") {
            self.clear(point);
        }
        self.declare(from);
        self.agent.launch(&[]);
        let ids = self.settle(point, from);
        let starts = self.starts();
        self.agent.kill();
        self.declare(to);
        self.prepare(before);
        let asked = Asked::at(point);
        self.archives = TempDir::new().expect("a temporary folder can be made");
        if asked == Some(Asked::Import) {
            self.send_away(point, &ids);
        }
        let armed = if before == Before::Nothing { format!("{point}:{passing}") } else { point.to_owned() };
        match asked {
            None => self.die_at(&armed),
            Some(asked) => self.die_asked(&armed, asked, &ids),
        }
        for id in self.vms().into_keys() {
            let _ = std::fs::remove_dir(self.world().join(format!("{id}.tmp")));
        }
        self.agent.launch(&[]);
        if asked == Some(Asked::Import) {
            self.take_in_the_rest(point, passing, &ids);
            self.declare(to);
        }
        let after = self.settle(point, to);
        if asked == Some(Asked::Export) {
            self.check_exports(point, passing);
        }
        if from != NONE && to != NONE {
            assert_eq!(after, ids, "{point}: ids and addresses are kept\n{}", self.agent.log());
            if !matches!(before, Before::VmsLost | Before::SnapshotsLost) {
                assert_eq!(self.starts(), starts, "{point}: memory is kept\n{}", self.agent.log());
            }
        }
        self.agent.kill();
    }

    /// Has an agent make it so that nothing is there, not even a template.
    fn clear(&mut self, point: &str) {
        self.agent.declare(&nothing());
        self.agent.launch(&[]);
        self.settle(point, NONE);
        wait_for("the templates to be gone", PATIENCE, || self.templates_rest(0).then_some(()));
        // Their records go last: an agent that is killed before would leave one, and the next guest would only boot.
        self.agent.process().signal(Signal::SIGTERM);
        self.agent.process().wait_exit(PATIENCE);
    }

    fn run_all(&mut self, passing: u32) {
        for point in crash::ALL {
            self.run(point, passing);
        }
        self.clear("the end");
    }
}

#[test]
fn one_instance_survives_the_agents_end_at_every_point() {
    Matrix::new(1).run_all(1);
}

#[test]
fn two_instances_survive_the_agents_end_where_the_first_of_them_passes_each_point() {
    Matrix::new(2).run_all(1);
}

#[test]
fn two_instances_survive_the_agents_end_where_the_second_of_them_passes_each_point() {
    Matrix::new(2).run_all(2);
}

/// What is listed is tried: by this matrix, or by the tests with microVMs that go through the other lists.
#[test]
fn every_point_in_the_agents_sources_is_listed() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("../agent/src"), root.join("../vmm/src")];
    let mut found = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("sources can be read").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(path).expect("sources can be read");
                let passed = text.split("crash::point(\"").skip(1);
                found.extend(passed.filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
            }
        }
    }
    let listed =
        [crash::ALL, crash::SESSION_POINTS, crash::TRANSFER_POINTS, mvm_vmm::crash::OF_SNAPSHOTS].concat();
    let unlisted: Vec<_> = found.iter().filter(|name| !listed.contains(&name.as_str())).collect();
    assert!(found.len() > crash::ALL.len() / 2 && unlisted.is_empty(), "no agent is ended at {unlisted:?}");
}
