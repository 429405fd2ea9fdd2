//! Where things lie in a coordinator's data directory. The only place that knows file names.

use std::path::{Path, PathBuf};

/// A coordinator's data directory.
#[derive(Debug, Clone)]
pub struct DataDir(PathBuf);

impl DataDir {
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// What this directory is: written last by `init`, so that its presence means "complete".
    #[must_use]
    pub fn cluster_file(&self) -> PathBuf {
        self.0.join("cluster.json")
    }

    #[must_use]
    pub fn root_ca_dir(&self) -> PathBuf {
        self.0.join("pki/root")
    }

    /// The root certificates that everyone pins.
    #[must_use]
    pub fn root_ca_cert(&self) -> PathBuf {
        self.root_ca_dir().join("ca.crt")
    }

    /// Which of them vouches for which; see [`mvm_pki::endorsement`].
    #[must_use]
    pub fn endorsements(&self) -> PathBuf {
        self.root_ca_dir().join("endorsements.pem")
    }

    #[must_use]
    pub fn issuing_ca_dir(&self) -> PathBuf {
        self.0.join("pki/issuing")
    }

    /// The coordinator's own key and chain.
    #[must_use]
    pub fn leaf(&self) -> PathBuf {
        self.0.join("pki/coordinator.pem")
    }

    /// The key of stateless resets; see [`mvm_transport::ResetKey`].
    #[must_use]
    pub fn reset_key(&self) -> PathBuf {
        self.0.join("pki/reset.key")
    }

    /// Notes of operators' certificates that the coordinator has not taken into its records yet.
    #[must_use]
    pub fn operator_notes(&self) -> PathBuf {
        self.0.join("pki/operators")
    }

    #[must_use]
    pub fn signing_dir(&self) -> PathBuf {
        self.0.join("signing")
    }

    #[must_use]
    pub fn director_key(&self) -> PathBuf {
        self.signing_dir().join("director.key")
    }

    /// The chain of root versions and the newest image statement.
    #[must_use]
    pub fn trust_file(&self) -> PathBuf {
        self.0.join("trust.json")
    }

    /// Which documents of replaced directors are still issued.
    #[must_use]
    pub fn carried_file(&self) -> PathBuf {
        self.signing_dir().join("carried.json")
    }

    /// What Secrets are encrypted with in the store. Not in the store, and to be backed up apart from it.
    #[must_use]
    pub fn secret_keys(&self) -> PathBuf {
        self.0.join("secrets.keys")
    }

    #[must_use]
    pub fn store_dir(&self) -> PathBuf {
        self.0.join("store")
    }

    /// What the first operator needs: root certificates, credential, settings file.
    #[must_use]
    pub fn operator_dir(&self) -> PathBuf {
        self.0.join("operator")
    }
}
