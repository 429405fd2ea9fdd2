//! Values of Secrets: encrypted in the store, put together into the bundles that nodes are given, and shown to no one.
//!
//! ```text
//! secrets/<tenant>/<name>   the values of a Secret, encrypted for this tenant, name and uid
//! secrets_of/<tenant>       how many Secrets a tenant has, and of how many bytes
//! ```
//! The key is a file of the coordinator's own ([`SecretKeys`]), and not in the store. Plain values are in buffers that are wiped.

mod bundle;
mod contents;
mod deliver;
mod keys;
mod reencrypt;

use bundle::bundle;
pub(crate) use bundle::{Bundle, waiting};
pub(crate) use contents::{Contents, StoredValues};
pub(crate) use deliver::{Delivery, Next};
pub(crate) use keys::{Encrypted, SecretKeys};
pub(crate) use reencrypt::reencrypt;

use std::collections::BTreeSet;

use mvm_proto::TenantId;
use serde::{Deserialize, Serialize};

use crate::stored::{Backend, StateError, load};

pub(crate) const SECRETS: &str = "secrets/";
const SCHEMA: u32 = 1;

/// Why the values of a Secret can't be had.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretsError {
    #[error("no random bytes could be had")]
    Random,
    #[error("the values could not be encrypted")]
    Encrypt,
    #[error("the key {key} that the values were encrypted with is not in the coordinator's secrets.keys")]
    NoKey { key: String },
    #[error("the values were changed in the store, or are another Secret's")]
    Damaged,
    #[error("the values are of schema {schema}, and this version reads up to {SCHEMA}")]
    Newer { schema: u32 },
    #[error(transparent)]
    State(#[from] StateError),
}

/// The values of a Secret in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SecretRecord {
    schema: u32,
    uid: String,
    values: Encrypted,
}

pub(crate) fn secret_key(tenant: &TenantId, name: &str) -> String {
    format!("{SECRETS}{tenant}/{name}")
}

/// What binds encrypted values to their Secret: those of another one, or of an earlier one of the name, don't decrypt here.
fn binding(tenant: &str, name: &str, uid: &str) -> Vec<u8> {
    // None of them has such a byte.
    format!("mvm secret 1\0{tenant}\0{name}\0{uid}").into_bytes()
}

impl SecretRecord {
    pub(crate) fn new(
        keys: &SecretKeys,
        (tenant, name, uid): (&TenantId, &str, &str),
        contents: &Contents,
    ) -> Result<Self, SecretsError> {
        let values = keys.encrypt(&binding(tenant.as_str(), name, uid), &contents.to_bytes())?;
        Ok(Self { schema: SCHEMA, uid: uid.to_owned(), values })
    }

    pub(crate) fn open(
        &self,
        keys: &SecretKeys,
        tenant: &TenantId,
        name: &str,
    ) -> Result<Contents, SecretsError> {
        if self.schema > SCHEMA {
            return Err(SecretsError::Newer { schema: self.schema });
        }
        let plain = keys.decrypt(&binding(tenant.as_str(), name, &self.uid), &self.values)?;
        Contents::from_bytes(&plain).ok_or(SecretsError::Damaged)
    }
}

/// The values of a Secret, if there is one.
pub(crate) async fn load_contents(
    store: &Backend,
    keys: &SecretKeys,
    tenant: &TenantId,
    name: &str,
) -> Result<Option<Contents>, SecretsError> {
    match load::<SecretRecord>(store, &secret_key(tenant, name)).await? {
        Some(found) => found.value.open(keys, tenant, name).map(Some),
        None => Ok(None),
    }
}

/// What became of a bundle.
pub(crate) enum Made {
    Bundle(Bundle),
    /// There are no Secrets of these names.
    Missing(Vec<String>),
    /// The values of this one can't be had.
    Unreadable(String, SecretsError),
    TooLarge,
}

/// The bundle of some of a tenant's Secrets, as they are stored now.
pub(crate) async fn make_bundle(
    store: &Backend,
    keys: &SecretKeys,
    tenant: &TenantId,
    names: &BTreeSet<String>,
) -> Result<Made, StateError> {
    let (mut secrets, mut missing) = (Vec::new(), Vec::new());
    for name in names {
        match load_contents(store, keys, tenant, name).await {
            Ok(Some(contents)) => secrets.push((name.as_str(), contents)),
            Ok(None) => missing.push(name.clone()),
            Err(SecretsError::State(error)) => return Err(error),
            Err(error) => return Ok(Made::Unreadable(name.clone(), error)),
        }
    }
    if !missing.is_empty() {
        return Ok(Made::Missing(missing));
    }
    Ok(bundle(tenant, &secrets).map_or(Made::TooLarge, Made::Bundle))
}
