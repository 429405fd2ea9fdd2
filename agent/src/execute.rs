//! Carries out steps.
