//! `mvm-guest`: PID 1 of a microVM, or a service that the image's own init starts.

fn main() {}
