//! Contexts: several clusters in one file, each with whom to call, as whom, and which tenant is meant.
//!
//! The file is `MVM_CONTEXTS`, else `mvm/contexts.toml` in the user's folder for settings. `--context`, else
//! `MVM_CONTEXT`, else the file's `current` says which of them counts. A flag beats the environment, which beats the
//! context, which beats the settings file.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};
use mvm_proto::TenantId;
use serde::{Deserialize, Serialize};

/// One cluster, as its user calls it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Context {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) coordinator: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) operator_dir: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<TenantId>,
    /// The agent of the cluster's only node, for what does not go through a coordinator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) node_endpoint: Option<String>,
}

/// The file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Contexts {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) current: Option<String>,
    pub(crate) contexts: BTreeMap<String, Context>,
}

/// Where the contexts are.
pub(crate) fn file() -> Option<PathBuf> {
    let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || named("HOME").map(|home| home.join(".config"));
    named("MVM_CONTEXTS").or_else(|| {
        named("XDG_CONFIG_HOME").or_else(home).map(|folder| folder.join("mvm").join("contexts.toml"))
    })
}

impl Contexts {
    /// What the file holds; nothing when there is none.
    pub(crate) fn load(file: &Path) -> anyhow::Result<Self> {
        let text = match std::fs::read_to_string(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            text => text.with_context(|| format!("could not read the contexts in {}", file.display()))?,
        };
        toml::from_str(&text).with_context(|| format!("could not use the contexts in {}", file.display()))
    }

    /// Loads the file, changes it and saves it while no other `mvm` does. What `change` refuses is not saved.
    pub(crate) fn change<T>(
        file: &Path,
        change: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        let folder = file.parent().unwrap_or(Path::new("/"));
        let lock = || -> std::io::Result<File> {
            std::fs::create_dir_all(folder)?;
            // The folder, since the file is replaced by its new version.
            let lock = File::open(folder)?;
            lock.lock()?;
            Ok(lock)
        };
        let _lock = lock().with_context(|| format!("could not lock the contexts in {}", folder.display()))?;
        let mut contexts = Self::load(file)?;
        let changed = change(&mut contexts)?;
        contexts.save(file)?;
        Ok(changed)
    }

    /// Only its user may read it; what was there is replaced at once or not at all.
    pub(crate) fn save(&self, file: &Path) -> anyhow::Result<()> {
        let save = || -> anyhow::Result<()> {
            if let Some(folder) = file.parent() {
                std::fs::create_dir_all(folder)?;
            }
            Ok(mvm_pki::files::write_private(file, toml::to_string(self)?.as_bytes())?)
        };
        save().with_context(|| format!("could not write the contexts to {}", file.display()))
    }

    pub(crate) fn named(&self, name: &str) -> anyhow::Result<&Context> {
        self.contexts.get(name).ok_or_else(|| {
            let known: Vec<_> = self.contexts.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "there are none".to_owned() } else { known.join(", ") };
            anyhow!("there is no context {name}: {known}\nmake one with: mvm context set {name} --coordinator URL --operator-dir DIR")
        })
    }

    /// The one that counts: `chosen`, which must exist, else the current one.
    pub(crate) fn in_force(&self, chosen: Option<&str>) -> anyhow::Result<Option<&Context>> {
        match (chosen, &self.current) {
            (Some(chosen), _) => self.named(chosen).map(Some),
            (None, Some(current)) => Ok(self.contexts.get(current)),
            (None, None) => Ok(None),
        }
    }
}

impl Context {
    /// What it says, by the environment variable that says the same.
    pub(crate) fn values(&self) -> Vec<(&'static str, String)> {
        let folder = self.operator_dir.as_ref().map(|folder| folder.display().to_string());
        let tenant = self.tenant.as_ref().map(ToString::to_string);
        let all = [
            ("MVM_COORDINATOR", self.coordinator.clone()),
            ("MVM_OPERATOR_DIR", folder),
            ("MVM_TENANT", tenant),
            ("MVM_NODE_ENDPOINT", self.node_endpoint.clone()),
        ];
        all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn contexts() -> Contexts {
        let prod = Context {
            coordinator: Some("https://c1.example:4433".to_owned()),
            operator_dir: Some("/etc/mvm/alice".into()),
            tenant: Some("acme".parse().unwrap()),
            node_endpoint: Some("unix:/run/mvm/agent.sock".to_owned()),
        };
        let contexts = [("prod".to_owned(), prod), ("dev".to_owned(), Context::default())];
        Contexts { current: Some("dev".to_owned()), contexts: contexts.into() }
    }

    #[test]
    fn what_is_saved_is_loaded_and_only_its_user_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mvm").join("contexts.toml");
        assert_eq!(Contexts::load(&file).unwrap(), Contexts::default());
        for saved in [Contexts::default(), contexts()] {
            saved.save(&file).unwrap();
            assert_eq!(Contexts::load(&file).unwrap(), saved);
            assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        }
        std::fs::write(&file, "[contexts.a]\ncordinator = \"x\"\n").unwrap();
        let told = format!("{:#}", Contexts::load(&file).unwrap_err());
        assert!(told.contains("contexts.toml") && told.contains("cordinator"), "{told}");
    }

    #[test]
    fn a_chosen_context_must_exist_and_the_current_one_counts_otherwise() {
        let contexts = contexts();
        assert_eq!(contexts.in_force(None).unwrap(), Some(&Context::default()));
        assert_eq!(contexts.in_force(Some("prod")).unwrap().unwrap().values().len(), 4);
        let told = contexts.in_force(Some("prood")).unwrap_err().to_string();
        assert!(told.contains("dev, prod") && told.contains("mvm context set prood"), "{told}");
    }
}
