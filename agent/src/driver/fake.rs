//! A driver without a VMM.

/// MicroVMs in memory, with state and laws.
#[derive(Debug)]
pub struct FakeDriver {}
