//! What most tests of the relay need: a migrated database and a part of a NATS server, with names of their own.

use std::time::Duration;

use async_nats::jetstream::Context;
use tokio_postgres::Client;

use super::load::Outbox;
use super::nats::{Nats, NatsVersion, Space};
use super::postgres::{Database, PgVersion, Postgres};
use super::relay::{Relay, RelaySettings};
use super::stream::{self, Stored};
use super::wait::eventually;

/// How long rows may take through the relay, on two busy cores.
pub const DELIVERED: Duration = Duration::from_mins(1);

/// A database with the outbox tables, a place for a stream, and the settings of a relay between them.
#[derive(Debug)]
pub struct Scene {
    pub database: Database,
    pub space: Space,
    pub settings: RelaySettings,
    pub client: Client,
    pub jetstream: Context,
}

impl Scene {
    /// On the newest shared servers.
    pub async fn new() -> Self {
        Self::on(PgVersion::V18, NatsVersion::V2_15).await
    }

    /// On shared servers of these versions.
    pub async fn on(postgres: PgVersion, nats: NatsVersion) -> Self {
        Self::before(postgres, Nats::shared(nats).await, Space::new()).await
    }

    /// On a shared PostgreSQL and a NATS server of the test's own.
    pub async fn before(postgres: PgVersion, nats: &Nats, space: Space) -> Self {
        Self::of(Postgres::shared(postgres).await.database().await, nats, space).await
    }

    /// In a database of the test's own making.
    pub async fn of(database: Database, nats: &Nats, space: Space) -> Self {
        let settings = RelaySettings::shared(&database, nats, &space);
        settings.migrate().await;
        let (client, jetstream) = (database.client().await, nats.jetstream().await);
        Self { database, space, settings, client, jetstream }
    }

    /// Starts the relay and waits until rows flow.
    pub async fn relay(&self) -> Relay {
        self.relay_with(&self.settings).await
    }

    /// The same with other settings.
    pub async fn relay_with(&self, settings: &RelaySettings) -> Relay {
        let mut relay = settings.start();
        relay.wait_ready().await;
        relay
    }

    /// The outbox under load, and the stream that it is to be compared with.
    pub async fn outbox(&self) -> Outbox {
        Outbox::new(&self.database.url(), &self.space.stream).await
    }

    /// Runs statements.
    pub async fn sql(&self, statements: &str) {
        self.client.batch_execute(statements).await.unwrap_or_else(|error| panic!("{statements}: {error:?}"));
    }

    /// One number from the database.
    pub async fn number(&self, query: &str) -> i64 {
        self.client.query_one(query, &[]).await.unwrap_or_else(|error| panic!("{query}: {error:?}")).get(0)
    }

    /// Every text of the first column, in the order of the query.
    pub async fn texts(&self, query: &str) -> Vec<String> {
        let rows = self.client.query(query, &[]).await.unwrap_or_else(|error| panic!("{query}: {error:?}"));
        rows.iter().map(|row| row.get(0)).collect()
    }

    /// Waits until `query` counts `expected`.
    pub async fn wait_number(&self, query: &str, expected: i64) {
        let mut last = None;
        let reached = tokio::time::timeout(DELIVERED, async {
            loop {
                let now = self.number(query).await;
                last = Some(now);
                if now == expected {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        assert!(reached.await.is_ok(), "waited {DELIVERED:?} in vain for {expected}, last was {last:?}: {query}");
    }

    /// Waits until so many rows of `outbox_events` are completed.
    pub async fn wait_completed(&self, rows: i64) {
        self.wait_number("SELECT count(*) FROM outbox_events WHERE status = 'completed'", rows).await;
    }

    /// Waits until the stream holds so many messages, or more.
    pub async fn wait_stored(&self, messages: u64) {
        let what = format!("the stream holds {messages} messages");
        eventually(DELIVERED, &what, async || self.count().await >= messages).await;
    }

    pub async fn count(&self) -> u64 {
        stream::count(&self.jetstream, &self.space.stream).await
    }

    /// Every message of the stream, in order.
    pub async fn stored(&self) -> Vec<Stored> {
        stream::read_all(&self.jetstream, &self.space.stream).await
    }

    /// The ids of the stream's messages, in order.
    pub async fn ids(&self) -> Vec<String> {
        self.stored().await.iter().map(|message| message.id().to_owned()).collect()
    }
}

/// The value of a counter of the relay, by its name without prefix and `_total`, with labels if it has any.
pub async fn counter(relay: &Relay, name: &str) -> u64 {
    let (name, labels) = name.split_once('{').map_or((name, String::new()), |(name, rest)| (name, format!("{{{rest}")));
    let series = format!("outbox_relay_{name}_total{labels}");
    let value = relay.metric(&series).await.unwrap_or_else(|| panic!("the relay has no {series}"));
    value.to_string().parse().expect("a whole number")
}

/// How many publishes of the relay had this outcome so far: `stored`, `duplicate`, `transient`, `poison`.
pub async fn publishes(relay: &Relay, outcome: &str) -> u64 {
    counter(relay, &format!("publishes{{outcome=\"{outcome}\"}}")).await
}
