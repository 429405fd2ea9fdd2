//! How orders come in: over the session to the coordinator, over HTTP/3, over the local socket, from a file. Streams to guests
//! come through the [`tunnel`] that the session asks for.
//!
//! Documents meet one [`acceptor`] whatever way they came, and are in the [`ledger`] before they are in force. Who may ask
//! what is one table ([`authz`]).

pub mod acceptor;
pub mod api;
pub mod authz;
pub mod coordinator_session;
mod guest_sessions;
pub mod ledger;
pub mod local_socket;
mod problem;
pub mod removed_operators;
pub mod source;
pub mod tunnel;
