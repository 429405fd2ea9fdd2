//! QEMU without an agent: the same command line and the same files as a VMM of ours, driven by as few commands as it
//! takes. It does only what every user of QEMU must do.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mvm_vmm::conformance::Client;
use mvm_vmm::qemu::qmp::Qmp;
use mvm_vmm::run_files::Dial;
use serde_json::{Value, json};

const WITHIN: Duration = Duration::from_secs(30);
const PROGRAM: &str = "qemu-system-x86_64";

/// What a VMM was started with, to be started again elsewhere.
#[derive(Debug, Clone)]
pub struct CommandLine(Vec<String>);

impl CommandLine {
    /// Of a process that lives.
    pub fn of(pid: u32) -> Result<Self> {
        let text = std::fs::read(format!("/proc/{pid}/cmdline")).context("the VMM is gone")?;
        let words = text.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        Ok(Self(words.skip(1).map(|word| String::from_utf8_lossy(word).into_owned()).collect()))
    }

    /// The same machine from its beginning.
    #[must_use]
    pub fn booting(&self) -> Self {
        let mut words = self.0.clone();
        if let Some(at) = words.iter().position(|word| word == "-incoming") {
            words.drain(at..at + 2);
        }
        Self(words)
    }

    /// The same machine with nothing but memory behind its memory.
    #[must_use]
    pub fn in_memory(&self) -> Self {
        let plain = |word: &String| match word.split_once(",mem-path=") {
            Some((head, _)) => head.replace("memory-backend-file", "memory-backend-ram"),
            None => word.clone(),
        };
        Self(self.0.iter().map(plain).collect())
    }
}

/// One QEMU, and its connection.
#[derive(Debug)]
pub struct BareQemu {
    dir: PathBuf,
    child: Child,
    qmp: Qmp,
}

impl BareQemu {
    /// Starts it in `dir`, where the files that the command line names must be.
    pub async fn start(dir: &Path, line: &CommandLine) -> Result<Self> {
        for socket in ["qmp.sock", "guest.sock"] {
            let _ = std::fs::remove_file(dir.join(socket));
        }
        let child = Command::new(PROGRAM)
            .args(&line.0)
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("could not start QEMU")?;
        let qmp = Qmp::connect(&Dial::directly(dir, "qmp.sock"), WITHIN).await?;
        Ok(Self { dir: dir.to_owned(), child, qmp })
    }

    pub async fn command(&self, command: &'static str, arguments: Value) -> Result<Value> {
        Ok(self.qmp.command(command, arguments, WITHIN).await?)
    }

    /// Loads what was saved, and lets it run until its guest answers.
    pub async fn restore(&self, state: &Path, memory_apart: bool) -> Result<()> {
        self.agree(memory_apart).await?;
        self.qmp.give("state", File::open(state)?.as_fd(), WITHIN).await?;
        let mut migration = self.qmp.migration();
        self.command("migrate-incoming", json!({ "uri": "fd:state" })).await?;
        let over = migration.wait_for(|status| matches!(status.as_str(), "completed" | "failed" | "closed"));
        let status = tokio::time::timeout(WITHIN, over).await??.clone();
        ensure!(status == "completed", "QEMU did not load what was saved: {status}");
        while self.qmp.query_run(WITHIN).await? == "inmigrate" {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.command("cont", Value::Null).await?;
        self.answer().await
    }

    /// Waits for the guest's first word.
    pub async fn answer(&self) -> Result<()> {
        let stream = Dial::directly(&self.dir, "guest.sock").connect().await?;
        Client::greet(Box::new(stream)).await.map(|_| ()).map_err(anyhow::Error::msg)
    }

    /// Stops it and writes all of it to a file that is on disk then.
    pub async fn save(&self, state: &Path) -> Result<()> {
        self.command("stop", Value::Null).await?;
        self.agree(false).await?;
        self.command("migrate-set-parameters", json!({ "max-bandwidth": 10_u64 << 30 })).await?;
        let file = File::create(state)?;
        self.qmp.give("state", file.as_fd(), WITHIN).await?;
        let mut migration = self.qmp.migration();
        self.command("migrate", json!({ "uri": "fd:state" })).await?;
        let over = migration.wait_for(|status| matches!(status.as_str(), "completed" | "failed" | "closed"));
        let status = tokio::time::timeout(WITHIN, over).await??.clone();
        ensure!(status == "completed", "QEMU did not save: {status}");
        file.sync_all()?;
        File::open(&self.dir)?.sync_all()?;
        Ok(())
    }

    async fn agree(&self, memory_apart: bool) -> Result<()> {
        let capabilities = json!({ "capabilities": [
            { "capability": "events", "state": true },
            { "capability": "x-ignore-shared", "state": memory_apart },
        ] });
        self.command("migrate-set-capabilities", capabilities).await.map(|_| ())
    }
}

impl Drop for BareQemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
