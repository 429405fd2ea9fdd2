//! How many streams there may be at once: on the node, of one tenant, and of one caller.

use std::collections::BTreeMap;
use std::sync::Arc;

use mvm_proto::{Problem, TenantId};
use parking_lot::Mutex;

/// Each stream has a task, buffers of half a MiB at most, and often a program in a guest.
pub(super) const MAX_STREAMS: usize = 256;
/// No tenant takes all streams of a node.
pub(super) const MAX_STREAMS_PER_TENANT: usize = 192;
/// Nor does one caller take all of its tenant's.
pub(super) const MAX_STREAMS_PER_CALLER: usize = 128;

/// The streams there are.
#[derive(Debug, Default)]
pub(super) struct StreamLimits {
    counts: Mutex<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    all: usize,
    tenants: BTreeMap<TenantId, usize>,
    callers: BTreeMap<(TenantId, String), usize>,
}

/// One stream's place among them. Given back when dropped.
#[derive(Debug)]
pub(super) struct StreamSlot {
    limits: Arc<StreamLimits>,
    tenant: TenantId,
    caller: String,
}

impl StreamLimits {
    /// A slot for one more stream; the refusal says which limit is reached.
    pub(super) fn take(self: &Arc<Self>, tenant: &TenantId, caller: &str) -> Result<StreamSlot, Problem> {
        let mut counts = self.counts.lock();
        let of_tenant = counts.tenants.get(tenant).copied().unwrap_or(0);
        let key = (tenant.clone(), caller.to_owned());
        let of_caller = counts.callers.get(&key).copied().unwrap_or(0);
        if of_caller >= MAX_STREAMS_PER_CALLER {
            let detail =
                format!("{caller} has {MAX_STREAMS_PER_CALLER} streams to tenant {tenant} on this node");
            return Err(full("caller_streams_full", detail));
        }
        if of_tenant >= MAX_STREAMS_PER_TENANT {
            let detail = format!("tenant {tenant} has {MAX_STREAMS_PER_TENANT} streams on this node");
            return Err(full("tenant_streams_full", detail));
        }
        if counts.all >= MAX_STREAMS {
            return Err(full("node_streams_full", format!("this node has {MAX_STREAMS} streams")));
        }
        counts.all += 1;
        *counts.tenants.entry(tenant.clone()).or_default() += 1;
        *counts.callers.entry(key).or_default() += 1;
        drop(counts);
        Ok(StreamSlot { limits: Arc::clone(self), tenant: tenant.clone(), caller: caller.to_owned() })
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        let mut counts = self.limits.counts.lock();
        counts.all -= 1;
        give_back(&mut counts.tenants, &self.tenant);
        give_back(&mut counts.callers, &(self.tenant.clone(), std::mem::take(&mut self.caller)));
    }
}

fn give_back<K: Ord>(counts: &mut BTreeMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

fn full(code: &str, detail: String) -> Problem {
    Problem::new(429, code, detail, "End some of them, or wait until they have ended.")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_its_own_refusal_and_slots_come_back() {
        let limits: Arc<StreamLimits> = Arc::default();
        let (acme, beta): (TenantId, TenantId) = ("acme".parse().unwrap(), "beta".parse().unwrap());
        let take = |tenant, caller: &str, count: usize| -> Vec<_> {
            (0..count).map(|_| limits.take(tenant, caller).expect("room")).collect()
        };
        let code = |tenant, caller| limits.take(tenant, caller).expect_err("full").code;
        let ann = take(&acme, "ann", MAX_STREAMS_PER_CALLER);
        assert_eq!(code(&acme, "ann"), "caller_streams_full");
        let bob = take(&acme, "bob", MAX_STREAMS_PER_TENANT - MAX_STREAMS_PER_CALLER);
        assert_eq!(code(&acme, "bob"), "tenant_streams_full");
        let cid = take(&beta, "cid", MAX_STREAMS - MAX_STREAMS_PER_TENANT);
        assert_eq!(code(&beta, "dan"), "node_streams_full");
        drop((ann, bob, cid));
        let counts = limits.counts.lock();
        assert_eq!((counts.all, counts.tenants.len(), counts.callers.len()), (0, 0, 0));
    }
}
