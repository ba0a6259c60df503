//! The tests against real servers: one binary, so that its servers are started once.
//!
//! `make test` fetches the servers first. A test never passes because a server is missing: it fails and says so.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::indexing_slicing, reason = "a failed test is a panic")]

#[allow(dead_code, reason = "a box of tools for every test; not each of them has a user at each moment")]
mod harness;

mod beside;
mod commands;
mod compensations;
mod config;
mod connect;
mod crashes;
mod dead_letters;
mod decode;
mod delivery;
mod demo;
mod deploy;
mod desk;
mod docs;
mod doctor;
mod encoding;
mod failover;
mod hostile;
mod layering;
mod locks;
mod logs;
mod long_outage;
mod lost_messages;
mod lost_slot;
mod making;
mod memory;
mod nats;
mod order;
mod outages;
mod page;
mod partitions;
mod position;
mod refusals;
mod resume;
mod retention;
mod roles;
mod rows;
mod schema;
mod seam;
mod setup;
mod sharing;
mod slot;
mod smoke;
mod source;
mod speed;
mod standby;
mod start_up;
mod status;
mod stream_trouble;
mod systemd;
mod values;
mod waiting;
mod window;
mod withdrawn;
