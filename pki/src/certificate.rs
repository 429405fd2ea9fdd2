//! Facts read from certificates.
