//! How many requests of each API key are under way: watches and answers that are not read yet cost memory, and all keys share
//! the few connections without a certificate.

use std::collections::HashMap;
use std::sync::Arc;

use mvm_proto::Problem;
use parking_lot::Mutex;

use crate::objects::Caller;

/// As many as one connection carries: some watches, and what a program asks beside them.
const MOST_PER_KEY: usize = 64;

#[derive(Debug, Clone, Default)]
pub(crate) struct KeyCalls(Arc<Mutex<HashMap<String, usize>>>);

/// One request, until it is dropped.
#[derive(Debug)]
pub(crate) struct KeyCall {
    calls: KeyCalls,
    name: String,
}

impl KeyCalls {
    /// One more of this caller. None of an operator: its connections are counted.
    pub(crate) fn begin(&self, caller: &Caller) -> Result<Option<KeyCall>, Problem> {
        if !caller.is_key() {
            return Ok(None);
        }
        let mut calls = self.0.lock();
        let under_way = calls.entry(caller.name.clone()).or_default();
        if *under_way >= MOST_PER_KEY {
            let detail =
                format!("{} has {MOST_PER_KEY} requests under way, as many as a key may", caller.name);
            let advice = "End some watches, read the answers, or use one key for each program.";
            return Err(Problem::new(429, "too_many_requests", detail, advice));
        }
        *under_way += 1;
        Ok(Some(KeyCall { calls: self.clone(), name: caller.name.clone() }))
    }
}

impl Drop for KeyCall {
    fn drop(&mut self) {
        let mut calls = self.calls.0.lock();
        if let Some(under_way) = calls.get_mut(&self.name) {
            *under_way -= 1;
            if *under_way == 0 {
                calls.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_so_many_requests_at_once_and_takes_none_from_others() {
        let calls = KeyCalls::default();
        let key = |name: &str| Caller { name: format!("api-key/{name}"), ..Caller::admin() };
        let mut held: Vec<_> = (0..MOST_PER_KEY).map(|_| calls.begin(&key("a")).unwrap()).collect();
        assert_eq!(calls.begin(&key("a")).unwrap_err().code, "too_many_requests");
        assert!(calls.begin(&key("b")).unwrap().is_some());
        assert!(calls.begin(&Caller::admin()).unwrap().is_none(), "operators are not counted here");
        drop(held.pop());
        held.push(calls.begin(&key("a")).unwrap());
        drop(held);
        assert!(calls.0.lock().is_empty());
    }
}
