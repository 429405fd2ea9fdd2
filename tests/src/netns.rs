//! Network namespaces that a test makes for itself: all traffic of tests with real links stays in them.

use std::ffi::OsStr;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

static MADE: AtomicU32 = AtomicU32::new(0);

/// A namespace with a name of its own and its loopback up. Gone when dropped.
#[derive(Debug)]
pub struct NetNs {
    name: String,
}

impl NetNs {
    pub fn new(label: &str) -> Self {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("mvm-{label}-{}-{number}", std::process::id());
        let made = Self { name };
        ip(&["netns", "add", &made.name]);
        made.ok(&["ip", "link", "set", "lo", "up"]);
        made
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// `program`, to be run inside.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    pub fn run(&self, args: &[&str]) -> Output {
        self.command(args[0]).args(&args[1..]).output().expect("ip runs")
    }

    /// Runs a command inside, which must succeed; gives what it prints.
    pub fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?} in {} failed: {stderr}", self.name);
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// A cable between this one and another, with an address at either end.
    pub fn connect(&self, link: &str, address: &str, other: &NetNs, other_link: &str, other_address: &str) {
        ip(&[
            "link",
            "add",
            link,
            "netns",
            &self.name,
            "type",
            "veth",
            "peer",
            "name",
            other_link,
            "netns",
            other.name(),
        ]);
        for (namespace, link, address) in [(self, link, address), (other, other_link, other_address)] {
            namespace.ok(&["ip", "address", "add", address, "dev", link]);
            namespace.ok(&["ip", "link", "set", link, "up"]);
        }
    }
}

impl Drop for NetNs {
    fn drop(&mut self) {
        // Whatever is left in it goes with it.
        let _ = Command::new("ip").args(["netns", "del", &self.name]).status();
    }
}

fn ip(args: &[&str]) {
    let output = Command::new("ip").args(args).output().expect("ip runs");
    assert!(output.status.success(), "ip {args:?}: {}", String::from_utf8_lossy(&output.stderr));
}
