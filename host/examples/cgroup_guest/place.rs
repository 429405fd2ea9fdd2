//! Where groups and processes are.

use std::fs;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use mvm_host::cgroup::{CgroupError, CgroupSettings, Cgroups, Group, Mode, Repair};
use mvm_host::spawn_into;

use crate::{Bench, Checked, SELF, ending, expect, reap, usual, wait_until, wide};

pub(crate) fn delegation(bench: &Bench) -> Checked {
    let root = bench.cgroups.root().unwrap();
    let handed = fs::read_to_string(root.join("cgroup.subtree_control")).unwrap();
    let all =
        ["cpu", "memory", "pids"].iter().all(|name| handed.split_whitespace().any(|word| word == *name));
    let told =
        format!("{} hands down {}; missing {:?}", root.display(), handed.trim(), bench.cgroups.missing());
    expect(all && root == Path::new("/sys/fs/cgroup/mvm") && bench.cgroups.missing().is_empty(), told)
}

pub(crate) fn busy_parent(_: &Bench) -> Checked {
    let parent = Path::new("/sys/fs/cgroup/busy");
    fs::create_dir(parent).unwrap();
    let directory = fs::File::open(parent).unwrap();
    let inside = spawn_into(Some(directory.as_fd()), Path::new(SELF), &[SELF, "wait"]).unwrap();
    let settings = |mode| CgroupSettings { mode, parent: Some("busy".into()), ..CgroupSettings::default() };
    let refused = Cgroups::open(&settings(Mode::Required));
    let effort = Cgroups::open(&settings(Mode::BestEffort)).unwrap().missing();
    fs::write(parent.join("cgroup.kill"), "1").unwrap();
    ending(&inside);
    // An attempt that failed may leave a group; it is empty.
    let _ = fs::remove_dir(parent.join("mvm"));
    wait_until("the parent to be empty", || fs::remove_dir(parent).is_ok() || !parent.exists())?;
    let well = matches!(&refused, Err(CgroupError::NotDelegated { .. }));
    let told = effort.iter().any(|told| told.contains("memory") && told.contains("holds processes"));
    expect(
        well && told,
        format!("{}; missing {}", refused.err().map_or("taken".into(), |e| e.to_string()), effort.len()),
    )
}

pub(crate) fn drift(bench: &Bench) -> Checked {
    bench.tenant("drift", &wide());
    let group = bench.instance("drift", 1, &usual());
    let again = bench.cgroups.ensure_instance(&group, &usual()).unwrap();
    let tenant_again = bench.cgroups.ensure_tenant(&group.tenant, &wide()).unwrap();
    let kept: Vec<String> =
        ["memory.max", "memory.swap.max", "memory.oom.group", "cpu.max", "cpu.weight", "pids.max"]
            .into_iter()
            .map(|file| {
                let path = bench.cgroups.directory(&group.clone().into()).unwrap().join(file);
                // A kernel without swap has no file for it.
                fs::read_to_string(path).map_or("-".to_owned(), |text| text.trim().to_owned())
            })
            .collect();
    let as_told = kept[0] == "33554432" && ["0", "-"].contains(&kept[1].as_str());
    let as_told = as_told && kept[2..] == ["1", "100000 100000", "100", "20"];
    let directory = bench.cgroups.directory(&group.clone().into()).unwrap();
    fs::write(directory.join("memory.max"), "max").unwrap();
    let quota = bench.cgroups.directory(&Group::Tenant(group.tenant.clone())).unwrap();
    fs::write(quota.join("cpu.max"), "max").unwrap();
    let mut repairs = bench.cgroups.ensure_instance(&group, &usual()).unwrap();
    repairs.extend(bench.cgroups.ensure_tenant(&group.tenant, &wide()).unwrap());
    let files: Vec<&str> = repairs
        .iter()
        .map(|repair| if let Repair::Set { file, .. } = repair { file.as_str() } else { "other" })
        .collect();
    let repaired =
        files == ["memory.max", "cpu.max"] && bench.read(&group.clone().into(), "memory.max") == "33554432";
    bench.clear(&[group]);
    let idle = again.is_empty() && tenant_again.is_empty();
    expect(idle && as_told && repaired, format!("{kept:?}, then repaired {files:?}"))
}

/// What a process that was told to say where it is said.
fn said(file: &Path) -> String {
    let text = fs::read_to_string(file).unwrap_or_default();
    let _ = fs::remove_file(file);
    text.trim().to_owned()
}

pub(crate) fn born(bench: &Bench) -> Checked {
    bench.tenant("born", &wide());
    let group = bench.instance("born", 2, &usual());
    let file = PathBuf::from("/tmp/born");
    let code = ending(&bench.start(&group, &["where", "/tmp/born"]));
    let place = said(&file);
    bench.clear(&[group]);
    expect(code == 0 && place == "0::/mvm/born/pool/i-00000002", place)
}

pub(crate) fn entered(bench: &Bench) -> Checked {
    bench.tenant("entered", &wide());
    let group = bench.instance("entered", 3, &usual());
    let directory = bench.cgroups.directory(&group.clone().into()).unwrap();
    let args = [SELF, "without-clone3", directory.to_str().unwrap(), "/tmp/entered"];
    let code = ending(&spawn_into(None, Path::new(SELF), &args).unwrap());
    let place = said(Path::new("/tmp/entered"));
    bench.clear(&[group]);
    reap();
    expect(code == 0 && place == "0::/mvm/entered/pool/i-00000003", format!("{place} (exit {code})"))
}

/// As a jailer that moves itself into a group of its own.
pub(crate) fn left(bench: &Bench) -> Checked {
    bench.tenant("left", &wide());
    let group = bench.instance("left", 4, &usual());
    let born = bench.start(&group, &["wait"]);
    let pid = born.pid.as_raw_nonzero().get().unsigned_abs();
    let at_home = bench.cgroups.confirm(&group, pid);
    let other = Path::new("/sys/fs/cgroup/firecracker");
    fs::create_dir(other).unwrap();
    fs::write(other.join("cgroup.procs"), pid.to_string()).unwrap();
    let away = bench.cgroups.confirm(&group, pid);
    fs::write(other.join("cgroup.kill"), "1").unwrap();
    ending(&born);
    wait_until("the other group to be empty", || fs::remove_dir(other).is_ok() || !other.exists())?;
    bench.clear(&[group]);
    let found_out = matches!(&away, Err(CgroupError::Elsewhere { found, .. }) if found == "/firecracker");
    expect(at_home.is_ok() && found_out, format!("{at_home:?}, then {away:?}"))
}
