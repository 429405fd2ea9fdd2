//! The quinn settings of both sides, hardened: what differs from quinn's defaults, and why.
