//! The units in `examples/systemd`: every line is one that systemd knows, and they say what the daemons need.
//!
//! With systemd on the machine its own checker looks at them too; without, only its words are compared.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use mvm_host::privileges::HELPER_CAPABILITIES;

/// Directives of systemd 252 that the units use, by section (systemd.unit, .service, .exec, .kill, .resource-control).
const KNOWN: [(&str, &str); 3] = [
    ("Unit", "Description Wants After"),
    (
        "Service",
        "Type NotifyAccess ExecStart Restart RestartSec WatchdogSec TimeoutStopSec KillMode Delegate TasksMax \
         LimitNOFILE OOMScoreAdjust StateDirectory StateDirectoryMode RuntimeDirectory RuntimeDirectoryMode \
         RuntimeDirectoryPreserve CapabilityBoundingSet AmbientCapabilities NoNewPrivileges ProtectSystem ReadWritePaths \
         ProtectHome PrivateTmp PrivateDevices PrivateUsers ProtectClock ProtectControlGroups ProtectHostname \
         ProtectKernelLogs ProtectKernelModules ProtectKernelTunables ProtectProc ProcSubset LockPersonality \
         MemoryDenyWriteExecute RemoveIPC RestrictNamespaces RestrictRealtime RestrictSUIDSGID SystemCallArchitectures \
         SystemCallFilter SystemCallErrorNumber RestrictAddressFamilies DevicePolicy DeviceAllow DynamicUser User UMask",
    ),
    ("Install", "WantedBy"),
];

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/systemd").join(name)
}

/// Section, directive, value.
fn unit(name: &str) -> Vec<(String, String, String)> {
    let text = std::fs::read_to_string(path(name)).unwrap();
    let mut section = String::new();
    let mut lines = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(title) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            title.clone_into(&mut section);
            continue;
        }
        let (key, value) = line.split_once('=').unwrap_or_else(|| panic!("{name}: {line}"));
        lines.push((section.clone(), key.to_owned(), value.to_owned()));
    }
    lines
}

fn value(unit: &[(String, String, String)], wanted: &str) -> String {
    let found: Vec<_> = unit.iter().filter(|(_, key, _)| key == wanted).map(|(.., value)| value).collect();
    assert_eq!(found.len(), 1, "{wanted}");
    found[0].clone()
}

const UNITS: [&str; 2] = ["mvm-agent.service", "mvm-coordinator.service"];

#[test]
fn every_directive_is_one_that_systemd_knows() {
    for name in UNITS {
        for (section, key, _) in unit(name) {
            let known = KNOWN.iter().find(|(known, _)| *known == section);
            let known = known.unwrap_or_else(|| panic!("{name}: [{section}]")).1;
            assert!(known.split_whitespace().any(|known| known == key), "{name}: [{section}] {key}");
        }
    }
}

#[test]
fn systemd_itself_finds_nothing_wrong() {
    if !mvm_needs::can_run(&[mvm_needs::Need::Program("systemd-analyze")]) {
        return;
    }
    for name in UNITS {
        let output = Command::new("systemd-analyze").arg("verify").arg(path(name)).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // The program need not be installed where the unit is checked.
        let said: Vec<_> = said.lines().filter(|line| !line.contains("/usr/bin/mvm")).collect();
        assert!(said.is_empty(), "{name}: {said:?}");
    }
}

#[test]
fn microvms_outlive_the_agent_and_it_is_bounded_to_what_its_helper_keeps() {
    let agent = unit("mvm-agent.service");
    for (key, expected) in [
        ("Type", "notify"),
        ("KillMode", "process"),
        ("Delegate", "yes"),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
    ] {
        assert_eq!(value(&agent, key), expected, "{key}");
    }
    assert!(agent.iter().any(|(_, key, _)| key == "WatchdogSec"));
    let bounded = value(&agent, "CapabilityBoundingSet");
    let bounded: BTreeSet<_> = bounded.split_whitespace().map(str::to_owned).collect();
    let kept =
        HELPER_CAPABILITIES.iter().map(|(one, _)| format!("CAP_{}", one.iter_names().next().unwrap().0));
    assert_eq!(bounded, kept.collect());
}

#[test]
fn a_coordinator_never_needs_root() {
    let coordinator = unit("mvm-coordinator.service");
    for (key, expected) in [
        ("Type", "notify"),
        ("DynamicUser", "yes"),
        ("CapabilityBoundingSet", ""),
        ("NoNewPrivileges", "yes"),
        ("ProtectSystem", "strict"),
    ] {
        assert_eq!(value(&coordinator, key), expected, "{key}");
    }
    assert!(coordinator.iter().any(|(_, key, _)| key == "WatchdogSec"));
}
