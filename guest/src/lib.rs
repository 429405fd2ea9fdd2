//! The program inside a microVM: serves the agent's requests, and tells how the workload fares.
