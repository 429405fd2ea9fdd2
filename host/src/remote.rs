//! A host that another process is: the agent's privileged helper.
//!
//! ```text
//!  agent (no privileges, speaks to the network)              helper (root, speaks to no one else)
//!  drivers -> RemoteHost -- requests, numbered, in JSON -->  serve_helper -> Policy -> LocalHost
//!                        <-- answers, with descriptors ----
//! ```
//!
//! The helper is the agent's own program, started again under a hidden command before the agent gives up its
//! privileges, and not a fork that goes on: it shares no memory, no open file and no half-started library with the
//! process that later speaks to strangers. The socket is its standard input, so that nothing need be said of numbers
//! of descriptors. The first frame is the [`Policy`], written by the agent while it is still root; from then on the
//! agent is not trusted: the set of requests is closed, and every argument is checked again ([`Policy::admit`]).
//!
//! Requests overlap, and each answer bears its request's number: a slow one holds up no other instance's ([`turns`]). What can't be understood
//! ends the conversation, and the helper with it. The helper ends with its agent; VMMs outlive both.

mod client;
mod frame;
mod message;
mod policy;
mod programs;
mod server;
#[cfg(test)]
mod table_tests;
mod turns;
mod vmm_args;

pub use client::RemoteHost;
pub use policy::{Policy, VmmProgram};
pub use server::{HELPER_THREADS, HelperError, run_helper, serve_helper};

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command};

/// Starts the helper of this data directory: `program` with `args`, and tells it its limits. The caller is root still.
pub fn start_helper(program: &Path, args: &[&str], policy: &Policy) -> io::Result<(Child, OwnedFd)> {
    let (ours, theirs) = UnixStream::pair()?;
    let child = Command::new(program).args(args).stdin(OwnedFd::from(theirs)).spawn()?;
    let text = serde_json::to_vec(policy)?;
    frame::write_blocking(&ours, &text)?;
    Ok((child, ours.into()))
}
