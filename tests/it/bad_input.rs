//! Everything bad that can be sent to an agent, against a real agent process.
//!
//! Each case asserts three things: the answer's status and code (or, below HTTP, the refusal in words), that the
//! accepted mark and the instances are what they were, and that the next good document is still accepted.

mod crowd;
mod damage;
mod documents;
mod flipped;
mod full_disk;
mod handshakes;
mod one_agent;
mod requests;
