//! Durable state behind one small trait.
//!
//! [`Store`] is what the agent and the coordinator see: versioned keys, all-or-nothing transactions with
//! guards, watches and leases. It asks for nothing that etcd does not offer. [`SledStore`] is the embedded
//! implementation; whatever implements the trait must pass [`conformance::suite`].

pub mod conformance;
mod error;
mod key;
mod lease;
mod sled_store;
mod store;
mod transaction;
mod watch;

pub use error::StoreError;
pub use key::{MAX_KEY_BYTES, check_key, check_prefix};
pub use lease::LeaseId;
pub use sled_store::{MAX_LEASE_TTL, MIN_LEASE_TTL, Settings, SledStore};
pub use store::{Committed, Entry, Listing, Store};
pub use transaction::{Change, Guard, MAX_CHANGES, MAX_TRANSACTION_BYTES, MAX_VALUE_BYTES, Transaction};
pub use watch::{Event, Watch};
