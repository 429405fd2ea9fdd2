//! The house rules as a test.
