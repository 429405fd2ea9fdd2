//! The worlds that the laws and the examples are tried in.

pub(crate) mod blocks;
pub(crate) mod crowd;
pub(crate) mod fleet;
pub(crate) mod limits;
pub(crate) mod model;
pub(crate) mod one_pool;
pub(crate) mod placement;
pub(crate) mod rest;
pub(crate) mod returning;
pub(crate) mod shares;
pub(crate) mod slow;
