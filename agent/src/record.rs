//! One record per instance.
