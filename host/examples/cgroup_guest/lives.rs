//! Standing still, ending, and leaving nothing.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{Bench, Checked, PATIENCE, expect, pass, reap, usual, wait_until, wide};

const CYCLES: u32 = 200;

pub(crate) fn freeze(bench: &Bench) -> Checked {
    bench.tenant("still", &wide());
    let group = bench.instance("still", 1, &usual());
    bench.start(&group, &["spin"]);
    let used = || bench.cgroups.usage(&group.clone().into()).unwrap().cpu_usec;
    wait_until("it to run", || used() > 20_000)?;
    let began = Instant::now();
    bench.cgroups.freeze(&group, PATIENCE).map_err(|cause| cause.to_string())?;
    let took = began.elapsed();
    let frozen = bench.cgroups.usage(&group.clone().into()).unwrap().frozen;
    let before = used();
    pass(Duration::from_millis(200));
    let meanwhile = used() - before;
    bench.cgroups.thaw(&group, PATIENCE).map_err(|cause| cause.to_string())?;
    wait_until("it to run again", || used() > before + 20_000)?;
    // What is frozen can be ended too.
    bench.cgroups.freeze(&group, PATIENCE).map_err(|cause| cause.to_string())?;
    bench.clear(&[group]);
    let told = format!("frozen in {} us, ran {meanwhile} us of 200 ms", took.as_micros());
    expect(frozen && meanwhile < 2_000, told)
}

pub(crate) fn tree(bench: &Bench) -> Checked {
    bench.tenant("tree", &wide());
    let group = bench.instance("tree", 1, &usual());
    bench.start(&group, &["tree", "3"]);
    wait_until("the tree to grow", || bench.pids(&group) == 15)?;
    let pids: Vec<String> =
        bench.read(&group.clone().into(), "cgroup.procs").lines().map(str::to_owned).collect();
    // Some VMMs' jailers make groups of their own below the instance's.
    let directory = bench.cgroups.directory(&group.clone().into()).unwrap();
    fs::create_dir(directory.join("below")).unwrap();
    let busy = bench.cgroups.remove_pool(&group.tenant, &group.pool).is_err();
    let began = Instant::now();
    let removed = bench.cgroups.remove_instance(&group, PATIENCE).map_err(|cause| cause.to_string())?;
    let took = began.elapsed();
    let again = bench.cgroups.remove_instance(&group, PATIENCE).map_err(|cause| cause.to_string())?;
    // The kernel calls a group empty when all in it are past the point of no return, and a little is left to do.
    let left = || pids.iter().filter(|pid| Path::new("/proc").join(pid).exists()).count();
    wait_until("the tree to be gone", || {
        reap();
        left() == 0
    })?;
    let left = left();
    let well = removed.is_some_and(|last| last.cpu_usec > 0)
        && again.is_none()
        && busy
        && left == 0
        && !directory.exists();
    bench.clear(&[group]);
    expect(
        well,
        format!("{} processes and their group gone in {} us, {left} left", pids.len(), took.as_micros()),
    )
}

pub(crate) fn cycles(bench: &Bench) -> Checked {
    bench.tenant("cycle", &wide());
    let began = Instant::now();
    for bits in 0..CYCLES {
        let group = bench.instance("cycle", bits, &usual());
        // Emulated, starting a program takes longer than all the rest.
        if bits % 4 == 0 {
            bench.start(&group, &["wait"]);
        }
        bench.cgroups.remove_instance(&group, PATIENCE).map_err(|cause| cause.to_string())?;
        reap();
    }
    let each = began.elapsed() / CYCLES;
    bench.clear(&[crate::group("cycle", 0)]);
    let observed = bench.cgroups.observe().unwrap();
    let stat = fs::read_to_string(bench.cgroups.root().unwrap().join("cgroup.stat")).unwrap();
    let none = observed.groups.is_empty() && observed.orphans.is_empty();
    let none = none && stat.lines().any(|line| line == "nr_descendants 0");
    let left = observed.groups.len() + observed.orphans.len();
    expect(none, format!("{CYCLES}, every fourth with a process, {} us each, {left} left", each.as_micros()))
}
