//! The control plane: enrolment, documents, fleet sessions and the operators' API.
//!
//! [`serve`] runs one coordinator on one data directory made by [`init`]. Inside it:
//! - the QUIC endpoint answers enrolment over HTTP/3 ([`http`]) and holds one [`session`] per node,
//! - the TCP endpoint answers operators over gRPC ([`api`]),
//! - [`documents`] numbers, signs and stores; [`fleet`] delivers the newest document of each node,
//! - background tasks issue documents again at half-life, renew the own certificate, and tidy up.
//!
//! The store is the truth; sessions and progress live in memory and are rebuilt from the agents' hellos.

mod api;
mod causes;
mod cleanup_task;
mod clock;
mod crash;
mod documents;
mod drain_task;
mod enrolment;
mod error;
mod events;
mod fleet;
mod grpc_listener;
mod health_task;
mod http;
mod init;
mod key_calls;
mod metrics;
mod numbering;
mod objects;
mod offline_notes;
mod operators;
mod own_leaf;
mod paths;
mod placement;
mod rate_limit;
mod records;
mod refuse;
mod reissue_task;
mod render;
mod reset_key;
mod rest;
mod revocation_task;
mod roots;
mod secrets;
mod serve;
mod session;
mod settings;
mod state;
mod stored;
mod tokens;
mod trust;
mod tunnel_listener;
mod tunnels;
mod webhook;
mod world;

#[cfg(debug_assertions)]
#[doc(hidden)]
pub use clock::shift::shift_clock;
#[doc(hidden)]
pub use crash::CrashPoints;
pub use error::{BoxError, CoordinatorError};
pub use init::{
    ClusterFile, InitError, InitReport, InitSettings, OfflineKey, OperatorFiles, coordinator_credential,
    create_operator, init,
};
pub use paths::DataDir;
pub use roots::{TrustedRoot, add_root, retire_root, switch_issuing, trusted_roots};
pub use serve::serve;
pub use settings::{
    Addresses, CoordinatorSettings, DEFAULT_METRICS_PORT, DEFAULT_PORT, DEFAULT_TUNNEL_PORT, DOCUMENT_LIFE,
    ENROL_BURST, ENROL_PER_SECOND, HEARTBEAT, MAX_GRPC_CONNECTIONS, OPERATOR_LIFE, OnBeat, OnReady,
    SILENT_INTERVALS, WebhookSettings,
};
pub use tokens::{DEFAULT_TTL as TOKEN_DEFAULT_TTL, MAX_TTL as TOKEN_MAX_TTL};

/// All metrics with made-up values: what `docs/metrics.md` is made of.
#[doc(hidden)]
#[must_use]
pub fn metrics_example() -> String {
    metrics::example()
}
