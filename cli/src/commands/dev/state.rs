//! What a development cluster remembers of itself: `dev.json`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use mvm_vmm::DriverChoice;
use serde::{Deserialize, Serialize};

use super::isolation::Modes;
use super::ports::Ports;

/// Of the file.
const FORMAT: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    format: u32,
    pub(super) ports: Ports,
    pub(super) images_dir: PathBuf,
    /// As the flag is written.
    driver: String,
    /// Of the agent that was started last.
    pub(super) isolation: Modes,
    /// Its name in the file of contexts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) context: Option<String>,
    /// Tenant and pool were declared. What becomes of them then is their user's.
    #[serde(default)]
    pub(super) declared: bool,
}

impl State {
    pub(super) fn new(ports: Ports, images_dir: PathBuf, driver: DriverChoice) -> Self {
        let (isolation, driver) = (Modes::NONE, driver.to_string());
        Self { format: FORMAT, ports, images_dir, driver, isolation, context: None, declared: false }
    }

    /// None where no cluster is.
    pub(super) fn load(file: &Path) -> anyhow::Result<Option<Self>> {
        let bytes = match std::fs::read(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.with_context(|| format!("could not read {}", file.display()))?,
        };
        let advice = || {
            format!(
                "could not use {}\nif it is damaged, remove its directory and run `mvm dev up`",
                file.display()
            )
        };
        let state: Self = serde_json::from_slice(&bytes).with_context(advice)?;
        if state.format != FORMAT {
            bail!(
                "{} is of another version of mvm\nuse that version for `mvm dev down`, then this one",
                file.display()
            );
        }
        Ok(Some(state))
    }

    pub(super) fn save(&self, file: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_vec_pretty(self)?;
        mvm_pki::files::write_private(file, &text)
            .with_context(|| format!("could not write {}\nmake room there, or use --dir DIR", file.display()))
    }

    pub(super) fn driver(&self) -> DriverChoice {
        // It was parsed before it was written.
        self.driver.parse().unwrap_or_default()
    }

    pub(super) fn set_driver(&mut self, driver: DriverChoice) {
        self.driver = driver.to_string();
    }

    /// Where agent and operators find the coordinator.
    pub(super) fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.ports.coordinator)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_is_loaded_and_what_is_damaged_says_what_to_do() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("dev.json");
        assert_eq!(State::load(&file).unwrap(), None);
        let ports = Ports { coordinator: 1, coordinator_metrics: 2, agent: 3, agent_metrics: 4 };
        let driver: DriverChoice = "qemu".parse().unwrap();
        let mut state = State::new(ports, "/images".into(), driver);
        state.context = Some("dev".to_owned());
        state.save(&file).unwrap();
        assert_eq!(State::load(&file).unwrap(), Some(state.clone()));
        assert_eq!(state.driver(), driver);
        std::fs::write(&file, b"{}").unwrap();
        assert!(format!("{:#}", State::load(&file).unwrap_err()).contains("mvm dev up"));
        state.format = 2;
        state.save(&file).unwrap();
        assert!(format!("{:#}", State::load(&file).unwrap_err()).contains("another version"));
    }
}
