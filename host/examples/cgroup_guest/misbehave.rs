//! What the limited processes do. Each is this program, started inside a group.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use mvm_host::spawn_into;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

use crate::{SELF, disk};

pub(crate) fn run(what: &str, args: &[String]) {
    match what {
        // Before anything else: where it was born, not where it got to.
        "where" => fs::write(&args[0], fs::read("/proc/self/cgroup").unwrap()).unwrap(),
        "wait" => wait(),
        "spin" => loop {
            std::hint::spin_loop();
        },
        "bomb" => bomb(),
        "hog" => hog(args[0].parse().unwrap()),
        "churn" => churn(args[0].parse().unwrap()),
        "write" => disk::write(&args[0], &args[1], args[2].parse().unwrap()),
        "read" => disk::read(&args[0], args[1].parse().unwrap(), args[2].parse().unwrap()),
        "tree" => tree(args[0].parse().unwrap()),
        "without-clone3" => without_clone3(&args[0], &args[1]),
        other => panic!("nobody does {other}"),
    }
}

fn wait() -> ! {
    loop {
        std::thread::park_timeout(Duration::from_secs(3600));
    }
}

/// Every one starts two more for as long as it is let.
fn bomb() {
    let start = || Command::new(SELF).arg("bomb").spawn();
    let children = [start(), start()];
    if children.iter().all(Result::is_ok) {
        wait();
    }
    // Try again and again, as such a thing would.
    loop {
        let _ = start();
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

fn touched(mib: usize) -> Vec<u8> {
    let mut memory = vec![0_u8; mib << 20];
    memory.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    memory
}

fn hog(mib: usize) {
    let memory = touched(mib);
    fs::write("/tmp/touched", memory.len().to_string()).unwrap();
    wait();
}

/// Wants a little more than it may keep, over and over.
fn churn(mib: usize) {
    loop {
        std::hint::black_box(touched(mib));
    }
}

/// A chain of processes, each in a session of its own, so that no signal to one reaches another.
fn tree(depth: u32) {
    let _ = rustix::process::setsid();
    if depth > 0 {
        let below = (depth - 1).to_string();
        let start = || Command::new(SELF).args(["tree", &below]).spawn().unwrap();
        let mut children = [start(), start()];
        children.iter_mut().for_each(|child| drop(child.wait()));
    }
    wait();
}

/// Starts a child in a group while a filter refuses the one call that can do it at birth.
fn without_clone3(group: &str, told: &str) {
    let refused = BTreeMap::from([(nix::libc::SYS_clone3, Vec::new())]);
    let absent = SeccompAction::Errno(nix::libc::ENOSYS as u32);
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(refused, SeccompAction::Allow, absent, arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
    let group = fs::File::open(group).unwrap();
    let born = spawn_into(Some(group.as_fd()), Path::new(SELF), &[SELF, "where", told]).unwrap();
    std::process::exit(crate::ending(&born));
}
