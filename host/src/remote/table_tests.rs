//! The table of requests in `docs/privileges.md` has a row for every argument of every request, and names tests that exist.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::message::Call;
use crate::cgroup::InstanceGroup;
use crate::network::{NetworkWanted, Port, TenantNet};
use crate::{Confinement, Jail, JailFile, Operation, SpawnVmm};

/// What has parts, by name. The patterns are whole, so that one that is missing here does not compile.
macro_rules! parts {
    ($($kind:ident { $($variant:ident { $($field:tt),* })* })* ; $($plain:ident { $($own:ident),* })*) => {
        #[allow(dead_code, reason = "the compiler is the one that looks at it")]
        mod whole {
            use super::*;
            $(
                #[allow(non_snake_case)]
                fn $kind(value: &$kind) {
                    match value { $($kind::$variant { $($field: _),* } => {})* }
                }
            )*
            $(
                #[allow(non_snake_case)]
                fn $plain(value: &$plain) {
                    let $plain { $($own: _),* } = value;
                }
            )*
        }
        const PARTS: &[(&str, &[&str])] = &[
            $($((stringify!($variant), &[$(stringify!($field)),*]),)*)*
            $((stringify!($plain), &[$(stringify!($own)),*]),)*
        ];
    };
}

// A variant with one unnamed part has it by the number 0.
parts! {
    Operation {
        MakeRunDir { instance }
        RemoveRunDir { instance }
        RemoveFile { instance, name }
        WriteFile { instance, name, text }
        MakeDir { instance, name }
        Rename { instance, from, to }
        TrimLog { instance, name, max_bytes }
        PunchLog { instance, name, max_bytes }
        MakeReadOnly { instance, name }
        LinkFile { instance, source, name }
        MakeJail { jail, files }
        ShareWithJail { jail, files }
        UnshareFromJail { jail, names }
        RemoveJail { jail }
        MakeDisk { instance, name, size_mib }
        DigHoles { instance, name }
        ShareMemory { instance, template, memory, name }
        MeasureDisk { instance }
        MeasureMemory { instances }
        AdmitVmm { instance, user, files }
        SpawnVmm { 0 }
        EndProcess { process, signal }
        EnsureTenantGroup { tenant, limits }
        RemoveTenantGroup { tenant }
        EnsureGroup { group, limits }
        LimitIo { group, limits }
        ConfirmGroup { group, process }
        RemoveGroup { group }
        LookAtGroups { }
        TryNetwork { }
        EnsureNet { net }
        RemoveNet { net }
        EnsurePort { net, port }
        OpenPort { port }
        RemovePort { port }
        RemoveLink { name }
        ProbeNet { net, port, others }
        KeepNetwork { wanted }
    }
    Call {
        Perform { 0 }
        Vmms { }
        RunDirs { }
        WaitEnd { 0 }
        Open { instance, name, access }
        Connect { instance, name }
        Names { instance }
        JailRoot { instance }
        Forget { number }
    }
    ;
    SpawnVmm { instance, program, args, log, tap, group, confine }
    Confinement { uid, gid, umask, images, needs, kvm, filter, limits, oom_score, demand }
    Jail { instance, root, uid, gid }
    JailFile { source, name, writable }
    InstanceGroup { tenant, pool, instance }
    TenantNet { tenant, net_id, subnet, egress, dns, isolate_ports, mtu }
    Port { tenant, instance, net_id, offset, address, owner_uid }
    NetworkWanted { nets, ports, hands_off, denied }
}

/// The words between backticks.
fn quoted(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

/// Names of functions in the sources below `dir`.
fn functions(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path: PathBuf = entry.path();
        if path.is_dir() {
            functions(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            let after = text.split("fn ").skip(1);
            found.extend(after.filter_map(|rest| rest.split(['(', '<']).next()).map(str::to_owned));
        }
    }
}

#[test]
fn the_table_has_every_argument_of_every_request_and_its_tests_exist() {
    let docs = include_str!("../../../docs/privileges.md");
    let table = docs.split("<!-- requests -->").nth(1).expect("a table between marks");
    let mut tests = BTreeSet::new();
    for dir in ["src", "tests"] {
        functions(&Path::new(env!("CARGO_MANIFEST_DIR")).join(dir), &mut tests);
    }
    let mut told: BTreeSet<(String, String)> = BTreeSet::new();
    for row in table.lines().filter(|row| row.starts_with("| `")) {
        let cells: Vec<_> = row.trim_matches('|').split(" | ").collect();
        let [requests, arguments, rule, shown] = cells[..] else { panic!("four cells: {row}") };
        assert!(!rule.trim().is_empty(), "{row}");
        assert!(!quoted(shown).is_empty(), "no test: {row}");
        for test in quoted(shown) {
            assert!(tests.contains(test), "there is no test {test}");
        }
        let arguments = match quoted(arguments) {
            none if none.is_empty() => vec![""],
            some => some,
        };
        for request in quoted(requests) {
            let known: Vec<_> = PARTS.iter().filter(|(name, _)| *name == request).collect();
            assert!(!known.is_empty(), "there is no {request}");
            for argument in &arguments {
                let has = known.iter().any(|(_, parts)| parts.contains(argument));
                assert!(argument.is_empty() || has, "{request} has no {argument}");
                told.insert((request.to_owned(), (*argument).to_owned()));
            }
        }
    }
    let all = PARTS.iter().flat_map(|(request, parts)| match parts {
        [] | ["0"] => vec![(request.to_string(), String::new())],
        parts => parts.iter().map(|part| (request.to_string(), part.to_string())).collect(),
    });
    // What has a part without a name is told by that part's own rows.
    let by_parts = ["Perform", "SpawnVmm"];
    let missing: Vec<_> = all
        .filter(|(request, part)| !(part.is_empty() && by_parts.contains(&request.as_str())))
        .filter(|pair| !told.contains(pair))
        .collect();
    assert_eq!(missing, [], "rows that docs/privileges.md lacks");
}
