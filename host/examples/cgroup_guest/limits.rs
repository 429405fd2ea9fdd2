//! That limits hold, and that it is told when they are met.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mvm_host::cgroup::{
    CgroupEvents, Group, Limit, LimitEvent, NODE_MEMORY_PRESSURE, PressureWatch, TenantLimits, VmmCost,
    read_pressure,
};

use crate::{Bench, Checked, PATIENCE, ending, expect, lives, pass, usual, wait_until, wide};

const KILLED: i32 = -9;

/// How often a share of a processor is measured until it is right.
const LOOKS: usize = 4;

impl Bench {
    /// Waits for what is told of limits, until one is what is looked for.
    fn told(&self, events: &mut CgroupEvents, wanted: impl Fn(&LimitEvent) -> bool) -> Option<LimitEvent> {
        let deadline = Instant::now() + PATIENCE;
        while let Some(left) = deadline.checked_duration_since(Instant::now()) {
            let met = self.runtime.block_on(events.next(left)).unwrap();
            if let Some(event) = met.into_iter().find(|event| wanted(event)) {
                return Some(event);
            }
        }
        None
    }

    fn events(&self) -> CgroupEvents {
        let _inside = self.runtime.enter();
        CgroupEvents::new(Arc::clone(&self.cgroups)).unwrap()
    }
}

pub(crate) fn fork_bomb(bench: &Bench) -> Checked {
    // Made before its group, which it has to find by itself.
    let mut events = bench.events();
    bench.tenant("bomb", &wide());
    let group = bench.instance("bomb", 1, &usual());
    let began = Instant::now();
    bench.start(&group, &["bomb"]);
    let wanted = |event: &LimitEvent| {
        matches!(event.limit, Limit::Pids { .. }) && event.group == Group::from(group.clone())
    };
    let event = bench.told(&mut events, wanted);
    // By a watch: looking at everything anew comes only when patience ends.
    let prompt = began.elapsed() < PATIENCE / 2;
    let took = began.elapsed().as_millis();
    let pids = bench.pids(&group);
    bench.clear(&[group]);
    expect(
        event.is_some() && prompt && (2..=20).contains(&pids),
        format!("{pids} of 20 processes, told {event:?} after {took} ms"),
    )
}

pub(crate) fn out_of_memory(bench: &Bench) -> Checked {
    bench.tenant("oom", &wide());
    let group = bench.instance("oom", 1, &usual());
    let mut events = bench.events();
    let innocent = bench.start(&group, &["wait"]);
    let guilty = bench.start(&group, &["hog", "100"]);
    let (guilty, innocent) = (ending(&guilty), ending(&innocent));
    let event =
        bench.told(&mut events, |event| matches!(event.limit, Limit::OutOfMemory { killed } if killed >= 2));
    bench.clear(&[group]);
    expect(
        guilty == KILLED && innocent == KILLED && event.is_some(),
        format!("{guilty} {innocent}, told {event:?}"),
    )
}

pub(crate) fn within_memory(bench: &Bench) -> Checked {
    bench.tenant("fits", &wide());
    let group = bench.instance("fits", 1, &usual());
    let _ = fs::remove_file("/tmp/touched");
    let modest = bench.start(&group, &["hog", "24"]);
    wait_until("24 MiB to be touched", || Path::new("/tmp/touched").exists())?;
    let (alive, used) = (lives(&modest), bench.cgroups.usage(&group.clone().into()).unwrap().memory_bytes);
    bench.clear(&[group]);
    expect(alive && used > 24 << 20 && used <= 32 << 20, format!("{} of 32 MiB", used >> 20))
}

/// The share of a processor that these groups took together while time passed, in per cent: as soon as it is an allowed
/// one. Without a limit it would be one or two whole processors each time, while one look may fall into a moment in which
/// the machine's own processors were taken away.
fn share(bench: &Bench, groups: &[Group], allowed: &RangeInclusive<u64>) -> u64 {
    let used = || groups.iter().map(|group| bench.cgroups.usage(group).unwrap().cpu_usec).sum::<u64>();
    let mut share = 0;
    for _ in 0..LOOKS {
        let (before, began) = (used(), Instant::now());
        pass(Duration::from_millis(1500));
        share = (used() - before) * 100 / u64::try_from(began.elapsed().as_micros()).unwrap();
        if allowed.contains(&share) {
            break;
        }
    }
    share
}

pub(crate) fn throttled(bench: &Bench) -> Checked {
    bench.tenant("slow", &wide());
    let mut limits = usual();
    limits.milli_cpus = 200;
    let group = bench.instance("slow", 1, &limits);
    let mut events = bench.events();
    bench.start(&group, &["spin"]);
    let allowed = 14..=26;
    let share = share(bench, &[group.clone().into()], &allowed);
    let met = bench.runtime.block_on(events.next(Duration::ZERO)).unwrap();
    let event =
        met.into_iter().find(|event| matches!(event.limit, Limit::Throttled { periods, .. } if periods > 5));
    bench.clear(&[group]);
    expect(
        allowed.contains(&share) && event.is_some(),
        format!("{share} % of a processor (20 allowed), told {event:?}"),
    )
}

pub(crate) fn tenant_cpu(bench: &Bench) -> Checked {
    let mut limits = wide();
    limits.milli_cpus = 300;
    bench.tenant("both", &limits);
    let groups = [bench.instance("both", 1, &usual()), bench.instance("both", 2, &usual())];
    for group in &groups {
        bench.start(group, &["spin"]);
    }
    let all: Vec<Group> = groups.iter().cloned().map(Group::from).collect();
    let allowed = 22..=38;
    let share = share(bench, &all, &allowed);
    bench.clear(&groups);
    expect(allowed.contains(&share), format!("{share} % of a processor (30 allowed for both, 100 for each)"))
}

/// Which of the two is killed, or whether both are, is the kernel's to choose: it may look for another to kill before the
/// memory of the first has come back. What holds is that they never have more than the sum, that no one else is
/// harmed, and that the sum is there again for who comes after.
pub(crate) fn tenant_memory(bench: &Bench) -> Checked {
    const SUM_MIB: u64 = 40;
    bench.tenant("sum", &TenantLimits::new(8, SUM_MIB, 2, VmmCost { mem_mib: 0, pids: 30 }));
    bench.tenant("other", &wide());
    let groups =
        [("sum", 1), ("sum", 2), ("other", 3)].map(|(name, bits)| bench.instance(name, bits, &usual()));
    let [first, second, others] = &groups;
    let mut events = bench.events();
    let _ = fs::remove_file("/tmp/touched");
    let neighbour = bench.start(others, &["hog", "26"]);
    wait_until("another tenant's 26 MiB", || Path::new("/tmp/touched").exists())?;
    let hogs = [first, second].map(|group| bench.start(group, &["hog", "26"]));
    let event = bench.told(&mut events, |event| matches!(event.limit, Limit::TenantMemory { .. }));
    wait_until("one to be killed", || hogs.iter().any(|hog| !lives(hog)))?;
    pass(Duration::from_millis(200));
    let living = hogs.iter().filter(|hog| lives(hog)).count();
    let peak = bench.read(&Group::Tenant(first.tenant.clone()), "memory.peak").parse::<u64>().unwrap();
    for group in [first, second] {
        bench.cgroups.kill_instance(group, PATIENCE).unwrap();
    }
    // Nothing that is born in a group that was killed can be relied on to live.
    let cleared = bench.cgroups.clear_instance(first).unwrap();
    bench.instance("sum", 1, &usual());
    let _ = fs::remove_file("/tmp/touched");
    let next = bench.start(first, &["hog", "26"]);
    let touched = wait_until("26 MiB to be touched alone", || Path::new("/tmp/touched").exists());
    let alone = cleared && touched.is_ok() && lives(&next);
    let unharmed = lives(&neighbour) && !bench.cgroups.clear_instance(others).unwrap();
    bench.clear(&groups);
    expect(
        living <= 1 && event.is_some() && peak <= SUM_MIB << 20 && alone && unharmed,
        format!(
            "{living} of 2 live on {} of {SUM_MIB} MiB (32 for each), told {event:?}; then one alone: {alone}, \
             another tenant's: {unharmed}",
            peak >> 20
        ),
    )
}

pub(crate) fn pressure(bench: &Bench) -> Checked {
    bench.tenant("press", &wide());
    let group = bench.instance("press", 1, &usual());
    let directory = bench.cgroups.directory(&group.clone().into()).unwrap();
    // A limit that slows down instead of killing makes it stand still for want of memory.
    fs::write(directory.join("memory.high"), (8 << 20).to_string()).unwrap();
    let file = directory.join("memory.pressure");
    let woken = bench.runtime.block_on(async {
        let ours = PressureWatch::new(&file, 50_000, 1_000_000).unwrap();
        let nodes = PressureWatch::new(Path::new(NODE_MEMORY_PRESSURE), 50_000, 1_000_000).unwrap();
        // Nothing presses yet.
        let early = tokio::time::timeout(Duration::from_millis(100), ours.pressed()).await.is_ok();
        let began = Instant::now();
        bench.start(&group, &["churn", "20"]);
        let both = async { (ours.pressed().await.is_ok(), nodes.pressed().await.is_ok()) };
        let woken = tokio::time::timeout(PATIENCE, both).await;
        (early, woken.ok(), began.elapsed().as_millis())
    });
    let read = read_pressure(&file).map_err(|cause| cause.to_string())?;
    bench.clear(&[group]);
    let (early, both, took) = woken;
    let well = !early && both == Some((true, true)) && read.some.total_us > 0;
    expect(well, format!("woken {both:?} after {took} ms, {} us lost", read.some.total_us))
}
