//! The tests against real servers: one binary, so that its servers are started once.
//!
//! `make test` fetches the servers first. A test never passes because a server is missing: it fails and says so.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a failed test is a panic")]

#[allow(dead_code, reason = "a box of tools for every test; not each of them has a user at each moment")]
mod harness;

mod config;
mod connect;
mod crashes;
mod decode;
mod delivery;
mod hostile;
mod layering;
mod logs;
mod memory;
mod nats;
mod outages;
mod position;
mod rows;
mod schema;
mod seam;
mod setup;
mod slot;
mod smoke;
mod standby;
mod start_up;
mod values;
