//! Everything that speaks to NATS: the connection, publishing with acknowledgements, the stream.

mod api;
pub mod connect;
pub mod demo;
mod dial;
pub mod facts;
mod fitness;
pub mod ids;
pub mod notice;
pub mod plan;
pub mod presence;
pub mod publish;
pub mod request;
pub mod stream;
