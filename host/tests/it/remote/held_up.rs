//! A request that can't go on keeps no other instance's from its answer. Whoever opens what is marked is held up by
//! the kernel until the test lets it go, which needs root.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use mvm_host::{Access, HELPER_THREADS, Host, Operation, Outcome, RemoteHost, VmmProcess, serve_helper};
use mvm_needs::{Need, can_run};
use mvm_proto::InstanceId;
use nix::fcntl::AT_FDCWD;
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyEvent, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use tokio::time::timeout;

use crate::remote::suite::{PATIENCE, Site, end};

/// Holds up those who open a file or directory.
struct Gate {
    fanotify: Fanotify,
    held: Vec<FanotifyEvent>,
}

impl Gate {
    fn new() -> Self {
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC | InitFlags::FAN_NONBLOCK;
        let events = EventFFlags::O_RDONLY | EventFFlags::O_CLOEXEC;
        Self { fanotify: Fanotify::init(flags, events).unwrap(), held: Vec::new() }
    }

    fn shut(&self, path: &Path) {
        let mask = MaskFlags::FAN_OPEN_PERM | MaskFlags::FAN_ONDIR;
        self.fanotify.mark(MarkFlags::FAN_MARK_ADD, mask, AT_FDCWD, Some(path)).unwrap();
    }

    /// Waits until so many are held up.
    async fn holds(&mut self, number: usize) {
        let all = async {
            while self.held.len() < number {
                match self.fanotify.read_events() {
                    Ok(events) => self.held.extend(events),
                    Err(nix::errno::Errno::EAGAIN) => tokio::task::yield_now().await,
                    Err(cause) => panic!("{cause}"),
                }
            }
        };
        timeout(PATIENCE, all).await.unwrap();
    }

    /// Lets all go, those that come later too.
    fn open(self) {
        for event in &self.held {
            let response = FanotifyResponse::new(event.fd().unwrap(), Response::FAN_ALLOW);
            self.fanotify.write_response(response).unwrap();
        }
    }
}

/// A helper as it is in life: one thread for its loop, some for what waits.
pub(crate) fn helper(site: &Site) -> Arc<RemoteHost> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let policy = crate::remote::policy(site);
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(HELPER_THREADS)
            .build()
            .unwrap();
        runtime.block_on(serve_helper(OwnedFd::from(theirs), policy)).unwrap();
    });
    Arc::new(RemoteHost::new(ours.into(), site.data_dir()).unwrap())
}

fn id(number: u32) -> InstanceId {
    InstanceId::from_bits(number)
}

async fn make(host: &impl Host, number: u32) {
    host.perform(&Operation::MakeRunDir { instance: id(number) }).await.unwrap();
}

/// All that another instance may ask for is answered.
async fn others_are_answered(host: &RemoteHost, site: &Site, number: u32) {
    let all = async {
        make(host, number).await;
        let write = Operation::WriteFile { instance: id(number), name: "n".to_owned(), text: "t".to_owned() };
        host.perform(&write).await.unwrap();
        assert_eq!(host.names(&id(number)).await.unwrap(), ["n"]);
        let file = host.open_file(&id(number), "n", Access::Read).await.unwrap().unwrap();
        assert_eq!(std::io::read_to_string(file).unwrap(), "t");
        host.vmms().await.unwrap();
        let process =
            match host.perform(&Operation::SpawnVmm(site.spawn(&id(number), "exit 0"))).await.unwrap() {
                Outcome::Process(process) => process,
                other => panic!("{other:?}"),
            };
        end(host, &VmmProcess { instance: id(number), process }).await;
        host.perform(&Operation::RemoveRunDir { instance: id(number) }).await.unwrap();
    };
    timeout(PATIENCE, all).await.expect("the others are held up, too");
}

#[tokio::test]
async fn a_removal_that_is_held_up_keeps_only_its_own_instance_waiting_and_in_order() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let site = Site::new();
    let host = helper(&site);
    make(&*host, 1).await;
    let inside = host.run_dir(&id(1)).join("snapshot");
    std::fs::create_dir(&inside).unwrap();
    std::fs::write(inside.join("memory"), "m").unwrap();
    let mut gate = Gate::new();
    gate.shut(&inside);
    let ask = |operation| {
        let host = Arc::clone(&host);
        tokio::spawn(async move { host.perform(&operation).await })
    };
    let removing = ask(Operation::RemoveRunDir { instance: id(1) });
    gate.holds(1).await;
    let making = ask(Operation::MakeRunDir { instance: id(1) });
    others_are_answered(&host, &site, 2).await;
    assert!(!removing.is_finished() && !making.is_finished());
    gate.open();
    for asked in [removing, making] {
        timeout(PATIENCE, asked).await.unwrap().unwrap().unwrap();
    }
    assert_eq!(host.names(&id(1)).await.unwrap(), Vec::<String>::new());
    assert_eq!(host.run_dirs().await.unwrap(), [id(1)], "made after it was removed");
}

#[tokio::test]
async fn a_file_directory_or_program_that_blocks_on_open_blocks_no_other_request() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let (site, slow) = (Site::new(), Site::new());
    let host = helper(&site);
    for number in [1, 2, 3] {
        make(&*host, number).await;
    }
    let file = host.run_dir(&id(1)).join("console.log");
    std::fs::write(&file, "console").unwrap();
    // The same program under another name: the others' is not held up.
    std::fs::rename(&slow.program, site.program.with_file_name("slow")).unwrap();
    let mut gate = Gate::new();
    gate.shut(&file);
    gate.shut(&host.run_dir(&id(2)));
    gate.shut(&site.program.with_file_name("slow"));
    let asked = [Arc::clone(&host), Arc::clone(&host), Arc::clone(&host)];
    let [one, two, three] = asked;
    let opening =
        tokio::spawn(async move { one.open_file(&id(1), "console.log", Access::Read).await.map(|_| ()) });
    let listing = tokio::spawn(async move { two.names(&id(2)).await.map(|_| ()) });
    let mut spawn = site.spawn(&id(3), "exit 0");
    spawn.program = site.program.with_file_name("slow");
    let starting = tokio::spawn(async move { three.perform(&Operation::SpawnVmm(spawn)).await.map(|_| ()) });
    gate.holds(3).await;
    others_are_answered(&host, &site, 4).await;
    let tasks = [opening, listing, starting];
    assert!(tasks.iter().all(|task| !task.is_finished()));
    gate.open();
    for task in tasks {
        timeout(PATIENCE, task).await.unwrap().unwrap().unwrap();
    }
}

#[tokio::test]
async fn however_many_slow_requests_there_are_quick_ones_are_answered() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let site = Site::new();
    let host = helper(&site);
    let mut gate = Gate::new();
    let numbers = 1..=40;
    for number in numbers.clone() {
        make(&*host, number).await;
        let inside = host.run_dir(&id(number)).join("snapshot");
        std::fs::create_dir(&inside).unwrap();
        std::fs::write(inside.join("memory"), "m").unwrap();
        gate.shut(&inside);
    }
    let removing: Vec<_> = numbers
        .map(|number| {
            let host = Arc::clone(&host);
            tokio::spawn(async move { host.perform(&Operation::RemoveRunDir { instance: id(number) }).await })
        })
        .collect();
    gate.holds(HELPER_THREADS - 4).await;
    let quick = async {
        make(&*host, 99).await;
        host.names(&id(99)).await.unwrap();
        host.vmms().await.unwrap();
    };
    timeout(PATIENCE, quick).await.unwrap();
    gate.open();
    for task in removing {
        timeout(PATIENCE, task).await.unwrap().unwrap().unwrap();
    }
    assert_eq!(host.run_dirs().await.unwrap(), [id(99)]);
}

#[tokio::test]
async fn however_often_one_instance_is_looked_at_there_are_threads_for_the_others() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let site = Site::new();
    let host = helper(&site);
    make(&*host, 1).await;
    let mut gate = Gate::new();
    gate.shut(&host.run_dir(&id(1)));
    // As an agent does that stops waiting and asks again.
    let looking: Vec<_> = (0..4 * HELPER_THREADS)
        .map(|number| {
            let host = Arc::clone(&host);
            let measure = Operation::MeasureDisk { instance: id(1) };
            tokio::spawn(async move {
                match number % 2 {
                    0 => host.names(&id(1)).await.map(|_| ()),
                    _ => host.perform(&measure).await.map(|_| ()),
                }
            })
        })
        .collect();
    gate.holds(2).await;
    others_are_answered(&host, &site, 2).await;
    assert!(looking.iter().all(|task| !task.is_finished()));
    gate.open();
    for task in looking {
        timeout(PATIENCE, task).await.unwrap().unwrap().unwrap();
    }
}
