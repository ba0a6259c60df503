//! The servers, and for each case a database and a stream of its own on them.

use std::cell::Cell;
use std::time::Duration;

use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::postgres::{PgVersion, Postgres, connect};
use crate::harness::relay::{Relay, RelaySettings};

/// As a production server would be set, but for its size: commits are synced, and checkpoints are rare.
const SETTINGS: [(&str, &str); 6] = [
    ("fsync", "on"),
    ("shared_buffers", "512MB"),
    ("max_wal_size", "8GB"),
    ("checkpoint_timeout", "30min"),
    ("logical_decoding_work_mem", "64MB"),
    ("wal_compression", "off"),
];

/// Long enough for everything on a busy machine.
pub const PATIENCE: Duration = Duration::from_mins(20);

pub struct Site {
    pub postgres: Postgres,
    pub nats: Nats,
    cases: Cell<u32>,
}

/// How the relay reaches PostgreSQL.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Over {
    Tcp,
    Socket,
}

impl Site {
    pub async fn start() -> Self {
        let postgres = Postgres::start(PgVersion::V18, &SETTINGS).await;
        Self { postgres, nats: Nats::start(NatsVersion::V2_15).await, cases: Cell::new(0) }
    }

    /// A new database with the outbox tables, and the settings of a relay for it: the defaults, but for names and
    /// addresses.
    pub async fn case(&self, over: Over) -> Case<'_> {
        self.cases.set(self.cases.get() + 1);
        let name = format!("bench_{}", self.cases.get());
        self.postgres.create_database(&name).await;
        let space = Space::new();
        let url = match over {
            Over::Tcp => self.postgres.url(&name),
            Over::Socket => self.postgres.socket_url(&name),
        };
        let settings = RelaySettings::new(&url, &self.nats.url())
            .unset("log.level")
            .set("source.slot", &name)
            .set("nats.stream", &space.stream)
            .set("nats.create.subjects", &space.subjects())
            .set("route.subject", &space.template());
        settings.migrate().await;
        let client = connect(&self.postgres.url(&name)).await;
        Case { site: self, name, settings, space, client }
    }
}

/// A database, a place for a stream, a relay's settings.
pub struct Case<'s> {
    pub site: &'s Site,
    pub name: String,
    pub settings: RelaySettings,
    pub space: Space,
    pub client: Client,
}

impl Case<'_> {
    /// Sets a key of the relay's settings.
    pub fn set(&mut self, key: &str, value: &str) {
        self.settings = self.settings.clone().set(key, value);
    }

    pub async fn relay(&self) -> Relay {
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        relay
    }

    /// Has the relay make its slot, its publication and its stream, and ends it: what is inserted from now on waits in
    /// the log.
    pub async fn make_slot(&self) {
        self.relay().await.terminate(PATIENCE).await;
    }

    pub async fn number(&self, sql: &str) -> f64 {
        let sql = format!("SELECT ({sql})::float8");
        self.client.query_one(&sql, &[]).await.unwrap_or_else(|error| panic!("{sql}: {error:?}")).get(0)
    }

    pub async fn sql(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    /// Bytes of write-ahead log so far.
    pub async fn wal(&self) -> f64 {
        self.number("pg_current_wal_insert_lsn() - '0/0'").await
    }

    /// Drops what would burden the next case: the slots and the stream. The database stays.
    pub async fn end(self) {
        self.sql("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = current_database() AND NOT active")
            .await;
        let _ = self.site.nats.jetstream().await.delete_stream(&self.space.stream).await;
        self.sql("DROP TABLE outbox_events CASCADE").await;
    }
}

/// Waits until so many rows have their outcome, as the relay counts them. Asked rarely: each answer takes some 100 µs
/// of the processors that are measured.
pub async fn settled(relay: &Relay, status: &str, rows: u64) {
    let series = format!("outbox_relay_writeback_rows_total{{status=\"{status}\"}}");
    let what = format!("{rows} rows are {status}");
    let done = async {
        while relay.metric(&series).await.is_none_or(|count| count < rows as f64) {
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, done).await.is_ok(), "waited in vain: {what}");
}
