//! What `vouch` and `next-root` share: the state they start from, and where the signed one goes.

use std::path::PathBuf;
use std::time::SystemTime;

use clap::Args;
use mvm_pki::TrustStore;
use mvm_proto::Timestamp;

use super::statements::{bundle_of, fetch, hand_over, read_bundle, write_bundle};
use crate::args::Global;
use crate::client::Operator;
use crate::exit::{Outcome, Run};
use crate::progress::Progress;

/// Where the current state is read from and the signed one goes to.
#[derive(Debug, Args)]
pub(crate) struct Place {
    /// Read the current state from this file instead of the coordinator
    #[arg(long, value_name = "FILE", requires = "out")]
    from: Option<PathBuf>,
    /// Write the signed state to this file instead of handing it to the coordinator
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    operator: Operator,
}

pub(super) async fn current(global: &Global, place: &Place) -> Result<TrustStore, Outcome> {
    let bundle = match &place.from {
        Some(path) => read_bundle(path)?,
        None => bundle_of(&fetch(global, &place.operator).await?)?,
    };
    let now = Timestamp::from(SystemTime::now());
    Ok(TrustStore::pin_bundle(&bundle, now).map_err(anyhow::Error::new)?)
}

/// Checks the new statement as an agent will, then hands it over or writes it down.
pub(super) async fn finish<E: std::error::Error + Send + Sync + 'static>(
    global: &Global,
    place: &Place,
    mut store: TrustStore,
    advance: impl FnOnce(&mut TrustStore) -> Result<(), E>,
) -> Run {
    advance(&mut store).map_err(anyhow::Error::new)?;
    let bundle = store.bundle();
    match &place.out {
        Some(path) => {
            write_bundle(path, &bundle)?;
            Progress::new(global.quiet).say(format!("written; next: mvm trust update -f {}", path.display()));
            Ok(())
        }
        None => hand_over(global, &place.operator, &bundle).await,
    }
}
