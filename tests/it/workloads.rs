//! A program that dies or falls ill in a real microVM: told, started again, back in service; its crash loop told.
//! Through sleep, wake, fork and the agent's end.
//!
//! Needs QEMU and the test image (`make test` installs and builds both); says so when it can't run, and fails in CI.

use std::path::Path;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, path_text, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(180);

/// Serves a page, unless it is doomed. Its runs are counted, and its number is known before it serves.
const PROGRAM: &str = "echo run >> /run/runs; [ -e /run/doomed ] && exit 7; mkdir -p /run/www; \
                       echo ok > /run/www/ok; echo $$ > /run/pid.new; mv /run/pid.new /run/pid; \
                       exec httpd -f -p 127.0.0.1:8080 -h /run/www";

/// The test image with a program of its own: a second archive behind its first, as kernels take them.
fn image_with_program(target: &Path) {
    let image = mvm_needs::test_image().expect("the test image is there");
    std::fs::create_dir(target).expect("a folder can be made");
    for file in ["kernel", "cmdline", "initrd"] {
        let bytes = std::fs::read(image.join(file)).expect("the image's files can be read");
        std::fs::write(target.join(file), bytes).expect("the image's files can be copied");
    }
    let config = json!({ "workload": ["sh", "-c", PROGRAM] }).to_string();
    let mut initrd = std::fs::read(target.join("initrd")).expect("it was copied");
    initrd.resize(initrd.len().next_multiple_of(512), 0);
    for (name, mode, content) in [
        ("etc", 0o040_755, ""),
        ("etc/mvm", 0o040_755, ""),
        ("etc/mvm/guest.json", 0o100_644, config.as_str()),
        ("TRAILER!!!", 0, ""),
    ] {
        let (size, name_size) = (content.len(), name.len() + 1);
        let fields = [1, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        let header: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        initrd.extend(format!("070701{header}{name}\0").bytes());
        initrd.resize(initrd.len().next_multiple_of(4), 0);
        initrd.extend(content.bytes());
        initrd.resize(initrd.len().next_multiple_of(4), 0);
    }
    std::fs::write(target.join("initrd"), initrd).expect("the archive can be written");
}

struct Site {
    agent: LoneAgent,
    dir: TempDir,
}

impl Site {
    fn start() -> Self {
        let images = mvm_needs::test_images();
        let dir = TempDir::new().expect("a temporary folder can be made");
        image_with_program(&dir.path().join("image"));
        let agent = LoneAgent::new("qemu", &["--images-dir", path_text(&images)]);
        let mut site = Self { agent, dir };
        site.declare(1, 0, &json!({}));
        site.agent.start();
        site.agent.wait_counts(1, 0, 0, LONG);
        site
    }

    fn declare(&self, running: u32, sleeping: u32, health: &Value) {
        let mut pool = json!({
            "pool_id": "web", "flake_ref": format!("path:{}", path_text(&self.dir.path().join("image"))),
            "profile": "minimal",
            "instance_resources": {"vcpus": 1, "mem_mib": 128, "data_disk_mib": 0},
            "desired_counts": {"running": running, "warm": 0, "sleeping": sleeping},
            "runtime_policy": {"min_running_seconds": 0, "min_warm_seconds": 0, "drain_timeout_seconds": 5,
                               "graceful_shutdown_seconds": 5},
            "stopped_retention_seconds": 0
        });
        if health.as_object().is_some_and(|health| !health.is_empty()) {
            pool["health"] = health.clone();
        }
        self.agent.declare(&json!({
            "schema_version": 1, "node_id": "node-a",
            "tenants": [{
                "tenant_id": "acme",
                "network": {"tenant_net_id": 7, "ipv4_subnet": "10.77.7.0/24"},
                "quotas": {"max_vcpus": 8, "max_mem_mib": 4096, "max_running": 8, "max_warm": 8, "max_pools": 4,
                           "max_instances_per_pool": 8, "max_disk_gib": 8},
                "pools": [pool]
            }]
        }));
    }

    fn ids(&self) -> Vec<String> {
        let instances = self.agent.observe().expect("the agent answers")["instances"].clone();
        let ids = instances.as_array().expect("a list").iter();
        ids.map(|i| i["id"].as_str().expect("an id").to_owned()).collect()
    }

    fn guest(&self, id: &str, line: &str) -> String {
        self.agent.mvm_ok(&["instance", "exec", id, "--", "sh", "-c", line])
    }

    /// What of this kind was told of the instance.
    fn told(&self, kind: &str, id: &str) -> usize {
        let text = self.agent.mvm_ok(&["events", "-o", "json"]);
        let events: Vec<Value> = serde_json::from_str(&text).expect("a list of events");
        let subject = format!("acme/web/{id}");
        events.iter().filter(|event| event["kind"] == kind && event["subject"] == subject.as_str()).count()
    }

    fn runs(&self, id: &str) -> usize {
        self.guest(id, "cat /run/runs").lines().count()
    }

    fn serves(&self, id: &str) -> bool {
        let fetch = "wget -q -O - http://127.0.0.1:8080/ok 2>/dev/null || echo no";
        self.guest(id, fetch).trim() == "ok"
    }

    fn workload(&self, id: &str) -> Value {
        let instances = self.agent.observe().expect("the agent answers")["instances"].clone();
        let mut instances = instances.as_array().expect("a list").iter();
        instances.find(|i| i["id"] == id).map_or(Value::Null, |i| i["workload"].clone())
    }

    /// Waits until it was told so often that the program was started again, and it serves.
    fn back_in_service(&self, id: &str, restarts: usize) {
        wait_until("the program to be started again", LONG, || {
            self.told("WorkloadRestarted", id) >= restarts && self.workload(id)["state"] == "running"
        });
        wait_until("it to serve", LONG, || self.serves(id));
    }

    fn kill_program(&self, id: &str) {
        wait_until("it to serve", LONG, || self.serves(id));
        self.guest(id, "kill -9 $(cat /run/pid)");
    }

    /// Takes everything away again: microVMs outlive their agent.
    fn clear(&self) {
        self.agent.declare(&mvm_tests::nothing());
        self.agent.wait_counts(0, 0, 0, LONG);
    }
}

#[test]
fn a_killed_program_is_back_in_service_through_sleep_wake_fork_and_the_agents_end() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut site = Site::start();
    let id = site.ids().remove(0);

    site.kill_program(&id);
    site.back_in_service(&id, 1);
    assert_eq!((site.told("WorkloadEnded", &id), site.runs(&id)), (1, 2));

    // What slept is the same guest, whose program is started again as before.
    site.declare(0, 1, &json!({}));
    site.agent.wait_counts(0, 0, 1, LONG);
    site.declare(1, 0, &json!({}));
    site.agent.wait_counts(1, 0, 0, LONG);
    site.kill_program(&id);
    site.back_in_service(&id, 2);
    assert_eq!((site.ids(), site.runs(&id)), (vec![id.clone()], 3));

    // A fork has a program of its own.
    site.declare(2, 0, &json!({}));
    site.agent.wait_counts(2, 0, 0, LONG);
    let fork = site.ids().into_iter().find(|other| *other != id).expect("there are two");
    site.kill_program(&fork);
    site.back_in_service(&fork, 1);
    assert_eq!((site.runs(&fork), site.runs(&id), site.told("WorkloadEnded", &id)), (2, 3, 2));

    // It dies while no agent looks: the console tells when.
    let console = site.agent.data_dir().join("vms").join(&fork).join("console.log");
    let line =
        "(sleep 2; kill -9 $(cat /run/pid); echo it is dead > /dev/console) >/dev/null 2>&1 </dev/null &";
    site.guest(&fork, &format!("setsid sh -c '{line}'"));
    site.agent.kill();
    wait_until("the program to die", LONG, || {
        std::fs::read_to_string(&console).unwrap_or_default().contains("it is dead")
    });
    site.agent.start();
    site.back_in_service(&fork, 1);
    assert_eq!(site.told("WorkloadEnded", &fork), 1, "of this agent");
    assert_eq!(site.runs(&fork), 3);
    site.clear();
}

#[test]
fn a_crash_loop_is_told_and_ends_with_a_new_guest() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let site = Site::start();
    let id = site.ids().remove(0);
    // In this guest it can't come back; the next one has no such file.
    site.guest(&id, "touch /run/doomed");
    site.guest(&id, "kill -9 $(cat /run/pid)");
    wait_until("the crash loop to be told", LONG, || site.told("WorkloadCrashLoop", &id) > 0);
    let told = site.agent.mvm_ok(&["node", "stats"]);
    assert!(told.contains("CrashLoop"), "{told}");
    wait_until("a new guest", LONG, || site.told("InstanceReplaced", &id) > 0);
    wait_until("it to serve", LONG, || site.serves(&id));
    assert_eq!((site.ids(), site.told("WorkloadRestarted", &id)), (vec![id.clone()], 3));
    assert_eq!(site.workload(&id)["restarts"], 4);
    site.clear();
}

#[test]
fn a_program_that_fails_its_health_check_is_restarted_through_sleep_wake_fork_and_the_agents_end() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let health = json!({"http": {"port": 8080, "path": "/ok"}, "start_period_seconds": 60, "interval_seconds": 1,
                        "timeout_seconds": 10, "failure_threshold": 2});
    let mut site = Site::start();
    let id = site.ids().remove(0);
    // A check that comes later replaces nothing.
    site.declare(1, 0, &health);
    let fall_ill = |site: &Site, id: &str| {
        wait_until("it to serve", LONG, || site.serves(id));
        site.guest(id, "rm /run/www/ok");
    };
    fall_ill(&site, &id);
    site.back_in_service(&id, 1);
    assert_eq!((site.told("WorkloadUnhealthy", &id), site.runs(&id), site.ids()), (1, 2, vec![id.clone()]));

    site.declare(0, 1, &health);
    site.agent.wait_counts(0, 0, 1, LONG);
    site.declare(1, 0, &health);
    site.agent.wait_counts(1, 0, 0, LONG);
    fall_ill(&site, &id);
    site.back_in_service(&id, 2);

    site.declare(2, 0, &health);
    site.agent.wait_counts(2, 0, 0, LONG);
    let fork = site.ids().into_iter().find(|other| *other != id).expect("there are two");
    fall_ill(&site, &fork);
    site.back_in_service(&fork, 1);

    // It falls ill while no agent looks, or just after: its guest checks it all the same.
    fall_ill(&site, &fork);
    site.agent.kill();
    site.agent.start();
    site.back_in_service(&fork, 1);
    assert_eq!(site.runs(&fork), 3);
    site.clear();
}
