//! What both ways in ask of guest sessions, and the coordinator's requests for them.

use std::time::Duration;

use mvm_proto::wire::session::v1::{DeleteSessions, KeptSession, ListSessions, Sessions, reply};
use mvm_proto::{PoolId, TenantId};

use crate::node::handle::NodeHandle;
use crate::node::removals::WhichSessions;

/// Sessions in one answer: a frame has room for more.
const MAX_TOLD: usize = 8192;

pub(super) fn asked(
    tenant: Option<TenantId>,
    pool: Option<PoolId>,
    slot: Option<u32>,
    unused_seconds: u64,
    stores: Vec<String>,
) -> WhichSessions {
    WhichSessions { tenant, pool, slot, unused_for: Duration::from_secs(unused_seconds), stores }
}

pub(super) async fn list(
    node: &NodeHandle,
    tenant: Option<TenantId>,
    pool: Option<PoolId>,
    asked_for: ListSessions,
) -> reply::Answer {
    let found = node.guest_sessions(&asked(tenant, pool, None, 0, asked_for.stores)).await;
    let mut told = Sessions { sessions: found.sessions, kept: Vec::new(), unreadable: found.unreadable };
    if told.sessions.len() > MAX_TOLD {
        let more = told.sessions.len() - MAX_TOLD;
        told.sessions.truncate(MAX_TOLD);
        told.unreadable.push(format!("{more} more sessions do not fit one answer; name a tenant or a pool"));
    }
    reply::Answer::Sessions(told)
}

pub(super) async fn delete(
    node: &NodeHandle,
    tenant: TenantId,
    pool: Option<PoolId>,
    asked_for: DeleteSessions,
) -> reply::Answer {
    let DeleteSessions { session, unused_seconds, by, stores, .. } = asked_for;
    let which = asked(Some(tenant), pool, session, unused_seconds, stores);
    let mut deleted = node.delete_guest_sessions(&which, &by).await;
    deleted.deleted.truncate(MAX_TOLD);
    deleted.kept.truncate(MAX_TOLD);
    let kept = deleted.kept.into_iter();
    let kept = kept.map(|(it, reason)| KeptSession { session: it.session, store: it.store, reason });
    reply::Answer::Sessions(Sessions {
        sessions: deleted.deleted,
        kept: kept.collect(),
        unreadable: deleted.unreadable,
    })
}
