//! What the tests stand on: PostgreSQL and NATS servers of their own, the relay as a process, a TCP proxy that
//! breaks connections on purpose, and helpers to wait and to read a stream back.

pub mod browser;
pub mod load;
pub mod nats;
pub mod outbox;
pub mod postgres;
pub mod process;
pub mod programs;
pub mod proxy;
pub mod relay;
pub mod scene;
pub mod server;
pub mod stream;
pub mod wait;
