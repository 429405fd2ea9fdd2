//! Tenants' networks from outside: a node without real guests, with real links and real rules, in a network namespace
//! of the test's own. Looked at with tools that are not ours.

mod cycles;
mod namespace;
