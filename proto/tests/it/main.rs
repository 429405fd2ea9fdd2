//! Documents, envelopes and frames from outside: what is read, what is refused, and what it may cost.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

mod arbitrary;
mod damage;
mod documents;
mod envelope;
mod evil;
mod measure;
