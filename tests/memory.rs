//! Memory is bounded by settings: not by a transaction, a backlog, or a row.

use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::pull::OrderedConfig;
use futures_util::StreamExt as _;
use outbox_relay::config::TableName;
use outbox_relay::postgres::outbox::{Completed, Due, Tables, snapshot};
use rustix::process::Signal;
use tokio_postgres::Client;

use crate::harness::nats::{Nats, NatsVersion, Space};
use crate::harness::outbox::{count, dead_letters, outcome, settled};
use crate::harness::postgres::{PgVersion, Postgres};
use crate::harness::relay::{Relay, RelaySettings};
use crate::harness::scene::Scene;
use crate::harness::stream;
use crate::harness::wait::eventually;

const MIB: u64 = 1024 * 1024;
/// What the relay may hold at most under its default settings.
const BOUND: u64 = 128 * MIB;
const DEADLINE: Duration = Duration::from_mins(8);
const SLOT_DEADLINE: Duration = Duration::from_mins(2);
const AGGREGATES: i64 = 5000;

/// Servers of its own: what is written here would keep every other relay on a shared server busy.
struct Site {
    postgres: Postgres,
    client: Client,
    nats: Nats,
    settings: RelaySettings,
    space: Space,
}

impl Site {
    async fn new() -> Self {
        let settings = [("max_wal_size", "4GB"), ("autovacuum", "off"), ("wal_compression", "on")];
        let postgres = Postgres::start(PgVersion::V18, &settings).await;
        let (nats, space) = (Nats::start(NatsVersion::V2_15).await, Space::new());
        let settings =
            RelaySettings::new(&postgres.url("postgres"), &nats.url()).set("log.level", "info").within(&space);
        settings.migrate().await;
        Self { client: postgres.client().await, postgres, nats, settings, space }
    }

    async fn start(&self) -> Relay {
        let mut relay = self.settings.start();
        relay.wait_ready().await;
        relay
    }

    /// Rows of about `bytes` each in one transaction, their numbers as ids.
    async fn insert(&self, rows: i64, bytes: i32) {
        let sql = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload)
                   SELECT i::text, 'order', (i % $2::int8)::text, 'x', to_jsonb(repeat('x', $3::int4))
                   FROM generate_series(1, $1::int8) i";
        self.client.execute(sql, &[&rows, &AGGREGATES, &bytes]).await.expect("insert");
    }

    /// Stops nats-server amid the delivery, for as long as the relay would need to read all that waits.
    async fn freeze_nats_for(&self, time: Duration) {
        eventually(DEADLINE, "some rows are delivered", async || count(&self.client, "status = 'completed'").await > 0)
            .await;
        self.nats.signal(Signal::STOP);
        tokio::time::sleep(time).await;
        self.nats.signal(Signal::CONT);
    }

    /// Waits until the slot is confirmed up to now, at the latest after some more log: with an idle outbox, a position
    /// that moved a little is not written down.
    async fn slot_confirmed(&self) {
        let sql = "SELECT bool_or(confirmed_flush_lsn >= $1::text::pg_lsn) FROM pg_replication_slots";
        let now: String = self.client.query_one("SELECT pg_current_wal_lsn()::text", &[]).await.unwrap().get(0);
        let more = "SELECT pg_logical_emit_message(false, 'more', repeat('x', 4 * 1024 * 1024))";
        self.client.execute(more, &[]).await.unwrap();
        eventually(SLOT_DEADLINE, "the slot has moved on", async || {
            self.client.query_one(sql, &[&now]).await.unwrap().get::<_, Option<bool>>(0) == Some(true)
        })
        .await;
    }
}

/// Reads the ids in the stream, and checks that there are `1..=rows`, each once, and each aggregate's in their order.
async fn check_order(jetstream: &Context, name: &str, rows: i64) {
    let stream = jetstream.get_stream(name).await.expect("the stream");
    let consumer = stream.create_consumer(OrderedConfig { headers_only: true, ..Default::default() }).await.unwrap();
    let mut messages = consumer.messages().await.expect("messages");
    let mut last = vec![0_i64; usize::try_from(AGGREGATES).unwrap()];
    for at in 0..rows {
        let next = tokio::time::timeout(DEADLINE, messages.next()).await.expect("the stream holds more messages");
        let message = next.expect("the consumer goes on").expect("a message");
        let id = message.headers.as_ref().and_then(|headers| headers.get("Nats-Msg-Id")).expect("an id");
        let id: i64 = id.as_str().parse().expect("a number");
        let last = &mut last[usize::try_from(id % AGGREGATES).unwrap()];
        // The next number of this aggregate: what is missing, repeated or early shows here.
        let expected = if *last == 0 && id % AGGREGATES == id { id } else { *last + AGGREGATES };
        assert_eq!(id, expected, "at {at}, after {last} of the same aggregate");
        *last = id;
    }
    assert_eq!(stream::count(jetstream, name).await, u64::try_from(rows).unwrap());
}

fn check_memory(relay: &Relay, bound: u64) {
    let peak = relay.peak_resident_bytes();
    println!("resident memory was {} MiB at most", peak / MIB);
    assert!(peak < bound, "resident memory was {} MiB", peak / MIB);
}

/// Case 19: more than three times the bound in one transaction, then a million changes that are none of ours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_transactions_fit_into_small_memory() {
    const ROWS: i64 = 200_000;
    let site = Site::new().await;
    let relay = site.start().await;
    site.insert(ROWS, 1000).await;
    site.freeze_nats_for(Duration::from_secs(15)).await;
    settled(&site.client, DEADLINE).await;
    check_memory(&relay, BOUND);
    assert_eq!(count(&site.client, "status <> 'completed'").await, 0);
    check_order(&site.nats.jetstream().await, &site.space.stream, ROWS).await;
    site.slot_confirmed().await;

    let other = "CREATE TABLE other AS SELECT i, 0 AS n FROM generate_series(1, 1000000) i; UPDATE other SET n = i";
    site.client.batch_execute(other).await.unwrap();
    site.slot_confirmed().await;
    check_memory(&relay, BOUND);
    assert_eq!(count(&site.client, "true").await, ROWS);
    assert_eq!(stream::count(&site.nats.jetstream().await, &site.space.stream).await, u64::try_from(ROWS).unwrap());
}

/// A backlog from before the slot is read from the table. `DRAIN_ROWS=1000000` makes it a larger one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn drain_of_a_large_table_fits_into_small_memory() {
    let rows = std::env::var("DRAIN_ROWS").map_or(100_000, |rows| rows.parse().expect("DRAIN_ROWS is a number"));
    let site = Site::new().await;
    site.insert(rows, 2000).await;
    // It is ready only when little waits.
    let relay = site.settings.start();
    site.freeze_nats_for(Duration::from_secs(10)).await;
    settled(&site.client, DEADLINE).await;
    check_memory(&relay, BOUND);
    check_order(&site.nats.jetstream().await, &site.space.stream, rows).await;
    let state = "SELECT bool_or(needs_drain) FROM outbox_relay_state";
    eventually(DEADLINE, "the drain is over", async || {
        site.client.query_one(state, &[]).await.unwrap().get::<_, Option<bool>>(0) == Some(false)
    })
    .await;
}

/// Rows that no server would take: one that is read whole, one that is cut while it is read. They come through the log
/// and, `before` the slot, from the table.
async fn giants(before: bool) {
    const GIANT: i32 = 30 * 1024 * 1024;
    let site = Site::new().await;
    let site = Site { settings: site.settings.set("delivery.max_in_flight_bytes", "32MiB"), ..site };
    let sql = "INSERT INTO outbox_events (event_id, aggregate_type, aggregate_id, event_type, payload, headers)
               SELECT $1::text, 'order', 'one', 'x', to_jsonb(repeat('x', $2::int4)), jsonb_build_object('h', repeat('h', $3::int4))";
    let insert = async || {
        for (id, payload, header) in [
            ("1", 1, 1),
            ("2-whole", GIANT, 1),
            ("3", 1, 1),
            ("4-cut", GIANT + 4 * 1024 * 1024, 1),
            ("5-headers", 1, 40 * 1024 * 1024),
            ("6", 1, 1),
        ] {
            site.client.execute(sql, &[&id, &payload, &header]).await.expect("insert");
        }
    };
    if before {
        insert().await;
    }
    let relay = site.start().await;
    if !before {
        insert().await;
    }
    settled(&site.client, DEADLINE).await;
    let stored = stream::read_all(&site.nats.jetstream().await, &site.space.stream).await;
    assert_eq!(stored.iter().map(stream::Stored::id).collect::<Vec<_>>(), ["1", "3", "6"]);
    let dead = dead_letters(&site.client).await;
    let ids: Vec<_> = dead.iter().map(|(id, _)| id.as_str()).collect();
    assert_eq!(ids, ["2-whole", "4-cut", "5-headers"]);
    let codes: Vec<_> = dead.iter().map(|(_, code)| code.as_str()).collect();
    assert_eq!(codes, ["message_too_large", "undecodable", "undecodable"]);
    let cut = outcome(&site.client, "4-cut").await;
    assert!(cut.error_message.as_ref().is_some_and(|text| text.contains("payload is cut off")), "{cut:?}");
    // The dead letter is whole, for the row is.
    let whole = "SELECT length(payload::text) FROM outbox_dead_letter WHERE original_event_id = '4-cut'";
    assert_eq!(site.client.query_one(whole, &[]).await.unwrap().get::<_, i32>(0), GIANT + 4 * 1024 * 1024 + 2);
    site.slot_confirmed().await;
    check_memory(&relay, 2 * BOUND);
    drop(site.postgres);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giant_rows_in_the_log_are_dead_letters() {
    giants(false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn giant_rows_in_the_table_are_dead_letters() {
    giants(true).await;
}

/// PostgreSQL stores a payload of a megabyte in some kilobytes: what counts is what is read of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_that_compress_well_are_read_some_megabytes_at_a_time() {
    const CAP: usize = 64 * 1024 * 1024;
    let scene = Scene::new().await;
    // Half of them have large headers instead; an adopted table may allow NULL.
    let rows = "ALTER TABLE outbox_events ALTER payload DROP NOT NULL, ALTER headers DROP NOT NULL;
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers, status, next_retry_at)
        SELECT 'order', i::text, 'paid',
          CASE WHEN i > 1 THEN to_jsonb(CASE WHEN i % 2 = 0 THEN large ELSE '' END) END,
          CASE WHEN i > 1 THEN jsonb_build_object('h', CASE WHEN i % 2 = 1 THEN large ELSE '' END) END,
          'failed', now() - interval '1 min'
        FROM generate_series(1, 40) i, repeat('x', 1024 * 1024) large";
    scene.sql(rows).await;
    let (client, tables) = (&scene.client, Tables::of(&"public.outbox_events".parse::<TableName>().unwrap()));
    let since = snapshot(client).await.unwrap();
    let due = Due { client, tables: &tables, cap: CAP, since: &since };
    let time = due.now().await.unwrap();
    let read: Vec<i64> = due.rows(time, 500).await.unwrap().iter().map(|row| row.id).collect();
    // Without its payload the first one weighs nothing.
    assert_eq!(read, (1..=9).collect::<Vec<_>>());

    scene.sql("UPDATE outbox_events SET status = 'completed', next_retry_at = NULL").await;
    let all: Vec<i64> = (1..=40).collect();
    let completed = Completed { client, tables: &tables };
    assert_eq!(completed.events(&all, CAP).await.unwrap().len(), 9);
}
