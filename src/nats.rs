//! Everything that speaks to NATS: the connection, publishing with acknowledgements, the stream.

mod api;
pub mod connect;
pub mod demo;
mod dial;
pub mod facts;
pub mod ids;
mod info;
pub mod notice;
pub mod plan;
pub mod presence;
pub mod publish;
pub mod request;
pub mod stream;
