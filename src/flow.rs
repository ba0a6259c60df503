//! The pure heart of the relay: no sockets, no clock, no runtime. Imports nothing of ours from outside.

pub mod confirm;
pub mod decode;
pub mod delivery;
pub mod event;
pub mod floors;
pub mod lsn;
pub mod order;
pub mod refusals;
pub mod retry;
pub mod route;
pub mod subject;
pub mod token;
