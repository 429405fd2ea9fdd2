//! Points that no change of the counts passes: a request wants what is being put to rest, or a person moves what sleeps.
//!
//! Each is asked of one instance after the other, so that the agent ends at the first or at the second of them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use mvm_tests::{PATIENCE, path_text, wait_for, wait_until};
use serde_json::{Value, json};

use super::{Matrix, NONE};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// For an instance whose memory is written, and the word that it is never comes.
    Wake,
    Export,
    /// Of what was exported and removed before.
    Import,
    /// Has the guest's program end.
    End,
}

impl Asked {
    pub(crate) fn at(point: &str) -> Option<Self> {
        match point.split_once('.')?.0 {
            "call_off" => Some(Self::Wake),
            "export" => Some(Self::Export),
            "import" => Some(Self::Import),
            "restart" => Some(Self::End),
            _ => None,
        }
    }
}

impl Matrix {
    /// Sends one request and reads all that comes; absent: nobody answered.
    pub(crate) fn send(&self, method: &str, path: &str) -> Option<Value> {
        let mut stream = UnixStream::connect(self.agent.data_dir().join("agent.sock")).ok()?;
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        serde_json::from_str(answer.split_once("\r\n\r\n")?.1).ok()
    }

    fn archive(&self, id: &str) -> PathBuf {
        self.archives.path().join(id)
    }

    /// The archives that are whole.
    fn written(&self) -> usize {
        std::fs::read_dir(self.archives.path()).expect("the folder of archives is there").count()
    }

    /// Starts an agent that ends itself at `point` once it is asked, asks it, and waits for that.
    pub(crate) fn die_asked(&mut self, point: &str, asked: Asked, ids: &BTreeMap<String, String>) {
        let mut environment = vec![("MVM_CRASH_AT", point)];
        if asked == Asked::Wake {
            environment.push(("MVM_FAKE_HANGS_AFTER", "snapshot"));
        }
        self.agent.launch(&environment);
        wait_until("the agent to be where it is asked", PATIENCE, || match asked {
            Asked::Wake => self.vms().values().all(|entry| !entry["snapshot"].is_null()),
            Asked::Export | Asked::Import | Asked::End => self.instances().is_some(),
        });
        // Whoever ends it gets no answer, and nobody after that.
        for id in ids.keys() {
            let archive = self.archive(id);
            let archive = path_text(&archive);
            match asked {
                Asked::Wake => {
                    self.send("POST", &format!("/v1/tenants/acme/pools/workers/instances/{id}/wake"));
                }
                Asked::Export => {
                    self.agent.mvm(&["instance", "export", id, archive]);
                }
                Asked::End => {
                    self.agent.mvm(&["instance", "exec", id, "--", "exit"]);
                }
                Asked::Import => {
                    self.agent.mvm(&["instance", "import", archive, "--override", "0s"]);
                }
            }
        }
        self.agent.wait_crashed(point, PATIENCE);
    }

    /// Has an agent put every sleeper into an archive and remove it, while the counts ask for none and touch none.
    pub(crate) fn send_away(&mut self, point: &str, ids: &BTreeMap<String, String>) {
        let mut document = self.document(NONE);
        document["tenants"][0]["pools"][0]["critical"] = json!(true);
        self.agent.declare(&document);
        self.agent.launch(&[]);
        wait_until("the document to be in force", PATIENCE, || {
            let pool = self.send("GET", "/v1/tenants/acme/pools/workers");
            pool.is_some_and(|pool| pool["desired"]["critical"] == true)
        });
        for id in ids.keys() {
            self.agent.mvm_ok(&["instance", "export", id, path_text(&self.archive(id)), "--remove"]);
        }
        self.settle(point, NONE);
        self.agent.kill();
    }

    /// After an agent ended in an import: what was recorded is there, nothing is left of the rest, and that can be
    /// imported now.
    pub(crate) fn take_in_the_rest(&self, point: &str, passing: u32, ids: &BTreeMap<String, String>) {
        let there = wait_for("what no record owns to be swept", PATIENCE, || {
            self.instances().filter(|there| there.keys().eq(self.vms().keys()))
        });
        let whole = if point == "import.recorded" { passing } else { passing - 1 };
        assert_eq!(there.len(), whole as usize, "{point}: {there:?}\n{}", self.agent.log());
        for id in ids.keys().filter(|id| !there.contains_key(*id)) {
            self.agent.mvm_ok(&["instance", "import", path_text(&self.archive(id)), "--override", "0s"]);
        }
    }

    /// After an agent ended in an export: an archive that was not closed is none, and what is in one is marked.
    pub(crate) fn check_exports(&self, point: &str, passing: u32) {
        assert_eq!(self.written(), passing as usize - 1, "{point}: an archive that was not closed is none");
        let list = self.list().expect("the agent answers");
        let says =
            |instance: &&Value| instance["reason"].as_str().is_some_and(|why| why.contains("exported at"));
        assert_eq!(list.iter().filter(says).count(), passing as usize, "{point}: {list:?}");
    }
}
