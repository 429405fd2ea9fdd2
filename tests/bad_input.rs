//! Everything bad that can be sent to an agent, against a real agent process.
//!
//! Each case asserts three things: the answer's status and code (or, below HTTP, the refusal in words), that the
//! accepted mark and the instances are what they were, and that the next good document is still accepted.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

#[path = "bad_input/crowd.rs"]
mod crowd;
#[path = "bad_input/damage.rs"]
mod damage;
#[path = "bad_input/documents.rs"]
mod documents;
#[path = "bad_input/flipped.rs"]
mod flipped;
#[path = "bad_input/full_disk.rs"]
mod full_disk;
#[path = "bad_input/handshakes.rs"]
mod handshakes;
#[path = "bad_input/one_agent.rs"]
mod one_agent;
#[path = "bad_input/requests.rs"]
mod requests;
