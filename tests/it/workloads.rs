//! A program that dies or falls ill in a real microVM: told, started again, back in service; its crash loop told.
//! Through sleep, wake, fork and the agent's end.
//!
//! Needs QEMU and the test image (`make test` installs and builds both); says so when it can't run, and fails in CI.

use std::path::Path;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_proto::Digest;
use mvm_tests::{LoneAgent, path_text, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(180);

/// Serves a page, unless it is doomed. Its runs are counted, and its number is known before it serves.
const PROGRAM: &str = "echo run >> /run/runs; [ -e /run/doomed ] && exit 7; mkdir -p /run/www; \
                       echo ok > /run/www/ok; echo $$ > /run/pid.new; mv /run/pid.new /run/pid; \
                       exec httpd -f -p 127.0.0.1:8080 -h /run/www";

/// What a pool may run in place of that: says who, where and with what it is.
const OTHER: &str = "echo $$ > pid.new; mv pid.new pid; touch /data/$0 ~root/$0 /run/mvm/worker-idle; \
                     { echo \"$(id -u) $(id -g) $(id -G) $PWD $HOME $MODE $FROM $0\"; cat /run/mvm/secrets/bundle; } >> said; \
                     while :; do sleep 1; done";

/// The test image with a program and users of its own: a second archive behind its first, as kernels take them.
fn image_with_program(target: &Path) {
    let image = mvm_needs::test_image().expect("the test image is there");
    std::fs::create_dir(target).expect("a folder can be made");
    for file in ["kernel", "cmdline", "initrd"] {
        let bytes = std::fs::read(image.join(file)).expect("the image's files can be read");
        std::fs::write(target.join(file), bytes).expect("the image's files can be copied");
    }
    let env = json!({ "MODE": "image", "FROM": "image" });
    let config = json!({ "workload": ["sh", "-c", PROGRAM], "env": env }).to_string();
    let mut initrd = std::fs::read(target.join("initrd")).expect("it was copied");
    initrd.resize(initrd.len().next_multiple_of(512), 0);
    for (name, mode, content) in [
        ("etc", 0o040_755, ""),
        ("etc/mvm", 0o040_755, ""),
        ("etc/mvm/guest.json", 0o100_644, config.as_str()),
        ("etc/passwd", 0o100_644, "root:x:0:0:root:/root:/bin/sh\napp:x:1234:1235:App:/srv/app:/bin/sh\n"),
        ("etc/group", 0o100_644, "root:x:0:\napp:x:1235:\nmedia:x:77:app,root\n"),
        ("srv", 0o040_755, ""),
        // Everyone's, for files are root's here.
        ("srv/app", 0o041_777, ""),
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
        let secrets = dir.path().join("secrets");
        std::fs::create_dir(&secrets).expect("a folder can be made");
        let flags = ["--images-dir", path_text(&images), "--secrets-dir", path_text(&secrets)];
        let agent = LoneAgent::new("qemu", &flags);
        let mut site = Self { agent, dir };
        site.declare(1, 0, &json!({}));
        site.agent.start();
        site.agent.wait_counts(1, 0, 0, LONG);
        site
    }

    fn declare(&self, running: u32, sleeping: u32, health: &Value) {
        let health = health.as_object().filter(|health| !health.is_empty());
        let more = health.map_or_else(|| json!({}), |health| json!({ "health": health }));
        self.declare_with(running, sleeping, &more);
    }

    /// With these in the pool.
    fn declare_with(&self, running: u32, sleeping: u32, more: &Value) {
        let mut pool = json!({
            "pool_id": "web", "flake_ref": format!("path:{}", path_text(&self.dir.path().join("image"))),
            "profile": "minimal",
            "instance_resources": {"vcpus": 1, "mem_mib": 128, "data_disk_mib": 0},
            "desired_counts": {"running": running, "warm": 0, "sleeping": sleeping},
            "runtime_policy": {"min_running_seconds": 0, "min_warm_seconds": 0, "drain_timeout_seconds": 5,
                               "graceful_shutdown_seconds": 5},
            "stopped_retention_seconds": 0
        });
        for (name, value) in more.as_object().expect("fields of a pool") {
            pool[name] = value.clone();
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

#[test]
fn a_pools_own_workload_runs_as_it_says_through_restart_sleep_wake_fork_and_the_agents_end() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut site = Site::start();
    let id = site.ids().remove(0);
    assert_eq!(site.guest(&id, "echo $MODE $FROM").trim(), "image image");
    std::fs::write(site.dir.path().join("secrets/pool.acme.web"), "TOKEN=web\n").expect("a bundle");
    let more = |name: &str| {
        json!({
            "workload": {
                "command": ["sh", "-c"], "args": [OTHER, name], "env": { "MODE": "of the\npool" },
                "working_dir": "/srv/app", "user": "app"
            },
            "secrets_hash": Digest::of(b"TOKEN=web\n").to_string(),
            "instance_resources": { "vcpus": 1, "mem_mib": 128, "data_disk_mib": 64 },
            // What is run in the template has the pool's variables.
            "warmup": { "command": ["sh", "-c", "echo $MODE $FROM > /run/warmed"] }
        })
    };
    let declare = |site: &Site, running, sleeping, name: &str| {
        site.declare_with(running, sleeping, &more(name));
        let counts = || site.agent.with_counts(running as usize, 0, sleeping as usize).is_some();
        wait_until("the counts", LONG, counts);
    };
    let once =
        |name: &str| format!("1234 1235 1235 77 /srv/app /srv/app of the\npool image {name}\nTOKEN=web\n");
    let says = |site: &Site, id: &str, what: &str| {
        wait_until("it to say so", LONG, || site.guest(id, "cat /srv/app/said 2>/dev/null || true") == what);
        // What is meant for it is its own to write, and nothing else is.
        assert_eq!(
            site.guest(id, "stat -c %u /data /srv/app/pid; ls ~root 2>/dev/null || true").trim(),
            "1234\n1234"
        );
    };
    let end = |site: &Site, id: &str, restarts: usize| {
        wait_until("it to have begun", LONG, || {
            !site.guest(id, "cat /srv/app/pid 2>/dev/null || true").is_empty()
        });
        site.guest(id, "kill -9 $(cat /srv/app/pid)");
        wait_until("a restart", LONG, || site.told("WorkloadRestarted", id) >= restarts);
    };

    // Another workload replaces the instance; it keeps its name.
    declare(&site, 1, 0, "one");
    wait_until("a new guest", LONG, || site.told("InstanceReplaced", &id) > 0);
    says(&site, &id, &once("one"));
    assert_eq!(site.guest(&id, "cat /run/warmed; ls /data").trim(), "of the pool image\nlost+found\none");
    end(&site, &id, 1);
    says(&site, &id, &once("one").repeat(2));

    declare(&site, 0, 1, "one");
    declare(&site, 1, 0, "one");
    says(&site, &id, &once("one").repeat(2));
    end(&site, &id, 2);
    says(&site, &id, &once("one").repeat(3));

    declare(&site, 2, 0, "one");
    let fork = site.ids().into_iter().find(|other| *other != id).expect("there are two");
    assert_eq!(site.told("TemplateFailed", &id) + site.told("TemplateFailed", &fork), 0);
    says(&site, &fork, &once("one"));

    // The next agent knows it from the record: it sleeps and wakes with it, and is restarted in it.
    site.agent.kill();
    site.agent.start();
    declare(&site, 0, 2, "one");
    declare(&site, 2, 0, "one");
    end(&site, &fork, 1);
    says(&site, &fork, &once("one").repeat(2));

    // A number that the guest does not list, and the image's own program.
    let args = json!(["-c", "while :; do sleep 1; done"]);
    site.declare_with(2, 0, &json!({ "workload": { "user": 4321, "args": args } }));
    let is_so = |id: &str| {
        let status = "cat /proc/[0-9]*/status 2>/dev/null | grep '^Uid:\\|^Gid:' | grep -c 4321 || true";
        site.guest(id, status).trim().parse::<u32>().is_ok_and(|lines| lines >= 2)
    };
    for id in [&id, &fork] {
        wait_until("the number", LONG, || site.told("InstanceReplaced", id) > 0);
        wait_until("it to run as that", LONG, || is_so(id));
    }
    site.clear();
}
