//! What confining costs at the start: the same small program, confined and not.

use std::path::Path;
use std::time::{Duration, Instant};

use mvm_host::sandbox::Confinement;

use super::{GID, Machine};
use mvm_needs::{Need, can_run};

const RUNS: u32 = 15;

async fn median_start(machine: &Machine, confine: bool) -> Duration {
    let mut times = Vec::new();
    for run in 0..RUNS {
        let number = 1000 + run + if confine { RUNS } else { 0 };
        machine.run_dir(number).await;
        let confine = confine.then(|| Confinement::qemu(Machine::uid(number), GID));
        let begun = Instant::now();
        let vmm = machine.start(number, Path::new("/usr/bin/true"), &[], confine).await.unwrap();
        times.push(begun.elapsed());
        assert_eq!(machine.ended(&vmm).await.exit_code, Some(0), "{}", machine.log(number));
    }
    times.sort();
    times[times.len() / 2]
}

#[tokio::test]
async fn confining_costs_milliseconds() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let machine = Machine::new();
    // The first start asks the machine what it can do.
    median_start(&machine, true).await;
    let machine = Machine::new();
    let (open, confined) = (median_start(&machine, false).await, median_start(&machine, true).await);
    eprintln!("start of a process: {open:?}, confined {confined:?} (medians of {RUNS})");
    assert!(confined < open + Duration::from_millis(500), "{open:?}, confined {confined:?}");
}
