//! The node half of the agent from outside: what it accepts, what it makes true, and what survives its end.

mod acceptance;
mod cancelled_sleep;
mod closing;
mod cluster;
mod crash;
mod disk;
mod disk_limits;
mod documents;
mod expiry;
mod failures;
mod full_disk;
mod images;
mod once;
mod overrides;
mod reclaim;
mod revoked;
mod secrets;
mod snapshot_options;
mod subject;
mod task;
mod test_node;
mod wake;
mod wake_timing;
mod warmup;
mod workloads;
