//! Archives that never were: taken apart, changed, and closed again with digests that fit.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mvm_agent::instance::archive::{Reader, Source, stored_bytes, write};
use mvm_proto::{Digest, InstanceId};
use serde_json::{Value, json};

#[derive(Debug, Clone)]
pub(crate) struct Forged {
    pub(crate) header: Value,
    /// Each member's content: a disk may be large, and mostly holes.
    members: Vec<Arc<File>>,
}

impl Forged {
    pub(crate) fn read(path: &Path) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        let bytes = std::fs::read(path).expect("the archive can be read");
        runtime.block_on(async {
            let (header, mut reader) = Reader::open(&bytes[..]).await.expect("it is an archive");
            let mut members = Vec::new();
            for member in &header.members {
                let file = tempfile::tempfile().expect("a file can be made");
                members.push(Arc::new(file.try_clone().expect("a file has two handles")));
                reader.member(member, Some(file)).await.expect("its members are whole");
            }
            reader.close().await.expect("it is whole");
            Self { header: serde_json::to_value(&header).expect("a header is JSON"), members }
        })
    }

    fn at(&self, name: &str) -> usize {
        let members = self.header["members"].as_array().expect("members are a list");
        members.iter().position(|member| member["name"] == name).expect("it has that member")
    }

    /// The content of the member of this name.
    pub(crate) fn content(&self, name: &str) -> Vec<u8> {
        let mut content = Vec::new();
        let mut file = &*self.members[self.at(name)];
        file.rewind().expect("it can be read");
        file.read_to_end(&mut content).expect("it can be read");
        content
    }

    pub(crate) fn with(mut self, name: &str, content: &[u8]) -> Self {
        let mut file = tempfile::tempfile().expect("a file can be made");
        file.write_all(content).expect("it can be written");
        let at = self.at(name);
        self.members[at] = Arc::new(file);
        self
    }

    pub(crate) fn manifest(&self) -> Value {
        serde_json::from_slice(&self.content("snapshot/manifest.json")).expect("a manifest is JSON")
    }

    /// Changes its snapshot's manifest, and the record that names it.
    pub(crate) fn with_manifest(self, change: impl FnOnce(&mut Value)) -> Self {
        let mut manifest = self.manifest();
        change(&mut manifest);
        let text = serde_json::to_vec_pretty(&manifest).expect("JSON can be written");
        let mut forged = self.with("snapshot/manifest.json", &text);
        forged.header["record"]["snapshot"]["digest"] = json!(Digest::of(&text));
        forged
    }

    pub(crate) fn rename(&mut self, id: &InstanceId) {
        self.header["record"]["id"] = json!(id);
        self.header["record"]["snapshot"]["instance"] = json!(id);
    }

    pub(crate) fn write(&self, path: &Path) -> PathBuf {
        let mut header = self.header.clone();
        let mut sources = Vec::new();
        for (number, file) in self.members.iter().enumerate() {
            let file = file.try_clone().expect("a file has two handles");
            let bytes = file.metadata().expect("it can be looked at").len();
            header["members"][number]["bytes"] = json!(bytes);
            header["members"][number]["stored_bytes"] = json!(stored_bytes(&file).expect("it has parts"));
            sources.push(Source { file, bytes });
        }
        let header = serde_json::from_value(header).expect("it is still a header");
        let mut out = File::create(path).expect("an archive can be made");
        let put = |piece: Vec<u8>| out.write_all(&piece);
        write(&header, &sources, put, || Ok(())).expect("it can be written");
        path.to_owned()
    }
}
