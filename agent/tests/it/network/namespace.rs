//! A thread in a network namespace of its own, and what that namespace and this process hold.

use std::process::Command;

use mvm_needs::{Need, can_run};
use nix::sched::{CloneFlags, unshare};

/// Runs `test` in a fresh network namespace. Says so plainly where that is not allowed.
pub(crate) fn in_namespace(test: impl FnOnce() + Send + 'static) {
    if !can_run(&[Need::Root, Need::NetworkNamespaces, Need::Tun]) {
        return;
    }
    let thread = std::thread::spawn(move || {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        test();
    });
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// What the tool prints in this thread's namespace.
pub(crate) fn printed(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Everything that a tenant or an instance could leave behind.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Left {
    links: String,
    addresses: String,
    elements: usize,
    rules: usize,
    files: usize,
    descriptors: usize,
    children: usize,
}

impl Left {
    pub(crate) fn look(data_dir: &std::path::Path) -> Self {
        let names = |text: String| {
            text.lines().map(|l| l.split_whitespace().take(3).collect::<Vec<_>>().join(" ") + "\n").collect()
        };
        let rules = printed("nft", &["list", "ruleset"]);
        let entries = |path: &std::path::Path| std::fs::read_dir(path).map_or(0, Iterator::count);
        Self {
            links: names(printed("ip", &["-br", "link"])),
            addresses: names(printed("ip", &["-br", "address"])),
            elements: rules.matches("tn").count() + rules.matches("br-tenant-").count(),
            rules: rules.lines().count(),
            files: entries(&data_dir.join("vms")),
            descriptors: entries("/proc/self/fd".as_ref()),
            children: printed("ps", &["--ppid", &std::process::id().to_string(), "-o", "pid="])
                .lines()
                .count(),
        }
    }
}
