//! What `doctor` wants to know of a server: facts, each topic in a few statements that need no rights beyond the
//! relay's own. What a role may not see is told as such. Nothing here writes, and nothing judges.

mod outbox;
mod pins;
mod replication;
mod rows;
mod server;
mod standbys;

pub use outbox::{Outbox, Relation, Sequence, Trigger};
pub use pins::{OpenTransaction, OtherSlot, Pins};
pub use replication::replication;
pub use rows::Rows;
pub use server::{OldDatabase, Platform, Role, Server};
pub use standbys::Standbys;
