//! What the node sees of itself.
