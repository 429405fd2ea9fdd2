//! Background tasks beside the reconcile loop: certificates, image garbage collection, memory pressure, copies of guest
//! sessions and their retention, the data of removed tenants, release of unused memory.

pub mod certs;
pub(crate) mod dir_watch;
pub(crate) mod image_gc_task;
pub(crate) mod pressure_task;
pub(crate) mod removed_tenants_task;
pub(crate) mod session_copy_task;
pub(crate) mod session_retention_task;
