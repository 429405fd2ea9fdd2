//! Signed statements and keys, read from and written to the coordinator and files.

use std::path::PathBuf;

use anyhow::Context;
use mvm_pki::{PublicKey, SigningKey, TrustBundle};
use mvm_proto::Envelope;
use mvm_proto::wire::control::v1::{GetTrustRequest, TrustState, UpdateTrustRequest};

use super::show;
use crate::client::{Operator, within};
use crate::exit::{Outcome, Run};
use crate::global::Global;

pub(super) async fn hand_over(global: &Global, operator: &Operator, bundle: &TrustBundle) -> Run {
    let mut client = operator.connect(global).await?;
    let request = UpdateTrustRequest {
        roots: bundle.roots.iter().map(Envelope::to_json).collect(),
        images: bundle.images.iter().map(Envelope::to_json).collect(),
    };
    let state = within(global.timeout(), client.update_trust(request)).await?;
    show(global, operator, &state)
}

pub(super) async fn fetch(global: &Global, operator: &Operator) -> Result<TrustState, Outcome> {
    let mut client = operator.connect(global).await?;
    within(global.timeout(), client.get_trust(GetTrustRequest {})).await
}

pub(super) fn bundle_of(state: &TrustState) -> anyhow::Result<TrustBundle> {
    let read = |bytes: &Vec<u8>| {
        Envelope::from_json(bytes).context("the coordinator sent something that is no envelope")
    };
    Ok(TrustBundle {
        roots: state.root_envelopes.iter().map(read).collect::<Result<_, _>>()?,
        images: Some(&state.images_envelope).filter(|bytes| !bytes.is_empty()).map(read).transpose()?,
    })
}

pub(super) fn read_bundle(path: &PathBuf) -> Result<TrustBundle, Outcome> {
    let read = || -> anyhow::Result<TrustBundle> {
        let text = std::fs::read(path).with_context(|| format!("could not read {}", path.display()))?;
        serde_json::from_slice(&text).with_context(|| format!("{} holds no trust statements", path.display()))
    };
    read().map_err(Outcome::Usage)
}

pub(super) fn write_bundle(path: &PathBuf, bundle: &TrustBundle) -> anyhow::Result<()> {
    let text = serde_json::to_vec_pretty(bundle).context("could not write the trust statements as JSON")?;
    std::fs::write(path, text).with_context(|| format!("could not write {}", path.display()))
}

pub(super) fn read_keys(paths: &[PathBuf]) -> anyhow::Result<Vec<SigningKey>> {
    paths.iter().map(|path| Ok(SigningKey::from_file(path)?)).collect()
}

pub(super) fn read_public_keys(paths: &[PathBuf]) -> anyhow::Result<Vec<PublicKey>> {
    let read = |path: &PathBuf| -> anyhow::Result<PublicKey> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display()))?;
        text.trim()
            .parse::<PublicKey>()
            .with_context(|| format!("{} holds no public signing key", path.display()))
    };
    paths.iter().map(read).collect()
}
