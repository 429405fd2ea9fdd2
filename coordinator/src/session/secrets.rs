//! Makes the bundles that a node asks for. It gets those alone that pools on it name: a node that was taken over learns what it
//! runs, and nothing else.

use mvm_proto::text::chain;
use mvm_proto::{Digest, NodeId, Problem, TenantId};
use tokio::time::Instant;

use super::{End, Talk};
use crate::secrets::{Bundle, Made, Next, make_bundle};
use crate::state::State;

impl Talk<'_> {
    pub(super) async fn make_secrets(&mut self) -> Result<(), End> {
        let Some(Next { tenant, digest }) = self.secrets.next(Instant::now()) else { return Ok(()) };
        let node = self.attached.node.clone();
        let made = bundle_for(self.state, &node, &tenant, &digest).await;
        match &made {
            Ok(_) => {
                self.state.metrics.secrets_delivered.inc();
                tracing::info!(%node, %tenant, %digest, "sends a bundle of secrets");
            }
            Err(problem) => {
                tracing::debug!(%node, %tenant, %digest, code = %problem.code, "no bundle of secrets for the node");
            }
        }
        self.secrets.made(made);
        Ok(())
    }
}

/// What a node is told where it gets none: the same, whatever the reason is.
fn unknown(tenant: &TenantId, digest: &Digest) -> Problem {
    let detail = format!("no pool of tenant {tenant} on this node names the bundle {digest} now");
    Problem::new(
        404,
        "secrets_unknown",
        detail,
        "A document that names another one is on its way, or a Secret is missing.",
    )
}

async fn bundle_for(
    state: &State,
    node: &NodeId,
    tenant: &TenantId,
    digest: &Digest,
) -> Result<Bundle, Problem> {
    let named = state.world.lock().bundle_on(node, tenant, digest);
    let names = named.ok_or_else(|| unknown(tenant, digest))?;
    match make_bundle(&state.store, &state.secret_keys, tenant, &names).await? {
        // A Secret may have changed since: the document that says so comes.
        Made::Bundle(bundle) if bundle.digest == *digest => Ok(bundle),
        Made::Unreadable(secret, error) => {
            tracing::warn!(%tenant, %secret, error = %chain(&error), "can't make a bundle of secrets");
            Err(unknown(tenant, digest))
        }
        Made::Bundle(_) | Made::Missing(_) | Made::TooLarge => Err(unknown(tenant, digest)),
    }
}
