//! What is sent, held to the facts of the API's description: paths, field names, enumerations, ranges.

use serde_json::{Value, json};

use super::*;

fn sent(request: Result<Request, BadRequest>) -> (String, Value) {
    let request = request.unwrap();
    let body = serde_json::from_str(request.body.as_deref().unwrap()).unwrap();
    (format!("{} {}", request.method, request.path), body)
}

fn machine(vcpu_count: u32) -> MachineConfig {
    MachineConfig { vcpu_count, mem_size_mib: 128, track_dirty_pages: true }
}

fn vsock(guest_cid: u32) -> Vsock {
    Vsock { guest_cid, uds_path: "v.sock".into() }
}

#[test]
fn what_configures_a_machine_is_spelled_as_the_api_spells_it() {
    let call = |line: &str, body: Value| (line.to_owned(), body);
    assert_eq!(
        sent(machine(2).request()),
        call("PUT /machine-config", json!({"vcpu_count": 2, "mem_size_mib": 128, "track_dirty_pages": true}))
    );
    let source =
        BootSource { kernel_image_path: "kernel".into(), initrd_path: None, boot_args: "quiet".into() };
    assert_eq!(
        sent(source.request()),
        call("PUT /boot-source", json!({"kernel_image_path": "kernel", "boot_args": "quiet"}))
    );
    let with_initrd = BootSource { initrd_path: Some("initrd".into()), ..source };
    assert_eq!(sent(with_initrd.request()).1["initrd_path"], "initrd");
    let drive = Drive {
        drive_id: "rootfs".into(),
        path_on_host: "rootfs.img".into(),
        is_root_device: true,
        is_read_only: true,
        cache_type: CacheType::Unsafe,
    };
    assert_eq!(
        sent(drive.request()),
        call(
            "PUT /drives/rootfs",
            json!({"drive_id": "rootfs", "path_on_host": "rootfs.img", "is_root_device": true, "is_read_only": true, "cache_type": "Unsafe"})
        )
    );
    let data = Drive { cache_type: CacheType::Writeback, ..drive };
    assert_eq!(sent(data.request()).1["cache_type"], "Writeback");
    assert_eq!(sent(vsock(3).request()), call("PUT /vsock", json!({"guest_cid": 3, "uds_path": "v.sock"})));
    assert_eq!(sent(entropy()), call("PUT /entropy", json!({})));
    let balloon = Balloon { amount_mib: 0, deflate_on_oom: true, stats_polling_interval_s: 1 };
    assert_eq!(
        sent(balloon.request()),
        call("PUT /balloon", json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1}))
    );
    assert_eq!(sent(Balloon::resize(8)), call("PATCH /balloon", json!({"amount_mib": 8})));
    assert_eq!(sent(metrics("m")), call("PUT /metrics", json!({"metrics_path": "m"})));
    assert_eq!(sent(serial("c")), call("PUT /serial", json!({"serial_out_path": "c"})));
}

#[test]
fn actions_and_states_are_the_words_of_the_api() {
    for (action, word) in
        [(Action::InstanceStart, "InstanceStart"), (Action::SendCtrlAltDel, "SendCtrlAltDel")]
    {
        assert_eq!(sent(action.request()), ("PUT /actions".into(), json!({ "action_type": word })));
    }
    assert_eq!(sent(TargetState::Paused.request()), ("PATCH /vm".into(), json!({"state": "Paused"})));
    assert_eq!(sent(TargetState::Resumed.request()), ("PATCH /vm".into(), json!({"state": "Resumed"})));
    assert_eq!(Request::describe(), Request { method: Method::GET, path: "/".into(), body: None });
}

#[test]
fn a_network_card_names_its_tap_and_its_hardware_address() {
    let nic = NetworkInterface { host_dev_name: "tn7i3".into(), guest_mac: "02:4d:00:07:00:03".into() };
    let body = json!({"iface_id": "eth0", "host_dev_name": "tn7i3", "guest_mac": "02:4d:00:07:00:03"});
    assert_eq!(sent(nic.request()), ("PUT /network-interfaces/eth0".into(), body));
}

#[test]
fn a_snapshot_is_created_and_loaded_with_its_overrides() {
    let create = SnapshotCreate {
        snapshot_type: SnapshotType::Diff,
        snapshot_path: "state".into(),
        mem_file_path: "mem".into(),
    };
    assert_eq!(
        sent(create.request()),
        (
            "PUT /snapshot/create".into(),
            json!({"snapshot_type": "Diff", "snapshot_path": "state", "mem_file_path": "mem"})
        )
    );
    let load = SnapshotLoad {
        network_overrides: vec![NetworkOverride { iface_id: "eth0".into(), host_dev_name: "tap7".into() }],
        ..SnapshotLoad::paused("state", "mem", true)
    };
    assert_eq!(
        sent(load.request()),
        (
            "PUT /snapshot/load".into(),
            json!({
                "snapshot_path": "state",
                "mem_backend": {"backend_type": "File", "backend_path": "mem"},
                "track_dirty_pages": true,
                "resume_vm": false,
                "network_overrides": [{"iface_id": "eth0", "host_dev_name": "tap7"}],
            })
        )
    );
    // Absent is not the same as empty for a version that does not know the field.
    let plain = sent(SnapshotLoad::paused("state", "mem", false).request()).1;
    assert!(plain.get("network_overrides").is_none());
    assert!(plain.get("track_dirty_pages").is_none());
}

#[test]
fn what_firecracker_would_refuse_or_regret_is_never_sent() {
    assert_eq!(machine(0).request(), Err(BadRequest::Vcpus(0)));
    assert_eq!(machine(33).request(), Err(BadRequest::Vcpus(33)));
    assert!(machine(1).request().is_ok() && machine(32).request().is_ok());
    let long = BootSource {
        kernel_image_path: "k".into(),
        initrd_path: None,
        boot_args: "x".repeat(MAX_PAYLOAD_BYTES),
    };
    assert!(matches!(long.request(), Err(BadRequest::TooLong(_))));
}
