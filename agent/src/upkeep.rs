//! What an agent does besides its node's desired state: certificates, images that nobody uses, memory pressure, sessions
//! of other nodes.

pub mod certs;
pub(crate) mod dir_watch;
pub(crate) mod give_back_task;
pub(crate) mod image_gc_task;
pub(crate) mod pressure_task;
pub(crate) mod session_copy_task;
