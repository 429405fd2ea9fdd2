//! Background tasks beside the reconcile loop: certificates, image garbage collection, memory pressure, copies of guest
//! sessions, release of unused memory.

pub mod certs;
pub(crate) mod dir_watch;
pub(crate) mod image_gc_task;
pub(crate) mod pressure_task;
pub(crate) mod session_copy_task;
