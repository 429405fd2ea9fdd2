//! The stand-in keeps the rules of the real one: each fact that was seen there, seen here.

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::firecracker::raw::{Raw, Vsock};

const START: &str = r#"{"action_type":"InstanceStart"}"#;
const LOAD: &str = r#"{"snapshot_path":"state","mem_backend":{"backend_type":"File","backend_path":"mem"}}"#;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// A folder with a snapshot of a machine that is gone; its sockets are still there.
fn asleep() -> tempfile::TempDir {
    let dir = dir();
    let mut raw = Raw::start(dir.path(), &[]);
    raw.boot();
    raw.guest_up();
    raw.vm("Paused");
    raw.snapshot("Full");
    kill(Pid::from_raw(raw.pid()), Signal::SIGKILL).unwrap();
    raw.ended();
    dir
}

#[test]
fn configuration_comes_before_the_start_and_the_start_comes_once() {
    let dir = dir();
    let raw = Raw::start(dir.path(), &[]);
    assert_eq!(raw.state(), "Not started");
    assert_eq!(raw.call("GET /version", "").1, r#"{"firecracker_version":"1.16.1"}"#);
    assert!(raw.refused("PUT /actions", START).contains("without kernel"));
    assert!(raw.refused("PATCH /vm", r#"{"state":"Paused"}"#).contains("before starting"));
    raw.done("PUT /entropy", "{}");
    raw.done("PUT /balloon", r#"{"amount_mib":0,"deflate_on_oom":true}"#);
    raw.done("PUT /metrics", r#"{"metrics_path":"metrics"}"#);
    raw.boot();
    assert_eq!(raw.state(), "Running");
    assert!(raw.refused("PUT /actions", START).contains("after starting"));
    let again = raw.refused("PUT /machine-config", r#"{"vcpu_count":1,"mem_size_mib":1}"#);
    assert!(again.contains("after starting"), "{again}");
    raw.done("PUT /actions", r#"{"action_type":"FlushMetrics"}"#);
    assert!(std::fs::read_to_string(dir.path().join("metrics")).unwrap().starts_with('{'));
    raw.vm("Paused");
    assert_eq!(raw.state(), "Paused");
    raw.vm("Resumed");
    assert_eq!(raw.state(), "Running");
}

#[test]
fn what_is_wrong_is_refused_at_once_and_with_words() {
    let dir = dir();
    let raw = Raw::start(dir.path(), &[("STAND_IN_BUSY_TAPS", "tap9")]);
    for (line, body, said) in [
        ("PUT /machine-config", r#"{"vcpu_count":33,"mem_size_mib":128}"#, "vCPU"),
        ("PUT /machine-config", r#"{"vcpu_count":1}"#, "mem_size_mib"),
        ("PUT /machine-config", "no json", "json"),
        ("PUT /boot-source", r#"{"kernel_image_path":"nothing"}"#, "No such file"),
        (
            "PUT /drives/a",
            r#"{"drive_id":"a","path_on_host":"nothing","is_root_device":false}"#,
            "No such file",
        ),
        (
            "PUT /drives/a",
            r#"{"drive_id":"b","path_on_host":"rootfs","is_root_device":false}"#,
            "does not match",
        ),
        ("PUT /network-interfaces/n", r#"{"iface_id":"n","host_dev_name":"tap9"}"#, "busy"),
        ("PUT /mmds/config", r#"{"network_interfaces":["eth7"]}"#, "eth7"),
        ("PUT /nothing", "{}", "Invalid request method and/or path"),
        ("PUT /snapshot/create", r#"{"snapshot_path":"s","mem_file_path":"m"}"#, "before starting"),
    ] {
        let fault = raw.refused(line, body);
        assert!(fault.contains(said), "{line}: {fault}");
    }
    // Accepted, although the description of the API says 3 and more.
    raw.done("PUT /vsock", r#"{"guest_cid":2,"uds_path":"v.sock"}"#);
    assert!(dir.path().join("v.sock").exists(), "the socket is there before the start");
    let twice = raw.refused("PUT /vsock", r#"{"guest_cid":3,"uds_path":"v.sock"}"#);
    assert!(twice.contains("Address already in use"), "{twice}");
    let (status, _) = raw.call("PUT /boot-source", &format!(r#"{{"boot_args":"{}"}}"#, "x".repeat(51_200)));
    assert_eq!(status, 413);
    assert_eq!(raw.state(), "Not started");
}

#[test]
fn a_balloon_waits_for_the_guests_driver() {
    let dir = dir();
    let raw = Raw::start(dir.path(), &[("STAND_IN_FAULT", "no-guest")]);
    raw.done("PUT /balloon", r#"{"amount_mib":0,"deflate_on_oom":true}"#);
    raw.boot();
    assert!(raw.refused("PATCH /balloon", r#"{"amount_mib":8}"#).contains("Device not activated yet"));
}

#[test]
fn a_snapshot_needs_a_pause_and_a_load_needs_a_fresh_process() {
    let dir = asleep();
    std::fs::remove_file(dir.path().join("v.sock")).unwrap();
    let mut raw = Raw::start(dir.path(), &[]);
    raw.done("PUT /machine-config", r#"{"vcpu_count":1,"mem_size_mib":1}"#);
    assert!(raw.refused("PUT /snapshot/load", LOAD).contains("boot-specific resources"));
    assert!(raw.is_alive());
    drop(raw);
    let raw = Raw::start(dir.path(), &[]);
    raw.done("PUT /logger", r#"{"log_path":"vmm.log","level":"Info"}"#);
    raw.done("PUT /metrics", r#"{"metrics_path":"metrics"}"#);
    raw.done("PUT /snapshot/load", LOAD);
    assert_eq!(raw.state(), "Paused");
    raw.vm("Resumed");
    raw.guest_up();
    let running = raw.refused("PUT /snapshot/create", r#"{"snapshot_path":"s","mem_file_path":"m"}"#);
    assert!(running.contains("save/restore unavailable while running"), "{running}");
}

/// A load in a folder that was broken in one way: 400, and then the process ends with 1.
fn fatal(said: &str, environment: &[(&str, &str)], body: &str, break_it: impl Fn(&Path)) {
    let dir = asleep();
    std::fs::remove_file(dir.path().join("v.sock")).unwrap();
    let mut raw = Raw::start(dir.path(), environment);
    break_it(dir.path());
    let fault = raw.refused("PUT /snapshot/load", body);
    assert!(fault.contains(said), "{fault}");
    assert_eq!(raw.ended().code(), Some(1), "{said}");
}

#[test]
fn a_load_that_fails_ends_the_process() {
    let remove = |name: &'static str| move |dir: &Path| std::fs::remove_file(dir.join(name)).unwrap();
    let write = |name: &'static str, bytes: &'static [u8]| {
        move |dir: &Path| std::fs::write(dir.join(name), bytes).unwrap()
    };
    fatal("rootfs", &[], LOAD, remove("rootfs"));
    fatal("No such file", &[], LOAD, remove("state"));
    fatal("No such file", &[], LOAD, remove("mem"));
    fatal("CRC", &[], LOAD, write("state", b"not what it was"));
    fatal("memory file", &[], LOAD, write("mem", b"short"));
    fatal("Address already in use", &[], LOAD, write("v.sock", b""));
    fatal("busy", &[("STAND_IN_BUSY_TAPS", "tap0")], LOAD, |_| ());
    let unknown =
        LOAD.replacen('{', r#"{"network_overrides":[{"iface_id":"eth7","host_dev_name":"tap1"}],"#, 1);
    fatal("eth7", &[], &unknown, |_| ());
}

#[test]
fn overrides_put_a_clone_elsewhere() {
    let dir = asleep();
    let raw = Raw::start(dir.path(), &[("STAND_IN_BUSY_TAPS", "tap0")]);
    let moved = LOAD.replacen(
        '{',
        r#"{"network_overrides":[{"iface_id":"eth0","host_dev_name":"tap1"}],"vsock_override":{"uds_path":"w.sock"},"#,
        1,
    );
    raw.done("PUT /snapshot/load", &moved);
    assert!(dir.path().join("w.sock").exists());
}

#[test]
fn sigterm_is_death_by_signal_and_leaves_the_sockets() {
    let dir = dir();
    let mut raw = Raw::start(dir.path(), &[]);
    raw.boot();
    kill(Pid::from_raw(raw.pid()), Signal::SIGTERM).unwrap();
    assert_eq!(raw.ended().signal(), Some(15));
    assert!(dir.path().join("api.sock").exists() && dir.path().join("v.sock").exists());
}

#[test]
fn a_guest_that_ends_and_one_that_panics_have_the_same_exit_code() {
    for (signal, panics) in [(Signal::SIGTERM, false), (Signal::SIGKILL, true)] {
        let dir = dir();
        let mut raw = Raw::start(dir.path(), &[]);
        raw.boot();
        raw.guest_up();
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", raw.pid())).unwrap();
        kill(Pid::from_raw(children.trim().parse().unwrap()), signal).unwrap();
        assert_eq!(raw.ended().code(), Some(0));
        let console = std::fs::read_to_string(dir.path().join("console.log")).unwrap();
        assert_eq!(console.contains("Kernel panic"), panics, "{console}");
    }
}

#[test]
fn vsock_answers_closes_or_resets() {
    let dir = dir();
    let raw = Raw::start(dir.path(), &[("STAND_IN_VERSION", "1.15.1")]);
    raw.boot();
    raw.guest_up();
    assert!(matches!(raw.vsock(5250), Vsock::Closed), "nobody listens there");
    let Vsock::Open(mut open) = raw.vsock(5252) else { panic!("the guest listens") };
    raw.vm("Paused");
    assert!(matches!(raw.vsock(5252), Vsock::Silent), "a paused guest says nothing");
    raw.snapshot("Diff");
    let mut rest = Vec::new();
    open.read_to_end(&mut rest).expect("a snapshot resets what is open");
    raw.vm("Resumed");
    raw.guest_up();
}

#[test]
fn a_bare_resume_loses_vsock_in_two_versions_and_a_snapshot_in_between_saves_it() {
    for (version, snapshot, reachable) in
        [("1.16.0", false, false), ("1.16.1", false, false), ("1.16.1", true, true), ("1.15.1", false, true)]
    {
        let dir = dir();
        let raw = Raw::start(dir.path(), &[("STAND_IN_VERSION", version)]);
        raw.boot();
        raw.guest_up();
        raw.vm("Paused");
        if snapshot {
            raw.snapshot("Diff");
        }
        raw.vm("Resumed");
        let answered = matches!(raw.vsock(5252), Vsock::Open(_));
        assert_eq!(answered, reachable, "{version}, snapshot: {snapshot}");
    }
}
