//! The tree of settings, as the TOML file spells it. Every other module takes its part of this tree.
//!
//! [`KEYS`] is the one table of all keys: the file, the environment, the flags, `config show` and the help texts are
//! made from it. [`load`] lays the sources over each other and reports every mistake at once.

mod check;
mod defaults;
mod keys;
mod layers;
mod load;
mod mask;
mod mistake;
mod show;
mod table_name;
pub mod value;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use check::Check;
pub use keys::{KEYS, Key, Name, names};
pub use load::{Loaded, Sources, load};
pub use mistake::{Mistake, Mistakes, Origin};
pub use show::{Entry, entries, toml};
pub use table_name::{TableName, TableNameError};

/// A value that is never printed: its `Debug` form is `***`.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

/// All settings.
#[derive(Clone, Debug)]
pub struct Settings {
    pub postgres: Postgres,
    pub source: Source,
    pub nats: Nats,
    pub route: Route,
    pub delivery: Delivery,
    pub retry: Retry,
    pub writeback: Writeback,
    pub reconcile: Reconcile,
    pub dead_letter: DeadLetter,
    pub compensation: Compensation,
    pub admin: Admin,
    pub log: Log,
    pub shutdown: Shutdown,
}

/// `[postgres]`
#[derive(Clone, Debug)]
pub struct Postgres {
    /// URL or key=value, as libpq.
    pub url: Secret,
    /// PostgreSQL itself, for every connection of a running relay, when `url` goes through a pooler.
    pub replication_url: Option<Secret>,
    /// Wins over a password in the URL.
    pub password: Option<Secret>,
}

/// `[source]`
#[derive(Clone, Debug)]
pub struct Source {
    pub table: TableName,
    pub slot: String,
    pub publication: String,
    pub create: bool,
    pub failover: bool,
    /// Bytes.
    pub max_retained_wal: u64,
}

/// `[nats]`
#[derive(Clone, Debug)]
pub struct Nats {
    /// One or more server addresses.
    pub url: Vec<String>,
    pub stream: String,
    pub manage: Manage,
    pub create: NatsCreate,
    pub credentials_file: Option<PathBuf>,
    pub nkey_file: Option<PathBuf>,
    pub user: Option<String>,
    pub password: Option<Secret>,
    pub token: Option<Secret>,
    pub tls_ca: Option<PathBuf>,
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    pub tls_first: bool,
    pub domain: Option<String>,
}

/// `nats.manage`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manage {
    /// Create the stream when missing, then verify it.
    Create,
    /// Only verify.
    Verify,
}

/// `[nats.create]`
#[derive(Clone, Debug)]
pub struct NatsCreate {
    pub subjects: Vec<String>,
    pub replicas: usize,
    pub storage: Storage,
    pub duplicate_window: Duration,
    pub max_age: Option<Duration>,
    /// Bytes.
    pub max_bytes: Option<u64>,
}

/// `nats.create.storage`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    File,
    Memory,
}

/// `[route]`
#[derive(Clone, Debug)]
pub struct Route {
    pub subject: String,
    pub cloudevents: bool,
    /// `ce-source`
    pub source: String,
}

/// `[delivery]`
#[derive(Clone, Debug)]
pub struct Delivery {
    pub ordering: Ordering,
    /// Events.
    pub max_in_flight: usize,
    /// Bytes.
    pub max_in_flight_bytes: u64,
    pub ack_timeout: Duration,
    /// Rows.
    pub max_blocked_rows: usize,
}

/// `delivery.ordering`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// At most one unacknowledged event per aggregate.
    Aggregate,
    /// No gate.
    None,
}

/// `[retry]`
#[derive(Clone, Debug)]
pub struct Retry {
    pub initial: Duration,
    pub max: Duration,
}

/// `[writeback]`
#[derive(Clone, Debug)]
pub struct Writeback {
    pub on_success: OnSuccess,
}

/// `writeback.on_success`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnSuccess {
    Complete,
    Delete,
}

/// `[reconcile]`
#[derive(Clone, Debug)]
pub struct Reconcile {
    pub interval: Duration,
    pub sweep_interval: Duration,
    /// `None`: never.
    pub retention: Option<Duration>,
}

/// `[dead_letter]`
#[derive(Clone, Debug)]
pub struct DeadLetter {
    pub announce: bool,
}

/// `[compensation]`
#[derive(Clone, Debug)]
pub struct Compensation {
    pub enabled: bool,
    pub subject: String,
    pub timeout: Duration,
}

/// `[admin]`
#[derive(Clone, Debug)]
pub struct Admin {
    /// `None`: off.
    pub listen: Option<SocketAddr>,
}

/// `[log]`
#[derive(Clone, Debug)]
pub struct Log {
    pub format: LogFormat,
    /// A level or a filter, as `tracing_subscriber::EnvFilter` reads it.
    pub level: String,
}

/// `log.format`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogFormat {
    Text,
    Json,
}

/// `[shutdown]`
#[derive(Clone, Debug)]
pub struct Shutdown {
    pub grace: Duration,
}
