//! What `init` tells: every path, and what to do with the keys that belong offline.

use std::path::PathBuf;

use mvm_pki::Identity;
use mvm_proto::Digest;
use serde::Serialize;

use super::{Built, InitSettings, OperatorFiles};
use crate::paths::DataDir;

/// A key that the running coordinator never reads.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct OfflineKey {
    pub what: &'static str,
    pub path: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InitReport {
    pub cluster: String,
    /// The coordinator's identity.
    pub identity: String,
    pub dev: bool,
    pub data_dir: PathBuf,
    /// The root certificate: what nodes and operators pin.
    pub ca_certificate: PathBuf,
    pub ca_fingerprint: Digest,
    pub issuing_ca_dir: PathBuf,
    pub coordinator_credential: PathBuf,
    pub director_key: PathBuf,
    pub trust_file: PathBuf,
    /// What names the first trust root, to be compared by people and written down.
    pub trust_digest: Digest,
    /// The pinned trust beside the offline keys: it belongs with them.
    pub offline_pin: PathBuf,
    pub operator: OperatorFiles,
    pub offline_keys: Vec<OfflineKey>,
    /// How to take the offline keys away, for people.
    pub offline_advice: String,
}

impl InitReport {
    /// What to show as a table.
    #[must_use]
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let mut rows = vec![
            ("cluster", self.cluster.clone()),
            ("kind", if self.dev { "development" } else { "production" }.to_owned()),
            ("coordinator", self.identity.clone()),
            ("data folder", self.data_dir.display().to_string()),
            ("root certificate", self.ca_certificate.display().to_string()),
            ("root fingerprint", self.ca_fingerprint.to_string()),
            ("trust root digest", self.trust_digest.to_string()),
            ("operator", self.operator.identity.clone()),
            ("operator's folder", self.operator.dir.display().to_string()),
        ];
        rows.extend(self.offline_keys.iter().map(|key| (key.what, key.path.display().to_string())));
        rows.push(("pinned trust", self.offline_pin.display().to_string()));
        rows
    }

    /// What to do now, for people.
    #[must_use]
    pub fn next_steps(&self) -> String {
        let data_dir = self.data_dir.display();
        format!(
            "{}\n\nNext:\n  mvm coordinator serve --data-dir {data_dir}\n  \
             export MVM_OPERATOR_DIR={}\n  mvm coordinator token create --node NODE",
            self.offline_advice,
            self.operator.dir.display()
        )
    }
}

pub(super) fn report(
    settings: &InitSettings,
    data: &DataDir,
    identity: &Identity,
    built: Built,
) -> InitReport {
    let offline_advice = advice(settings, &built);
    InitReport {
        cluster: settings.cluster.to_string(),
        identity: identity.to_string(),
        dev: settings.dev,
        data_dir: data.path().to_owned(),
        ca_certificate: data.root_ca_cert(),
        ca_fingerprint: built.root_fingerprint,
        issuing_ca_dir: data.issuing_ca_dir(),
        coordinator_credential: data.leaf(),
        director_key: data.director_key(),
        trust_file: data.trust_file(),
        operator: built.operator,
        trust_digest: built.trust_digest,
        offline_advice,
        offline_pin: built.offline_pin,
        offline_keys: built.offline,
    }
}

fn advice(settings: &InitSettings, built: &Built) -> String {
    if settings.dev {
        return "This is a dev cluster: the coordinator keeps every key, and anyone with this directory can run \
                anything on its nodes. Make a cluster without --dev for anything that matters."
            .to_owned();
    }
    let keys = built.offline.iter().map(|key| &key.path);
    let paths: Vec<String> =
        keys.chain([&built.offline_pin]).map(|path| path.display().to_string()).collect();
    format!(
        "The coordinator never reads these keys. Move them to offline media, with the pinned trust that they sign on \
         top of, and keep two copies:\n  mv {} /media/OFFLINE/\nThey are needed again only to replace the issuing \
         authority, to change the trust root, and to vouch for images. Write down the trust root's digest: other \
         operators pin it with\n  mvm trust pin --digest {}",
        paths.join(" "),
        built.trust_digest
    )
}
