//! Works out which bundles pools name, after a Secret or what a pool names of them changed: from the values in the store, which are
//! wiped when that is done.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::PoolKey;
use mvm_proto::TenantId;
use mvm_proto::text::chain;

use crate::secrets::{Made, make_bundle};
use crate::state::State;
use crate::stored::StateError;
use crate::world::PoolBundle;

/// Before documents are made that name them.
pub(super) async fn make_bundles(state: &State) -> Result<(), StateError> {
    let open = state.world.lock().take_unbundled();
    // Many pools may name the same Secrets.
    let mut made: BTreeMap<(&TenantId, &BTreeSet<String>), PoolBundle> = BTreeMap::new();
    for (at, (key, names)) in open.iter().enumerate() {
        let known = made.get(&(&key.tenant, names)).cloned();
        let bundle = match known {
            Some(known) => Ok(known),
            None => bundle_of(state, key, names).await,
        };
        match bundle {
            Ok(bundle) => {
                state.world.lock().set_bundle(key, names, bundle.clone());
                made.insert((&key.tenant, names), bundle);
            }
            Err(error) => {
                let left = open[at..].iter().map(|(key, _)| key.clone());
                state.world.lock().bundles.open(left);
                return Err(error);
            }
        }
    }
    Ok(())
}

async fn bundle_of(state: &State, key: &PoolKey, names: &BTreeSet<String>) -> Result<PoolBundle, StateError> {
    let made = make_bundle(&state.store, &state.secret_keys, &key.tenant, names).await?;
    Ok(match made {
        Made::Bundle(bundle) => PoolBundle::Made(bundle.digest),
        Made::Missing(names) => PoolBundle::Waits {
            reason: "SecretMissing",
            message: format!("waits for secret {}", names.join(", ")),
        },
        Made::Unreadable(name, error) => {
            tracing::warn!(tenant = %key.tenant, pool = %key.pool, secret = %name, error = %chain(&error), "can't make a bundle");
            PoolBundle::Waits {
                reason: "SecretUnreadable",
                message: format!("can't read secret {name}: {error}; declare it again with its values"),
            }
        }
        Made::TooLarge => PoolBundle::Waits {
            reason: "SecretsTooLarge",
            message: "its secrets are more than a guest takes; name fewer".to_owned(),
        },
    })
}
