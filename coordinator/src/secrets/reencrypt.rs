//! After a new key came into `secrets.keys`: what was encrypted with an older one is encrypted with it, while the coordinator
//! starts. Then the older one can be taken out of the file.

use mvm_proto::TenantId;
use mvm_proto::text::chain;
use mvm_store::{Guard, Store, StoreError, Transaction};

use super::{SECRETS, SecretKeys, SecretRecord, SecretsError};
use crate::stored::{Backend, StateError, encode, load_all};

/// What one look at all Secrets found.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Done {
    encrypted: u64,
    unreadable: u64,
}

pub(crate) async fn reencrypt(store: &Backend, keys: &SecretKeys) -> Result<(), StateError> {
    let done = all(store, keys).await?;
    let Done { encrypted, unreadable } = done;
    if encrypted > 0 {
        tracing::info!(encrypted, unreadable, "encrypted Secrets with the newest key of secrets.keys");
    }
    if unreadable > 0 {
        let fix = "put the key back into secrets.keys, or declare these Secrets again";
        tracing::error!(unreadable, fix, "there are Secrets that can't be decrypted");
    }
    Ok(())
}

async fn all(store: &Backend, keys: &SecretKeys) -> Result<Done, StateError> {
    let mut done = Done::default();
    for (path, found) in load_all::<SecretRecord>(store, SECRETS).await? {
        let Some((tenant, name)) = path.split_once('/') else { continue };
        let Ok(tenant) = tenant.parse::<TenantId>() else { continue };
        let opened = match found.value.open(keys, &tenant, name) {
            Ok(contents) if !keys.is_newest(&found.value.values) => {
                SecretRecord::new(keys, (&tenant, name, &found.value.uid), &contents)
            }
            Ok(_) => continue,
            Err(error) => Err(error),
        };
        match opened {
            Ok(record) => {
                let key = format!("{SECRETS}{path}");
                let txn = Transaction::new().guard(key.as_str(), Guard::Version(found.version));
                match store.commit(txn.put(key.as_str(), encode(&record))).await {
                    Ok(_) => done.encrypted += 1,
                    // Someone wrote it meanwhile, with the newest key.
                    Err(StoreError::Conflict { .. }) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(SecretsError::State(error)) => return Err(error),
            Err(error) => {
                tracing::error!(secret = %path, error = %chain(&error), "can't decrypt a Secret");
                done.unreadable += 1;
            }
        }
    }
    Ok(done)
}
