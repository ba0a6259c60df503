//! Carries committed rows of a PostgreSQL outbox table to NATS JetStream, in commit order, and writes back to each row
//! what became of it. It reads the write-ahead log through a logical replication slot instead of polling.
//!
//! ```text
//!             PostgreSQL                                                     NATS JetStream
//!   outbox_events ──WAL──▶ wal ─▶ decode ─▶ route ─▶ publish ───────────────▶ stream
//!         ▲                 ▲                           │ acks, failures
//!         │                 └── safe LSN ── confirm ◀───┤
//!         └───────────────────────────── writeback ◀────┘
//!         ▲
//!         └── reconcile: due retries, ended leases, missed and held rows, compensations, retention
//! ```
//!
//! Data moves one way through bounded channels. There is one backward edge: the safe LSN.
//!
//! # Promises
//! 1. **Nothing is lost.** Every committed row is acknowledged by JetStream or stands in `outbox_dead_letter`.
//! 2. **Nothing is stored twice** in a stream that keeps its messages: `Nats-Msg-Id` within its duplicate window, the
//!    stream's own ids beyond it.
//! 3. **Order.** Events of one aggregate reach the stream in commit order, also when one of them fails and is retried.
//! 4. **The slot advances past a transaction only when the outcome of each of its events is committed in the
//!    table**, or its row is proven deleted, or the transaction was left to the table under promise 5.
//! 5. **The relay never fills the database's disk.** Past a bound, rows wait in the table instead of the log.
//! 6. **Memory is bounded** by settings, but for at most 850,000 ids that a session reads from the stream at its start.
//! 7. **It fails loudly and early**, and bad data never stops the flow.
//!
//! README.md says where each of them ends.
//!
//! # Modules
//! | module | |
//! |---|---|
//! | [`cli`] | the command line: one file a command |
//! | [`config`] | the tree of settings, from file, environment and flags |
//! | [`relay`] | the wiring: the only module that knows every stage |
//! | [`pace`] | when the thread of a busy relay rests |
//! | [`flow`] | pure: events, decoding, routing, order, delivery, what may be confirmed |
//! | [`postgres`] | everything that speaks to PostgreSQL, and all SQL |
//! | [`nats`] | everything that speaks to NATS |
//! | [`reconcile`] | rows whose time has come or that were missed, compensations, retention |
//! | [`fault`] | every failure: its class, its code, its hint |
//! | [`telemetry`], [`admin`] | the log, metrics, probes |
//!
//! # Enqueueing from Rust
//! [`postgres::store`] puts an event into the outbox in a transaction of the caller's own:
//!
//! ```no_run
//! use outbox_relay::config::TableName;
//! use outbox_relay::postgres::store::{NewEvent, enqueue};
//!
//! # async fn place(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
//! let outbox: TableName = "public.outbox_events".parse()?;
//! let tx = client.transaction().await?;
//! let event = NewEvent::new("order", "order-7", "placed", r#"{"total": "12.50"}"#);
//! let event_id = enqueue(&tx, &outbox, event).await?;
//! tx.commit().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Running a relay inside another program
//! [`relay::run_until`] runs one until it is told to stop:
//!
//! ```no_run
//! use outbox_relay::{config, relay};
//! use tokio_util::sync::CancellationToken;
//!
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let sources = config::Sources { environment: std::env::vars_os().collect(), ..Default::default() };
//! let loaded = config::load(&sources, relay::CHECKS)?;
//! let stop = CancellationToken::new();
//! relay::run_until(loaded.settings, stop.child_token()).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The program [`cli`] gives it a thread of its own, which rests for moments while much is to do (see [`pace`]);
//! without that it takes more system calls for each event of a backlog:
//!
//! ```no_run
//! # fn run() -> std::io::Result<()> {
//! # let relay = async {};
//! let mut alone = tokio::runtime::Builder::new_current_thread();
//! let runtime = alone.enable_all().on_thread_park(outbox_relay::pace::rest).build()?;
//! std::thread::spawn(move || runtime.block_on(relay));
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

pub mod admin;
pub mod cli;
pub mod config;
pub mod fault;
pub mod flow;
pub mod nats;
pub mod pace;
mod pause;
pub mod postgres;
pub mod reconcile;
pub mod relay;
pub mod telemetry;

/// The examples in README.md compile.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
