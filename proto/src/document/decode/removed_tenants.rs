//! Reads the tenants that were deleted together with their data.

use super::all;
use super::rules::{self, Unique};
use crate::TenantId;
use crate::document::{MAX_SESSION_STORES, MAX_STORE_BYTES, MAX_UID_BYTES, RemovedTenant};
use crate::json::Node;

const REMOVED_TENANT: &[&str] = &["tenant_id", "uid", "session_stores"];
/// More than a node has tenants.
const MAX_REMOVED_TENANTS: usize = 4096;

/// `tenants` are those that the document wants: none of them is removed.
pub(super) fn removed_tenants(node: &Node<'_, '_>, tenants: &Unique<TenantId>) -> Option<Vec<RemovedTenant>> {
    at_most(node, MAX_REMOVED_TENANTS)?;
    let mut ids = Unique::default();
    all(node, |at, item| {
        let fields = item.fields(REMOVED_TENANT)?;
        let tenant_id = fields.get("tenant_id", |node| {
            let id = node.parse()?;
            ids.check(&id, "removed_tenants", at, &node);
            match tenants.first(&id) {
                Some(first) => node.refuse(format_args!("must not be tenants[{first}] too")),
                None => Some(id),
            }
        });
        let uid = fields.get("uid", |node| rules::printable(&node, MAX_UID_BYTES));
        let session_stores = fields.or("session_stores", Vec::new(), |node| {
            at_most(&node, MAX_SESSION_STORES)?;
            all(&node, |_, item| rules::session_store(&item, MAX_STORE_BYTES))
        });
        Some(RemovedTenant { tenant_id: tenant_id?, uid: uid?, session_stores: session_stores? })
    })
}

fn at_most(node: &Node<'_, '_>, most: usize) -> Option<()> {
    match node.items()?.len() {
        found if found > most => node.refuse_as(format_args!("must have at most {most} items"), found),
        _ => Some(()),
    }
}

#[cfg(test)]
mod tests;
