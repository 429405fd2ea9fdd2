//! From declared objects to documents: what is declared is placed, rendered, signed and sent; what nodes say of it becomes
//! the objects' status.
//!
//! [`World`](crate::world::World) holds what placement is decided from, and changes with the store's objects and the fleet's news. One task
//! ([`placement_task`]) keeps it, settles what changed, stores the placements, and issues the documents of the nodes that
//! are touched. A crash at any point loses nothing: what is stored is where the next start goes on from, and a document
//! that says what the node's newest one says is not issued again.

mod answers;
mod batch;
mod bundles;
mod commit;
mod demand;
mod documents;
mod measured;
mod pace;
mod settle;
mod statuses;
mod task;

pub(crate) use answers::{explain, plan};
pub(crate) use commit::store_move;
pub(crate) use demand::{demand, of as demand_of};
pub(crate) use documents::take_for_push;
pub(crate) use measured::measured;
pub(crate) use statuses::show_live;
pub(crate) use task::{load_world, placement_task};
