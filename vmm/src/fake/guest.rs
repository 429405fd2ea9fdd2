//! A guest as a script: greets, takes an identity, gets ready, runs a few programs, drains and ends.
//!
//! It has no timers, and hears nothing while its VM is paused.

use std::sync::Arc;

use mvm_proto::InstanceId;
use mvm_proto::guest::{
    Accepted, Chunk, Deframer, Directory, Done, Entry, FEATURE_DETACH, FEATURE_EXEC_USER, FEATURE_HEALTH,
    FEATURE_PTY, FEATURE_RESTART, FEATURE_WORKLOAD, Failure, FailureCode, Found, GuestFrame, GuestHello,
    HostFrame, HostHello, MAX_VERSION, MIN_VERSION, OPENING, Readiness, Reborn, State, Window, Workload,
    guest_frame, host_frame, negotiate, put_frame,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

use super::super::VmState;
use super::faults::{Faults, Manner};
use super::life::{Host, Life, SECRETS};
use super::program::Program;

type Answer = guest_frame::Body;

const FEATURES: [&str; 6] =
    [FEATURE_RESTART, FEATURE_HEALTH, FEATURE_WORKLOAD, FEATURE_PTY, FEATURE_EXEC_USER, FEATURE_DETACH];

/// What a guest's kernel has to say of its memory.
const MEMORY: &str = "/proc/meminfo";

#[derive(Debug)]
struct Guest {
    host: Arc<Host>,
    faults: Arc<Faults>,
    instance: InstanceId,
    life: Life,
    nonce: u64,
    greeted: bool,
    told: Readiness,
    /// What all relays took.
    relayed: u64,
    out: Vec<u8>,
}

/// Serves one connection until the agent leaves or the VM ends.
pub(super) async fn serve(
    host: Arc<Host>,
    faults: Arc<Faults>,
    instance: InstanceId,
    life: Life,
    mut stream: DuplexStream,
) {
    let mut outside = life.outside.subscribe();
    let mut guest = Guest {
        host,
        faults,
        instance,
        life,
        nonce: 0,
        greeted: false,
        told: Readiness::Unspecified,
        relayed: 0,
        out: Vec::new(),
    };
    let mut deframer = Deframer::default();
    let mut buffer = [0; 512];
    loop {
        let now = *outside.borrow_and_update();
        match now.vm {
            None => return,
            Some(VmState::Paused) => {
                if outside.changed().await.is_err() {
                    return;
                }
                continue;
            }
            Some(VmState::Running) => {}
        }
        guest.say_readiness();
        if !guest.out.is_empty() {
            let out = std::mem::take(&mut guest.out);
            if stream.write_all(&out).await.is_err() {
                return;
            }
        }
        tokio::select! {
            changed = outside.changed() => if changed.is_err() { return },
            read = stream.read(&mut buffer) => match read {
                Ok(0) | Err(_) => return,
                Ok(count) => {
                    deframer.push(&buffer[..count]);
                    while let Some(found) = deframer.next::<HostFrame>() {
                        if let Found::Message(frame) = found {
                            guest.hear(frame);
                        }
                    }
                }
            },
        }
    }
}

impl Guest {
    fn hear(&mut self, frame: HostFrame) {
        let manner = self.faults.manner(&self.instance);
        if manner == Manner::Silent {
            return;
        }
        let number = frame.request;
        match frame.body {
            Some(host_frame::Body::Hello(hello)) => self.greet(frame.nonce, &hello, manner),
            _ if !self.greeted || frame.nonce != self.nonce => {}
            Some(host_frame::Body::Forget(_)) => {
                let mut memory = self.memory();
                memory.answers.remove(&number);
                memory.programs.remove(&number);
            }
            Some(body) if self.is_of_program(number, &body) => {
                for answer in self.to_program(number, body) {
                    self.put(number, answer);
                }
            }
            Some(body) => {
                let known = self.memory().answers.get(&number).cloned();
                let answers = match known {
                    Some(answers) if !continues(&body) => answers,
                    _ => self.carry_out(body, manner),
                };
                self.memory().answers.insert(number, answers.clone());
                for answer in answers {
                    self.put(number, answer);
                }
            }
            None => {}
        }
    }

    fn memory(&self) -> parking_lot::MutexGuard<'_, super::life::Memory> {
        self.life.memory.lock()
    }

    fn put(&mut self, request: u64, body: Answer) {
        // What the script says is short.
        let _ = put_frame(&mut self.out, &GuestFrame { nonce: self.nonce, request, body: Some(body) });
    }

    fn readiness(&self) -> Readiness {
        let born = self.host.world().get(&self.instance).and_then(|entry| entry.vm).map(|vm| vm.generation);
        let manner = self.faults.manner(&self.instance);
        let says = self.life.outside.borrow().says;
        match (manner, born) {
            (Manner::Old, _) => says.unwrap_or(Readiness::Ready),
            (_, None | Some(0)) | (Manner::NeverReady, _) => Readiness::Starting,
            (Manner::Fails, _) => Readiness::Failed,
            _ => says.unwrap_or(Readiness::Ready),
        }
    }

    /// How its workload fares, unless it is of a version that does not tell.
    fn workload(&self, readiness: Readiness) -> Option<Workload> {
        use mvm_proto::guest::workload::State as Fares;
        let state = match readiness {
            Readiness::Failed => Fares::Failed,
            Readiness::Starting | Readiness::Unspecified => Fares::None,
            Readiness::Ready | Readiness::Idle | Readiness::Busy => Fares::Running,
        };
        use Manner::{Old, WithoutFeatures, WithoutSecrets};
        let old = matches!(self.faults.manner(&self.instance), Old | WithoutSecrets | WithoutFeatures);
        (!old).then(|| Workload { state: state.into(), run: 1 + self.memory().restarts })
    }

    fn say_readiness(&mut self) {
        let readiness = self.readiness();
        if self.greeted && readiness != self.told {
            self.told = readiness;
            let message = if readiness == Readiness::Failed { "the workload exited with 1" } else { "" };
            let workload = self.workload(readiness);
            let state = State { readiness: readiness.into(), message: message.to_owned(), workload };
            self.put(0, Answer::State(state));
        }
    }

    fn greet(&mut self, nonce: u64, hello: &HostHello, manner: Manner) {
        let newest = match manner {
            Manner::Old => 1,
            Manner::WithoutSecrets => 2,
            _ => MAX_VERSION,
        };
        let theirs = (hello.min_version, hello.max_version);
        let version = negotiate(theirs, (MIN_VERSION, newest)).unwrap_or(0);
        self.nonce = nonce;
        self.greeted = true;
        self.told = self.readiness();
        self.out.extend_from_slice(OPENING);
        let hello = GuestHello {
            version,
            guest_min: MIN_VERSION,
            guest_max: newest,
            guest: "fake".to_owned(),
            boot_id: self.instance.to_string(),
            readiness: self.told.into(),
            configured: self.told != Readiness::Starting,
            features: match manner {
                _ if newest < MAX_VERSION => Vec::new(),
                Manner::WithoutFeatures => Vec::new(),
                _ => FEATURES.map(str::to_owned).into(),
            },
            workload: self.workload(self.told),
        };
        self.put(0, Answer::Hello(hello));
    }

    fn carry_out(&mut self, body: host_frame::Body, manner: Manner) -> Vec<Answer> {
        use host_frame::Body;
        let done = || vec![Answer::Done(Done {})];
        match body {
            Body::Ping(_) | Body::CancelSleep(_) | Body::EndWork(_) | Body::SetEntry(_) => done(),
            Body::PrepareSleep(_) if manner == Manner::IgnoresSleep => Vec::new(),
            Body::PrepareSleep(_) => done(),
            Body::Reborn(_) if manner == Manner::RefusesIdentity => {
                refusal(FailureCode::Denied, "was told to refuse")
            }
            Body::Reborn(reborn) => self.take_identity(&reborn),
            Body::RestartWorkload(asked) => {
                if self.memory().restarts < asked.run {
                    self.memory().restarts = asked.run;
                    // It is told as news, also where it is as it was.
                    self.told = Readiness::Unspecified;
                    self.life.outside.send_modify(|outside| outside.says = None);
                }
                done()
            }
            Body::SetHealth(set) => {
                self.memory().health = set.health;
                done()
            }
            Body::SetWorkload(set) => {
                self.memory().instead = set.workload;
                done()
            }
            Body::Shutdown(_) if manner == Manner::IgnoresShutdown => vec![Answer::Accepted(Accepted {})],
            Body::Shutdown(_) => {
                self.host.end(&self.instance, "shut down");
                Vec::new()
            }
            Body::ReadFile(read) if manner == Manner::HidesMemory && read.path == MEMORY => Vec::new(),
            Body::ReadFile(read) => match self.memory().files.get(&read.path) {
                Some(data) => {
                    let from = usize::try_from(read.offset).unwrap_or(usize::MAX).min(data.len());
                    let data = data[from..].iter().take(usize::try_from(read.limit).unwrap_or(0)).copied();
                    vec![Answer::Chunk(Chunk { data: data.collect(), last: true })]
                }
                None => refusal(FailureCode::NotFound, &read.path),
            },
            Body::WriteFile(write) => {
                self.memory().files.entry(write.path).or_default().extend(write.data);
                done()
            }
            Body::Secrets(piece) => {
                let mut memory = self.memory();
                let kept = memory.files.entry(SECRETS.to_owned()).or_default();
                if piece.offset == 0 {
                    kept.clear();
                }
                kept.extend_from_slice(&piece.data);
                done()
            }
            Body::WipeSecrets(_) if manner == Manner::KeepsSecrets => {
                refusal(FailureCode::Io, "was told to keep them")
            }
            Body::WipeSecrets(_) => {
                self.memory().files.remove(SECRETS);
                done()
            }
            Body::ListDirectory(_) => {
                let memory = self.memory();
                let entry = |(name, data): (&String, &Vec<u8>)| Entry {
                    name: name.clone(),
                    mode: 0o100_644,
                    size: data.len() as u64,
                    ..Entry::default()
                };
                let entries = memory.files.iter().map(entry).collect();
                vec![Answer::Directory(Directory { entries, last: true })]
            }
            Body::RelayOpen(_) => vec![Answer::Accepted(Accepted {})],
            Body::RelayData(chunk) => {
                self.relayed += chunk.data.len() as u64;
                vec![window(self.relayed), Answer::Chunk(chunk)]
            }
            // Of programs that are not there.
            Body::Exec(_) | Body::Input(_) | Body::Signal(_) | Body::Resize(_) | Body::Detach(_) => {
                Vec::new()
            }
            Body::Hello(_) | Body::Forget(_) | Body::Window(_) => Vec::new(),
        }
    }

    fn take_identity(&mut self, reborn: &Reborn) -> Vec<Answer> {
        let secrets = self.life.has_secrets();
        let told = self.host.apply(&self.instance, "give an identity to", |entry, _| {
            let Some(vm) = &mut entry.vm else { return Ok(()) };
            if reborn.generation < vm.generation {
                return Ok(());
            }
            vm.reborn = true;
            if secrets {
                entry.console.push_str("has secrets\n");
            }
            vm.generation = reborn.generation;
            Ok(())
        });
        match told {
            Ok(()) => {
                self.memory().hostname.clone_from(&reborn.hostname);
                if let Some(set) = &reborn.workload {
                    self.memory().instead.clone_from(&set.workload);
                }
                if let Some(set) = &reborn.health {
                    self.memory().health.clone_from(&set.health);
                }
                vec![Answer::Done(Done {})]
            }
            Err(error) => refusal(FailureCode::Io, &error.to_string()),
        }
    }

    fn is_of_program(&self, number: u64, body: &host_frame::Body) -> bool {
        use host_frame::Body;
        match body {
            Body::Exec(_) => true,
            Body::Input(_) | Body::Signal(_) | Body::Window(_) | Body::Detach(_) => {
                self.memory().programs.contains_key(&number)
            }
            _ => false,
        }
    }

    fn to_program(&self, number: u64, body: host_frame::Body) -> Vec<Answer> {
        use host_frame::Body;
        let mut memory = self.memory();
        match (body, memory.programs.get_mut(&number)) {
            (Body::Exec(exec), Some(program)) => program.attach(&exec),
            (Body::Exec(exec), None) => {
                let Some(program) = Program::start(&exec, &memory.hostname) else {
                    let name = exec.command.first().map_or("no program was named", String::as_str);
                    return refusal(FailureCode::NotFound, name);
                };
                if exec.command.first().is_some_and(|name| name == "exit") {
                    // Ends the guest's own program.
                    self.life.outside.send_modify(|outside| outside.says = Some(Readiness::Failed));
                }
                memory.programs.entry(number).or_insert(program).attach(&exec)
            }
            (Body::Input(input), Some(program)) => program.hear_input(&input),
            (Body::Window(window), Some(program)) => program.hear_window(window),
            (Body::Signal(signal), Some(program)) => program.hear_signal(signal.number),
            (Body::Detach(_), Some(program)) => program.let_go(),
            _ => Vec::new(),
        }
    }
}

/// What adds to a request rather than repeating it.
fn continues(body: &host_frame::Body) -> bool {
    use host_frame::Body;
    matches!(
        body,
        Body::Input(_)
            | Body::Signal(_)
            | Body::RelayData(_)
            | Body::Window(_)
            | Body::Resize(_)
            | Body::Detach(_)
    )
}

fn window(bytes: u64) -> Answer {
    Answer::Window(Window { bytes, received: 0 })
}

fn refusal(code: FailureCode, message: &str) -> Vec<Answer> {
    vec![Answer::Failure(Failure::new(code, message))]
}
