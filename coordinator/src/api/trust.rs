//! Trust as operators see it and change it.

use mvm_pki::trust::{MAX_ROOTS, TrustRole};
use mvm_pki::{RootMetadata, TrustStore};
use mvm_proto::wire::control::v1::{TrustKey, TrustState, UpdateTrustRequest};
use mvm_proto::{Envelope, Problem};

use crate::refuse;
use crate::state::State;
use crate::stored::now;

/// The longest chain of roots that anyone follows, and a statement of images.
const MAX_ENVELOPES: usize = MAX_ROOTS + 1;

pub(super) async fn update(state: &State, request: &UpdateTrustRequest) -> Result<TrustState, Problem> {
    if request.roots.len() + request.images.len() > MAX_ENVELOPES {
        return Err(refuse::bad_request(format!("at most {MAX_ENVELOPES} envelopes may be sent at once")));
    }
    // While the directors who signed them are still known.
    if !request.roots.is_empty() {
        state.documents.carry_over().await?;
    }
    let followed = state.trust.update(&request.roots, &request.images, now()).await?;
    for change in &followed.roots {
        tracing::info!(from = change.from, to = change.to, "moved to the next trust root");
    }
    // First the trust, then the documents that need it.
    state.fleet.trust_changed();
    if followed.roots.iter().any(|change| change.resets_high_water) {
        state.fleet.forget_marks();
        state.world.lock().forget_numbers();
    }
    // Also when nothing is new: sending the root again retries what failed the last time.
    state.documents.follow_reset(now()).await?;
    match followed.images_refused {
        None => Ok(self::state(&state.trust.current())),
        Some(error) if followed.roots.is_empty() => Err(error.to_problem()),
        Some(error) => {
            let mut problem = error.to_problem();
            let version = state.trust.current().root_version();
            problem.detail = format!(
                "root version {version} is in force; the images statement was refused: {}",
                problem.detail
            );
            Err(problem)
        }
    }
}

pub(super) fn state(trust: &TrustStore) -> TrustState {
    let root = trust.root();
    let images = trust.images();
    TrustState {
        root_version: root.version,
        root_expires_at: root.expires_at.to_string(),
        dev_cluster: root.dev,
        keys: TrustRole::ALL.into_iter().flat_map(|role| keys(root, role)).collect(),
        images_version: trust.images_version(),
        image_digests: images.map_or(0, |images| u32::try_from(images.digests.len()).unwrap_or(u32::MAX)),
        images_expires_at: images.map(|images| images.expires_at.to_string()).unwrap_or_default(),
        root_envelope: trust.root_envelopes().last().map(Envelope::to_json).unwrap_or_default(),
        root_envelopes: trust.root_envelopes().iter().map(Envelope::to_json).collect(),
        images_envelope: trust.images_envelope().map(Envelope::to_json).unwrap_or_default(),
    }
}

/// The keys of one role; a role without an expiry of its own ends with the root.
fn keys(root: &RootMetadata, role: TrustRole) -> Vec<TrustKey> {
    let holders = root.role(role);
    let expires_at = holders.expires_at.map_or(root.expires_at, |own| own.min(root.expires_at));
    let key = |key_id: &String| TrustKey {
        key_id: key_id.clone(),
        role: role.to_string(),
        expires_at: expires_at.to_string(),
        threshold: holders.threshold,
    };
    holders.key_ids.iter().map(key).collect()
}
