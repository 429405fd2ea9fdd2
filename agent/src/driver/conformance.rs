//! What every driver must do.
