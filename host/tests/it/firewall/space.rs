//! A network namespace: a thread that lives in one of its own and does there what it is told.

use mvm_needs::Need;
use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

/// It is gone with its thread, and everything in it.
pub(crate) struct Space {
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    /// The thread's own number, by which `ip` finds the namespace.
    pub(crate) thread_id: i32,
}

impl Space {
    pub(crate) fn new() -> Self {
        let (jobs, to_do) = channel::<Job>();
        let (ready, is_ready) = channel();
        let thread = std::thread::spawn(move || {
            nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET).unwrap();
            ready.send(nix::unistd::gettid().as_raw()).unwrap();
            for job in to_do {
                job();
            }
        });
        let thread_id = is_ready.recv().unwrap();
        let space = Self { jobs: Some(jobs), thread: Some(thread), thread_id };
        space.ip("link set lo up");
        // Links greet their neighbours by IPv6 of their own accord; tests count every frame.
        space.sysctl("ipv6/conf/default/disable_ipv6", "1");
        space
    }

    /// Carries out `job` in the namespace and waits for what comes of it.
    pub(crate) fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> T {
        let (done, is_done) = channel();
        let job = Box::new(move || drop(done.send(job())));
        self.jobs.as_ref().unwrap().send(job).unwrap();
        is_done.recv().expect("what was done in the namespace did not panic")
    }

    /// A batch of `ip` commands, one a line.
    pub(crate) fn ip(&self, commands: &str) {
        self.command("ip", &["-batch", "-"], commands);
    }

    pub(crate) fn nft(&self, commands: &str) -> String {
        self.command("nft", &["-f", "-"], commands)
    }

    /// Waits until these ports of bridges pass frames on: until then the bridge drops them before any rule sees them.
    pub(crate) fn wait_forwarding(&self, links: &[&str]) {
        wait_until("the bridge's ports forward", || {
            let told = self.command("bridge", &["link"], "");
            let forwards = |link: &&str| {
                let mut of_link = told.lines().filter(|line| line.contains(&format!(" {link}")));
                of_link.any(|line| line.contains(" state forwarding"))
            };
            links.iter().all(forwards)
        });
    }

    pub(crate) fn command(
        &self,
        program: &'static str,
        args: &'static [&'static str],
        input: &str,
    ) -> String {
        let input = input.to_owned();
        self.run(move || {
            let mut child = Command::new(program)
                .args(args)
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
            let output = child.wait_with_output().unwrap();
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{program} {args:?} <<< {input}: {told}");
            String::from_utf8_lossy(&output.stdout).into_owned()
        })
    }

    pub(crate) fn sysctl(&self, name: &str, value: &str) {
        let (path, value) = (format!("/proc/sys/net/{name}"), value.to_owned());
        self.run(move || std::fs::write(path, value).unwrap());
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            // A job's panic was told to whoever waited for it.
            drop(thread.join());
        }
    }
}

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Polls until it is so.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What these tests are run with.
pub(crate) const NEEDS: [Need; 4] =
    [Need::Root, Need::NetworkNamespaces, Need::Program("ip"), Need::Program("nft")];
